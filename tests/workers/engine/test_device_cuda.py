"""The GPU's side of an engine, run on the CPU: what it packs, plans and pads gives the model's own tokens."""

from pathlib import Path

import numpy as np
import pytest
import torch
from engine_driver import rebuilt, request, run_all
from host_device import use_host_device
from tiny_models import save_tiny_model
from torch._subclasses.fake_tensor import FakeTensorMode

from shared.records import EngineSettings
from shared.wire import Sampling
from workers.engine import attention
from workers.engine.attention import Variant
from workers.engine.attention_cuda import lengths_of, new_cache, usable_backends
from workers.engine.attention_plan import Tiling
from workers.engine.batch_cuda import CudaPacker
from workers.engine.decode_graphs import bucket_of, buckets_up_to
from workers.engine.device_cuda import block_bytes, kv_dtype_of
from workers.engine.engine import BatchEngine
from workers.engine.gate import LayerShape
from workers.engine.load import LoadRefused, load_engine
from workers.engine.request import EngineRequest
from workers.engine.runner_cuda import CudaRunner
from workers.engine.scheduler import Sequence, Slice, StepPlan

CPU = torch.device("cpu")
OUTPUT = 24
PROMPTS = [
    [(31 * position + 7 * index) % 250 for position in range(length)] for index, length in enumerate((37, 5, 18))
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("mistral", tmp_path_factory.mktemp("mistral"))


@pytest.fixture(scope="module")
def engine(directory: Path) -> BatchEngine:
    with pytest.MonkeyPatch.context() as patch:
        use_host_device(patch)
        return load_engine("s3", directory, EngineSettings(dtype="float32", slots=6, prefill_chunk=16), 1)


@pytest.fixture(scope="module")
def expected(directory: Path) -> list[list[int]]:
    plain = load_engine("s3", directory, EngineSettings(dtype="float32"), 1)
    ids = [outcome.ids[0] for outcome in run_all(plain, *requests())]
    assert min(len(set(each)) for each in ids) > OUTPUT / 3, "a model that repeats itself tells little"
    return ids


def requests() -> list[EngineRequest]:
    return [request(str(index), prompt, max_tokens=OUTPUT) for index, prompt in enumerate(PROMPTS)]


def test_a_loaded_engine_decodes_from_recorded_buckets(engine: BatchEngine, expected: list[list[int]]) -> None:
    runner = engine._runner
    assert isinstance(runner, CudaRunner)
    assert runner.graphs is not None
    assert runner.graphs.buckets == [1, 2, 4, 6]
    replayed = []
    replay = runner.graphs.replay
    runner.graphs.replay = lambda bucket, rows: (replayed.append((bucket, rows)), replay(bucket, rows))[1]  # type: ignore
    outcomes = run_all(rebuilt(engine, slots=6, prefill_chunk=16), *requests())
    assert [outcome.ids[0] for outcome in outcomes] == expected
    assert (4, 3) in replayed


@pytest.mark.parametrize(("chunk", "blocks"), [(1, 64), (7, 6)])
def test_chunks_preemption_and_recorded_decodes_change_nothing(
    engine: BatchEngine, expected: list[list[int]], chunk: int, blocks: int
) -> None:
    again = rebuilt(engine, slots=6, prefill_chunk=chunk, blocks=blocks)
    more = [request(f"again {index}", prompt, max_tokens=OUTPUT) for index, prompt in enumerate(PROMPTS)]
    outcomes = run_all(again, *requests(), *more)
    assert (again.stats().preemptions > 0) == (blocks == 6)
    assert [outcome.ids[0] for outcome in outcomes] == expected * 2


def sequence(slot: int, length: int, blocks: list[int]) -> Sequence:
    return Sequence(str(slot), "t", 0, Sampling(), list(range(length)), length, length + 9, blocks=blocks, slot=slot)


def test_tables_follow_sequences_that_grow_leave_and_come_back() -> None:
    packer = CudaPacker(64, 2, 4, 90, Tiling(4, 16), CPU)
    first, second = sequence(0, 17, [7, 3]), sequence(1, 5, [9])
    batch = packer.pack(StepPlan([Slice(first, 15, 2, True), Slice(second, 4, 1, True)]))
    assert batch.tables.tolist() == [[7, 3, 0, 0], [9, 0, 0, 0]]
    assert batch.slots.tolist() == [7 * 16 + 15, 3 * 16, 9 * 16 + 4]
    assert batch.ids.tolist() == [[15, 16, 4]]
    assert batch.positions.tolist() == [[15, 16, 4]]
    assert batch.logit_rows.tolist() == [1, 2]
    first.blocks += [1]
    first.tokens += range(17, 33)
    second.blocks = [5]  # preempted, and admitted to the same slot
    batch = packer.pack(StepPlan([Slice(first, 32, 1, True), Slice(second, 0, 5, False)]))
    assert batch.tables.tolist() == [[7, 3, 1, 0], [5, 0, 0, 0]]
    assert batch.slots.tolist() == [16, *range(5 * 16, 5 * 16 + 5)]
    assert batch.logit_rows.tolist() == [0]


def test_a_bucket_is_padded_with_rows_that_do_nothing() -> None:
    packer = CudaPacker(64, 8, 4, 90, Tiling(4, 16), CPU)
    packer.pack(StepPlan([Slice(sequence(3, 40, [4, 6, 8]), 0, 40, True)]))  # leaves its traces in the buffer
    batch = packer.pack(StepPlan([Slice(sequence(5, 3, [2]), 2, 1, True)]), bucket=4)
    assert batch.ids.tolist() == [[2, 0, 0, 0]]
    assert batch.slots.tolist() == [2 * 16 + 2, 90 * 16, 90 * 16, 90 * 16]
    assert batch.logit_rows.tolist() == [0, 0, 0, 0]
    assert batch.small[0].tolist() == [5, 0, 1, 2, 0, 3, -1, 0]
    assert (batch.small[1:] == 0).all()
    assert (batch.merges == 0).all()
    assert len(batch.large) == 0


def test_the_flat_index_gathers_each_context() -> None:
    packer = CudaPacker(64, 3, 4, 90, Tiling(4, 16), CPU)
    plan = StepPlan([Slice(sequence(2, 18, [7, 3]), 17, 1, True), Slice(sequence(0, 4, [9]), 1, 3, True)])
    lengths = lengths_of(packer.pack(plan))
    assert lengths.slots.tolist() == [*range(7 * 16, 8 * 16), 48, 49, *range(144, 148)]
    assert lengths.queries.tolist() == [0, 1, 4]
    assert lengths.keys.tolist() == [0, 18, 22]
    assert (lengths.queries_max, lengths.keys_max) == (3, 18)


def test_buckets_hold_decodes_only() -> None:
    buckets = buckets_up_to(6)
    decode = [Slice(sequence(slot, 3, [slot]), 2, 1, True) for slot in range(5)]
    assert bucket_of(StepPlan(decode[:1]), buckets) == 1
    assert bucket_of(StepPlan(decode), buckets) == 6
    assert bucket_of(StepPlan(decode * 2), buckets) is None
    assert bucket_of(StepPlan([*decode, Slice(sequence(5, 9, [5]), 0, 9, True)]), buckets) is None
    assert bucket_of(StepPlan([Slice(sequence(5, 9, [5]), 3, 1, False)]), buckets) is None
    scoring = sequence(5, 9, [5])
    scoring.score_from = 1
    assert bucket_of(StepPlan([Slice(scoring, 3, 1, True)]), buckets) is None
    assert buckets_up_to(1) == [1]
    assert buckets_up_to(400)[-4:] == [256, 320, 384, 400]


def shape(**changes: object) -> LayerShape:
    fields = {"heads": 2, "key_dim": 64, "value_dim": 64, "query_heads": 8, "special": False} | changes
    return LayerShape(torch.nn.Identity(), **fields)  # type: ignore[arg-type]


HALF = torch.bfloat16


def chosen(
    wanted: str = "auto", dtype: torch.dtype = HALF, kv: torch.dtype = HALF, capability=(9, 0), **changes
) -> str:
    return usable_backends(wanted, [shape(), shape(**changes)], dtype, kv, capability)


def test_the_attention_is_chosen_by_device_and_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert chosen() == ["triton", "varlen", "torch"]
    assert chosen(kv=torch.float8_e4m3fn) == ["triton"]
    assert chosen(dtype=torch.float32, kv=torch.float32) == ["triton", "torch"]
    assert chosen(capability=(7, 5)) == ["torch"]
    assert chosen("varlen") == ["varlen"]
    assert chosen(special=True) == ["triton", "torch"]
    assert chosen(value_dim=32) == ["triton", "torch"]
    assert chosen(key_dim=20, value_dim=20) == ["triton", "torch"]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert chosen() == ["varlen", "torch"]


@pytest.mark.parametrize(
    ("wanted", "changes", "reason"),
    [
        ("flash", {}, "attention is one of auto, triton, varlen, torch; not 'flash'"),
        ("triton", {"capability": (7, 5)}, "this one has 7.5"),
        ("triton", {"kv": torch.float8_e4m3fn, "capability": (8, 6)}, "kv_dtype=fp8 needs a device of compute"),
        ("varlen", {"kv": torch.int8}, "float16 or bfloat16, as the model is"),
        ("varlen", {"special": True}, "softcap and sinks"),
        ("auto", {"kv": torch.int8, "capability": (7, 5)}, "attention=torch: keys and values are of the model's type"),
    ],
)
def test_an_attention_that_cannot_be_had_is_refused(
    wanted: str, changes: dict[str, object], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    with pytest.raises(LoadRefused, match=reason):
        chosen(wanted, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "fp8"])
def test_a_block_takes_what_is_reckoned(kv_dtype: str) -> None:
    kind = kv_dtype_of(EngineSettings(kv_dtype=kv_dtype), HALF)
    cache = new_cache(shape(value_dim=32), 3, kind, CPU)
    tensors = [cache.keys, cache.values, cache.key_scales, cache.value_scales]
    taken = sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)
    assert block_bytes([shape(value_dim=32)], kind) * 3 == taken


