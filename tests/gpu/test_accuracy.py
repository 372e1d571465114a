"""What keys and values in 8 bits cost: the log probabilities of a text, scored through the engine."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_driver import request, run_all
from random_model import save_random_llama

from shared.records import EngineSettings
from workers.engine.load import load_engine

TEXT = Path(__file__).parents[2] / "docs" / "structures.md"
TOKENS = 1500


def scores(directory: Path, ids: list[int], kv_dtype: str, attention: str) -> torch.Tensor:
    """Log probabilities of all ids but the first."""
    settings = EngineSettings(dtype="bfloat16", slots=4, kv_blocks=256, kv_dtype=kv_dtype, attention=attention)
    engine: Any = load_engine("s3", directory, settings, 1)
    (outcome,) = run_all(engine, request("text", ids, max_tokens=0, echo=True, logprobs=0))
    assert outcome.error is None
    return torch.tensor([score.logprob for score in outcome.logprobs[0][1:]], dtype=torch.float64)


def differences(directory: Path, ids: list[int], kv_dtype: str) -> dict[str, float]:
    """Of the 8-bit cache, and of the same 16 bits in another attention: what rounding costs anyway."""
    exact = scores(directory, ids, "auto", "triton")
    eight = scores(directory, ids, kv_dtype, "triton")
    other = scores(directory, ids, "auto", "torch")
    return {
        "mean": (eight - exact).mean().item(),
        "spread": (eight - exact).abs().mean().item(),
        "rounding": (other - exact).abs().mean().item(),
        "nll": -exact.mean().item(),
    }


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_on_random_weights(kv_dtype: str, gpu: torch.device, tmp_path: Path) -> None:
    directory = save_random_llama(tmp_path, 1024, 6, 16, 4, 1000, 4096)
    found = differences(directory, [(7919 * position) % 900 for position in range(TOKENS)], kv_dtype)
    print(kv_dtype, found)
    assert found["spread"] < max(0.05, 4 * found["rounding"])


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_on_a_real_model(kv_dtype: str, gpu: torch.device) -> None:
    named = os.environ.get("HEADRACE_TEST_MODEL")
    if named is None:
        pytest.skip("HEADRACE_TEST_MODEL names no directory of a real model")
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(named)(TEXT.read_text())["input_ids"][:TOKENS]
    found = differences(Path(named), ids, kv_dtype)
    print(kv_dtype, found)
    assert abs(found["mean"]) < 0.02 * found["nll"]
    assert found["spread"] < 0.1
