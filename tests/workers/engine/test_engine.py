"""The engine thread: events, ends, cancels, choices, resumes, and steps that raise."""

import asyncio
import gc
import threading
import time
from typing import Any

import pytest
from engine_driver import BUDGET_S, CountingRunner, Driver, counting_engine, request, run_all

from shared.errors import BadRequest, ContextLength
from shared.wire import ChatMessage, Input, Sampling, Usage
from workers.engine.engine import UNREAD_STEPS_MAX, BatchEngine, Drawn
from workers.engine.request import EngineRequest, TokenEvent
from workers.engine.runs import Choice
from workers.engine.scheduler import StepPlan
from workers.engine.sim import WORDS


def numbers(first: int, count: int) -> list[int]:
    """What CountingRunner gives a prompt that begins with `first`."""
    return [first + index for index in range(count)]


def raising(*keys: str, times: int = 1_000_000) -> CountingRunner:
    """A runner that raises, `times` times, on a plan with one of `keys` in it."""
    left = [times]

    def before(plan: StepPlan) -> None:
        if left[0] and any(part.sequence.key in keys for part in plan.slices):
            left[0] -= 1
            raise RuntimeError("the kernel broke")

    return CountingRunner(before)


def gated(gate: threading.Event) -> CountingRunner:
    """A runner whose steps wait for `gate`."""

    def before(plan: StepPlan) -> None:
        assert gate.wait(BUDGET_S)

    return CountingRunner(before)


def test_every_token_comes_once_in_order_with_its_text_and_one_finish() -> None:
    first, second = run_all(
        counting_engine(CountingRunner()), request("a", [100], max_tokens=5), request("b", [200, 3])
    )
    assert first.ids == {0: numbers(100, 5)}
    assert first.text == {0: [WORDS[token] for token in numbers(100, 5)]}
    assert (first.finish, first.usage) == ({0: "length"}, Usage(1, 5))
    assert (second.ids, second.usage) == ({0: numbers(200, 12)}, Usage(2, 12))


def test_all_that_waits_is_admitted_in_one_batch() -> None:
    gate = threading.Event()
    runner = gated(gate)

    async def main() -> None:
        driver = Driver(counting_engine(runner))
        driver.submit(request("first", [1], max_tokens=3))
        await driver.until(lambda: driver.engine.stats().step_started > 0)
        driver.submit(*(request(str(index), [index], max_tokens=2) for index in range(5)))
        assert driver.engine.stats().waiting == 5
        gate.set()
        await driver.ended()
        driver.engine.stop()

    asyncio.run(main())
    assert [len(plan) for plan in runner.plans] == [1, 6, 6]


def test_stop_strings_and_stop_ids_end_a_run_in_their_step() -> None:
    stop = WORDS[103][3:]
    assert not any(stop in WORDS[token] for token in (100, 101, 102))
    outcomes = run_all(
        counting_engine(CountingRunner()),
        request("string", [100], stop=[stop]),
        request("id", [100], stop_token_ids=[104]),
    )
    assert [outcome.ids[0] for outcome in outcomes] == [numbers(100, 4), numbers(100, 5)]
    assert [outcome.finish for outcome in outcomes] == [{0: "stop"}, {0: "stop"}]
    assert outcomes[0].whole_text == "".join(WORDS[100:103]) + WORDS[103][:3]
    assert outcomes[1].whole_text == "".join(WORDS[100:104])


def test_choices_are_separate_and_the_usage_comes_with_the_last_finish() -> None:
    (outcome,) = run_all(counting_engine(CountingRunner()), request("a", [7] * 20, n=3, max_tokens=4))
    assert outcome.ids == {choice: numbers(7, 4) for choice in range(3)}
    assert set(outcome.finish.values()) == {"length"}
    assert outcome.usage == Usage(20, 12)


def test_more_choices_than_slots_come_one_after_the_other() -> None:
    (outcome,) = run_all(counting_engine(CountingRunner(), slots=2), request("a", [7], n=5, max_tokens=4))
    assert outcome.ids == {choice: numbers(7, 4) for choice in range(5)}


