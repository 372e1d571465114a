"""The gates: what is surely worse is found, what only looks so is not."""

import math
import random
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.gates import SURE, Window, dispersion, evidence_more, evidence_over, judge, quantile
from shared.rollouts import Finding, Gates, LatencyGate, RateGate
from shared.tally import Tally, bucket_of, milliseconds_of, total

PROMISE = math.erfc(SURE / math.sqrt(2)) / 2  # the chance of being wrong, in a single look at the very limit


def tally(
    ended: int, errors: int = 0, refusals: int = 0, ttft_ms: Sequence[float] = (), tpot_ms: float = 20.0
) -> Tally:
    """`ttft_ms` in turn, or 50 each."""
    found = Tally()
    for number in range(ended):
        status = 500 if number < errors else 400 if number < errors + refusals else 200
        ttft_s = (ttft_ms[number % len(ttft_ms)] if ttft_ms else 50.0) / 1e3
        found.note(status, *((ttft_s, tpot_ms / 1e3) if status == 200 else (None, None)))
    return found


def breached(gates: Gates, canary: Tally, stable: Tally, **slices: Any) -> set[str]:
    return {each.gate for each in judge(gates, Window("step", canary, stable, **slices)) if each.breached}


def binomial(count: int, share: float) -> list[float]:
    return [math.comb(count, hits) * share**hits * (1 - share) ** (count - hits) for hits in range(count + 1)]


# -- the evidence ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [20, 30, 100, 400])
@pytest.mark.parametrize("limit", [0.001, 0.01, 0.05, 0.3])
def test_one_look_is_wrong_as_rarely_as_is_promised(count: int, limit: float) -> None:
    """Exactly, of all that can be seen, where the truth is at the limit. Counts come in whole numbers: some more is allowed."""
    wrong = sum(
        chance for hits, chance in enumerate(binomial(count, limit)) if evidence_over(hits, count, limit) > SURE * SURE
    )
    assert wrong < 2.5 * PROMISE


@pytest.mark.parametrize(("share", "difference"), [(0.0, 0.01), (0.01, 0.0), (0.01, 0.01), (0.2, 0.05)])
@pytest.mark.parametrize(("count", "other_count"), [(40, 40), (40, 250), (150, 80)])
def test_nor_is_it_of_two_samples(share: float, difference: float, count: int, other_count: int) -> None:
    others, wrong = binomial(other_count, share), 0.0
    for hits, chance in enumerate(binomial(count, share + difference)):
        if chance > 1e-12:
            seen = (evidence_more(hits, count, other, other_count, difference) for other in range(other_count + 1))
            wrong += chance * sum(own for own, each in zip(others, seen, strict=True) if each > SURE * SURE)
    assert wrong < 2.5 * PROMISE


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 500), st.integers(1, 500), st.data())
def test_evidence_is_the_likelihood_lost_by_the_best_explanation_without_a_breach(
    count: int, other_count: int, data: st.DataObject
) -> None:
    hits, other_hits = data.draw(st.integers(0, count)), data.draw(st.integers(0, other_count))
    difference = data.draw(st.sampled_from([0.0, 0.01, 0.05]))

    def likelihood(*shares: float) -> float:
        parts = ((hits, count), (other_hits, other_count))
        inner = [min(max(each, 1e-12), 1 - 1e-12) for each in shares]
        return sum(h * math.log(p) + (n - h) * math.log(1 - p) for (h, n), p in zip(parts, inner, strict=True))

    found = evidence_more(hits, count, other_hits, other_count, difference)
    share, other = hits / count, other_hits / other_count
    if share <= other + difference:
        assert found == 0
        return
    grid = (other + (share - difference - other) * step / 500 for step in range(501))
    best = max(likelihood(each + difference, each) for each in grid)
    lost = 2 * (likelihood(share, other) - best)
    assert 0 <= found <= lost + 1e-6
    assert found == pytest.approx(lost, rel=0.01, abs=1e-3)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 200), st.integers(1, 200), st.data())
