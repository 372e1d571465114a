"""Virtual time."""

import pytest

from headrace.fleet.clock import Clock


def test_events_happen_in_order_and_equal_times_in_the_order_of_asking() -> None:
    clock, seen = Clock(), []
    for when, name in ((2.0, "c"), (1.0, "a"), (1.0, "b"), (5.0, "late")):
        clock.at(when, lambda name: seen.append((clock.now, name)), name)
    clock.at(1.0, lambda name: seen.append((clock.now, name)), "first", rank=-1)
    clock.run(3.0)
    assert seen == [(1.0, "first"), (1.0, "a"), (1.0, "b"), (2.0, "c")]
    assert clock.now == 3.0


def test_an_event_may_ask_for_others_and_nothing_happens_in_the_past() -> None:
    clock, seen = Clock(), []

    def first(_: object) -> None:
        clock.at(clock.now + 1.0, lambda _: seen.append(clock.now))

    clock.at(1.0, first)
    clock.run(9.0)
    assert seen == [2.0]
    with pytest.raises(AssertionError, match="before"):
        clock.at(8.0, first)