def test_without_max_tokens_the_models_length_ends_it() -> None:
    (outcome,) = run_all(counting_engine(CountingRunner()), request("a", [1] * 200, max_tokens=None))
    assert len(outcome.ids[0]) == 56
    assert outcome.finish == {0: "length"}


def test_a_resumed_run_goes_on_at_its_index_and_counts_the_prefix() -> None:
    prefix = numbers(100, 3)
    stop = WORDS[102][-1] + WORDS[103]  # begins in the prefix, and is completed after it
    outcomes = run_all(
        counting_engine(CountingRunner()),
        request("plain", [100], max_tokens=6, prefix=[prefix]),
        request("stop", [100], max_tokens=6, prefix=[prefix], stop=[stop]),
        request("two", [100], max_tokens=6, n=2, prefix=[prefix, []]),
    )
    assert outcomes[0].ids == {0: numbers(103, 3)}
    assert outcomes[0].usage == Usage(1, 6)
    assert (outcomes[1].ids, outcomes[1].finish) == ({0: [103]}, {0: "stop"})
    assert outcomes[1].whole_text == ""
    assert outcomes[2].ids == {0: numbers(103, 3), 1: numbers(100, 6)}
    assert outcomes[2].usage == Usage(1, 12)
    assert list(outcomes[2].before) == [0]


@pytest.mark.parametrize(
    ("sampling", "finish"),
    [({"max_tokens": 3}, "length"), ({"stop_token_ids": [102]}, "stop"), ({"stop": [WORDS[102]]}, "stop")],
)
def test_a_prefix_that_is_complete_has_one_event_without_ids(sampling: dict[str, Any], finish: str) -> None:
    runner = CountingRunner()
    (outcome,) = run_all(counting_engine(runner), request("a", [100], prefix=[numbers(100, 3)], **sampling))
    assert (outcome.ids, outcome.text, outcome.finish) == ({0: []}, {0: []}, {0: finish})
    assert outcome.usage == Usage(1, 3)
    assert runner.plans == []


def test_text_of_a_token_does_not_depend_on_where_a_run_was_resumed() -> None:
    stop = [WORDS[104] + WORDS[105] + "never"]
    (whole,) = run_all(counting_engine(CountingRunner()), request("a", [100], stop=stop))
    for done in range(1, 12):
        (rest,) = run_all(
            counting_engine(CountingRunner()), request("a", [100], stop=stop, prefix=[numbers(100, done)])
        )
        assert rest.before[0] + rest.text[0] == whole.text[0]


def test_a_cancelled_run_frees_its_slot_and_blocks_at_the_next_step_edge() -> None:
    async def main() -> None:
        runner = CountingRunner()
        driver = Driver(counting_engine(runner, slots=1))
        driver.submit(request("long", [1] * 50, max_tokens=200), request("next", [5], max_tokens=2))
        await driver.until(lambda: len(driver.outcomes["long"].ids.get(0, [])) > 3)
        driver.engine.cancel("long")
        driver.engine.cancel("long")
        driver.engine.cancel("unknown")
        await driver.ended("next")
        await driver.idle()
        driver.engine.stop()
        assert not driver.outcomes["long"].ended
        after = [key for plan in runner.plans for key, *_ in plan]
        assert after == ["long"] * after.count("long") + ["next"] * 2

    asyncio.run(main())


def test_a_run_that_waits_can_be_cancelled() -> None:
    async def main() -> None:
        driver = Driver(counting_engine(CountingRunner(), slots=1))
        driver.submit(request("a", [1], max_tokens=30), request("b", [2]))
        driver.engine.cancel("b")
        await driver.ended("a")
        await driver.idle()
        driver.engine.stop()
        assert driver.outcomes["b"].ids == {}

    asyncio.run(main())


def test_a_step_that_raises_once_costs_nobody_a_token() -> None:
    runner = raising("b", times=1)
    outcomes = run_all(counting_engine(runner), *(request(key, [index * 100]) for index, key in enumerate("abc")))
    assert [outcome.ids[0] for outcome in outcomes] == [numbers(index * 100, 12) for index in range(3)]


