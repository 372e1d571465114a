"""The gates of a rollout: is the canary surely worse than it may be? Pure: counts in, findings out.

A rate is breached when the lower bound of the canary's exceeds the upper bound of stable's plus what may be between them. A
99th percentile is breached when surely more than one in a hundred of the canary's requests took longer than the limit, which
is stable's 99th percentile, at its upper bound, times what may be between them. Bounds are Wilson's score intervals (1927) at
`SURE` deviations, so that looking again and again finds nothing where there is nothing, and three errors in twenty are enough
where there are none. Samples too few to say anything pass nothing: steps have a minimum of requests for that.
"""

import math
from collections.abc import Callable

from msgspec.structs import replace

from shared.rollouts import Finding, Gates, LatencyGate, RateGate
from shared.tally import Histogram, Tally, milliseconds_of

SURE = 3.7  # standard deviations: one chance in 9,000 that a bound is wrong, in a single look
TAIL = 0.01  # of a 99th percentile


def judge(gates: Gates, canary: Tally, stable: Tally, window: str) -> list[Finding]:
    """What each gate sees. `stable` may be empty: then only the absolute limits are looked at."""
    found = [
        _rate("error_rate", gates.error_rate, gates, canary, stable, lambda tally: tally.errors),
        _rate("refusal_rate", gates.refusal_rate, gates, canary, stable, lambda tally: tally.refusals),
        _latency("ttft_p99", gates.ttft_p99, gates, canary.ttft, stable.ttft),
        _latency("tpot_p99", gates.tpot_p99, gates, canary.tpot, stable.tpot),
    ]
    return [replace(finding, window=window) for finding in found if finding is not None]


def _rate(
    name: str, gate: RateGate | None, gates: Gates, canary: Tally, stable: Tally, count: Callable[[Tally], int]
) -> Finding | None:
    if gate is None or canary.ended < gates.samples_min:
        return None
    compared = gate.difference_max is not None and stable.ended >= gates.samples_min
    limits = [gate.max] if gate.max is not None else []
    if compared and gate.difference_max is not None:
        limits.append(upper_bound(count(stable), stable.ended) + gate.difference_max)
    if not limits:
        return None
    return Finding(
        gate=name,
        breached=lower_bound(count(canary), canary.ended) > min(limits),
        canary=round(count(canary) / canary.ended, 5),
        limit=round(min(limits), 5),
        samples=canary.ended,
        window="",
        stable=round(count(stable) / stable.ended, 5) if compared else None,
        stable_samples=stable.ended if compared else 0,
    )


def _latency(name: str, gate: LatencyGate | None, gates: Gates, canary: Histogram, stable: Histogram) -> Finding | None:
    samples, stable_samples = sum(canary.values()), sum(stable.values())
    if gate is None or samples < gates.samples_min:
        return None
    compared = gate.ratio_max is not None and stable_samples >= gates.samples_min
    limits = [gate.max_ms] if gate.max_ms is not None else []
    if compared and gate.ratio_max is not None:
        limits.append(quantile_upper_bound(stable, 1 - TAIL) * gate.ratio_max + gate.slack_ms)
    if not limits:
        return None
    limit = min(limits)
    over = sum(count for bucket, count in canary.items() if milliseconds_of(bucket) > limit)
    return Finding(
        gate=name,
        breached=lower_bound(over, samples) > TAIL,
        canary=round(quantile(canary, 1 - TAIL), 3),
        limit=round(limit, 3),
        samples=samples,
        window="",
        stable=round(quantile(stable, 1 - TAIL), 3) if compared else None,
        stable_samples=stable_samples if compared else 0,
    )


def quantile(histogram: Histogram, share: float) -> float:
    """Milliseconds that `share` of the observations do not exceed; of at least one."""
    rank = math.ceil(share * sum(histogram.values()))
    for bucket in sorted(histogram):
        rank -= histogram[bucket]
        if rank <= 0:
            break
    return milliseconds_of(bucket)


def quantile_upper_bound(histogram: Histogram, share: float) -> float:
    """What the quantile surely does not exceed, as far as the observations tell: at most the largest of them."""
    count = sum(histogram.values())
    return quantile(histogram, min(1.0, upper_bound(round(share * count), count)))


def lower_bound(hits: int, count: int) -> float:
    """What the share behind `hits` of `count` surely exceeds."""
    middle, half = _wilson(hits, count)
    return max(0.0, middle - half)


def upper_bound(hits: int, count: int) -> float:
    """What the share behind `hits` of `count` surely does not exceed."""
    middle, half = _wilson(hits, count)
    return min(1.0, middle + half)


def _wilson(hits: int, count: int) -> tuple[float, float]:
    share, square = hits / count, SURE * SURE
    scale = 1 + square / count
    half = SURE * math.sqrt(share * (1 - share) / count + square / (4 * count * count)) / scale
    return (share + square / (2 * count)) / scale, half
