"""What a consumer's counts tell over time, against a queue whose truth is known."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.flow import Flow, Reading


def reading(at: float, pending: int = 0, claimed: int = 0, delivered: int = 0, in_flight: int | None = None) -> Reading:
    return Reading(
        at=at,
        pending=pending,
        claimed=claimed,
        delivered=delivered,
        in_flight=claimed if in_flight is None else in_flight,
    )


def steady(rate: float, service_s: float, seconds: float, seed: int = 1) -> Flow:
    """A queue whose requests are taken at once, and looked at four times a second."""
    flow, dice, now, due, delivered = Flow(2.5), random.Random(seed), 0.0, 0.0, 0
    ends: list[float] = []
    while now < seconds:
        now += 0.25
        while due <= now:
            delivered += 1
            ends.append(due + service_s)
            due += dice.expovariate(rate)
        ends = [end for end in ends if end > now]
        flow.read(reading(now, 0, len(ends), delivered))
    return flow


def test_nothing_is_told_before_something_was_seen() -> None:
    flow = Flow(2.5)
    assert (flow.rate(), flow.service_s, flow.oldest_s(0.0), flow.stranded) == (None, None, 0.0, 0)
    flow.read(reading(0.0, 5))
    assert (flow.rate(), flow.service_s) == (None, None)


@settings(max_examples=15, deadline=None)
@given(st.floats(5.0, 80.0), st.floats(0.3, 10.0), st.integers(1, 1000))
def test_rate_and_time_in_a_slot_are_what_they_are(rate: float, service_s: float, seed: int) -> None:
    flow = steady(rate, service_s, 90.0, seed)
    assert flow.rate() == pytest.approx(rate, rel=0.5)
    assert flow.service_s == pytest.approx(service_s, rel=0.25, abs=0.15)


def test_a_jump_beyond_doubt_shows_within_two_seconds() -> None:
    flow, arrived = Flow(2.5), 0
    for tick in range(120):
        arrived += 2
        flow.read(reading(tick / 4, 0, 0, arrived))
    assert flow.rate() == pytest.approx(8.0)
    for tick in range(120, 128):
        arrived += 25
        flow.read(reading(tick / 4, 0, 0, arrived))
    assert 80.0 < (flow.rate() or 0.0) <= 100.0


def test_the_oldest_is_as_old_as_it_was_seen_first_in_first_out() -> None:
    flow = Flow(2.5)
    flow.read(reading(0.0))
    flow.read(reading(10.0, pending=3))
    flow.read(reading(20.0, pending=5))
    assert flow.oldest_s(25.0) == 15.0
    flow.read(reading(26.0, pending=3, claimed=2, delivered=2))
    assert flow.oldest_s(26.0) == 16.0
    flow.read(reading(27.0, pending=2, claimed=3, delivered=3))
    assert flow.oldest_s(27.0) == 7.0
    flow.read(reading(28.0, pending=1, claimed=3, delivered=3))  # one was withdrawn
    assert flow.oldest_s(28.0) == 8.0
    flow.read(reading(29.0, pending=0, claimed=3, delivered=4))
    assert flow.oldest_s(29.0) == 0.0


def test_what_no_lease_tells_of_for_long_enough_is_stranded() -> None:
    flow = Flow(2.5)
    for at, in_flight in ((0.0, 0), (1.0, 10), (2.0, 10)):  # a lease is late: nothing is stranded
        flow.read(reading(at, claimed=10, delivered=10, in_flight=in_flight))
    assert flow.stranded == 0
    for at in (3.0, 4.0, 5.0, 6.0, 7.0):
        flow.read(reading(at, claimed=10, delivered=10, in_flight=4))
    assert flow.stranded == 6
    flow.read(reading(8.0, claimed=4, delivered=10, in_flight=4))
    assert flow.stranded == 0


def test_a_consumer_that_was_made_anew_starts_anew() -> None:
    flow = steady(10.0, 1.0, 30.0)
    flow.read(reading(31.0, pending=2))
    assert flow.rate() is None
    assert flow.oldest_s(33.0) == 2.0


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30), st.integers(0, 5)), max_size=40))
def test_whatever_the_counts_do_it_tells_something_sane(steps: list[tuple[int, int, int]]) -> None:
    flow, delivered = Flow(2.5), 0
    for number, (pending, claimed, more) in enumerate(steps):
        delivered += more
        flow.read(reading(number * 0.5, pending, claimed, delivered))
        assert 0.0 <= flow.oldest_s(number * 0.5) <= number * 0.5
        assert (flow.oldest_s(number * 0.5 + 1) > 0) == (pending > 0)
        assert (flow.rate() or 0.0) >= 0.0
        assert flow.service_s is None or flow.service_s > 0.0
        assert 0 <= flow.stranded <= claimed
