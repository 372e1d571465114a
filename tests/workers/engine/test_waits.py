"""How long those that wait will wait."""

import pytest
from virtual_engine import Life, VirtualEngine

from workers.engine.pacer import Cost
from workers.engine.waits import steps_to_wait


def guesses(it: VirtualEngine) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for sequence, steps in steps_to_wait(it.scheduler):
        found.setdefault(sequence.tenant, []).append(steps)
    return found


def test_nobody_waits_where_nothing_runs() -> None:
    it = VirtualEngine(Cost(step=1.0), 100, 4)
    it.submit("A", 10, 10)
    assert steps_to_wait(it.scheduler) == []


def test_the_guess_is_right_where_all_requests_are_alike() -> None:
    it = VirtualEngine(Cost(step=1.0), 1000, 4)
    for number in range(200):
        it.submit("A", 10, 40)
        if number < 4:
            for _ in range(10):
                it.step()
    for _ in range(300):
        it.step()
    guess = dict(steps_to_wait(it.scheduler))
    now = it.steps
    waiting: list[Life] = [it.lives[sequence] for sequence in guess][:40]
    while any(life.admitted_step is None for life in waiting):
        it.step()
    for place in (9, 19, 39):
        life = waiting[place]
        assert life.admitted_step is not None
        assert guess[life.sequence] == pytest.approx(life.admitted_step - now, rel=0.25)


def test_a_tenant_with_little_waiting_does_not_wait_behind_all_of_another() -> None:
    it = VirtualEngine(Cost(step=1.0), 1000, 4)
    for _ in range(100):
        it.submit("flood", 10, 40)
    for _ in range(90):
        it.step()
    it.submit("other", 10, 40)
    found = guesses(it)
    assert found["other"][0] < found["flood"][2]
    assert found["flood"] == sorted(found["flood"])


def test_one_that_lacks_memory_waits_for_as_many_as_hold_it() -> None:
    it = VirtualEngine(Cost(step=1.0), 40, 16)
    for _ in range(8):
        it.submit("A", 60, 20)
    it.step()
    for _ in range(10):
        it.step()
    small, large = it.submit("B", 10, 10), it.submit("C", 500, 10)
    steps = dict(steps_to_wait(it.scheduler))
    assert steps[large.sequence] > 2 * steps[small.sequence]
