"""What a version's queue tells over time, from its consumer's counts alone: arrival rate, time in a slot, age of the oldest.

Pure. A consumer counts deliveries, and what comes back is delivered again: such a message counts as one that arrived again.
"""

from collections import deque
from math import sqrt

from msgspec import Struct

RATE_S = 20.0  # the rate is taken over so long,
JUMP_S = 2.0  # and over so long where a rise is beyond doubt
DOUBT = 2.0  # standard deviations of a Poisson count
SERVICE_S = 60.0  # the time in a slot is taken over so long
COMPLETIONS_MIN = 3  # of which so many have to end in it
SPACING_S = 0.2  # between two readings that are kept
SPAN_S = 1.0  # no rate from less
WAITS_KEPT = 4096


class Reading(Struct, frozen=True, kw_only=True):
    """A look at a version's queue."""

    at: float  # seconds
    pending: int
    claimed: int
    delivered: int  # deliveries since the consumer was made
    in_flight: int  # claims that live leases tell of

    @property
    def arrived(self) -> int:
        return self.delivered + self.pending


class _Point(Struct, frozen=True):
    at: float
    arrived: int
    delivered: int
    ended: int
    held_s: float  # slot-seconds since the first reading


class Flow:
    """Takes in the readings of one version. `stranded_s`: leases tell of a claim within this time."""

    def __init__(self, stranded_s: float) -> None:
        self._stranded_s = stranded_s
        self._points: deque[_Point] = deque()
        self._served = 0
        self._waits: deque[tuple[float, int]] = deque()  # when it was first seen that so many had arrived in all
        self._unclaimed: deque[tuple[float, int]] = deque()  # claims that no lease told of, at a time
        self.service_s: float | None = None  # that a request has held a slot lately

    def read(self, reading: Reading) -> None:
        """Take in a reading, later than the ones before."""
        unclaimed, points = self._unclaimed, self._points
        unclaimed.append((reading.at, reading.claimed - reading.in_flight))
        while len(unclaimed) > 1 and unclaimed[1][0] <= reading.at - self._stranded_s:
            unclaimed.popleft()
        if points and reading.delivered - reading.claimed < points[-1].ended:  # the consumer is another one
            points.clear()
            self._waits.clear()
        served = reading.claimed - self.stranded
        before = points[-1] if points else _Point(reading.at, 0, 0, 0, 0.0)
        held_s = before.held_s + (reading.at - before.at) * (served + self._served) / 2
        self._served = served
        if len(points) > 1 and before.at - points[-2].at < SPACING_S:
            points.pop()
        ended = reading.delivered - reading.claimed
        points.append(_Point(reading.at, reading.arrived, reading.delivered, ended, held_s))
        while reading.at - points[0].at > SERVICE_S:
            points.popleft()
        self._take_service()
        self._read_waits(reading)

    def _take_service(self) -> None:
        """Little's law: the slot-seconds of what was in service over what went through it."""
        first, last = self._points[0], self._points[-1]
        began, ended = last.delivered - first.delivered, last.ended - first.ended
        held_s = last.held_s - first.held_s
        if ended >= COMPLETIONS_MIN and held_s > 0:
            self.service_s = held_s / ((began + ended) / 2)  # in a rise few have ended of the many that are held

    def _read_waits(self, reading: Reading) -> None:
        waits, since = self._waits, reading.at
        while waits and waits[-1][1] > reading.arrived:  # some that were pending are gone: the newest, it is taken
            since = waits.pop()[0]
        if reading.arrived > (waits[-1][1] if waits else reading.delivered):
            waits.append((since, reading.arrived))
        while waits and waits[0][1] <= reading.delivered:
            waits.popleft()
        if len(waits) > WAITS_KEPT:
            del waits[1]

    def rate(self) -> float | None:
        """Requests a second; None while it is not known."""
        slow, jump = self._arrivals(RATE_S), self._arrivals(JUMP_S)
        if slow is None:
            return None
        rate = slow[0] / slow[1]
        if jump is not None:
            recent, recent_s = jump
            rate = max(rate, (recent - DOUBT * sqrt(recent)) / recent_s)
        return rate

    def _arrivals(self, window_s: float) -> tuple[int, float] | None:
        if not self._points:
            return None
        first = last = self._points[-1]
        for point in reversed(self._points):
            if last.at - point.at > window_s:
                break
            first = point
        if last.at - first.at < SPAN_S:
            return None
        return max(0, last.arrived - first.arrived), last.at - first.at

    def oldest_s(self, now: float) -> float:
        """How long the oldest pending message has been seen waiting; 0 where none is."""
        return max(0.0, now - self._waits[0][0]) if self._waits else 0.0

    @property
    def stranded(self) -> int:
        """Claimed messages that no live lease tells of, for as long as leases take to tell: a dead worker holds them."""
        unclaimed = self._unclaimed
        if not unclaimed or unclaimed[-1][0] - unclaimed[0][0] < self._stranded_s:
            return 0
        return max(0, min(count for _, count in unclaimed))
