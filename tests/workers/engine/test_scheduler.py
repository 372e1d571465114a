"""What a step computes, and who gets slots and blocks."""

from typing import Any

import pytest

from shared.wire import Sampling
from workers.engine.blocks import BlockPool
from workers.engine.pacer import Cost, Pacer
from workers.engine.request import TenantLimits
from workers.engine.scheduler import PREEMPTIONS_MAX, Scheduler
from workers.engine.sequence import Sequence, StepPlan


def sequence(key: str, prompt: int, output: int = 10, tenant: str = "t") -> Sequence:
    """Its tokens are like no other's: nothing of it is in the prefix cache."""
    first = 1000 * sum(map(ord, key + tenant))
    return Sequence(key, tenant, 0, Sampling(), list(range(first, first + prompt)), prompt, prompt + output)


def scheduler(blocks: int = 64, slots: int = 8, chunk: int = 32, **options: Any) -> Scheduler:
    return Scheduler(BlockPool(blocks), slots, chunk, **options)


def parts(plan: StepPlan) -> list[tuple[str, int, int, bool]]:
    return [(part.sequence.key, part.start, part.count, part.samples) for part in plan.slices]


def step(scheduler: Scheduler) -> list[tuple[str, int, int, bool]]:
    """Plan, commit with token 7 for each sampling slice, check; what was planned."""
    plan = scheduler.plan()
    scheduler.commit(plan, [7 for part in plan.slices if part.samples])
    scheduler.check()
    return parts(plan)


def step_and_end(scheduler: Scheduler) -> None:
    """A step, after which whoever has all its tokens has ended."""
    step(scheduler)
    for each in list(scheduler.running):
        if len(each.tokens) == each.length_max:
            scheduler.remove(each)


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
        plan = it.plan()
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
    assert step(it) == [("new", 16, length - 16, True)]  # its first block is still known


def test_nobody_is_admitted_in_a_step_that_preempted() -> None:
    it = scheduler(blocks=3, chunk=64)
    it.add(sequence("old", 15, output=30))
    it.add(sequence("new", 1, output=30))
    plan = StepPlan([])
    while not plan.preempted:
        plan = it.plan()
        it.commit(plan, [7 for part in plan.slices if part.samples])
    assert [part.sequence.key for part in plan.slices] == ["old"]


def test_a_suspect_is_computed_alone_before_anything_else() -> None:
    it = scheduler(chunk=16)
    first, second = sequence("a", 20), sequence("b", 5)
    it.add(first)
    it.add(second)
    step(it)
    plan = it.plan()
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
    it.commit(it.plan(), [])
    it.remove(suspect)
    assert it.waiting + len(it.running) == 1
    it.check()


