"""What callers met of each version: ends, errors, refusals and latencies, counted so that counts can be added and subtracted.

Every requester process counts for itself while a model's traffic is being moved, and tells in its lease; the counts only
rise, so that a lost lease loses nothing.
"""

import math
from collections.abc import Iterable

from msgspec import Struct

from shared import records
from shared.errors import Cancelled
from shared.stored import Stored, json

STEPS_PER_DOUBLING = 16  # 4.4% from one bucket to the next
BUCKET_MAX = STEPS_PER_DOUBLING * 24  # 4.7 hours
VERSIONS_MAX = 64  # in a lease

Histogram = dict[int, int]  # how many in each bucket


def bucket_of(milliseconds: float) -> int:
    return min(max(round(STEPS_PER_DOUBLING * math.log2(max(milliseconds, 1e-3))), 0), BUCKET_MAX)


def milliseconds_of(bucket: int) -> float:
    """The middle of a bucket."""
    return float(2 ** (bucket / STEPS_PER_DOUBLING))


class Tally(Struct, omit_defaults=True):
    """Of one version. `ended` counts requests with an answer of any kind, not those whose client left."""

    ended: int = 0
    errors: int = 0  # 500 and more
    refusals: int = 0  # 400 to 498, once it was known which version they are for
    ttft: Histogram = {}  # ms
    tpot: Histogram = {}  # ms, one observation a request: its mean

    def note(self, status: int, ttft_s: float | None, tpot_s: float | None) -> None:
        """Count a request that ended with `status` (200: with its answer)."""
        if status == Cancelled.status:
            return
        self.ended += 1
        self.errors += status >= 500
        self.refusals += 400 <= status < 500
        for histogram, seconds in ((self.ttft, ttft_s), (self.tpot, tpot_s)):
            if seconds is not None:
                bucket = bucket_of(seconds * 1e3)
                histogram[bucket] = histogram.get(bucket, 0) + 1

    def __add__(self, other: "Tally") -> "Tally":
        return _combined(self, other, 1)

    def __sub__(self, other: "Tally") -> "Tally":
        return _combined(self, other, -1)


def _combined(one: Tally, other: Tally, sign: int) -> Tally:
    def histogram(mine: Histogram, its: Histogram) -> Histogram:
        sums = {bucket: mine.get(bucket, 0) + sign * its.get(bucket, 0) for bucket in mine.keys() | its.keys()}
        return {bucket: count for bucket, count in sums.items() if count}

    return Tally(
        ended=one.ended + sign * other.ended,
        errors=one.errors + sign * other.errors,
        refusals=one.refusals + sign * other.refusals,
        ttft=histogram(one.ttft, other.ttft),
        tpot=histogram(one.tpot, other.tpot),
    )


def total(tallies: Iterable[Tally]) -> Tally:
    """The sum."""
    found = Tally()
    for tally in tallies:
        found += tally
    return found


class VersionTally(Struct, frozen=True, kw_only=True):
    model: str
    version: str
    deployment: str  # during which it was counted
    tally: Tally


class IngressLease(Struct, frozen=True, kw_only=True):
    """What a requester process says of itself every second, in the bucket `ingresses` under its id, with a TTL."""

    ingress: str
    pid: int
    host: str
    started: float  # unix seconds
    tallies: list[VersionTally] = []


INGRESS_LEASES = Stored(json(IngressLease), "the lease of an ingress", lambda each: (each.ingress,))
encode = records.encode
