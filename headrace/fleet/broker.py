"""The queue as JetStream keeps it: open pulls are served in turn, what nobody pulls waits, what comes back goes first."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from headrace.fleet.backlogs import Backlogs
from headrace.fleet.clock import Clock
from headrace.fleet.workload import Request
from shared.streams import ConsumerInfo, Delivered
from shared.subjects import LANE_FAIR


class Puller(Protocol):
    """Who pulls. `listens`: until it is not there any more; then its pulls are passed over."""

    listens: bool

    def message(self, request: Request) -> None: ...

    def pull_ended(self, name: str, left: int) -> None: ...


class FairPuller(Protocol):
    """Who pulls from backlogs, and hears of them."""

    def message(self, request: Request, left: int) -> None:
        """`left`: of its tenant's, behind it."""

    def hinted(self, tenants: Sequence[str] | None) -> None:
        """Something waits, of these tenants or of whomever."""


@dataclass(slots=True, eq=False)
class _Pull:
    puller: Puller
    name: str
    left: int


class Broker:
    """The queues of one model version: the durable consumer of the lane `fast`, and the backlogs of the lane `fair`."""

    def __init__(self, clock: Clock, version: str = "") -> None:
        self.version = version
        self._clock = clock
        self._move: Callable[[Request], None] | None = None
        self.rehomed = 0
        self._pulls: deque[_Pull] = deque()
        self._waiting: deque[Request] = deque()
        self._returned: deque[Request] = deque()
        self._backlogs = Backlogs()
        self.pullers: dict[FairPuller, None] = {}  # of the lane fair: they hear hints
        self._claimed = 0  # of fast: delivered and not acknowledged
        self._delivered = 0  # so far
        self.paused = False
        self._serving = False

    @property
    def pending(self) -> int:
        return len(self._waiting) + len(self._returned) + self._backlogs.pending

    @property
    def claimed(self) -> int:
        """Delivered and not acknowledged."""
        return self._claimed + self._backlogs.claimed

    def info(self) -> ConsumerInfo:
        """What the server says of the consumer, with what waits in the other lane."""
        open_pulls = sum(pull.puller.listens and pull.left > 0 for pull in self._pulls)
        return ConsumerInfo(
            num_pending=self.pending,
            num_ack_pending=self.claimed,
            num_waiting=open_pulls,
            delivered=Delivered(self._delivered + self._backlogs.delivered),
        )

    def publish(self, request: Request) -> None:
        request.version = self.version
        if request.lane == LANE_FAIR:
            self._backlogs.publish(request)
            return
        self._waiting.append(request)
        self._serve()

    def give_back(self, request: Request) -> None:
        """A negative acknowledgement: it is delivered again, before all others."""
        if request.lane == LANE_FAIR:
            self._backlogs.give_back(request)
        else:
            self._claimed -= 1
            self._returned.append(request)
        if self._move is not None:
            self.rehome(self._move)
        if request.lane == LANE_FAIR:
            self.hint(None)
        self._serve()

    def rehome(self, move: Callable[[Request], None]) -> None:
        """What nobody has claimed and no token is there of is to `move` to another version's queue, from now on."""
        self._move = move
        unclaimed = [*self._returned, *self._waiting, *self._backlogs.unclaimed()]
        moved = [request for request in unclaimed if request.first < 0]
        for request in moved:
            self.withdraw(request)
            move(request)
        self.rehomed += len(moved)

    def acknowledge(self, request: Request) -> None:
        if request.lane == LANE_FAIR:
            self._backlogs.acknowledge(request.tenant)
        else:
            self._claimed -= 1

    def pull(self, puller: Puller, name: str, batch: int, expires: float) -> None:
        pull = _Pull(puller, name, batch)
        self._pulls.append(pull)
        self._clock.at(expires, self._expire, pull)
        self._serve()

    def take(self, puller: FairPuller, tenant: str, batch: int) -> None:
        """Pull up to `batch` messages of a tenant's backlog, without waiting for any."""
        while batch and puller in self.pullers and (request := self._backlogs.take(tenant)) is not None:
            batch -= 1
            puller.message(request, self._backlogs.left(tenant))

    def stored(self) -> Mapping[str, int]:
        """Messages in the lane fair by tenant, the claimed ones, too."""
        return self._backlogs.stored

    def hint(self, tenants: Sequence[str] | None) -> None:
        """Tell those who pull that something waits in the lane fair."""
        for puller in list(self.pullers):
            puller.hinted(tenants)

    def resume(self, _: object = None) -> None:
        self.paused = False
        self._serve()

    def withdraw(self, request: Request) -> bool:
        """Delete a message that nobody has claimed."""
        if request.lane == LANE_FAIR:
            return self._backlogs.withdraw(request)
        for queue in (self._waiting, self._returned):
            if request in queue:
                queue.remove(request)
                return True
        return False

    def _serve(self) -> None:
        """Hand out what can be. A message calls for the next pull, which is served here too and not one call deeper."""
        if self._serving:
            return
        self._serving = True
        pulls = self._pulls
        while pulls and not self.paused and (queue := self._returned or self._waiting):
            pull = pulls.popleft()
            if pull.left <= 0 or not pull.puller.listens:
                continue
            request = queue.popleft()
            pull.left -= 1
            if pull.left:
                pulls.append(pull)
            self._claimed += 1
            self._delivered += 1
            pull.puller.message(request)
        self._serving = False

    def _expire(self, pull: _Pull) -> None:
        if pull.left > 0 and pull.puller.listens:
            left, pull.left = pull.left, 0
            pull.puller.pull_ended(pull.name, left)
