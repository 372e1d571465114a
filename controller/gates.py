"""The gates of a rollout: is the canary surely worse than it may be? Pure: counts in, findings out.

Both kinds of gates ask whether a share is surely larger than it may be, by the likelihood ratio (Wilks 1938), which unlike the
usual intervals keeps its promise for rare events, too:

- A rate: the canary's share is more than stable's and what may be between them, or more than the absolute limit.
- A 99th percentile: the limit is stable's 99th percentile times and plus what may be between them. The canary exceeds it more
  often than stable exceeds its own, and more often than once in a hundred: where both are alike it does not, whatever the
  sizes of the samples. An absolute limit is exceeded more often than once in a hundred.

Requests that meet the same burst or the same long prompt are late together, and count for less than so many. So the evidence
is divided by how much more unevenly the hits are spread over slices of time than independent ones would be (quasi-likelihood,
Wedderburn 1974; Pearson's estimate), and has to be there in `SLICES_MIN` of them. `SURE` deviations are asked for, so that
looking again and again finds nothing where there is nothing. Samples too few to say anything pass nothing: steps have a
minimum of requests for that.
"""

import math
from collections.abc import Callable, Iterable, Sequence

from msgspec import Struct

from shared.rollouts import Finding, Gates, LatencyGate, RateGate
from shared.tally import Histogram, Tally, milliseconds_of

SURE = 3.0  # standard deviations: one chance in 700 of being wrong, in a single look at the very limit
TAIL = 0.01  # beyond a 99th percentile
SLICES_MIN = 3  # of time, that have to have a share in a breach
HALVINGS = 40  # until a likelihood is at its maximum

Hits = tuple[int, int]  # of how many


class Window(Struct, frozen=True):
    """What was counted of both versions in a span of time. `slices` are the counts of both by time, as far as they are kept."""

    name: str  # step | deployment
    canary: Tally
    stable: Tally  # may be empty: then only the absolute limits are looked at
    canary_slices: Sequence[Tally] = ()
    stable_slices: Sequence[Tally] = ()


def judge(gates: Gates, window: Window) -> list[Finding]:
    """What each gate sees."""
    found = (
        _rate("error_rate", gates.error_rate, gates, window, lambda tally: tally.errors),
        _rate("refusal_rate", gates.refusal_rate, gates, window, lambda tally: tally.refusals),
        _latency("ttft_p99", gates.ttft_p99, gates, window, lambda tally: tally.ttft),
        _latency("tpot_p99", gates.tpot_p99, gates, window, lambda tally: tally.tpot),
    )
    return [finding for finding in found if finding is not None]


def _rate(
    name: str, gate: RateGate | None, gates: Gates, window: Window, count: Callable[[Tally], int]
) -> Finding | None:
    canary, stable = window.canary, window.stable
    if gate is None or canary.ended < gates.samples_min:
        return None

    def hits(tally: Tally) -> Hits:
        return count(tally), tally.ended

    compared = gate.difference_max is not None and stable.ended >= gates.samples_min
    breached, limits = False, []
    if gate.max is not None:
        breached = _breached(evidence_over(*hits(canary), gate.max), window, hits, hits)
        limits.append(gate.max)
    if compared and gate.difference_max is not None:
        evidence = evidence_more(*hits(canary), *hits(stable), gate.difference_max)
        breached |= _breached(evidence, window, hits, hits)
        limits.append(count(stable) / stable.ended + gate.difference_max)
    if not limits:
        return None
    return Finding(
        gate=name,
        breached=breached,
        canary=round(count(canary) / canary.ended, 5),
        limit=round(min(limits), 5),
        samples=canary.ended,
        window=window.name,
        stable=round(count(stable) / stable.ended, 5) if compared else None,
        stable_samples=stable.ended if compared else 0,
    )


