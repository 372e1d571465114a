"""Drafts from the text itself: what is guessed and when, and that no token is other than without them."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from engine_driver import Driver, Outcome, rebuilt, request, run_all
from hypothesis import given
from hypothesis import strategies as st
from paged_memory import PagedMemory
from tiny_models import save_tiny_model

from shared.records import EngineSettings
from shared.wire import Sampling
from workers.engine.drafts import DRAFT_MAX, INDEXED_MAX, NGRAMS, REST_MAX, ROWS_MAX, Drafter, Lookup
from workers.engine.engine import BatchEngine, Drawn
from workers.engine.load import load_engine
from workers.engine.native import build
from workers.engine.native.runner import NativeRunner, UpgradingRunner
from workers.engine.pacer import Cost, Pacer
from workers.engine.request import EngineInfo
from workers.engine.scheduler import Sequence, Slice, StepPlan
from workers.engine.sim import SimulatedText

# -- the lookup ------------------------------------------------------------------------------------------------------


def confident() -> Lookup:
    lookup = Lookup()
    lookup.length = DRAFT_MAX
    return lookup


def test_what_came_last_after_the_same_tokens_is_guessed() -> None:
    assert confident().draft([1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3], 4) == (4, 5, 6, 7)
    assert confident().draft([1, 2, 3, 8, 1, 2, 3, 9, 9, 1, 2, 3], 2) == (9, 9)
    assert confident().draft([1, 2, 3, 8, 4, 2, 3, 9, 1, 2, 3], 1) == (8,), "three tokens are better evidence than two"
    assert confident().draft([5, 1, 2, 8, 7, 4, 1, 2], 2) == (8, 7)
    assert confident().draft([1, 2, 3, 4], 2) == ()
    assert confident().draft([1], 2) == ()


def test_a_text_that_repeats_itself_is_guessed_to_go_on_so() -> None:
    assert confident().draft([9, 9, 9], 5) == (9,) * 5
    assert confident().draft([1, 2, 1, 2, 1], 5) == (2, 1, 2, 1, 2)


def naive(tokens: list[int], length: int) -> tuple[int, ...]:
    for n in NGRAMS:
        for end in range(len(tokens) - 1, n - 1, -1):
            if len(tokens) > n and tokens[end - n : end] == tokens[-n:]:
                return tuple(((tokens[end:]) * length)[:length])
    return ()


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=12))
def test_an_index_that_grows_finds_what_a_search_finds(steps: list[list[int]]) -> None:
    lookup, tokens = confident(), []
    for step in steps:
        tokens += step
        assert lookup.draft(tokens, 5) == naive(tokens, 5)


def test_a_long_prompt_is_indexed_over_several_steps() -> None:
    lookup = confident()
    tokens = [1, 2, 3, 4, *range(10, 10 + 2 * INDEXED_MAX), 1, 2, 3]
    assert [lookup.draft(tokens, 1) for _ in range(3)] == [(), (), (4,)]


def test_drafts_grow_while_they_are_right_and_rest_when_they_are_not() -> None:
    lookup, tokens = Lookup(), [7] * 10
    for length in (2, 4, DRAFT_MAX, DRAFT_MAX):
        assert len(lookup.draft(tokens, 20)) == length
        lookup.learn(len(tokens), length, length)
    lookup.learn(len(tokens), 1, 1)
    assert len(lookup.draft(tokens, 20)) == DRAFT_MAX, "one that was cut short says nothing against long ones"
    lookup.learn(len(tokens), DRAFT_MAX, 2)
    assert len(lookup.draft(tokens, 20)) == 3
    rests = []
    for _ in range(8):
        lookup.learn(len(tokens), 2, 0)
        rest = 0
        while not lookup.draft(tokens, 20):
            tokens.append(7)
            rest += 1
        rests.append(rest)
    assert rests == sorted(rests)
    assert rests[0] < 6
    assert rests[-1] >= REST_MAX
    lookup.learn(len(tokens), 1, 1)
    assert lookup.draft([*tokens, 7], 20)


# -- the drafter -----------------------------------------------------------------------------------------------------


def decoding(tokens: list[int] | None = None, **sampling: Any) -> Sequence:
    tokens = tokens or [7] * 10
    return Sequence("s", "t", 0, Sampling(**sampling), tokens, 4, 100, computed=len(tokens) - 1, lookup=confident())


def lengths(sequences: list[Sequence], pacer: Pacer | None = None) -> list[int]:
    Drafter().propose(sequences, pacer or Pacer())
    return [len(each.draft) for each in sequences]


def test_a_step_with_drafts_has_few_rows() -> None:
    assert lengths([decoding()]) == [DRAFT_MAX]
    assert lengths([decoding(), decoding([1, 2, 3]), decoding()]) == [ROWS_MAX - 3, 0, 0]
    assert lengths([decoding() for _ in range(ROWS_MAX)]) == [0] * ROWS_MAX


def test_nobody_drafts_beside_a_prompt_and_old_drafts_are_gone() -> None:
    pair = [decoding(), decoding()]
    assert lengths(pair)[0] > 0
    pair[1].computed -= 1
    assert lengths(pair) == [0, 0]


@pytest.mark.parametrize(
    "sampling", [{"repetition_penalty": 1.1}, {"presence_penalty": 0.1}, {"frequency_penalty": -1}]
)
def test_no_drafts_where_a_guess_would_change_what_follows_it(sampling: dict[str, Any]) -> None:
    assert lengths([decoding(**sampling), decoding()]) == [0, ROWS_MAX - 2]
    grammar = decoding()
    grammar.matcher = object()
    assert lengths([grammar]) == [0]


def test_a_target_for_the_time_of_a_token_bounds_drafts() -> None:
    cost = Cost(step=10.0, decode=1.0)
    assert lengths([decoding()], Pacer(100.0, cost)) == [DRAFT_MAX]
    assert 0 < lengths([decoding()], Pacer(15.0, cost))[0] < DRAFT_MAX
    assert lengths([decoding()], Pacer(10.0, cost)) == [0]


# -- exactness -------------------------------------------------------------------------------------------------------

RUNNERS = [
    "torch",
    pytest.param(
        "auto",
        marks=pytest.mark.skipif(
            not build.can_build() or not build.cpu_flags() >= build.CPU_NEEDED, reason="no kernels for this CPU"
        ),
    ),
]
PHRASE = [(37 * place) % 250 for place in range(12)]


@pytest.fixture(scope="module", params=RUNNERS)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> BatchEngine:
    directory: Path = save_tiny_model("llama", tmp_path_factory.mktemp("model"), initializer_range=0.07)
    if request.param == "auto":
        build.build()
    engine: Any = load_engine("s3", directory, EngineSettings(dtype="float32", kernels=request.param), 1)
    assert isinstance(engine._runner, NativeRunner) == (request.param == "auto")
    return engine


def both(engine: BatchEngine, *requests: Any, **sizes: Any) -> tuple[list[Outcome], list[Outcome], BatchEngine]:
    """What becomes of requests without and with drafts, and the engine with them."""
    without = run_all(rebuilt(engine, speculation="off", **sizes), *requests)
    speculating = rebuilt(engine, **sizes)
    return without, run_all(speculating, *requests), speculating


def same(without: list[Outcome], drafted: list[Outcome]) -> None:
    for one, two in zip(without, drafted, strict=True):
        assert (one.ids, one.text, one.finish, one.error) == (two.ids, two.text, two.finish, two.error)
        assert (one.usage is None) == (two.usage is None)


def looping(key: str, prompt: list[int], **sampling: Any) -> Any:
    """Of a model whose greedy text ends in loops, not in a token."""
    return request(key, prompt, **({"ignore_eos": True} | sampling))


def requests(count: int, **sampling: Any) -> list[Any]:
    return [
        looping(str(index), [index + 1, *PHRASE, *PHRASE[: 3 + index]], seed=index, max_tokens=100, **sampling)
        for index in range(count)
    ]


@pytest.mark.parametrize("streams", [1, 3, 6])
@pytest.mark.parametrize("temperature", [0.0, 0.05])
def test_the_tokens_are_those_without_drafts(engine: BatchEngine, streams: int, temperature: float) -> None:
    asked = requests(streams, temperature=temperature, top_p=0.95, n=1)
    without, drafted, speculating = both(engine, *asked)
    same(without, drafted)
    stats = speculating.stats()
    assert 0 < stats.accepted <= stats.drafted
    assert stats.generated_tokens == 100 * streams


def test_choices_minimums_biases_and_log_probabilities_agree(engine: BatchEngine) -> None:
    asked = [
        looping("a", [1, *PHRASE * 2], max_tokens=60, n=3, temperature=0.05, seed=3, logprobs=2),
        looping("b", [2, *PHRASE * 2], max_tokens=60, min_tokens=40, stop_token_ids=PHRASE, logit_bias={5: 3.0}),
        looping("c", [3, *PHRASE * 2], max_tokens=60, repetition_penalty=1.2),
    ]
    without, drafted, speculating = both(engine, *asked)
    same(without, drafted)
    assert speculating.stats().accepted > 0
    for choice, logprobs in without[0].logprobs.items():
        assert len(logprobs) == 60
        for one, two in zip(logprobs, drafted[0].logprobs[choice], strict=True):
            assert (one.id, [top.id for top in one.top]) == (two.id, [top.id for top in two.top])
            assert one.logprob == pytest.approx(two.logprob, abs=1e-4)


def test_text_that_repeats_takes_fewer_steps(engine: BatchEngine) -> None:
    without, drafted, speculating = both(engine, looping("a", [1, *PHRASE], max_tokens=200))
    same(without, drafted)
    stats = speculating.stats()
    assert stats.steps == 200 - stats.accepted
    assert stats.accepted > 50, "a tiny model's greedy text ends in a loop"


def test_an_output_ends_where_its_stop_string_does(engine: BatchEngine) -> None:
    (whole,) = run_all(rebuilt(engine, speculation="off"), looping("a", [1, *PHRASE], max_tokens=200))
    loop = next(text for text in reversed(whole.text[0]) if text.strip("\ufffd"))
    asked = [
        looping(str(count), [1, *PHRASE], max_tokens=200, min_tokens=count, stop=[loop]) for count in range(150, 160)
    ]
    for each in asked:
        without, drafted, speculating = both(engine, each)
        same(without, drafted)
        assert without[0].finish == {0: "stop"}
        assert speculating.stats().accepted > 0


def test_neither_preemption_nor_a_resume_makes_a_difference(engine: BatchEngine) -> None:
    asked = requests(4)
    without, drafted, speculating = both(engine, *asked, blocks=16)
    same(without, drafted)
    stats = speculating.stats()
    assert stats.preemptions > 0
    assert stats.accepted > 0
    resumed = [
        looping(f"{each.key} after {done}", each.prompt_ids, max_tokens=100, prefix=[outcome.ids[0][:done]])
        for each, outcome in zip(asked, without, strict=True)
        for done in (1, 31, 50, 99)
    ]
    again = run_all(rebuilt(engine, slots=4), *resumed)
    assert [outcome.ids[0] for outcome in again] == [
        outcome.ids[0][done:] for outcome in without for done in (1, 31, 50, 99)
    ]


def test_what_follows_an_answer_finds_it_in_the_prefix_cache(engine: BatchEngine) -> None:
    speculating = rebuilt(engine)
    (first,) = run_all(rebuilt(engine, speculation="off"), looping("a", [1, *PHRASE], max_tokens=90))
    longer = [1, *PHRASE, *first.ids[0]]
    (expected,) = run_all(rebuilt(engine, speculation="off"), looping("b", longer, max_tokens=50))

    async def main() -> None:
        driver = Driver(speculating)
        driver.submit(looping("a", [1, *PHRASE], max_tokens=90))
        await driver.ended("a")
        driver.submit(looping("b", longer, max_tokens=50))
        await driver.ended("b")
        await driver.idle()
        speculating.stop()
        assert driver.outcomes["b"].ids == expected.ids
        usage = driver.outcomes["b"].usage
        assert usage is not None
        assert usage.cached_tokens >= 96

    asyncio.run(main())


# -- ends, failures and change-over with runners that need no model ---------------------------------------------------


class Reciting(PagedMemory):
    """Says `text` again and again, whatever the prompt."""

    verifies_drafts = True

    def __init__(self, text: list[int]) -> None:
        super().__init__()
        self.said = text

    def sample(self, plan: StepPlan, computed: Any) -> Drawn:
        tokens: list[int] = []
        counts: list[int] = []
        for part in (each for each in plan.slices if each.samples):
            count = 0
            for guess in (*part.draft, -1):
                tokens.append(self.said[(part.sequence.output_index + count) % len(self.said)])
                count += 1
                if tokens[-1] != guess:
                    break
            counts.append(count)
        return Drawn(tokens, counts=counts)


def reciting_engine(text: list[int], runner: type[Reciting] = Reciting, **settings: Any) -> BatchEngine:
    info = EngineInfo(max_model_len=256, slots=4, blocks_total=64, device="none", dtype="none")
    return BatchEngine(runner(text), SimulatedText(), info, EngineSettings(**settings))


@pytest.mark.parametrize("place", range(2, 18))
def test_a_token_that_ends_the_output_is_its_last_wherever_in_a_draft_it_stands(place: int) -> None:
    text = list(range(100, 120))
    prompt = [50, *text]
    engine = reciting_engine(text)
    stopped, counted = run_all(
        engine, request("a", prompt, stop_token_ids=[text[place]]), request("b", prompt, max_tokens=place)
    )
    assert (stopped.ids[0], stopped.finish[0]) == (text[: place + 1], "stop") if place < 12 else (text[:12], "length")
    assert (counted.ids[0], counted.finish[0]) == (text[:place], "length")
    assert counted.usage is not None
    assert counted.usage.completion_tokens == place


def test_drafts_are_for_runners_that_verify_them_and_only_if_not_told_otherwise() -> None:
    class Other(Reciting):
        verifies_drafts = False

    text = list(range(100, 110))
    for engine in (reciting_engine(text, speculation="off"), reciting_engine(text, Other)):
        run_all(engine, request("a", text, max_tokens=40))
        assert engine.stats().drafted == 0
        assert engine.stats().steps == 40
    engine = reciting_engine(text)
    run_all(engine, request("a", text, max_tokens=40))
    assert engine.stats().steps < 20


def test_two_runners_verify_each_their_own() -> None:
    runners = [Reciting([9]), Reciting([8])]
    runners[1].slots = runners[0].slots
    upgrading = UpgradingRunner(runners[0], lambda: None)
    old = Sequence("old", "t", 0, Sampling(), [1, 2, 3], 3, 40, blocks=[0])
    new = Sequence("new", "t", 0, Sampling(), [1, 2, 3], 3, 40, blocks=[1])
    first = StepPlan([Slice(old, 0, 3, True)])
    upgrading.sample(first, upgrading.forward(first))
    upgrading.offer(runners[1])
    for each in (old, new):
        runners[0].forward(StepPlan([Slice(each, 0, 3, True)]))
        each.tokens.append(4)
    both = StepPlan([Slice(new, 3, 4, True, (8, 8, 5)), Slice(old, 3, 3, True, (9, 5))])
    drawn = upgrading.sample(both, upgrading.forward(both))
    assert (drawn.tokens, drawn.counts) == ([8, 8, 8, 9, 9], [3, 2])