def test_more_hits_are_more_evidence(count: int, other_count: int, data: st.DataObject) -> None:
    other_hits = data.draw(st.integers(0, other_count))
    found = [evidence_more(hits, count, other_hits, other_count, 0.01) for hits in range(count + 1)]
    assert all(two >= one - 1e-9 for one, two in pairwise(found))
    over = [evidence_over(hits, count, 0.05) for hits in range(count + 1)]
    assert over == sorted(over)
    assert evidence_over(1, count, 0.0) == math.inf


def test_hits_that_come_by_themselves_are_not_dispersed_and_those_that_come_together_are() -> None:
    draw = random.Random(1)
    alone = [(sum(draw.random() < 0.1 for _ in range(50)), 50) for _ in range(200)]
    assert 1.0 <= dispersion(alone) < 1.3
    together = [(10 * hits, 10 * count) for hits, count in alone]  # ten at once, or none
    assert dispersion(together) == pytest.approx(10 * dispersion(alone), rel=0.3)
    assert dispersion(together, alone) < dispersion(together)
    assert dispersion() == dispersion([(3, 10)]) == dispersion([(0, 10), (0, 10)]) == dispersion([(0, 0)]) == 1.0


# -- the gates ---------------------------------------------------------------------------------------------------------


@given(
    st.lists(st.floats(0.1, 1e5), min_size=1, max_size=60),
    st.integers(1, 5),
    st.integers(1, 5),
    st.integers(0, 30),
)
def test_who_is_like_stable_passes(times_ms: list[float], canary: int, stable: int, errors: int) -> None:
    count = len(times_ms)
    seen = tally(count, min(errors, count), ttft_ms=times_ms)
    assert breached(Gates(samples_min=1), total([seen] * canary), total([seen] * stable)) == set()


@given(st.lists(st.floats(1.0, 1e4), min_size=1, max_size=60), st.floats(0.1, 1.2))
def test_within_the_ratio_is_within_the_limit(times_ms: list[float], times: float) -> None:
    count = 3 * len(times_ms)
    canary = tally(count, ttft_ms=[times * each for each in times_ms], tpot_ms=20 * times)
    assert breached(Gates(samples_min=1), canary, tally(count, ttft_ms=times_ms)) == set()


@pytest.mark.parametrize(
    ("canary", "name"),
    [
        (tally(300, errors=15), "error_rate"),
        (tally(300, refusals=45), "refusal_rate"),
        (tally(60, ttft_ms=[40.0, 300.0]), "ttft_p99"),
        (tally(60, tpot_ms=40.0), "tpot_p99"),
    ],
)
def test_what_is_worse_is_found_by_its_gate(canary: Tally, name: str) -> None:
    assert breached(Gates(), canary, tally(2000)) == {name}
    off = Gates(**{name: None})  # type: ignore[arg-type]
    assert breached(off, canary, tally(2000)) == set()


def test_what_is_found_is_said_with_its_figures() -> None:
    findings = {
        each.gate: each for each in judge(Gates(), Window("step", tally(300, errors=15), tally(2000, errors=2)))
    }
    assert set(findings) == {"error_rate", "refusal_rate", "ttft_p99", "tpot_p99"}
    assert findings["error_rate"] == Finding(
        gate="error_rate",
        breached=True,
        canary=0.05,
        limit=0.011,
        samples=300,
        window="step",
        stable=0.001,
        stable_samples=2000,
    )
    ttft = findings["ttft_p99"]
    assert (ttft.canary, ttft.limit) == (pytest.approx(50, rel=0.03), pytest.approx(125, rel=0.03))
    assert (ttft.samples, ttft.stable_samples) == (285, 1998)


def test_too_few_say_nothing_and_pass_nothing() -> None:
    bad = tally(29, errors=20)
    assert judge(Gates(), Window("step", bad, tally(1000))) == []
    assert [each.gate for each in judge(Gates(samples_min=29), Window("step", bad, tally(1000)))] == [
        "error_rate",
        "refusal_rate",
    ]  # of latencies there are nine
    assert judge(Gates(), Window("step", tally(500, errors=100), tally(29))) == []
    assert judge(Gates(), Window("step", Tally(), Tally())) == []