def test_an_unknown_kv_dtype_is_refused() -> None:
    with pytest.raises(LoadRefused, match="kv_dtype is one of auto, int8, fp8; not 'fp4'"):
        kv_dtype_of(EngineSettings(kv_dtype="fp4"), HALF)


def test_an_idle_batch_of_the_largest_size_reads_within_the_tables() -> None:
    packer = CudaPacker(513, 1, 4, 90, Tiling(4, 16), CPU)  # a chunk longer than the longest sequence
    batch = packer.idle_batch(513, 1)
    assert batch.ids.shape == (1, 513)
    assert len(lengths_of(batch).slots) == 64
    assert np.unique(batch.slots.numpy()).tolist() == [90 * 16]


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_a_decode_reads_nothing_back_so_that_it_can_be_recorded(name: str, tmp_path: Path) -> None:
    """Fake tensors have no values: whatever reads one raises, as it would under capture on a GPU."""
    from transformers import AutoModelForCausalLM

    directory = save_tiny_model(name, tmp_path / name)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16, attn_implementation=attention.NAME)
    for module in model.modules():
        attention.attach(module, NoAttention())
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
        positions = torch.arange(4).unsqueeze(0)
        rows = torch.arange(4)
        out = model.eval()(input_ids=positions, position_ids=positions, use_cache=False, logits_to_keep=rows)
        assert out.logits.shape == (1, 4, 257)


class NoAttention:
    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, variant: Variant) -> torch.Tensor:
        return q.new_zeros((q.shape[1], q.shape[0], v.shape[2]))
