"""A simulated ingress: the production's admission and lane switch, and the hints about what waits in the lane fair."""

from collections.abc import Callable, Mapping

from headrace.fleet.broker import Broker
from headrace.fleet.clock import Clock
from headrace.fleet.control import MODEL
from headrace.fleet.workload import Request
from ingress.admission import Admission
from shared.lanes import LaneSwitch, Place
from shared.settings import Settings
from shared.subjects import LANE_FAIR
from shared.wakes import EVERY_S


class Ingress:
    """One of several; or a client that publishes for itself, with a burst of 0."""

    def __init__(
        self,
        clock: Clock,
        settings: Settings,
        brokers: Mapping[str, Broker],
        burst: int,
        ingresses: int,
        weight: Callable[[str], float],
    ) -> None:
        self.lanes = LaneSwitch(burst)
        self.lanes.weight, self.lanes.processes = weight, lambda: ingresses
        self._clock, self._brokers = clock, brokers
        self._admission = Admission(settings, self.lanes)
        self._gathered: dict[str, dict[str, None]] = {}  # by version with a hint of late: whom the next one is to name

    def check(self, request: Request) -> None:
        """Raises QueueFull for one that may not be queued."""
        self._admission.check_queue(request.tenant, 1, self._clock.now)

    def submit(self, request: Request) -> None:
        """Queue a request for its version."""
        self._enter(request, request.version)

    def move(self, request: Request, version: str) -> None:
        """It is to wait for another version, behind what its tenant has waiting for that one."""
        if request.place is not None:
            self.left(request)
            self._enter(request, version)
        else:
            request.lane = self.lanes.lane(request.tenant, MODEL, version)
            self._publish(request, version)

    def accepted(self, request: Request, path_s: float) -> None:
        """A worker has it, which is known here after `path_s`: what comes meanwhile still finds it waiting."""
        if request.place is not None:
            self._clock.at(self._clock.now + path_s, self._heard, (request, request.place))

    def left(self, request: Request) -> None:
        """It waits no more."""
        if request.place is not None:
            self.lanes.leave(request.place)
            request.place = None

    def _heard(self, accepted: tuple[Request, Place]) -> None:
        request, place = accepted
        if request.place is place:
            self.left(request)

    def _enter(self, request: Request, version: str) -> None:
        request.place = self.lanes.enter(request.tenant, MODEL, version)
        request.lane = request.place.lane
        self._publish(request, version)

    def _publish(self, request: Request, version: str) -> None:
        self._brokers[version].publish(request)
        if request.lane == LANE_FAIR:
            self._hint(version, request.tenant)

    def _hint(self, version: str, tenant: str) -> None:
        """Those within EVERY_S after one are gathered."""
        if version in self._gathered:
            self._gathered[version][tenant] = None
            return
        self._gathered[version] = {}
        self._brokers[version].hint([tenant])
        self._clock.at(self._clock.now + EVERY_S, self._go_on, version)

    def _go_on(self, version: str) -> None:
        if tenants := self._gathered.pop(version):
            self._gathered[version] = {}
            self._brokers[version].hint(list(tenants))
            self._clock.at(self._clock.now + EVERY_S, self._go_on, version)
