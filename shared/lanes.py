"""Which lane a request is published to: `fast`, or `fair` for a tenant that has more waiting than a burst. Pure.

The sparse-flow rule of FQ-CoDel. A requester process counts what it has queued of each tenant and version: published, and not
accepted by a worker yet. With fewer than a burst a tenant is sparse, and `fast` serves it first come, first served, before
all others. At the burst it is backlogged, and whatever it sends goes to `fair`, where workers take turns among tenants, until
nothing of it waits there: so its own requests are not reordered.
"""

import math
from collections import Counter
from collections.abc import Callable

from msgspec import Struct

from shared.subjects import LANE_FAIR, LANE_FAST


class Place(Struct, frozen=True):
    """Where a request is queued."""

    tenant: str
    model: str
    version: str
    lane: str


def _one(_tenant: str) -> float:
    return 1.0


class LaneSwitch:
    """All tenants of one requester process."""

    def __init__(self, burst: int) -> None:
        """`burst`: requests of a tenant of weight 1 over all processes; 0: everything goes to `fair`."""
        self._burst = burst
        self._queued: Counter[Place] = Counter()
        self._of_tenant: Counter[str] = Counter()
        self.weight: Callable[[str], float] = _one  # of a tenant
        self.processes: Callable[[], int] = lambda: 1  # that share the burst

    def queued(self, tenant: str) -> int:
        """Requests of a tenant that wait, whatever they are for."""
        return self._of_tenant[tenant]

    @property
    def queued_of_all(self) -> int:
        """The same of all tenants."""
        return self._of_tenant.total()

    def lane(self, tenant: str, model: str, version: str) -> str:
        """Where its next request goes."""
        fair = self._queued[Place(tenant, model, version, LANE_FAIR)]
        fast = self._queued[Place(tenant, model, version, LANE_FAST)]
        return LANE_FAIR if fair or fast >= self._sparse_max(tenant) else LANE_FAST

    def enter(self, tenant: str, model: str, version: str) -> Place:
        """Its next request is queued: where."""
        place = Place(tenant, model, version, self.lane(tenant, model, version))
        self._queued[place] += 1
        self._of_tenant[tenant] += 1
        return place

    def leave(self, place: Place) -> None:
        """A request of those that entered there waits no more."""
        self._queued[place] -= 1
        self._of_tenant[place.tenant] -= 1
        if not self._queued[place]:
            del self._queued[place]
        if not self._of_tenant[place.tenant]:
            del self._of_tenant[place.tenant]

    def _sparse_max(self, tenant: str) -> int:
        if not self._burst:
            return 0
        return max(1, math.ceil(self._burst * self.weight(tenant) / max(1, self.processes())))