def _latency(
    name: str, gate: LatencyGate | None, gates: Gates, window: Window, of: Callable[[Tally], Histogram]
) -> Finding | None:
    canary, stable = of(window.canary), of(window.stable)
    samples, stable_samples = sum(canary.values()), sum(stable.values())
    if gate is None or samples < gates.samples_min:
        return None

    def beyond(limit_ms: float) -> Callable[[Tally], Hits]:
        return lambda tally: _beyond(of(tally), limit_ms)

    compared = gate.ratio_max is not None and stable_samples >= gates.samples_min
    breached, limits = False, []
    if gate.max_ms is not None:
        over = beyond(gate.max_ms)
        breached = _breached(evidence_over(*over(window.canary), TAIL), window, over, over)
        limits.append(gate.max_ms)
    if compared and gate.ratio_max is not None:
        usual = quantile(stable, 1 - TAIL)
        limits.append(usual * gate.ratio_max + gate.slack_ms)
        over, stable_over = beyond(limits[-1]), beyond(usual)
        more = evidence_more(*over(window.canary), *stable_over(window.stable))
        breached |= _breached(min(more, evidence_over(*over(window.canary), TAIL)), window, over, stable_over)
    if not limits:
        return None
    return Finding(
        gate=name,
        breached=breached,
        canary=round(quantile(canary, 1 - TAIL), 3),
        limit=round(min(limits), 3),
        samples=samples,
        window=window.name,
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


def _beyond(histogram: Histogram, limit_ms: float) -> Hits:
    over = sum(count for bucket, count in histogram.items() if milliseconds_of(bucket) > limit_ms)
    return over, sum(histogram.values())


# -- the test ----------------------------------------------------------------------------------------------------------


def _breached(
    evidence: float, window: Window, of_canary: Callable[[Tally], Hits], of_stable: Callable[[Tally], Hits]
) -> bool:
    """Whether the evidence is enough, and is not of one moment."""
    if evidence <= SURE * SURE:
        return False
    canary = [of_canary(each) for each in window.canary_slices]
    if not canary:
        return True
    stable = [of_stable(each) for each in window.stable_slices]
    return sum(hits > 0 for hits, _ in canary) >= SLICES_MIN and evidence > SURE * SURE * dispersion(canary, stable)


def dispersion(*groups: Iterable[Hits]) -> float:
    """How much more unevenly hits are spread over the slices of each group than independent ones would be; at least 1."""
    squares, freedom = 0.0, 0
    for group in groups:
        cells = [(hits, count) for hits, count in group if count]
        share = sum(hits for hits, _ in cells) / max(1, sum(count for _, count in cells))
        if 0 < share < 1:
            squares += sum((hits - share * count) ** 2 / (share * (1 - share) * count) for hits, count in cells)
            freedom += len(cells) - 1
    return max(1.0, squares / freedom) if freedom else 1.0


def evidence_over(hits: int, count: int, limit: float) -> float:
    """That the share behind `hits` of `count` is more than `limit`: the square of so many standard deviations."""
    if hits <= limit * count:
        return 0.0
    if limit == 0:
        return math.inf
    return 2 * (_likelihood(hits, count, hits / count) - _likelihood(hits, count, limit))


def evidence_more(hits: int, count: int, other_hits: int, other_count: int, difference: float = 0.0) -> float:
    """That the share behind `hits` of `count` is more than the other one and `difference`, in the same unit."""
    share, other = hits / count, other_hits / other_count
    if share <= other + difference:
        return 0.0
    low, high = other, share - difference  # the other share that explains both best, if they differ by no more
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        slope = _slope(hits, count, middle + difference) + _slope(other_hits, other_count, middle)
        low, high = (middle, high) if slope > 0 else (low, middle)
    together = _likelihood(hits, count, high + difference) + _likelihood(other_hits, other_count, high)
    return 2 * (_likelihood(hits, count, share) + _likelihood(other_hits, other_count, other) - together)


def _likelihood(hits: int, count: int, share: float) -> float:
    """The logarithm of it."""
    found = hits * math.log(share) if hits else 0.0
    return found + (count - hits) * math.log1p(-share) if count > hits else found


def _slope(hits: int, count: int, share: float) -> float:
    """Of the logarithm of the likelihood."""
    return (hits / share if hits else 0.0) - ((count - hits) / (1 - share) if count > hits else 0.0)