@pytest.mark.parametrize("chunk", [2, 32])
def test_a_request_that_always_raises_fails_alone(chunk: int) -> None:
    requests = [request(key, [index * 100] * 5) for index, key in enumerate("abcd")]
    outcomes = run_all(counting_engine(raising("b", "c"), prefill_chunk=chunk), *requests)
    assert [outcome.ids.get(0) for outcome in outcomes] == [numbers(0, 12), [], [], numbers(300, 12)]
    for outcome in outcomes[1:3]:
        assert outcome.error is not None
        assert outcome.error[0] == "engine_failed"
        assert "the kernel broke" in outcome.error[1]


def test_all_choices_of_a_failing_run_end_with_one_error() -> None:
    first, second = run_all(counting_engine(raising("a")), request("a", [1], n=3), request("b", [2]))
    assert first.error is not None
    assert second.ids == {0: numbers(2, 12)}


def test_a_batch_that_raises_only_together_ends_after_a_few_tries() -> None:
    def before(plan: StepPlan) -> None:
        if len(plan.slices) > 1:
            raise RuntimeError("too large")

    outcomes = run_all(counting_engine(CountingRunner(before)), request("a", [1]), request("b", [2]))
    assert all(outcome.error is not None for outcome in outcomes)


def test_a_runner_that_draws_too_few_tokens_does_not_end_the_engine() -> None:
    class Forgetful(CountingRunner):
        forget = True

        def sample(self, plan: StepPlan, computed: None) -> Drawn:
            drawn = super().sample(plan, computed)
            if self.forget:
                self.forget = False
                drawn.tokens.pop()
            return drawn

    async def main() -> None:
        driver = Driver(counting_engine(Forgetful()))
        driver.submit(request("a", [1]), request("b", [2]))
        await driver.ended()
        driver.submit(request("c", [3]))
        await driver.ended("c")
        await driver.idle()
        driver.engine.stop()
        assert [driver.outcomes[key].error is not None for key in "abc"] == [True, True, False]
        assert driver.outcomes["c"].ids == {0: numbers(3, 12)}

    asyncio.run(main())


def test_a_row_that_fails_ends_its_own_run_with_nothing_committed() -> None:
    class Failing(CountingRunner):
        def sample(self, plan: StepPlan, computed: None) -> Drawn:
            drawn = super().sample(plan, computed)
            broken = [
                part.sequence for part in plan.slices if part.sequence.key == "b" and part.sequence.output_index == 3
            ]
            drawn.failed = [(each, ArithmeticError("no number")) for each in broken if each.choice == 1]
            return drawn

    first, second, third = run_all(
        counting_engine(Failing()), request("a", [100]), request("b", [200], n=2), request("c", [300])
    )
    assert second.error is not None
    assert second.error[0] == "engine_failed"
    assert "no number" in second.error[1]
    assert second.ids == {0: numbers(200, 3), 1: numbers(200, 3)}
    assert [first.ids, third.ids] == [{0: numbers(100, 12)}, {0: numbers(300, 12)}]


def test_text_that_fails_ends_its_own_run_only() -> None:
    class Babbling(CountingRunner):
        def sample(self, plan: StepPlan, computed: None) -> Drawn:
            drawn = super().sample(plan, computed)
            return Drawn([len(WORDS) if token == 103 else token for token in drawn.tokens])

    first, second = run_all(counting_engine(Babbling()), request("a", [100], n=2), request("b", [2]))
    assert first.error is not None
    assert first.error[0] == "engine_failed"
    assert first.ids[0] == numbers(100, 3)
    assert second.ids == {0: numbers(2, 12)}