def test_a_preempted_sequence_comes_back_only_where_it_can_stay() -> None:
    it = scheduler(blocks=8, chunk=64, prefix_cache="off")
    old, new = sequence("old", 30, output=90), sequence("new", 30, output=90)
    it.add(old)
    it.add(new)
    while new.preemptions == 0:
        step(it)
    assert (new.slot, old.preemptions) == (-1, 0)
    room = []
    while len(old.tokens) < old.length_max:
        room.append(it.pool.free - len(new.tokens) // 16 - 1)
        step(it)
        assert new.slot < 0, "one step later it would have to leave again"
    assert max(room) < 2
    it.remove(old)
    step(it)
    assert new.slot >= 0


def test_nobody_is_admitted_before_one_that_was_preempted_often_and_others_leave_rather_than_it() -> None:
    it = scheduler(blocks=12, slots=4, chunk=256, prefix_cache="off")
    worn, other = sequence("worn", 30, output=100), sequence("other", 30, output=100, tenant="u")
    it.add(worn)
    it.add(other)
    while worn.preemptions < PREEMPTIONS_MAX:
        step(it)
        if worn.slot >= 0:
            it._preempt(worn)
    waiting = sequence("small", 1, tenant="v")
    it.add(waiting)
    while worn.slot < 0:
        assert waiting.slot < 0
        step_and_end(it)
    it.add(sequence("another", 30, output=130, tenant="u"))
    preemptions = it.preemptions
    while worn.slot >= 0:
        step_and_end(it)
    assert it.preemptions > preemptions
    assert (worn.preemptions, len(worn.tokens)) == (PREEMPTIONS_MAX, worn.length_max)


def test_memory_of_a_tenant_at_its_cap_is_taken_from_itself() -> None:
    it = scheduler(blocks=20, chunk=64, prefix_cache="off")
    limits = TenantLimits(blocks_max=4)
    old, new, other = (sequence(key, 15, output=45, tenant=key[0]) for key in ("a old", "a new", "b"))
    for each in (old, new):
        it.add(each, limits)
    it.add(other)
    while not it.preemptions:
        step(it)
        assert old.account.blocks <= 4
    assert (old.slot >= 0, new.slot, other.slot >= 0) == (True, -1, True)
    assert it.pool.free > 10


def test_a_sequence_that_outgrows_its_tenants_cap_is_not_taken() -> None:
    it = scheduler(blocks=20, reserved_fraction=0.5)
    assert it.capacity(TenantLimits()) == 160
    assert it.capacity(TenantLimits(blocks_max=3)) == 48
    assert scheduler(blocks=20, reserved_fraction=0.5, length_max=200).capacity(TenantLimits()) == 208
    assert scheduler(blocks=2, reserved_fraction=0.5, length_max=200).capacity(TenantLimits()) == 32
    with pytest.raises(AssertionError, match="161 tokens can never fit"):
        it.add(sequence("a", 100, output=61))


def test_it_says_when_what_is_missing_is_room_and_not_the_turn_of_the_next_step() -> None:
    it = scheduler(slots=2, blocks=8, chunk=16, prefix_cache="off")
    it.add(sequence("a", 40))
    it.add(sequence("b", 5))
    step(it)
    assert (it.waiting, it.blocked) == (1, False)  # the step was full
    step(it)
    step(it)
    assert (it.waiting, it.blocked) == (0, False)
    it.add(sequence("c", 5))
    step(it)
    assert it.blocked  # no slot
    it = scheduler(slots=8, blocks=8, chunk=160, prefix_cache="off")
    it.add(sequence("a", 100))
    it.add(sequence("b", 50))
    step(it)
    assert it.blocked  # no memory


def test_a_draft_is_verified_in_one_step_and_what_was_right_is_kept() -> None:
    it = scheduler(chunk=64)
    one, two = sequence("a", 4, output=30), sequence("b", 6, output=30)
    it.add(one)
    it.add(two)
    step(it)
    one.draft = (8, 9, 10)
    plan = it.plan()
    assert [(part.start, part.count, part.draft) for part in plan.slices] == [(4, 4, (8, 9, 10)), (6, 1, ())]
    it.commit(plan, [8, 9, 11, 7], [3, 1])  # two guesses were right, and the token after them was drawn
    it.check()
    assert (one.tokens[4:], one.computed) == ([7, 8, 9, 11], 7)
    assert (two.tokens[6:], two.computed) == ([7, 7], 7)
    one.draft = ()
    assert step(it) == [("a", 7, 1, True), ("b", 7, 1, True)]


@pytest.mark.parametrize(("prompt", "output", "longest"), [(4, 30, 11), (4, 5, 3), (14, 30, 1), (15, 30, 0)])
def test_a_draft_ends_where_the_memory_or_the_sequence_does(prompt: int, output: int, longest: int) -> None:
    it = scheduler(chunk=64)
    one = sequence("a", prompt, output=output)
    it.add(one)
    step(it)
    one.draft = (8,) * 40
    (part,) = it.plan().slices
    assert len(part.draft) == longest
    assert len(one.tokens) + longest + 1 <= one.length_max


def test_drafts_and_prefills_share_what_a_step_may_carry() -> None:
    it = scheduler(chunk=8)
    one = sequence("a", 4, output=30)
    it.add(one)
    step(it)
    it.add(sequence("b", 30))
    one.draft = (8,) * 6
    assert [part.count for part in it.plan().slices] == [7, 2]


def detached(key: str, prompt: int, output: int = 10, tenant: str = "t") -> Sequence:
    found = sequence(key, prompt, output, tenant)
    found.detached = True
    return found


def test_detached_sequences_leave_their_slots_in_the_step_in_which_others_come() -> None:
    it = scheduler(slots=4, chunk=64)
    jobs = [detached(f"job{number}", 5, output=90, tenant="ab"[number % 2]) for number in range(5)]
    for each in jobs:
        it.add(each)
    step(it)
    assert [each.slot >= 0 for each in jobs] == [True] * 4 + [False]
    for number in range(3):
        it.add(sequence(f"ask{number}", 5, tenant="a"))
    planned = [key for key, *_ in step(it)]
    assert planned[1:] == ["ask0", "ask1", "ask2"]
    assert (it.waiting, it.ledger.detached, it.blocked) == (0, 4, False)
    for _ in range(10):
        step_and_end(it)
    assert len(it.detached) == 4
    while it.running:
        step_and_end(it)
    assert it.idle


def test_detached_sequences_leave_their_memory_to_others_and_wait_where_somebody_waits_for_it() -> None:
    it = scheduler(blocks=10, chunk=64)
    job = detached("job", 60, output=90)
    it.add(job)
    step(it)
    it.add(sequence("large", 100, output=20, tenant="b"))
    assert [key for key, *_ in step(it)] == ["large"]
    it.add(sequence("larger", 130, output=20, tenant="c"))
    step(it)
    assert (it.blocked, job.slot) == (True, -1)


def test_a_prompt_that_somebody_waits_for_comes_before_those_of_detached_sequences() -> None:
    it = scheduler(chunk=32)
    it.add(detached("job", 100))
    step(it)
    it.add(sequence("ask", 40))
    assert [step(it) for _ in range(2)] == [
        [("ask", 0, 32, False)],
        [("ask", 32, 8, True), ("job", 32, 24, False)],
    ]


def test_a_tenants_own_detached_sequences_do_not_keep_it_at_its_cap() -> None:
    it = scheduler(slots=4, chunk=64)
    limits = TenantLimits(slots_max=2)
    for key in ("job0", "job1", "job2"):
        it.add(detached(key, 5), limits)
    step(it)
    assert len(it.detached) == 2
    it.add(sequence("ask", 5), limits)
    assert [key for key, *_ in step(it)] == ["job0", "ask"]


def test_tenants_share_by_weight_what_is_left_for_detached_work_and_pay_for_it() -> None:
    it = scheduler(blocks=4000, slots=6, chunk=512)
    weights = {"a": 1.0, "b": 3.0}
    for number in range(400):
        for tenant, weight in weights.items():
            it.add(detached(f"{tenant}{number}", 8, output=4, tenant=tenant), TenantLimits(weight=weight))
    for _ in range(300):
        step_and_end(it)
    service = {account.tenant: account.service for account in it.ledger.active}
    assert service["b"] / service["a"] == pytest.approx(3, rel=0.05)
    it.add(sequence("ask", 5, tenant="new"))
    assert it.ledger.standing("new").counter >= min(it.ledger.standing(tenant).counter for tenant in weights)


def test_where_pace_is_short_tenants_with_nothing_in_the_batch_have_what_is_reserved() -> None:
    pacer = Pacer(10.0, Cost(step=1.0, decode=1.5))
    it = scheduler(slots=20, reserved_fraction=0.1, pacer=pacer)
    for number in range(20):
        it.add(sequence(f"loud{number}", 1, 100, "loud"))
    step(it)
    paced = len(it.running)
    assert 2 < paced < 8
    for tenant in ("a", "b", "c"):
        it.add(sequence(tenant, 1, 100, tenant))
        it.add(sequence(f"{tenant}2", 1, 100, tenant))
    step(it)
    assert [each.key for each in it.running][paced:] == ["a", "b"]
    step(it)
    assert len(it.running) == paced + 2


def test_a_step_begins_the_only_sequence_of_a_tenant_without_other_prompts_but_not_two_steps_in_turn() -> None:
    it = scheduler(slots=16, chunk=32)

    def prompts() -> list[tuple[str, int]]:
        return [(key, count) for key, _, count, _ in step(it) if count > 1]

    for number in range(4):
        it.add(sequence(f"loud{number}", 30, tenant="loud"))
    it.add(detached("job", 40, tenant="jobs"))
    assert prompts() == [("loud0", 30), ("loud1", 2)]
    it.add(sequence("quiet", 5, tenant="quiet"))
    assert prompts() == [("quiet", 5)]
    it.add(sequence("other", 5, tenant="other"))
    assert prompts() == [("loud1", 27), ("other", 5)]
    it.add(sequence("long", 40, tenant="long"))  # it needs more than a step
    assert prompts() == [("long", 16), ("loud2", 16)]
