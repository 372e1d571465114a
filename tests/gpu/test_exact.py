"""Token-exact on a GPU against `model.generate(do_sample=False)`, family by family, chunked, preempted and from graphs."""

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import INTERPRETED
from engine_driver import rebuilt, request, run_all
from host_device import use_host_device
from tiny_models import FAMILIES, save_tiny_model

from shared.records import EngineSettings
from workers.engine.engine import BatchEngine
from workers.engine.load import load_engine
from workers.engine.runner_cuda import CudaRunner

pytest.importorskip("triton", reason="triton is not installed")

EXPERTS = ("gpt_oss", "mixtral", "qwen3_moe", "deepseek_v3")
OUTPUT = 12 if INTERPRETED else 40
PROMPTS = [
    [(31 * position + 7 * index) % 250 for position in range(length)] for index, length in enumerate((37, 5, 18, 1))
]


class Family:
    def __init__(self, name: str, directory: Path, device: torch.device, attention: str) -> None:
        self.name = name
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
        model = model.to(device)
        self.expected = []
        for prompt in PROMPTS:
            ids = torch.tensor([prompt], device=device)
            mask = torch.ones_like(ids)
            out = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=OUTPUT, pad_token_id=0)
            self.expected.append(out[0, len(prompt) :].tolist())
        settings = EngineSettings(dtype="float32", slots=8, kv_blocks=128, attention=attention)
        engine = load_engine("s3", directory, settings, 1)
        assert isinstance(engine, BatchEngine)
        self.engine = engine


@pytest.fixture(scope="module", params=list(FAMILIES))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, device: torch.device) -> Family:
    directory = save_tiny_model(request.param, tmp_path_factory.mktemp(request.param))
    with pytest.MonkeyPatch.context() as patch:
        if device.type == "cpu":
            use_host_device(patch, interpreted=True)
        return Family(request.param, directory, device, "triton")


def requests(prefix: str = "") -> list[Any]:
    return [request(f"{prefix}{index}", prompt, max_tokens=OUTPUT) for index, prompt in enumerate(PROMPTS)]


@pytest.mark.parametrize("chunk", [7] if INTERPRETED else [7, 512])
def test_any_chunking_gives_the_models_own_tokens(family: Family, chunk: int) -> None:
    outcomes = run_all(rebuilt(family.engine, prefill_chunk=chunk), *requests())
    assert [outcome.ids[0] for outcome in outcomes] == family.expected


def test_forced_preemption_changes_nothing(family: Family, gpu: torch.device) -> None:
    engine = rebuilt(family.engine, blocks=8)
    outcomes = run_all(engine, *requests(), *requests("again "))
    assert engine.stats().preemptions > 0
    assert [outcome.ids[0] for outcome in outcomes] == family.expected * 2


def test_a_resumed_prefix_goes_on_as_if_nothing_had_happened(family: Family, gpu: torch.device) -> None:
    done = 17
    resumed = [
        request(str(index), prompt, max_tokens=OUTPUT, prefix=[family.expected[index][:done]])
        for index, prompt in enumerate(PROMPTS)
        if len(family.expected[index]) == OUTPUT
    ]
    outcomes = run_all(rebuilt(family.engine, prefill_chunk=7), *resumed)
    assert [outcome.ids[0] for outcome in outcomes] == [each[done:] for each in family.expected if len(each) == OUTPUT]


def test_decodes_come_from_graphs(family: Family, device: torch.device) -> None:
    if device.type == "cuda" and family.name in EXPERTS:
        pytest.skip("in float32 the products of experts read sizes back, and cannot be recorded")
    runner = family.engine._runner
    assert isinstance(runner, CudaRunner)
    assert runner.graphs is not None
    assert runner.graphs.buckets == [1, 2, 4, 8], "the model could not be recorded: see the log"


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral"])
def test_torchs_own_attention_agrees_in_16_bits(name: str, tmp_path: Path, gpu: torch.device) -> None:
    """The load itself compares packed, chunked logits with the model's; here both kinds of attention are loaded."""
    directory = (
        save_tiny_model(name, tmp_path / name, head_dim=16)
        if name == "qwen3"
        else save_tiny_model(name, tmp_path / name)
    )
    for attention in ("varlen", "torch"):
        settings = EngineSettings(dtype="bfloat16", slots=8, kv_blocks=128, attention=attention)
        engine = load_engine("s3", directory, settings, 1)
        outcomes = run_all(engine, *requests())
        assert all(outcome.ended and outcome.error is None for outcome in outcomes)
