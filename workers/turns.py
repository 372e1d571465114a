"""Whose backlog a worker takes from next. Pure.

What waits in the lane fair is known by hints, by looks at the stream and by what comes with each message; all of it is a
guess, and a pull that finds nothing corrects it.
"""

import heapq
import math
from collections.abc import Mapping

from msgspec import Struct

from workers.engine.fairness import OUTPUT_COST, PROMPT_COST
from workers.engine.request import Standing, TenantLimits

UNBATCHED_PART = 8  # one of so many of what a tenant may hold may wait for the batch, and it is still given more
SURE_PART = 8  # one of so many is for backlogs, however busy `fast` is


def mean_service(prompt_tokens: int, output_tokens: int, requests: int) -> float:
    """What the ledger charges for a request, on average over those that an engine was given."""
    return max(1.0, (PROMPT_COST * prompt_tokens + OUTPUT_COST * output_tokens) / max(1, requests))


class _Queue(Struct):
    left: int  # messages that are believed to wait
    pulling: int = 0  # credit that a pull of ours still has
    hinted: bool = False  # since that pull began


class Turns:
    """The tenants that are believed to have something in the lane fair."""

    def __init__(self, hold_max: int) -> None:
        """`hold_max`: requests of any one tenant that the batch has room for."""
        self._hold_max = hold_max
        self.sure = math.ceil(hold_max / SURE_PART)  # requests that the lane may hold, however busy `fast` is
        self._queues: dict[str, _Queue] = {}

    def __bool__(self) -> bool:
        return bool(self._queues)

    @property
    def tenants(self) -> list[str]:
        return list(self._queues)

    @property
    def pulling(self) -> int:
        """Credit that pulls of ours still have."""
        return sum(queue.pulling for queue in self._queues.values())

    def hint(self, tenant: str) -> None:
        """It has something waiting, as somebody says."""
        queue = self._queues.setdefault(tenant, _Queue(1))
        queue.left = max(queue.left, 1)
        queue.hinted = True

    def look(self, waiting: Mapping[str, int]) -> None:
        """What is stored and not ours, by tenant."""
        for tenant, queue in list(self._queues.items()):
            if not queue.pulling and waiting.get(tenant, 0) <= 0:
                del self._queues[tenant]
        for tenant, count in waiting.items():
            if count > 0:
                self._queues.setdefault(tenant, _Queue(count)).left = count

    def pulled(self, tenant: str, count: int) -> None:
        """A pull is sent."""
        queue = self._queues[tenant]
        queue.pulling, queue.hinted = count, False

    def message(self, tenant: str, left: int) -> bool:
        """A message came, and at least so many are left behind it, those not counted that came back; whether it was the last
        of its pull."""
        queue = self._queues.get(tenant)
        if queue is None or not queue.pulling:
            return False  # of a pull that was given up
        queue.left = max(left, queue.left - 1)
        queue.pulling -= 1
        if not queue.pulling and not queue.left:
            self._exhausted(tenant, queue)
        return not queue.pulling

    def ended(self, tenant: str) -> None:
        """A pull ended before it had all it asked for: there is nothing left."""
        if (queue := self._queues.get(tenant)) is not None:
            queue.pulling = 0
            self._exhausted(tenant, queue)

    def _exhausted(self, tenant: str, queue: _Queue) -> None:
        if queue.hinted:
            queue.left = 1
        else:
            del self._queues[tenant]

    def share(
        self,
        credit: int,
        holding: Mapping[str, int],
        standings: Mapping[str, Standing],
        limits: Mapping[str, TenantLimits],
        service: float,
    ) -> list[tuple[str, int]]:
        """(tenant, messages to pull), `credit` in all, in the order of the ledger.

        The ledger charges a request as it is computed. Those that are held count as if they had `service` each to come, so
        that many slots that become free at once do not all go to whom it is owed to.
        """
        given: dict[str, int] = {}
        heap: list[tuple[int, float, str]] = []

        def push(tenant: str) -> None:
            own = limits[tenant]
            held = holding.get(tenant, 0) + given.get(tenant, 0)
            most = self._hold_max if own.slots_max is None else max(1, min(own.slots_max, self._hold_max))
            if held < most and given.get(tenant, 0) < self._queues[tenant].left:
                rank = standings[tenant].counter + (held + 1) * service / own.weight
                heapq.heappush(heap, (-own.priority, rank, tenant))

        for tenant, queue in self._queues.items():
            if not queue.pulling and standings[tenant].waiting * UNBATCHED_PART <= self._hold_max:
                push(tenant)
        for _ in range(credit):
            if not heap:
                break
            _, _, tenant = heapq.heappop(heap)
            given[tenant] = given.get(tenant, 0) + 1
            push(tenant)
        return list(given.items())
