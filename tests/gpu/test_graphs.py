"""Decode steps from graphs give what eager steps give, step after step, at every batch size."""

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_driver import rebuilt, request, run_all
from random_model import save_random_llama
from tiny_models import save_tiny_model

from shared.records import EngineSettings
from shared.wire import Sampling
from workers.engine.blocks import blocks_for
from workers.engine.engine import BatchEngine
from workers.engine.load import load_engine
from workers.engine.runner_cuda import CudaRunner
from workers.engine.scheduler import Sequence, Slice, StepPlan

SLOTS = 12


@pytest.fixture(scope="module")
def engine(gpu: torch.device, tmp_path_factory: pytest.TempPathFactory) -> BatchEngine:
    directory = save_random_llama(tmp_path_factory.mktemp("llama"), 512, 4, 8, 2, 1000, 4096)
    settings = EngineSettings(dtype="float32", slots=SLOTS, kv_blocks=600, prefill_chunk=1024, attention="triton")
    loaded = load_engine("s3", directory, settings, 1)
    assert isinstance(loaded, BatchEngine)
    return loaded


def runner_of(engine: BatchEngine) -> CudaRunner:
    runner = engine._runner
    assert isinstance(runner, CudaRunner)
    return runner


def sequences(lengths: list[int]) -> list[Sequence]:
    made, first = [], 0
    for slot, length in enumerate(lengths):
        blocks = list(range(first, first + blocks_for(length + 8)))
        first += len(blocks)
        tokens = [(7919 * position + 31 * slot) % 1000 for position in range(length)]
        made.append(Sequence(str(slot), "t", 0, Sampling(), tokens, length, length + 8, blocks=blocks, slot=slot))
    return made


@pytest.mark.parametrize("count", [1, 3, 8, 11, SLOTS])
def test_logits_are_those_of_an_eager_step(engine: BatchEngine, count: int) -> None:
    runner = runner_of(engine)
    graphs = runner.graphs
    assert graphs is not None
    assert graphs.buckets == [1, 2, 4, 8, SLOTS]
    batch = sequences([5, 700, 33, 1, 16, 90, 17, 64, 250, 31, 2, 48][:count])
    for sequence in batch:
        runner.forward(StepPlan([Slice(sequence, 0, len(sequence.tokens), True)]))
    for step in range(4):
        for sequence in batch:
            sequence.tokens.append((37 * step + sequence.slot) % 1000)
        plan = StepPlan([Slice(sequence, len(sequence.tokens) - 1, 1, True) for sequence in batch])
        replayed = runner.forward(plan).clone()
        runner.graphs = None
        try:
            eager = runner.forward(plan)
        finally:
            runner.graphs = graphs
        assert replayed.shape == eager.shape == (count, 1000)
        torch.testing.assert_close(replayed, eager, rtol=1e-3, atol=1e-4)


def test_the_engine_says_the_same_with_and_without_graphs(engine: BatchEngine) -> None:
    runner = runner_of(engine)
    prompts = [[(31 * position + 7 * index) % 900 for position in range(20 + 60 * index)] for index in range(6)]
    said = []
    graphs = runner.graphs
    for chosen in (graphs, None):
        runner.graphs = chosen
        again = rebuilt(engine, slots=SLOTS, blocks=600, prefill_chunk=128)
        outcomes = run_all(
            again, *(request(str(i), ids, max_tokens=30, ignore_eos=True) for i, ids in enumerate(prompts))
        )
        said.append([outcome.ids[0] for outcome in outcomes])
    runner.graphs = graphs
    assert said[0] == said[1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_serve_whether_or_not_they_can_be_recorded(dtype: str, tmp_path: Path, gpu: torch.device) -> None:
    """In float32 the experts' products read sizes back: capture fails, and the steps run eagerly."""
    directory = save_tiny_model("mixtral", tmp_path / "mixtral")
    engine: Any = load_engine("s3", directory, EngineSettings(dtype=dtype, slots=4, kv_blocks=64), 1)
    (outcome,) = run_all(engine, request("a", list(range(20)), max_tokens=10))
    assert outcome.error is None
    assert len(outcome.ids[0]) > 0