@pytest.mark.parametrize(
    ("prompt", "sampling", "code"),
    [
        ([1] * 250, {"max_tokens": 7}, "context_length_exceeded"),
        ([1] * 256, {"max_tokens": None}, "context_length_exceeded"),
        ([], {}, "engine_failed"),
        ([len(WORDS)], {}, "invalid_request"),
        ([1], {"prefix": [[2, -1]]}, "invalid_request"),
    ],
)
def test_what_can_never_run_is_refused_at_submit(prompt: list[int], sampling: dict[str, Any], code: str) -> None:
    first, second = run_all(counting_engine(CountingRunner()), request("a", prompt, **sampling), request("b", [2]))
    assert first.error is not None
    assert first.error[0] == code
    assert second.ids == {0: numbers(2, 12)}


def test_a_second_run_with_a_living_key_does_not_disturb_the_first() -> None:
    (outcome,) = run_all(counting_engine(CountingRunner()), request("a", [1]), request("a", [500]))[:1]
    assert outcome.ids == {0: numbers(1, 12)}


def test_one_call_of_the_loop_has_the_events_of_a_whole_step() -> None:
    calls: list[list[TokenEvent]] = []

    async def main() -> None:
        driver = Driver(counting_engine(CountingRunner()))
        driver.on_step = calls.append
        driver.submit(*(request(str(index), [index], max_tokens=4) for index in range(5)))
        await driver.ended()
        driver.engine.stop()

    asyncio.run(main())
    assert sum(len(events) for events in calls) == 20
    assert max(len(events) for events in calls) == 5
    assert len(calls) <= 8


def test_the_engine_waits_for_a_loop_that_does_not_read() -> None:
    async def main() -> None:
        runner = CountingRunner()
        driver = Driver(counting_engine(runner))
        driver.submit(request("a", [1], max_tokens=100))
        await driver.until(lambda: driver.outcomes["a"].ids)
        seen = len(driver.outcomes["a"].ids[0])
        deadline = time.monotonic() + BUDGET_S
        while len(runner.plans) < seen + UNREAD_STEPS_MAX and time.monotonic() < deadline:
            time.sleep(0.001)  # noqa: ASYNC251 - the loop is to stand still
        time.sleep(0.05)  # noqa: ASYNC251 - time enough for thousands of steps
        assert len(runner.plans) <= seen + UNREAD_STEPS_MAX + 1
        assert driver.engine.stats().step_started == 0.0
        await driver.ended()
        driver.engine.stop()

    asyncio.run(main())


def test_a_hung_step_shows_in_the_stats_and_not_between_steps() -> None:
    gate = threading.Event()

    async def main() -> None:
        driver = Driver(counting_engine(gated(gate)))
        assert driver.engine.stats().step_started == 0.0
        driver.submit(request("a", [1], max_tokens=1))
        begun = time.monotonic()
        await driver.until(lambda: driver.engine.stats().step_started > 0)
        assert abs(driver.engine.stats().step_started - begun) < BUDGET_S
        gate.set()
        await driver.ended()
        await driver.idle()
        assert driver.engine.stats().step_started == 0.0
        driver.engine.stop()

    asyncio.run(main())


def test_stop_ends_the_thread_in_the_middle_of_a_run() -> None:
    async def main() -> None:
        driver = Driver(counting_engine(CountingRunner()))
        driver.submit(request("a", [1], max_tokens=200))
        await driver.until(lambda: driver.outcomes["a"].ids)
        driver.engine.stop()
        assert not any(thread.name == "engine" for thread in threading.enumerate())

    asyncio.run(main())


def test_stats_count() -> None:
    engine = counting_engine(CountingRunner())
    run_all(engine, request("a", [1] * 40, max_tokens=3), request("b", [2], max_tokens=2))
    stats = engine.stats()
    assert (stats.prompt_tokens, stats.generated_tokens, stats.running, stats.waiting, stats.blocks_used) == (
        41,
        5,
        0,
        0,
        0,
    )
    assert stats.steps >= 4


def prepare(prompt: Input, **sampling: Any) -> list[int]:
    engine: BatchEngine = counting_engine(CountingRunner())
    return engine.prepare(prompt, Sampling(**sampling))


def test_prepare_gives_prompt_ids() -> None:
    assert len(prepare(Input(prompt="three short words"), max_tokens=253)) == 3
    assert prepare(Input(token_ids=[1, 2])) == [1, 2]
    assert len(prepare(Input(messages=[ChatMessage(role="user", content="two words")]))) == 3


