"""The engine's side of cache, caps, drafts and estimates: what requests and stats say of them."""

import asyncio
import threading
import time
from typing import Any

import pytest
from engine_driver import BUDGET_S, CountingRunner, Driver, counting_engine, request, run_all
from paged_memory import PagedMemory

from shared.wire import Logprob, Usage
from workers.engine.engine import Drawn
from workers.engine.request import EngineRequest, TenantLimits
from workers.engine.sequence import StepPlan

PROMPT = list(range(100))


def counts(runner: CountingRunner, key: str) -> list[int]:
    """The slices of `key`, choices together, that were more than one token."""
    return [count for plan in runner.plans for name, _, _, count in plan if name == key and count > 1]


def test_usage_says_what_was_found_in_the_cache() -> None:
    async def main() -> None:
        driver = Driver(counting_engine(CountingRunner()))
        for key, found in (("a", 0), ("b", 96)):
            driver.submit(request(key, PROMPT, max_tokens=4))
            await driver.ended(key)
            assert driver.outcomes[key].usage == Usage(100, 4, found)
        stats = driver.engine.stats()
        assert (stats.cache_queries, stats.cache_hits) == (200, 96)
        await driver.idle()
        assert driver.engine.stats().blocks_cached == 6
        driver.engine.stop()

    asyncio.run(main())


def test_choices_share_the_prompt_and_only_what_was_there_before_counts_as_cached() -> None:
    runner = CountingRunner()
    (outcome,) = run_all(counting_engine(runner, prefill_chunk=128), request("a", PROMPT, n=4, max_tokens=4))
    assert counts(runner, "a") == [100, 4, 4, 4]
    assert outcome.usage == Usage(100, 16, 0)


def test_a_prompt_whose_log_probabilities_are_wanted_is_computed_whole() -> None:
    class Scoring(CountingRunner):
        def sample(self, plan: StepPlan, computed: None) -> Drawn:
            drawn = super().sample(plan, computed)
            drawn.prompt_logprobs = [
                [Logprob(part.sequence.tokens[place], -1.0, b"") for place in part.scored]
                for part in plan.slices
                if part.scored
            ]
            return drawn

    async def main() -> None:
        driver = Driver(counting_engine(Scoring()))
        driver.submit(request("a", PROMPT, max_tokens=4))
        await driver.ended("a")
        driver.submit(request("b", PROMPT, max_tokens=1, echo=True, logprobs=0))
        await driver.ended("b")
        assert driver.outcomes["b"].usage == Usage(100, 1, 0)
        assert driver.outcomes["b"].ids[0][:100] == PROMPT
        driver.engine.stop()

    asyncio.run(main())


@pytest.mark.parametrize(("prompt", "sampling"), [(40, {"max_tokens": 9}), (48, {"max_tokens": None})])
def test_what_outgrows_a_tenants_memory_is_refused_with_both_numbers(prompt: int, sampling: dict[str, Any]) -> None:
    refused = request("a", [1] * prompt, **sampling)
    refused.limits = TenantLimits(blocks_max=3)
    first, second = run_all(counting_engine(CountingRunner()), refused, request("b", [2], max_tokens=2))
    assert first.error is not None
    assert first.error[0] == "context_length_exceeded"
    assert "48 tokens" in first.error[1]
    assert "49 tokens" in first.error[1]
    assert second.ids == {0: [2, 3]}


def test_without_max_tokens_a_tenants_memory_ends_an_output() -> None:
    capped = request("a", [1] * 40, max_tokens=None)
    capped.limits = TenantLimits(blocks_max=3)
    (outcome,) = run_all(counting_engine(CountingRunner()), capped)
    assert (len(outcome.ids[0]), outcome.finish) == (8, {0: "length"})


def test_drafts_give_several_tokens_a_step_and_end_where_the_output_does() -> None:
    class Guessing(PagedMemory):
        def sample(self, plan: StepPlan, computed: Any) -> Drawn:
            drawn = super().sample(plan, computed)
            for part in plan.slices:
                part.sequence.draft = tuple(wanted[part.sequence.output_index + 1 :][:5])
            return drawn

    (slow,) = run_all(counting_engine(PagedMemory()), request("a", PROMPT, max_tokens=20))
    wanted = [*slow.ids[0], 1, 2, 3]
    engine = counting_engine(Guessing())
    stop = [wanted[13]]
    assert stop[0] not in wanted[:13]
    fast, stopped = run_all(engine, request("a", PROMPT, max_tokens=20), request("b", PROMPT, stop_token_ids=stop))
    assert fast.ids[0] == wanted[:20]
    assert fast.usage == Usage(100, 20, fast.usage.cached_tokens if fast.usage else 0)
    assert len(fast.text[0]) == 20
    assert stopped.ids[0] == wanted[:12]
    assert engine.stats().steps < 16


def test_service_is_told_by_tenant() -> None:
    engine = counting_engine(CountingRunner())
    other = EngineRequest(key="b", tenant="other", prompt_ids=[1, 2], sampling=request("x", [1], max_tokens=3).sampling)
    run_all(engine, request("a", [1] * 10, max_tokens=4), other)
    assert engine.stats().service == {"t": 10 + 2 * 4, "other": 2 + 2 * 3}
    assert engine.stats().jain == 1.0


def test_a_run_that_will_be_late_is_named_until_it_is_in_the_batch() -> None:
    gate = threading.Event()

    def before(plan: StepPlan) -> None:
        if len(runner.plans) > 20:
            assert gate.wait(BUDGET_S)
        time.sleep(0.01)

    runner = CountingRunner(before)

    async def main() -> None:
        driver = Driver(counting_engine(runner, slots=1))
        driver.engine._observer.tend_at = 0.0
        late, patient = request("late", [2], max_tokens=2), request("patient", [3], max_tokens=2)
        late.admit_by, patient.admit_by = time.monotonic() + 0.05, time.monotonic() + 3600
        driver.submit(request("running", [1], max_tokens=60), late, patient)
        await driver.until(lambda: driver.engine.stats().running == 1)
        driver.engine._observer.tend_at = 0.0
        await driver.until(lambda: len(runner.plans) > 15)
        driver.engine._observer.tend_at = 0.0
        await driver.until(lambda: driver.engine.stats().late == ("late",))
        assert driver.engine.stats().blocked
        gate.set()
        await driver.ended()
        await driver.idle()
        assert driver.engine.stats().late == ()
        assert not driver.engine.stats().blocked
        driver.engine.stop()

    asyncio.run(main())


def test_with_a_target_the_cost_is_measured_before_anything_runs() -> None:
    runner = CountingRunner()
    engine = counting_engine(runner, tpot_ms_target=1000.0)
    run_all(engine, request("a", [1], max_tokens=3))
    assert engine._pacer.bounds
    assert [key for key, *_ in runner.plans[0]] == ["probe"]
    assert [plan[0][0] for plan in runner.plans[-3:]] == ["a"] * 3


def test_a_runner_that_cannot_be_measured_serves_without_a_bound() -> None:
    def before(plan: StepPlan) -> None:
        if plan.slices[0].sequence.key == "probe":
            raise RuntimeError("the kernel broke")

    engine = counting_engine(CountingRunner(before), tpot_ms_target=1000.0)
    (outcome,) = run_all(engine, request("a", [1], max_tokens=3))
    assert outcome.ids == {0: [1, 2, 3]}
    assert not engine._pacer.bounds
