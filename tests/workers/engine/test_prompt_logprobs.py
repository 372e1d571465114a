"""The prompt comes back first, token by token and with log probabilities: `echo` with `logprobs`."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_driver import CountingRunner, Driver, Outcome, counting_engine, rebuilt, request, run_all
from tiny_models import build_tiny_model, save_byte_tokenizer

from shared.errors import BadRequest
from shared.records import EngineSettings
from shared.wire import Grammar, Input, Logprob, Sampling, Usage
from workers.engine.checks import check_sampling
from workers.engine.engine import BatchEngine
from workers.engine.load import load_engine
from workers.engine.sim import WORDS

PROMPT = [(31 * position + 5) % 250 for position in range(40)]
TOP = 3


class Echoing:
    """An engine, and what its model says of the prompt and of what it generates."""

    def __init__(self, directory: Path) -> None:
        model = build_tiny_model("gemma2")
        model.save_pretrained(directory)
        save_byte_tokenizer(directory)
        self.engine = load_engine("s3", directory, EngineSettings(dtype="float32"), 1)
        ids = torch.tensor([PROMPT])
        whole = model.generate(ids, do_sample=False, max_new_tokens=12, pad_token_id=0)
        with torch.inference_mode():
            self.scores = model(whole).logits[0].log_softmax(-1)
        self.ids: list[int] = whole[0].tolist()

    def check(self, logprobs: list[Logprob], start: int = 0) -> None:
        """Each of `logprobs`, from position `start` on, is what the model says."""
        for position, given in enumerate(logprobs, start):
            assert given.id == self.ids[position]
            if position == 0:
                assert (given.logprob, given.top) == (None, [])
                continue
            row = self.scores[position - 1]
            assert given.logprob == pytest.approx(row[given.id].item(), abs=1e-4)
            values, tokens = row.topk(TOP)
            assert [each.id for each in given.top] == tokens.tolist()
            assert [each.logprob for each in given.top] == pytest.approx(values.tolist(), abs=1e-4)


@pytest.fixture(scope="module")
def echoing(tmp_path_factory: pytest.TempPathFactory) -> Echoing:
    return Echoing(tmp_path_factory.mktemp("gemma2"))


def scored(key: str, **more: Any) -> Any:
    return request(key, PROMPT, **({"echo": True, "logprobs": TOP} | more))


def run(echoing: Echoing, *requests: Any, **sizes: int) -> list[Outcome]:
    return run_all(rebuilt(echoing.engine, **sizes), *requests)  # type: ignore[arg-type]


@pytest.mark.parametrize("chunk", [1, 7, 512])
def test_every_token_of_the_prompt_is_scored_once_whatever_the_chunks(echoing: Echoing, chunk: int) -> None:
    neighbours = [request(f"n{index}", [index + 1] * 20) for index in range(2)]
    outcome, *others = run(echoing, scored("a", n=2), *neighbours, prefill_chunk=chunk)
    for choice in (0, 1):
        assert outcome.ids[choice] == echoing.ids
        echoing.check(outcome.logprobs[choice])
        assert "".join(outcome.text[choice][: len(PROMPT)]) == echoing.engine._text.decode(PROMPT)  # type: ignore[attr-defined]
    assert outcome.usage == Usage(len(PROMPT), 24)
    plain = run(echoing, *neighbours)
    assert [other.ids for other in others] == [other.ids for other in plain]


def test_a_preempted_echo_scores_nothing_twice(echoing: Echoing) -> None:
    engine = rebuilt(echoing.engine, blocks=6, prefill_chunk=1)  # type: ignore[arg-type]
    growing = request("growing", [3] * 14, max_tokens=60)
    _, outcome = run_all(engine, growing, scored("a"))
    assert engine.stats().preemptions > 0
    assert outcome.ids[0] == echoing.ids
    echoing.check(outcome.logprobs[0])


def test_a_resumed_echo_goes_on_where_it_stood(echoing: Echoing) -> None:
    positions = [1, 2, 25, len(PROMPT) - 1, len(PROMPT), len(PROMPT) + 1, len(echoing.ids) - 1]
    outcomes = run(echoing, *(scored(str(done), prefix=[echoing.ids[:done]]) for done in positions), prefill_chunk=9)
    for outcome, done in zip(outcomes, positions, strict=True):
        assert outcome.ids[0] == echoing.ids[done:]
        echoing.check(outcome.logprobs[0], done)
        assert outcome.usage is not None
        assert (outcome.usage.prompt_tokens, outcome.usage.completion_tokens) == (len(PROMPT), 12)


def test_the_prompt_alone(echoing: Echoing) -> None:
    outcome, done, plain = run(
        echoing,
        scored("a", max_tokens=0),
        scored("done", max_tokens=0, prefix=[PROMPT]),
        request("plain", PROMPT, echo=True, max_tokens=0),
    )
    assert outcome.ids[0] == PROMPT
    echoing.check(outcome.logprobs[0])
    assert (outcome.finish, outcome.usage) == ({0: "length"}, Usage(len(PROMPT), 0))
    assert (done.ids, done.finish, done.usage) == ({0: []}, {0: "length"}, Usage(len(PROMPT), 0))
    assert (plain.ids, plain.finish, plain.usage) == ({0: PROMPT}, {0: "length"}, Usage(len(PROMPT), 0))


def test_a_prompt_of_one_token_has_nothing_to_score(echoing: Echoing) -> None:
    (outcome,) = run(echoing, request("a", [9], echo=True, logprobs=0, max_tokens=1))
    assert outcome.ids[0][0] == 9
    assert [each.logprob is None for each in outcome.logprobs[0]] == [True, False]


def test_a_cancelled_echo_leaves_nothing(echoing: Echoing) -> None:
    async def main() -> None:
        driver = Driver(rebuilt(echoing.engine, prefill_chunk=4))  # type: ignore[arg-type]
        driver.submit(scored("a", max_tokens=0))
        await driver.until(lambda: len(driver.outcomes["a"].ids.get(0, [])) > 5)
        driver.engine.cancel("a")
        await driver.idle()
        driver.engine.stop()

    asyncio.run(main())


def counting(**more: Any) -> Outcome:
    engine: BatchEngine = counting_engine(CountingRunner())
    return run_all(engine, request("a", [100, 7, 8], **({"echo": True, "max_tokens": 2} | more)))[0]


def test_an_echo_without_scores_comes_at_once_and_its_text_with_the_first_token() -> None:
    outcome = counting()
    assert outcome.ids[0] == [100, 7, 8, 100, 101]
    assert outcome.text[0] == [WORDS[100] + WORDS[7] + WORDS[8], "", "", WORDS[100], WORDS[101]]
    assert outcome.usage == Usage(3, 2)


def test_a_resumed_echo_tells_the_text_of_its_prefix_and_counts_no_prompt_as_output() -> None:
    outcome = counting(prefix=[[100, 7, 8, 100]])
    assert outcome.ids[0] == [101]
    assert outcome.usage == Usage(3, 2)
    assert counting(prefix=[[100, 7]]).ids[0] == [8, 100, 101]


def test_a_prefix_that_is_no_echo_of_the_prompt_is_refused() -> None:
    outcome = counting(prefix=[[100, 9]])
    assert outcome.error is not None
    assert outcome.error[0] == "engine_failed"


@pytest.mark.parametrize(
    ("sampling", "param"),
    [
        ({"max_tokens": -1}, "max_tokens"),
        ({"echo": True, "logprobs": 21}, "logprobs"),
        ({"grammar": Grammar("regex", "a" * 300_000)}, "response_format"),
    ],
)
def test_what_nobody_can_serve_is_refused(sampling: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as refused:
        check_sampling(Sampling(**sampling), 1000)
    assert refused.value.param == param


def test_prepare_accepts_a_prompt_alone() -> None:
    engine = counting_engine(CountingRunner())
    for echo in (True, False):
        assert engine.prepare(Input(token_ids=[1, 2]), Sampling(echo=echo, max_tokens=0)) == [1, 2]
