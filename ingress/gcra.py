"""Rates by the generic cell rate algorithm (ITU-T I.371, virtual scheduling). Pure.

All that is kept of a rate is one number, the debt: in how many seconds the bucket is full again. What is taken adds its cost,
time takes it away. A debt in seconds means the same for the whole of a limit and for an n-th part of it, where each cost is n
times as high; so it can be handed from the one to the other.
"""

import msgspec

MINUTE_S = 60.0
TOLERANCE_S = 1e-6


class Rate(msgspec.Struct, frozen=True):
    """So many a minute, of which `burst_s` seconds' worth may come at once."""

    limit: int
    burst_s: float

    def cost_s(self, count: float) -> float:
        """What `count` add to the debt."""
        return count * MINUTE_S / self.limit

    def late_s(self, debt_s: float, cost_s: float) -> float:
        """Seconds until so much can be taken; 0: now. What is over the burst can be taken from a full bucket."""
        late_s = debt_s + min(cost_s, self.burst_s) - self.burst_s
        return late_s if late_s > TOLERANCE_S else 0.0

    def remaining(self, debt_s: float) -> int:
        """How many could be taken now."""
        return max(0, int((self.burst_s - debt_s) * self.limit / MINUTE_S + TOLERANCE_S))


class Bucket:
    """The debt, as it is known here. Times are monotonic seconds."""

    __slots__ = ("_full_at",)

    def __init__(self) -> None:
        self._full_at = 0.0

    def debt_s(self, now: float) -> float:
        return max(0.0, self._full_at - now)

    def put(self, debt_s: float, now: float) -> None:
        self._full_at = now + debt_s

    def add(self, cost_s: float, now: float) -> None:
        """Take, or with a negative cost give back."""
        self._full_at = max(self._full_at, now) + cost_s
