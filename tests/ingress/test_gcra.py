"""The arithmetic of a rate."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingress.gcra import Bucket, Rate
from ingress.limits import duration


def test_a_burst_and_then_one_after_the_other() -> None:
    rate, bucket = Rate(60, 10.0), Bucket()
    for taken in range(10):
        assert rate.remaining(bucket.debt_s(100.0)) == 10 - taken
        assert rate.late_s(bucket.debt_s(100.0), rate.cost_s(1)) == 0.0
        bucket.add(rate.cost_s(1), 100.0)
    assert rate.late_s(bucket.debt_s(100.0), rate.cost_s(1)) == pytest.approx(1.0)
    assert rate.late_s(bucket.debt_s(100.75), rate.cost_s(1)) == pytest.approx(0.25)
    assert rate.late_s(bucket.debt_s(101.0), rate.cost_s(1)) == 0.0
    bucket.add(-rate.cost_s(3), 101.0)
    assert rate.remaining(bucket.debt_s(101.0)) == 4


def test_what_is_over_the_burst_takes_a_full_bucket_and_is_paid_for() -> None:
    rate, bucket = Rate(600, 60.0), Bucket()
    bucket.add(rate.cost_s(1), 0.0)
    assert rate.late_s(bucket.debt_s(0.0), rate.cost_s(1000)) == pytest.approx(0.1)
    bucket.add(rate.cost_s(1000), 0.1)
    assert rate.late_s(bucket.debt_s(0.1), rate.cost_s(1)) == pytest.approx(40.1)
    assert rate.remaining(bucket.debt_s(0.1)) == 0


@given(
    limit=st.integers(1, 10**6),
    burst_s=st.floats(0.01, 100),
    parts=st.integers(1, 5),
    asks=st.lists(st.tuples(st.floats(0, 10), st.integers(1, 5)), max_size=60),
)
def test_never_more_than_the_rate_and_one_burst_whatever_the_parts(
    limit: int, burst_s: float, parts: int, asks: list[tuple[float, int]]
) -> None:
    rate, now, taken, largest = Rate(limit, burst_s), 0.0, 0, 0
    buckets = [Bucket() for _ in range(parts)]
    for number, (after_s, count) in enumerate(asks):
        now += after_s
        bucket, cost_s = buckets[number % parts], rate.cost_s(count) * parts
        if not rate.late_s(bucket.debt_s(now), cost_s):
            bucket.add(cost_s, now)
            taken, largest = taken + count, max(largest, count)
    # what is over its part of the burst is let through from a full bucket: one such request each
    assert taken <= (now + burst_s) * limit / 60 + parts * largest + 1e-3


def test_durations_are_written_as_openai_does() -> None:
    shown = {0.0: "0ms", 0.12: "120ms", 8.64: "8.64s", 60.0: "1m0s", 360.0: "6m0s", 3605.5: "1h0m5.5s", 0.9999: "1s"}
    assert {seconds: duration(seconds) for seconds in shown} == shown
