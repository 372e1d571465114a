"""The prefix cache as a scheduler uses it: who finds what, who waits for whom, and what is never shared."""

import pytest
from virtual_engine import Life, VirtualEngine

from workers.engine.pacer import Cost

COST = Cost(step=1.0)


def engine(blocks: int = 400, slots: int = 8, **options: object) -> VirtualEngine:
    return VirtualEngine(COST, blocks, slots, chunk=512, **options)


def ended(it: VirtualEngine, tenant: str, prompt: int = 100, output: int = 4, stem: int = 0) -> Life:
    """A request that ran alone to its end."""
    life = it.submit(tenant, prompt, output, stem=stem)
    it.run()
    return life


def test_a_prompt_that_begins_like_an_earlier_one_computes_the_rest() -> None:
    it = engine()
    assert ended(it, "A", stem=80).sequence.cached == 0
    assert ended(it, "A", stem=80).sequence.cached == 80
    assert ended(it, "A", prompt=90, stem=79).sequence.cached == 64
    assert (it.scheduler.cache.queries, it.scheduler.cache.hits) == (290, 144)


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    it = engine()
    ended(it, "A", prompt=64, stem=64)
    assert ended(it, "A", prompt=64, stem=64).sequence.cached == 48
    assert ended(it, "A", prompt=65, stem=64).sequence.cached == 64


def test_output_is_found_by_the_next_turn_of_a_conversation() -> None:
    it = engine()
    first = ended(it, "A", prompt=40, output=60)
    turn = it.submit("A", 120, 4)
    turn.sequence.tokens[:100] = first.sequence.tokens
    it.run()
    assert turn.sequence.cached == 96


def test_nothing_is_found_across_tenants_unless_the_model_says_so() -> None:
    it = engine()
    ended(it, "A", stem=80)
    assert ended(it, "B", stem=80).sequence.cached == 0
    assert ended(it, "B", stem=80).sequence.cached == 80
    shared = engine(prefix_cache="shared")
    ended(shared, "A", stem=80)
    assert ended(shared, "B", stem=80).sequence.cached == 80


def test_without_a_cache_nothing_is_found_and_nothing_kept() -> None:
    it = engine(prefix_cache="off")
    ended(it, "A", stem=80)
    assert ended(it, "A", stem=80).sequence.cached == 0
    assert it.scheduler.pool.cached == 0


def test_what_is_not_computed_yet_is_not_found() -> None:
    it = VirtualEngine(COST, 400, 8, chunk=32)
    it.submit("A", 200, 4, stem=190)
    it.step()
    pool = it.scheduler.pool
    (first,) = it.scheduler.running
    assert len(pool.find(first.hashes)) == 2
    assert len(first.hashes) == 12


def test_requests_that_begin_alike_and_come_together_compute_the_beginning_once() -> None:
    it = engine(slots=8)
    lives = [it.submit("A", 100, 4, stem=80) for _ in range(6)]
    plan = it.step()
    assert [part.count for part in plan.slices] == [100]
    assert not it.scheduler.blocked
    plan = it.step()
    assert sorted(part.count for part in plan.slices) == [1, 20, 20, 20, 20, 20]
    assert [life.sequence.cached for life in lives] == [0, 80, 80, 80, 80, 80]


def test_nobody_waits_for_a_small_part_of_what_it_lacks() -> None:
    it = engine()
    for _ in range(4):
        it.submit("A", 100, 4, stem=32)
    assert len(it.step().slices) == 4


def test_whoever_waits_for_one_that_ends_or_is_preempted_computes_by_itself() -> None:
    it = VirtualEngine(COST, 400, 8, chunk=16)
    first, second = (it.submit("A", 100, 4, stem=80) for _ in range(2))
    it.step()
    assert second.admitted_step is None
    it.scheduler.remove(first.sequence)
    it.step()
    assert second.admitted_step == 2
    assert second.sequence.cached == 16
    it.run()


def test_another_tenant_is_not_kept_waiting_by_one_that_waits_for_its_prompt() -> None:
    it = engine()
    for _ in range(3):
        it.submit("A", 100, 4, stem=80)
    other = it.submit("B", 100, 4)
    it.step()
    assert other.admitted_step == 1


def test_shared_blocks_are_held_once_and_outlive_whoever_computed_them() -> None:
    it = engine()
    first = it.submit("A", 100, 50, stem=96)
    it.step()
    second = it.submit("A", 100, 50, stem=96)
    it.step()
    pool = it.scheduler.pool
    assert second.sequence.blocks[:6] == first.sequence.blocks[:6]
    assert pool.used == 8
    it.scheduler.remove(first.sequence)
    assert pool.used == 7
    it.scheduler.check()
    pool.check_each()


def test_a_preempted_sequence_finds_its_own_blocks_and_reports_only_what_it_found_at_first() -> None:
    it = engine()
    life = it.submit("A", 100, 50)
    for _ in range(5):
        it.step()
    it.scheduler._preempt(life.sequence)
    plan = it.step()
    assert [(part.start, part.count) for part in plan.slices] == [(96, 9)]
    assert life.sequence.cached == 0
    assert life.sequence.account.service == 100 + 2 * 6


@pytest.mark.parametrize("fresh", [True, False])
def test_a_sequence_that_wants_every_token_computed_finds_nothing(fresh: bool) -> None:
    it = engine()
    ended(it, "A", stem=80)
    life = it.submit("A", 100, 4, stem=80)
    life.sequence.fresh = fresh
    it.run()
    assert life.sequence.cached == (0 if fresh else 80)


def test_what_a_step_that_raised_may_have_spoilt_is_not_found_again() -> None:
    it = engine()
    life = it.submit("A", 100, 50, stem=96)
    it.step()
    hashes = life.sequence.hashes
    assert len(it.scheduler.pool.find(hashes)) == 6
    it.scheduler.suspect(life.sequence)
    assert it.scheduler.pool.find(hashes) == []
    assert [(part.start, part.count) for part in it.step().slices] == [(0, 101)]
