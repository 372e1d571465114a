"""Our own CPU kernels: the models' own logits, whatever the sizes, and bit for bit the same whatever is beside a sequence."""

from pathlib import Path

import pytest
import torch
from native_world import CPU, DTYPES, LENGTH, MODELS, Served, needs_vnni
from tiny_models import save_tiny_model

from workers.engine import gate
from workers.engine.blocks import BLOCK_TOKENS
from workers.engine.kv_int8 import Quantised
from workers.engine.native import build
from workers.engine.native.decoder import BlockTables
from workers.engine.scheduler import Slice, StepPlan

pytestmark = pytest.mark.skipif(not build.can_build(), reason="no C++ compiler")


@pytest.fixture(params=DTYPES)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    found: torch.dtype = request.param
    return found


@pytest.mark.parametrize("name", list(MODELS))
def test_the_logits_are_the_models_own(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    family, changes = MODELS[name]
    served = Served(save_tiny_model(family, tmp_path, **changes), dtype)
    one, other = served.sequence(LENGTH), served.sequence(90, 1)
    expected = [served.own(one), served.own(other)]
    for counts in ((100, 7), (99, 82), (1, 1)):
        logits = served.step((one, counts[0]), (other, counts[1]))
        for row, sequence in enumerate((one, other)):
            wanted = expected[row][sequence.computed - 1]
            error = ((logits[row] - wanted).norm() / (wanted - wanted.mean()).norm()).item()
            assert error < gate.ERROR_MAX[dtype] / (10 if dtype == torch.float32 else 2), (name, sequence.computed)


@pytest.mark.parametrize("int8_weights", [False, pytest.param(True, marks=needs_vnni)])
def test_neither_chunks_nor_neighbours_nor_threads_change_a_bit(
    dtype: torch.dtype, int8_weights: bool, tmp_path: Path
) -> None:
    directory = save_tiny_model("mistral", tmp_path, sliding_window=70)
    served = Served(directory, dtype, int8_weights=int8_weights)
    whole = served.sequence(LENGTH)
    expected = served.step((whole, LENGTH))[0]
    for chunks in ([LENGTH - 1, 1], [64, 64, 64, 8], [33, 70, 96, 1], [1] * LENGTH):
        again = served.sequence(LENGTH)
        for count in chunks:
            logits = served.step((again, count))[0]
        assert torch.equal(logits, expected), chunks[:4]
        served._free += again.blocks
    neighbours = [served.sequence(40 + 9 * index, index) for index in range(5)]
    again = served.sequence(LENGTH)
    served.step((again, LENGTH - 1), *((each, 30 + index) for index, each in enumerate(neighbours)))
    logits = served.step(*((each, 1 + index) for index, each in enumerate(neighbours)), (again, 1))[-1]
    assert torch.equal(logits, expected)
    worlds = [Served(directory, dtype, threads, int8_weights=int8_weights) for threads in (1, 2, 3)]
    results = [world.step((world.sequence(77), 77)) for world in worlds]
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_a_cache_in_eight_bits_is_the_one_that_torch_would_make(dtype: torch.dtype, tmp_path: Path) -> None:
    directory = save_tiny_model("qwen3", tmp_path, head_dim=22)
    plain, small = (Served(directory, dtype, int8=int8) for int8 in (False, True))
    sequences = [world.sequence(LENGTH) for world in (plain, small)]
    expected = plain.own(sequences[0])
    for world, sequence in zip((plain, small), sequences, strict=True):
        logits = world.step((sequence, LENGTH))[0]
        error = (logits - expected[-1]).norm() / (expected[-1] - expected[-1].mean()).norm()
        assert error < gate.KV_ERROR_MAX["int8"] / 2
    for exact, found in zip(plain.caches[0], small.caches[0], strict=True):  # the first layer reads no cache
        assert isinstance(exact, torch.Tensor)
        assert isinstance(found, Quantised)
        made = Quantised((exact.shape[0], exact.shape[1], exact.shape[2]), dtype, CPU)
        made.store(torch.arange(exact.shape[1]), exact)
        assert torch.equal(made.numbers, found.numbers)
        assert torch.equal(made.scales, found.scales)
    again = small.sequence(LENGTH)
    for count in (33, 70, 96, 1):
        chunked = small.step((again, count))[0]
    assert torch.equal(chunked, logits)


def test_logits_of_any_rows(dtype: torch.dtype, tmp_path: Path) -> None:
    served = Served(save_tiny_model("llama", tmp_path), dtype)
    sequence = served.sequence(30)
    expected = [served.step((sequence, 1))[0] for _ in range(30)]
    again = served.sequence(30)
    again.prompt_length, again.score_from = 30, 1
    logits = served.step((again, 30))
    assert len(logits) == 30  # the last row, and each that says what the next token of the prompt is worth
    assert torch.equal(logits[0], expected[-1])
    assert all(torch.equal(*pair) for pair in zip(logits[1:], expected, strict=False))


def test_a_step_without_a_sample_computes_keys_and_values_only(dtype: torch.dtype, tmp_path: Path) -> None:
    served = Served(save_tiny_model("llama", tmp_path), dtype)
    sequence, again = served.sequence(30), served.sequence(30)
    expected = served.step((sequence, 30))
    batch = served._packer.pack(StepPlan([Slice(again, 0, 29, False)]))
    assert served.decoder.logits(batch).shape == (0, served.vocabulary)
    again.computed = 29
    assert torch.equal(served.step((again, 1)), expected)


def test_block_tables_follow_lists_that_grow_and_are_replaced() -> None:
    import ctypes

    import numpy as np

    def read(address: int, count: int) -> list[int]:
        return np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(ctypes.c_int32)), (count,)).tolist()

    tables = BlockTables()
    blocks = [4, 2]
    for _ in range(3 * BLOCK_TOKENS):
        tables.begin_step()
        assert read(tables.address(blocks), len(blocks)) == blocks
        blocks.append(len(blocks))
    blocks[:] = [9, 8]  # shorter: not the same contents grown
    tables.begin_step()
    assert read(tables.address(blocks), 2) == [9, 8]
    tables.begin_step()
    tables.begin_step()
    assert not tables._tables, "what no step uses is forgotten"
