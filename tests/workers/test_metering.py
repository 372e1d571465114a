"""Whose the engine's time is."""

import pytest

from shared.wire import Usage
from workers.engine.request import TokenEvent
from workers.metering import OVER_MAX, Meter


def token(run: str, last: bool = False) -> TokenEvent:
    return TokenEvent(key=run, choice=0, ids=[1], usage=Usage(1, 1) if last else None)


def test_a_step_is_divided_among_those_it_served_and_idle_time_is_nobodys() -> None:
    meter = Meter()
    meter.submitted("a.1", "a", 10, 100.0)
    meter.step([token("a.1")], 101.0)  # the prefill
    meter.submitted("b.1", "b", 20, 101.5)
    meter.step([token("a.1"), token("b.1"), token("b.1")], 103.0)
    meter.step([token("a.1", last=True), token("nobody.1")], 103.5)
    meter.step([token("b.1", last=True)], 104.0)
    meter.submitted("c.1", "c", 30, 200.0)
    meter.step([token("c.1")], 200.5)
    meter.ended("c.1")  # cancelled
    taken = {rid: meter.take(rid) for rid in "abc"}
    assert {rid: each.gpu_s for rid, each in taken.items()} == pytest.approx({"a": 2.5, "b": 1.5, "c": 0.5})
    assert {rid: each.prompt_tokens for rid, each in taken.items()} == {"a": 10, "b": 20, "c": 30}
    assert meter.take("a").gpu_s == 0.0  # told once


def test_the_runs_of_a_request_are_added_and_what_nobody_takes_is_forgotten() -> None:
    meter = Meter()
    for number in range(1, 3):
        meter.submitted(f"a.{number}", "a", 10, float(number))
        meter.step([token(f"a.{number}", last=True)], number + 0.25)
    assert meter.take("a").gpu_s == 0.5
    for number in range(OVER_MAX + 1):
        meter.submitted(f"{number}.1", str(number), 1, 10.0)
        meter.ended(f"{number}.1")
    assert (meter.take("0").prompt_tokens, meter.take("1").prompt_tokens) == (0, 1)