def test_absolute_limits_need_no_stable() -> None:
    gates = Gates(
        error_rate=RateGate(max=0.02), refusal_rate=RateGate(max=0.0), ttft_p99=LatencyGate(max_ms=100.0), tpot_p99=None
    )
    assert breached(gates, tally(200, refusals=1, ttft_ms=[50.0]), Tally()) == {"refusal_rate"}
    assert breached(gates, tally(200, errors=20, ttft_ms=[90.0, 120.0]), Tally()) == {"error_rate", "ttft_p99"}
    assert breached(gates, tally(200, errors=4, ttft_ms=[70.0]), tally(200, errors=100)) == set()
    alike = Gates(error_rate=RateGate(max=0.02), ttft_p99=LatencyGate(max_ms=100.0), tpot_p99=None)
    bad = tally(400, errors=40, ttft_ms=[150.0])
    assert breached(alike, bad, bad) == {"error_rate", "ttft_p99"}  # as bad as stable is too bad
    (finding,) = [each for each in judge(alike, Window("step", bad, bad)) if each.gate == "ttft_p99"]
    assert (finding.limit, finding.stable_samples) == (100.0, 360)


def slices(counts: Sequence[int], bad: Sequence[int]) -> list[Tally]:
    """So many requests in each slice of time, of which so many have a late first token."""
    return [
        tally(count, ttft_ms=[900.0] * late + [50.0] * (count - late)) for count, late in zip(counts, bad, strict=True)
    ]


@pytest.mark.parametrize(
    ("late", "found"),
    [
        ([0, 0, 0, 12, 0, 0, 0, 0, 0, 0], False),  # one moment
        ([0, 0, 0, 8, 4, 0, 0, 0, 0, 0], False),  # at the edge of two slices
        ([0, 5, 0, 0, 0, 5, 0, 0, 5, 0], False),  # thrice, each time many at once
        ([1, 2, 1, 1, 2, 0, 1, 2, 1, 1], True),  # as many as in one moment, all the time
        ([20] * 10, True),
    ],
)
def test_what_comes_at_once_is_not_so_many(late: list[int], found: bool) -> None:
    canary, stable = slices([20] * 10, late), slices([100] * 10, [0] * 10)
    both = total(canary), total(stable)
    assert breached(Gates(), *both) == {"ttft_p99"}  # as it would be if each were by itself
    assert (breached(Gates(), *both, canary_slices=canary, stable_slices=stable) == {"ttft_p99"}) is found


def test_bursts_of_stable_s_show_that_latencies_come_in_bursts() -> None:
    late = [1, 2, 1, 1, 2, 0, 1, 2, 1, 1]
    canary, calm, bursts = (
        slices([20] * 10, late),
        slices([100] * 10, [1, 0] * 5),
        slices([100] * 10, [0, 0, 0, 0, 0, 0, 0, 60, 0, 0]),
    )
    gates = Gates(ttft_p99=LatencyGate(max_ms=500.0))
    window = {"canary_slices": canary}
    assert breached(gates, total(canary), total(calm), stable_slices=calm, **window) == {"ttft_p99"}
    assert breached(gates, total(canary), total(bursts), stable_slices=bursts, **window) == set()


@given(st.lists(st.floats(0.5, 1e5), min_size=1, max_size=200), st.floats(0.01, 1.0))
def test_a_quantile_is_within_a_bucket(times_ms: list[float], share: float) -> None:
    histogram: dict[int, int] = {}
    for each in times_ms:
        histogram[bucket_of(each)] = histogram.get(bucket_of(each), 0) + 1
    exact = sorted(times_ms)[math.ceil(share * len(times_ms)) - 1]
    assert quantile(histogram, share) == milliseconds_of(bucket_of(exact))
    assert list(accumulate(histogram.values()))[-1] == len(times_ms)
