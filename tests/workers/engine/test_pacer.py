"""The cost of a step: how it is measured, corrected, and what it bounds."""

import random

import pytest
from virtual_engine import VirtualEngine

from workers.engine.pacer import PREFILL_MIN, Cost, Pacer
from workers.engine.probe import measure
from workers.engine.request import EngineInfo
from workers.engine.sequence import Load, StepPlan, load_of

COST = Cost(step=14.0, decode=1.3, context=0.002, prefill=0.5, pair=0.0001)


class Clocked:
    """A runner whose steps move a clock by what they cost."""

    def __init__(self, cost: Cost) -> None:
        self.cost = cost
        self.now = 0.0
        self.plans: list[StepPlan] = []

    def forward(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        self.now += self.cost.ms(load_of(plan.slices)) / 1e3

    def sample(self, plan: StepPlan, computed: None) -> None:
        return None


def info(slots: int = 64, blocks: int = 4096, length: int = 8192) -> EngineInfo:
    return EngineInfo(max_model_len=length, slots=slots, blocks_total=blocks, device="none", dtype="none")


@pytest.mark.parametrize("start", [0, 1000, 8000])
@pytest.mark.parametrize("pair", [0.0, 0.0001, 0.01])
def test_prefill_within_is_the_inverse_of_the_cost(start: int, pair: float) -> None:
    cost = Cost(step=3.0, prefill=0.5, pair=pair)
    for ms in (1.0, 20.0, 300.0):
        count = cost.prefill_within(ms, start)

        def taken(tokens: int) -> float:
            return cost.ms(Load(1, 0, 0, tokens, tokens * start + tokens * tokens // 2)) - cost.step

        assert taken(count) <= ms * 1.01 + 1e-6
        assert taken(count + 2) > ms
    assert cost.prefill_within(-1.0, start) == 0


def test_a_measured_cost_is_the_real_one() -> None:
    runner = Clocked(COST)
    found = measure(runner, info(), 512, clock=lambda: runner.now)
    for name in ("step", "decode", "context", "prefill", "pair"):
        assert getattr(found, name) == pytest.approx(getattr(COST, name), rel=0.15), name


@pytest.mark.parametrize(("slots", "blocks", "length", "chunk"), [(1, 1, 16, 1), (3, 5, 40, 7), (64, 8, 128, 512)])
def test_a_small_engine_is_measured_within_its_sizes(slots: int, blocks: int, length: int, chunk: int) -> None:
    runner = Clocked(COST)
    found = measure(runner, info(slots, blocks, length), chunk, clock=lambda: runner.now)
    assert found.step >= 0
    for plan in runner.plans:
        held = [block for part in plan.slices for block in part.sequence.blocks]
        assert len(plan.slices) <= slots
        assert len(set(held)) == len(held)
        assert max(held) < blocks
        assert all(part.start + part.count <= length for part in plan.slices)


def test_without_a_target_or_a_cost_there_is_no_bound() -> None:
    for pacer in (Pacer(None, COST), Pacer(80.0, None)):
        assert not pacer.bounds
        assert pacer.room(64, 100_000, 0) > 1_000_000
        assert pacer.admits(10_000, 10_000_000)


def test_nobody_is_kept_waiting_when_nothing_decodes() -> None:
    assert Pacer(20.0, COST).room(0, 0, 0) > 1_000_000


def test_room_shrinks_with_what_else_the_step_does_and_never_to_nothing() -> None:
    pacer = Pacer(80.0, COST)
    rooms = [
        pacer.room(8, 1000, 0),
        pacer.room(8, 1000, 4000),
        pacer.room(32, 4000, 4000),
        pacer.room(64, 100_000, 4000),
    ]
    assert rooms == sorted(rooms, reverse=True)
    assert rooms[-1] == PREFILL_MIN
    assert pacer.room(8, 1000, 0, late=True) > rooms[0]


@pytest.mark.parametrize("factor", [0.4, 1.0, 2.5])
def test_it_learns_what_steps_really_take(factor: float) -> None:
    pacer = Pacer(200.0, COST)
    rng = random.Random(1)
    for _ in range(60):
        room = min(512, pacer.room(8, 2000, 1000))
        load = Load(9, 8, 2000, room, room * 1000 + room * room // 2)
        ms = factor * COST.ms(load) * rng.uniform(0.95, 1.05)
        pacer.observe(load, ms)
    assert pacer.expected_ms(load) == pytest.approx(factor * COST.ms(load), rel=0.06)
    assert ms <= 200.0


def test_a_slow_step_makes_the_next_ones_smaller_and_is_forgotten_later() -> None:
    pacer = Pacer(80.0, COST)
    load = Load(9, 8, 2000, 50, 50_000)
    for _ in range(50):
        pacer.observe(load, COST.ms(load))
    before = pacer.room(8, 2000, 1000)
    pacer.observe(load, 100 * COST.ms(load))
    assert 0.2 * before < pacer.room(8, 2000, 1000) < 0.8 * before
    for _ in range(60):
        pacer.observe(load, COST.ms(load))
    assert pacer.room(8, 2000, 1000) > 0.9 * before


def test_however_calm_it_was_a_margin_is_kept() -> None:
    pacer = Pacer(80.0, COST)
    load = Load(9, 8, 2000, 50, 50_000)
    for _ in range(500):
        pacer.observe(load, COST.ms(load))
    room = pacer.room(8, 2000, 1000)
    assert 70 < COST.ms(Load(9, 8, 2000, room, room * 1000 + room * room // 2)) < 72


def test_the_batch_ends_where_the_target_does() -> None:
    pacer = Pacer(60.0, COST)
    largest = max(count for count in range(1, 64) if pacer.admits(count, 200 * count))
    assert 15 < largest < 35
    assert COST.ms(Load(largest, largest, 200 * largest)) <= 60
    assert Pacer(1.0, COST).admits(1, 100_000), "one sequence is always admitted"


def test_a_long_prompt_among_streams_holds_none_of_them_up() -> None:
    """80 ms for a token: with a cost that the pacer only knows to within a third, and noise on every step."""
    known = Cost(step=10.0, decode=1.0, context=0.002, prefill=0.35, pair=0.0001)
    pacer = Pacer(80.0, known)
    it = VirtualEngine(COST, 2000, 16, pacer=pacer)
    it.noise = random.Random(3)
    streams = [it.submit("A", 60, 500) for _ in range(8)]
    for _ in range(20):
        it.step()
    long = it.submit("A", 4000, 10)
    while not long.token_times:
        it.step()
    gaps = sorted(
        later - earlier
        for life in streams
        for earlier, later in zip(life.token_times[20:], life.token_times[21:], strict=False)
    )
    assert gaps[int(0.99 * len(gaps))] <= 96
    assert gaps[-1] <= 160
    assert long.token_times[0] - long.arrived < 6000, "the prompt itself gets on"


def test_a_batch_that_is_full_by_its_target_is_told_to_others() -> None:
    it = VirtualEngine(COST, 2000, 64, pacer=Pacer(40.0, COST))
    for _ in range(64):
        it.submit("A", 20, 400)
    for _ in range(40):
        it.step()
    assert 5 < len(it.scheduler.running) < 25
    assert it.scheduler.blocked
