"""Decoding several steps at once leaves everything as step by step."""

import random
from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from shared.wire import Sampling
from workers.engine.blocks import BLOCK_TOKENS, BlockPool
from workers.engine.pacer import Cost, Pacer
from workers.engine.request import TenantLimits
from workers.engine.scheduler import Scheduler
from workers.engine.sequence import Sequence

TOKEN = 7
LIMITS = {"A": TenantLimits(), "B": TenantLimits(weight=3.0, slots_max=2), "C": TenantLimits(blocks_max=6)}

State = tuple[object, ...]


class Run:
    """A scheduler and what is put into it; all choices come from the seed."""

    def __init__(self, seed: int, at_once: bool) -> None:
        dice = random.Random(seed)
        cost = Cost(step=1.0, decode=1.0, context=0.01, prefill=0.1)
        pacer = Pacer(dice.choice([None, 6.0]), cost)
        self.pool = BlockPool(dice.choice([14, 26, 60, 200]))
        cache = dice.choice(["tenant", "shared", "off"])
        reserved = dice.choice([0.0, 0.25])
        self.scheduler = Scheduler(self.pool, dice.choice([2, 5, 8]), 24, reserved, 40, pacer, cache)
        self.dice = random.Random(seed + 1)
        self.at_once = at_once
        self.alive: list[Sequence] = []
        self.skipped = 0
        self.count = 0

    def add(self) -> None:
        dice, self.count = self.dice, self.count + 1
        tenant = dice.choice("AABC")
        capacity = self.scheduler.capacity(LIMITS[tenant])
        prompt = ([dice.randrange(2)] * dice.choice([3, 16, 33, 40]) + [-self.count] * 5)[: capacity - 1]
        length_max = min(len(prompt) + dice.choice([3, 20, 50]), capacity)
        sequence = Sequence(str(self.count), tenant, 0, Sampling(), prompt, len(prompt), length_max)
        self.alive.append(sequence)
        self.scheduler.add(sequence, LIMITS[tenant])

    def end(self, ended: Callable[[Sequence], bool]) -> None:
        for sequence in [each for each in self.alive if ended(each)]:
            self.alive.remove(sequence)
            self.scheduler.remove(sequence)

    def steps(self, count: int) -> None:
        scheduler = self.scheduler
        while count and not scheduler.idle:
            many = min(count, scheduler.outlook()[0]) if self.at_once else 0
            if many:
                self.skipped += many
                scheduler.decode(many, TOKEN)
            else:
                plan = scheduler.plan()
                scheduler.commit(plan, [TOKEN] * sum(part.samples for part in plan.slices))
                many = 1
            count -= many
            self.end(lambda each: len(each.tokens) == each.length_max)

    def state(self) -> State:
        scheduler, pool = self.scheduler, self.pool
        return (
            [(each.key, each.tokens, each.computed, each.blocks, each.slot, each.entered) for each in self.alive],
            [each.key for each in scheduler.running],
            [each.key for each in scheduler._growing],
            [(each.tenant, each.counter, each.slots, each.blocks, each.output) for each in scheduler.ledger.active],
            (scheduler.steps, scheduler.blocked, scheduler.places, scheduler.residence, scheduler.preemptions),
            (list(pool._plain), list(pool._cached), pool._known, pool.returned),
            sorted(scheduler.cache._computing),
        )


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 10**6), events=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 40)), max_size=40))
def test_many_steps_at_once_leave_everything_as_step_by_step(seed: int, events: list[tuple[int, int]]) -> None:
    single, many = Run(seed, False), Run(seed, True)
    for adds, count in [*events, (0, 500)]:
        for run in (single, many):
            for _ in range(adds):
                run.add()
            run.steps(count)
            if run.alive and count % 7 == 0:
                cancelled = run.alive[count % len(run.alive)]
                run.end(lambda each, cancelled=cancelled: each is cancelled)  # type: ignore[misc]
            run.scheduler.check()
            run.pool.check_each()
        assert many.state() == single.state()


def test_most_steps_of_a_long_output_are_skipped() -> None:
    run = Run(1, True)
    for _ in range(3):
        run.add()
    run.steps(2000)
    assert run.scheduler.idle
    assert run.skipped > run.scheduler.steps / 2


def test_the_load_is_that_of_the_next_plan() -> None:
    scheduler = Scheduler(BlockPool(40), 4, 64, pacer=Pacer(1e9, Cost(step=1.0)))
    for name in "ab":
        scheduler.add(Sequence(name, name, 0, Sampling(), [1] * 20, 20, 60))
    plan = scheduler.plan()
    assert scheduler.outlook()[0] == 0  # nothing of the prompts is computed
    scheduler.commit(plan, [TOKEN] * 2)
    steps, load = scheduler.outlook()
    assert steps == BLOCK_TOKENS - 1
    assert load == scheduler.plan().load
