"""That what is meant to be fast is not slow: coarse orders only, figures are bench/gpu.py's."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu import measure
from random_model import save_random_llama

from shared.records import EngineSettings
from workers.engine.load import load_engine
from workers.engine.runner_cuda import CudaRunner


@pytest.fixture(scope="module")
def directory(gpu: torch.device, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_llama(tmp_path_factory.mktemp("llama"), 1024, 16, 16, 4, 32_000, 8192)


def decode_ms(directory: Path, batch: int, graphs: bool, **settings: Any) -> float:
    chosen = EngineSettings(dtype="bfloat16", slots=32, max_model_len=4096, **settings)
    engine: Any = load_engine("s3", directory, chosen, 1)
    runner = engine._runner
    if not graphs and isinstance(runner, CudaRunner):
        runner.graphs = None
    return asyncio.run(measure(engine, [batch], 256, 48))[batch]["decode_ms"]


def test_a_graph_beats_launching_kernel_by_kernel(directory: Path) -> None:
    graphs = decode_ms(directory, 1, True, attention="triton")
    eager = decode_ms(directory, 1, False, attention="triton")
    print(f"decode of one sequence: {graphs:.2f} ms from a graph, {eager:.2f} ms eagerly")
    assert graphs < eager / 1.5


def test_the_paged_kernel_beats_gathering(directory: Path) -> None:
    paged = decode_ms(directory, 32, False, attention="triton")
    gathered = decode_ms(directory, 32, False, attention="torch")
    print(f"eager decode of 32 sequences: {paged:.2f} ms paged, {gathered:.2f} ms gathered")
    assert paged < gathered
