"""How large the cache is made, what is refused, and what happens when memory runs out all the same."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_driver import request, run_all
from random_model import save_random_llama

from shared.records import EngineSettings
from workers.engine.load import LoadRefused, load_engine

SETTINGS = {"dtype": "bfloat16", "slots": 32, "attention": "triton"}


@pytest.fixture(scope="module")
def directory(gpu: torch.device, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_llama(tmp_path_factory.mktemp("llama"), 1024, 4, 16, 4, 128_000, 8192)


@pytest.fixture(autouse=True)
def clean(gpu: torch.device) -> Iterator[None]:
    torch.cuda.empty_cache()
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


def load(directory: Path, **changes: Any) -> Any:
    return load_engine("s3", directory, EngineSettings(**(SETTINGS | changes)), 1)


def test_the_cache_takes_what_is_left_and_the_largest_step_fits_beside_it(directory: Path) -> None:
    free, total = torch.cuda.mem_get_info()
    engine = load(directory, slots=128)
    left = torch.cuda.mem_get_info()[0]
    most = 128 * (8192 // 16)
    if engine.info.blocks_total < most:
        assert left < 0.12 * total, f"{left} of {free} bytes lie idle"
    many = [request(str(index), [index] * 500, max_tokens=8, temperature=0.8, top_p=0.9) for index in range(128)]
    outcomes = run_all(engine, *many)
    assert all(outcome.error is None for outcome in outcomes)


def test_weights_that_do_not_fit_are_refused_with_the_sum(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (50 << 20, 80 << 30))
    with pytest.raises(LoadRefused, match=r"the weights take 0\.\d+ GiB, and 0\.05 GiB of .* are free"):
        load(directory)


def test_a_cache_that_does_not_fit_is_refused_with_the_sum(directory: Path) -> None:
    with pytest.raises(LoadRefused, match=r"out of memory: .* a step takes .* 100000000 are needed"):
        load(directory, kv_blocks=100_000_000)


def test_running_out_makes_steps_smaller_and_ends_nothing(directory: Path) -> None:
    engine = load(directory, kv_blocks=4096, prefill_chunk=4096)
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (96 << 20)) / total)
    outcomes = run_all(engine, *(request(str(index), [index] * 600, max_tokens=6) for index in range(16)))
    assert all(outcome.error is None and len(outcome.ids[0]) for outcome in outcomes)


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_8_bits_hold_nearly_twice_as_much(directory: Path, kv_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    free, total = torch.cuda.mem_get_info()
    held = []
    for each in ("auto", kv_dtype):
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "mem_get_info", lambda device=None: (10 << 30, total))
            patch.setattr("workers.engine.sizing.MARGIN", 0.0)
            engine = load(directory, kv_dtype=each, slots=16, max_model_len=8192)
        held.append(engine.info.blocks_total)
        del engine
        torch.cuda.empty_cache()
    full = 16 * 8192 // 16
    assert held[1] == full or held[1] > 1.8 * held[0], f"{held} of {free} bytes"