@pytest.mark.parametrize(
    ("prompt", "sampling", "numbers"),
    [
        (Input(token_ids=[1] * 256), {}, ["256"]),
        (Input(token_ids=[1] * 300), {}, ["256", "300"]),
        (Input(token_ids=[1] * 200), {"max_tokens": 57}, ["256", "257", "200", "57"]),
        (Input(token_ids=[1]), {"max_tokens": 10**12}, ["256", str(10**12)]),
    ],
)
def test_prepare_refuses_what_is_too_long_and_names_the_numbers(
    prompt: Input, sampling: dict[str, Any], numbers: list[str]
) -> None:
    with pytest.raises(ContextLength) as refused:
        prepare(prompt, **sampling)
    assert all(number in refused.value.message for number in numbers)


@pytest.mark.parametrize(
    ("prompt", "sampling", "param"),
    [
        (Input(prompt=" "), {}, "prompt"),
        (Input(), {}, "prompt"),
        (Input(token_ids=[-1]), {}, "prompt"),
        (Input(token_ids=[4096]), {}, "prompt"),
        (Input(token_ids=[1]), {"temperature": float("nan")}, "temperature"),
        (Input(token_ids=[1]), {"temperature": -0.1}, "temperature"),
        (Input(token_ids=[1]), {"top_p": 0.0}, "top_p"),
        (Input(token_ids=[1]), {"top_k": -1}, "top_k"),
        (Input(token_ids=[1]), {"min_p": 1.1}, "min_p"),
        (Input(token_ids=[1]), {"repetition_penalty": 0.0}, "repetition_penalty"),
        (Input(token_ids=[1]), {"presence_penalty": float("inf")}, "presence_penalty"),
        (Input(token_ids=[1]), {"max_tokens": -5}, "max_tokens"),
        (Input(token_ids=[1]), {"min_tokens": -1}, "min_tokens"),
        (Input(token_ids=[1]), {"n": 0}, "n"),
        (Input(token_ids=[1]), {"n": 100_000}, "n"),
        (Input(token_ids=[1]), {"logprobs": 21}, "logprobs"),
        (Input(token_ids=[1]), {"stop": ["a", ""]}, "stop"),
        (Input(token_ids=[1]), {"stop_token_ids": [5000]}, "stop_token_ids"),
        (Input(token_ids=[1]), {"logit_bias": {-3: 1.0}}, "logit_bias"),
        (Input(token_ids=[1]), {"logit_bias": {3: float("nan")}}, "logit_bias"),
    ],
)
def test_prepare_refuses_what_no_sampler_can_use_and_names_it(
    prompt: Input, sampling: dict[str, Any], param: str
) -> None:
    with pytest.raises(BadRequest) as refused:
        prepare(prompt, **sampling)
    assert refused.value.param == param
    assert not isinstance(refused.value, ContextLength)


def test_a_key_can_be_used_again_after_its_end() -> None:
    async def main() -> None:
        driver = Driver(counting_engine(CountingRunner()))
        for first in (1, 300):
            driver.submit(EngineRequest(key="a", tenant="t", prompt_ids=[first], sampling=Sampling(max_tokens=3)))
            await driver.ended("a")
            assert driver.outcomes["a"].ids == {0: numbers(first, 3)}
        driver.engine.stop()

    asyncio.run(main())


def test_what_has_ended_is_freed_without_a_collection_of_garbage() -> None:
    async def main() -> None:
        driver = Driver(counting_engine(CountingRunner()))
        gc.collect()
        gc.disable()  # a prompt would stay until it comes round
        try:
            driver.submit(request("two", [5], n=2), request("cancelled", [7], max_tokens=900))
            await driver.until(lambda: driver.outcomes["cancelled"].ids)
            driver.engine.cancel("cancelled")
            await driver.ended("two")
            await driver.idle()
            assert [each.key for each in gc.get_objects() if type(each) is Choice] == []
        finally:
            gc.enable()
            driver.engine.stop()

    asyncio.run(main())
