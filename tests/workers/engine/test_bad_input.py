"""What a model, its files or a request can do wrong: whoever did it is told, nobody else notices."""

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_driver import CountingRunner, counting_engine, request, run_all
from tiny_models import save_tiny_model

from shared.errors import BadRequest, ContextLength
from shared.records import EngineSettings
from shared.wire import ChatMessage, Input, Sampling, Usage
from workers.engine.load import load_engine

LONG = [1] * 100_000


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("gpt2", tmp_path_factory.mktemp("gpt2"))


def load(directory: Path, **settings: Any) -> Any:
    return load_engine("s3", directory, EngineSettings(dtype="float32", **settings), 1)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_a_model_that_computes_no_numbers_fails_the_request_that_it_does_so_for(directory: Path, wrong: float) -> None:
    neighbours = [request(str(index), [10 + index] * 5) for index in range(3)]
    expected = [outcome.ids for outcome in run_all(load(directory), *neighbours)]
    engine = load(directory)
    engine._runner.model.get_input_embeddings().register_forward_hook(
        lambda _, given, out: out.masked_fill((given[0] == 200).unsqueeze(-1), wrong)
    )
    *others, broken, echoed = run_all(
        engine, *neighbours, request("b", [3, 200]), request("e", [4, 200, 5], echo=True, logprobs=1, max_tokens=0)
    )
    assert [outcome.ids for outcome in others] == expected
    for outcome in (broken, echoed):
        assert outcome.error is not None
        assert outcome.error[0] == "engine_failed"
        assert "not finite" in outcome.error[1]
    assert broken.ids == {0: []}


def test_nothing_asked_for_is_nothing_computed_and_the_prompt_is_counted() -> None:
    runner = CountingRunner()
    (counted,) = run_all(counting_engine(runner), request("count", [5] * 40, max_tokens=0))
    assert (counted.finish, counted.ids[0], counted.usage) == ({0: "length"}, [], Usage(40, 0, 0))
    assert runner.plans == []


def test_a_prompt_of_100k_tokens_is_refused_by_a_small_pool(directory: Path) -> None:
    engine = load(directory, kv_blocks=3)
    with pytest.raises(ContextLength) as refused:
        engine.prepare(Input(token_ids=LONG), Sampling())
    assert "48 tokens" in refused.value.message
    assert "100000 tokens" in refused.value.message


def test_a_prompt_of_100k_tokens_that_was_submitted_all_the_same_ends_alone() -> None:
    long, other = run_all(counting_engine(CountingRunner(), blocks=4), request("long", LONG), request("other", [7]))
    assert long.error is not None
    assert long.error[0] == "context_length_exceeded"
    assert len(other.ids[0]) == 12


def test_messages_for_a_tokenizer_without_a_chat_template_are_refused(directory: Path) -> None:
    with pytest.raises(BadRequest, match="no chat template") as refused:
        load(directory).prepare(Input(messages=[ChatMessage("user", "Hi")]), Sampling())
    assert refused.value.param == "messages"


def test_a_model_that_does_not_fit_is_refused_with_the_sum(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from workers.engine import model
    from workers.engine.load import LoadRefused

    monkeypatch.setattr(model, "available", lambda: 1000)
    with pytest.raises(LoadRefused, match=r"the weights take .* GiB, and 0\.00 GiB of .* are free"):
        load(directory)
    assert torch.is_grad_enabled()  # a refusal leaves nothing switched off
