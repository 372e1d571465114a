"""Which requests a worker takes, and which it hands back.

It hands back what it cannot begin in time, for another worker to take.

Only while another worker has a pull open at the broker, which is to say that it is there and has room. What is handed back is
redelivered at once; a worker does so once for each request (`ClaimTable.hand_back`), so that it comes to rest, at the
latest where it is met for the second time. It has no tokens yet, and its requester looks for the next claim as it does
when a worker drains: nothing is lost and nobody waits for a timer.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence

from shared.streams import ConsumerInfo

EVERY_S = 1.0  # questions to the broker


def hold_max_of(slots: int, reserved_fraction: float) -> int:
    """Requests of any one tenant that a batch has room for."""
    return max(1, slots - int(slots * reserved_fraction))


def free_slots(slots: int, hold_max: int, holding: Mapping[str, int], full: bool) -> int:
    """Requests that a worker may take, with what it is `holding` of each tenant.

    `hold_max`: of one tenant, for which the batch has room: what it has over that keeps no slot from others.
    `full`: it drains, or one waits for room already: others would only wait too, and another worker may have room for them.
    """
    if full:
        return 0
    counts = holding.values()
    if max(counts, default=0) <= hold_max:  # as it mostly is: this is asked at every step
        return slots - sum(counts)
    return slots - sum(min(count, hold_max) for count in counts)


class HandBack:
    """Asks the broker for others' open pulls, and hands back as many requests."""

    def __init__(
        self,
        info: Callable[[], Awaitable[ConsumerInfo | None]],
        own_pulls: Callable[[], int],
        hand_back: Callable[[str], None],
    ) -> None:
        """`info` is of the consumer that all workers of the version pull from; it may raise Unavailable."""
        self._info, self._own_pulls, self._hand_back = info, own_pulls, hand_back
        self._next_at = 0.0

    def is_due(self, late: Sequence[str], now: float) -> bool:
        """Whether `look` is worth its question to the broker."""
        if not late or now < self._next_at:
            return False
        self._next_at = now + EVERY_S
        return True

    async def look(self, late: Sequence[str]) -> None:
        """`late`: runs that will not begin in time, the one that was to begin first in front."""
        own = self._own_pulls()
        info = await self._info()
        if info is not None:
            for run in late[: max(0, info.num_waiting - max(own, self._own_pulls()))]:
                self._hand_back(run)
