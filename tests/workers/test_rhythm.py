"""When a worker turns to the lane fair, and for how much."""

import random
from dataclasses import dataclass, field

import pytest

from workers.rhythm import FAST_MAX, LOOK_HINTED_S, LOOK_S, QUIET_S, SPARE_S, STUCK_S, TURN_MAX, Rhythm
from workers.turns import Turns


@dataclass
class Worker:
    """What a rhythm is told of a worker that has 20 slots, of which 2 are reserved."""

    free: int = 20
    held: int = 0
    quiet_s: float = 1.0
    turns: Turns = field(default_factory=lambda: Turns(18))

    def rhythm(self) -> Rhythm:
        rhythm = Rhythm(self.turns, 2, lambda: self.free, lambda now: self.quiet_s, lambda: self.held)
        assert rhythm.is_time_to_look(100.0)
        return rhythm


def test_what_fast_has_no_use_for_is_shared() -> None:
    worker = Worker()
    rhythm = worker.rhythm()
    assert not rhythm.is_worth_a_turn(100.0)  # nobody has a backlog
    assert rhythm.next_at(100.0) == 100.0 + LOOK_S
    worker.turns.look({"a": 5})
    assert rhythm.is_worth_a_turn(100.0)
    assert rhythm.next_at(100.0) == 100.0 + QUIET_S
    assert rhythm.credit(100.0) == TURN_MAX  # all at once would go to the workers that are first
    worker.turns.pulled("a", 3)
    worker.free = 4
    assert rhythm.credit(100.0) == 1
    worker.quiet_s = 0.0
    assert rhythm.credit(100.0) == 0


def test_who_may_not_have_more_is_not_asked_for_at_once() -> None:
    worker = Worker()
    rhythm = worker.rhythm()
    worker.turns.look({"a": 5})
    rhythm.shared(rhythm.credit(100.0), 0)
    assert not rhythm.is_worth_a_turn(100.0)
    assert rhythm.next_at(100.0) == 100.0 + STUCK_S
    worker.free = 19
    assert rhythm.is_worth_a_turn(100.0)


def test_after_some_claims_of_fast_one_is_fair_while_backlogs_hold_less_than_their_sure_part() -> None:
    worker = Worker(free=0, quiet_s=0.0)
    rhythm = worker.rhythm()
    worker.turns.look({"a": 5})
    assert [rhythm.fast_claimed(100.0) for _ in range(FAST_MAX)] == [False] * (FAST_MAX - 1) + [True]
    assert rhythm.credit(100.0) == 1
    worker.held = worker.turns.sure
    assert worker.held == 3  # of 18
    assert rhythm.credit(100.0) == 0  # their requests are long: of claims alone they would have most of the batch
    worker.held -= 1
    worker.free = -1
    assert rhythm.credit(100.0) == 0
    worker.free = 0
    rhythm.fair_claimed()
    assert rhythm.credit(100.0) == 0


def test_slots_that_nobody_may_have_alone_are_kept_for_fast_as_long_as_it_is_in_use() -> None:
    worker = Worker(free=3)
    rhythm = worker.rhythm()
    worker.turns.look({"a": 5})
    rhythm.fast_claimed(100.0)
    assert rhythm.credit(100.5) == 2
    for _ in range(5):
        rhythm.fast_claimed(101.0)
    assert rhythm.credit(101.5) == 1
    worker.free = 2
    assert not rhythm.is_worth_a_turn(101.5)
    assert rhythm.credit(101.5) == 0
    rhythm.is_time_to_look(later := 101.0 + SPARE_S - LOOK_S / 2)
    assert rhythm.next_at(later) == 101.0 + SPARE_S  # when the first of the claims is forgotten
    assert rhythm.is_worth_a_turn(101.0 + SPARE_S)
    assert rhythm.credit(101.0 + SPARE_S) == 2


def test_hints_of_those_that_are_known_are_believed_and_others_are_looked_for() -> None:
    worker = Worker()
    rhythm = worker.rhythm()
    rhythm.hinted(["a"], {"a"})
    assert worker.turns.tenants == ["a"]
    worker.free = 0
    assert rhythm.next_at(100.0) == 100.0 + LOOK_S
    rhythm.hinted(["a", "b"], {"a"})
    assert rhythm.next_at(100.0) == 100.0 + LOOK_HINTED_S
    assert not rhythm.is_time_to_look(100.01)
    assert rhythm.is_time_to_look(100.0 + LOOK_HINTED_S)


@pytest.mark.parametrize("seed", range(20))
def test_time_goes_on_from_turn_to_turn(seed: int) -> None:
    dice = random.Random(seed)
    worker, now = Worker(), 100.0
    rhythm = worker.rhythm()
    worker.turns.look({"a": 5})
    for _ in range(300):
        worker.free, worker.quiet_s = dice.randrange(-1, 5), dice.choice([0.0, 1.0])
        for _ in range(dice.choice([0, 0, 0, 1, 3])):
            rhythm.fast_claimed(now)
        rhythm.is_time_to_look(now)
        rhythm.shared(rhythm.credit(now), dice.randrange(2))
        assert now < rhythm.next_at(now) <= now + LOOK_S
        now = rhythm.next_at(now)
