"""What a step computes, and who gets slots and blocks."""

from shared.wire import Sampling
from workers.engine.blocks import BlockPool
from workers.engine.scheduler import Fifo, Scheduler, Sequence, StepPlan

PLENTY = 10_000  # tokens of budget


def sequence(key: str, prompt: int, output: int = 10) -> Sequence:
    return Sequence(key, "t", 0, Sampling(), list(range(prompt)), prompt, prompt + output)


def scheduler(blocks: int = 64, slots: int = 8, chunk: int = 32) -> Scheduler:
    return Scheduler(BlockPool(blocks), slots, chunk, Fifo())


def parts(plan: StepPlan) -> list[tuple[str, int, int, bool]]:
    return [(part.sequence.key, part.start, part.count, part.samples) for part in plan.slices]


def step(scheduler: Scheduler, budget: int = PLENTY) -> list[tuple[str, int, int, bool]]:
    """Plan, commit with token 7 for each sampling slice, check; what was planned."""
    plan = scheduler.plan(budget)
    scheduler.commit(plan, [7 for part in plan.slices if part.samples])
    scheduler.check()
    return parts(plan)


def test_a_prompt_is_computed_in_chunks_and_then_token_by_token() -> None:
    it = scheduler(chunk=32)
    it.add(sequence("a", 70))
    assert [step(it) for _ in range(4)] == [
        [("a", 0, 32, False)],
        [("a", 32, 32, False)],
        [("a", 64, 6, True)],
        [("a", 70, 1, True)],
    ]


def test_decodes_come_first_then_unfinished_prefills_then_admissions_in_one_step() -> None:
    it = scheduler(chunk=32)
    it.add(sequence("decoding", 4))
    step(it)
    it.add(sequence("long", 40))
    it.add(sequence("short", 20))
    assert step(it) == [("decoding", 4, 1, True), ("long", 0, 32, False)]
    it.add(sequence("new", 3))
    assert step(it) == [
        ("decoding", 5, 1, True),
        ("long", 32, 8, True),
        ("short", 0, 20, True),
        ("new", 0, 3, True),
    ]


def test_the_budget_bounds_prefills_but_never_the_decodes() -> None:
    it = scheduler(chunk=32)
    for key in "abc":
        it.add(sequence(key, 2))
    step(it)
    it.add(sequence("d", 30))
    assert step(it, budget=10) == [("a", 2, 1, True), ("b", 2, 1, True), ("c", 2, 1, True), ("d", 0, 7, False)]
    assert step(it, budget=2)[-1] == ("d", 7, 1, False)


def test_slots_bound_the_batch_and_are_free_again_after_the_end() -> None:
    it = scheduler(slots=2)
    first, second, third = (sequence(key, 3) for key in "abc")
    for each in (first, second, third):
        it.add(each)
    assert [key for key, *_ in step(it)] == ["a", "b"]
    assert it.waiting == 1
    it.remove(first)
    it.check()
    assert [key for key, *_ in step(it)] == ["b", "c"]
    for each in (second, third):
        it.remove(each)
    assert it.idle
    assert it.pool.used == 0


def test_a_waiting_sequence_can_be_removed() -> None:
    it = scheduler(slots=1)
    first, second = sequence("a", 3), sequence("b", 3)
    it.add(first)
    it.add(second)
    step(it)
    it.remove(second)
    it.remove(first)
    assert it.idle


def test_the_head_is_waited_for_and_nobody_overtakes_it() -> None:
    it = scheduler(blocks=4)
    it.add(sequence("running", 20))
    step(it)
    it.add(sequence("large", 40))
    it.add(sequence("small", 1))
    assert [key for key, *_ in step(it)] == ["running"]


def test_admission_leaves_a_block_for_each_that_runs() -> None:
    it = scheduler(blocks=4, chunk=64)
    it.add(sequence("a", 30))
    step(it)
    it.add(sequence("b", 30))
    assert [key for key, *_ in step(it)] == ["a"]
    it.add(sequence("c", 1))
    assert [key for key, *_ in step(it)] == ["a"]


def test_the_newest_leaves_when_memory_runs_out_and_is_recomputed_with_its_output() -> None:
    it = scheduler(blocks=4, chunk=64)
    old, new = sequence("old", 30, output=34), sequence("new", 12, output=34)
    it.add(old)
    it.add(new)
    preempted = 0
    plans = []
    while not preempted:
        plan = it.plan(PLENTY)
        preempted = plan.preempted
        it.commit(plan, [7 for part in plan.slices if part.samples])
        it.check()
        plans.append(parts(plan))
    assert plans[-1] == [("old", len(old.tokens) - 2, 1, True)]
    assert it.preemptions == 1
    assert (new.computed, new.blocks, it.waiting) == (0, [], 1)
    length = len(new.tokens)
    assert length > 12
    it.remove(old)
    assert step(it) == [("new", 0, length, True)]


def test_nobody_is_admitted_in_a_step_that_preempted() -> None:
    it = scheduler(blocks=3, chunk=64)
    it.add(sequence("old", 15, output=30))
    it.add(sequence("new", 1, output=30))
    plan = StepPlan([])
    while not plan.preempted:
        plan = it.plan(PLENTY)
        it.commit(plan, [7 for part in plan.slices if part.samples])
    assert [part.sequence.key for part in plan.slices] == ["old"]


def test_a_suspect_is_computed_alone_before_anything_else() -> None:
    it = scheduler(chunk=16)
    first, second = sequence("a", 20), sequence("b", 5)
    it.add(first)
    it.add(second)
    step(it)
    plan = it.plan(PLENTY)
    assert {part.sequence.key for part in plan.slices} == {"a", "b"}
    for part in plan.slices:
        it.suspect(part.sequence)
    it.check()
    assert it.pool.used == 0
    assert step(it) == [("a", 0, 16, False)]
    assert step(it) == [("a", 16, 4, True)]
    assert step(it) == [("b", 0, 5, True)]
    assert step(it) == [("a", 20, 1, True), ("b", 5, 1, True)]
    assert (first.failures, first.alone) == (1, False)


def test_a_suspect_takes_its_memory_from_those_that_run() -> None:
    it = scheduler(blocks=3, chunk=8)
    suspect, other = sequence("a", 14, output=20), sequence("b", 8)
    it.add(suspect)
    it.add(other)
    step(it)
    it.suspect(suspect)
    it.commit(it.plan(PLENTY), [])
    it.remove(suspect)
    assert it.waiting + len(it.running) == 1
    it.check()


def test_what_can_never_fit_is_known_before() -> None:
    it = scheduler(blocks=2)
    assert it.fits(32)
    assert not it.fits(33)
