"""Weights in 8 bits: the kernels' arithmetic, bit for bit, what it makes of a model, and what is refused."""

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_driver import request, run_all
from native_world import DTYPES, GROUP, LENGTH, MODELS, Served, in_groups, needs_vnni
from tiny_models import save_tiny_model

from shared.records import EngineSettings
from workers.engine import gate
from workers.engine.load import LoadRefused, load_engine
from workers.engine.model import _device_sides
from workers.engine.native import build, weights
from workers.engine.native.bindings import Library
from workers.engine.native.runner import NativeRunner
from workers.engine.native.weights import PANEL_COLUMNS, ZERO, Packing, quantised

compiled = pytest.mark.skipif(not build.can_build(), reason="no C++ compiler")
INT8 = EngineSettings(dtype="float32", weights="int8")


@pytest.fixture(scope="module")
def product(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """product_int8.cpp as a function."""
    here, made = Path(__file__).parent, tmp_path_factory.mktemp("product") / "product.so"
    headers = Path(build.__file__).parent
    command = ["g++", *build.FLAGS, f"-I{headers}", str(here / "product_int8.cpp"), "-o", str(made)]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(made)).product_int8


def multiply(product: Any, x: torch.Tensor, weight: torch.Tensor, threads: int = 2) -> torch.Tensor:
    """x [rows, inputs] times weight [outputs, inputs], by the kernels."""
    (rows, inputs), outputs = x.shape, len(weight)
    packing = Packing(Library(build.build()), torch.uint8, 1, [(outputs, inputs)])
    linear = torch.nn.Linear(inputs, outputs, bias=False)
    linear.weight = torch.nn.Parameter(weight)
    matrix = packing.joined(linear)
    padded = torch.nn.functional.pad(x, (0, -inputs % weights.PADDED)).contiguous()
    out = torch.empty(rows, outputs + -outputs % PANEL_COLUMNS)
    pointers = [ctypes.c_void_p(each) for each in (padded.data_ptr(), matrix.panels, matrix.scales, out.data_ptr())]
    product(pointers[0], rows, padded.shape[1], pointers[1], pointers[2], outputs, inputs, pointers[3], threads)
    return out[:, :outputs]


def expected(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The same in doubles, rounded where the kernels round."""
    numbers, scales = in_groups(x)
    packed, columns = quantised(weight)
    whole = torch.nn.functional.pad(packed.double() - ZERO, (0, -weight.shape[1] % GROUP)).unflatten(-1, (-1, GROUP))
    sums = torch.zeros(len(x), len(weight))
    for group in range(numbers.shape[1]):
        exact = numbers[:, group].double() @ whole[:, group].T
        sums = (exact * scales[:, group].double() + sums.double()).float()
    return sums * columns


@compiled
@needs_vnni
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (47, 33), (97, 64), (48, 31), (145, 300)])
def test_a_product_is_exact_for_any_sizes(product: Any, outputs: int, inputs: int) -> None:
    torch.manual_seed(7)
    weight = torch.randn(outputs, inputs) * torch.rand(outputs, 1)
    x = torch.randn(129, inputs) * torch.rand(129, 1) * 9
    x[3] = 0
    x[5, inputs // 2] = 1e4  # as large as some activations are
    x[6] *= 1e-42
    wanted = expected(x, weight)
    assert torch.equal(wanted[3], torch.zeros(outputs))
    for rows in (*range(1, 10), 128, 129):
        found = multiply(product, x[-rows:], weight, threads=1 + rows % 2)
        assert torch.equal(found, wanted[-rows:]), rows
    assert torch.equal(multiply(product, x[:10], weight), wanted[:10])


@compiled
@needs_vnni
def test_what_is_no_number_stays_in_its_row(product: Any) -> None:
    torch.manual_seed(7)
    weight, x = torch.randn(50, 100), torch.randn(6, 100)
    wanted = expected(x, weight)
    for row, bad in ((1, float("nan")), (2, float("inf")), (4, float("-inf"))):
        x[row, 20 * row] = bad
    found = multiply(product, x, weight)
    assert not found[[1, 2, 4]].isfinite().any()
    assert torch.equal(found[[0, 3, 5]], wanted[[0, 3, 5]])


@compiled
@needs_vnni
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", list(MODELS))
def test_the_logits_are_those_of_the_same_arithmetic_in_torch(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    family, changes = MODELS[name]
    served = Served(save_tiny_model(family, tmp_path, **changes), dtype, int8_weights=True)
    sequence = served.sequence(LENGTH)
    wanted = served.own(sequence)
    for count in (100, 99, 1):
        logits = served.step((sequence, count))[0]
        row = wanted[sequence.computed - 1]
        error = ((logits - row).norm() / (row - row.mean()).norm()).item()
        assert error < (0.02 if dtype == torch.float32 else gate.ERROR_MAX[dtype])


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return save_tiny_model("llama", tmp_path / "model")


@compiled
@needs_vnni
@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_a_model_is_served(tiny: Path, kv_dtype: str) -> None:
    engine: Any = load_engine("s3", tiny, EngineSettings(dtype="float32", weights="int8", kv_dtype=kv_dtype), 1)
    assert isinstance(engine._runner, NativeRunner)
    alone, beside = request("a", [1, 2, 3]), request("b", [1, 2, 3])
    (first,) = run_all(engine, alone)
    engine = load_engine("s3", tiny, EngineSettings(dtype="float32", weights="int8", kv_dtype=kv_dtype), 1)
    second, _ = run_all(engine, beside, request("c", [9] * 40, max_tokens=5))
    assert first.ids == second.ids
    assert len(first.ids[0]) == 12


def refused(directory: Path, settings: EngineSettings = INT8) -> str:
    with pytest.raises(LoadRefused) as refusal:
        load_engine("s3", directory, settings, 1)
    return str(refusal.value)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"weights": "int4"}, "weights is one of auto, int8; not 'int4'"),
        ({"engine": "vllm"}, "not for engine=vllm"),
        ({"kernels": "torch"}, "CPU kernels only: kernels=torch"),
        ({"dtype": "float16"}, "CPU kernels only: they do not compute in float16"),
    ],
)
def test_settings_that_it_cannot_go_with_are_refused(tiny: Path, settings: dict[str, str], reason: str) -> None:
    given: Any = {"dtype": "float32", "weights": "int8"} | settings
    assert reason in refused(tiny, EngineSettings(**given))


def test_models_that_the_kernels_do_not_have_are_refused(tmp_path: Path) -> None:
    assert "they do not compute this Gemma2ForCausalLM" in refused(save_tiny_model("gemma2", tmp_path))


def test_other_devices_are_refused() -> None:
    with pytest.raises(LoadRefused, match="CPU kernels only: the device is a cuda"):
        _device_sides(torch.device("cuda"), None, [], INT8, torch.float32)


def test_a_cpu_without_the_instructions_is_refused(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "cpu_flags", lambda: build.CPU_NEEDED)
    assert "in float32 they need avx512_vnni, which this CPU does not have" in refused(tiny)
    assert "need avx512_bf16, avx512_vnni" in refused(tiny, EngineSettings(dtype="bfloat16", weights="int8"))


@needs_vnni
def test_it_is_refused_if_the_kernels_cannot_be_compiled(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = shutil.which("false")
    assert failing is not None
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", failing)
    assert "CPU kernels only" in refused(tiny)
    assert "false failed" in refused(tiny)


@compiled
@needs_vnni
def test_nothing_is_served_before_the_kernels_are_compiled(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, compiler = build.build(), tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\ncp {made} "$(eval echo \\${{$#}})"\n')
    compiler.chmod(0o700)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", str(compiler))
    assert build.find() is None
    engine: Any = load_engine("s3", tiny, INT8, 1)
    assert isinstance(engine._runner, NativeRunner)
    assert build.find() is not None


@compiled
@needs_vnni
@pytest.mark.parametrize("spoil", [lambda scales: scales.flip(0), lambda scales: scales * 1.5, torch.zeros_like])
def test_wrong_scales_are_refused(tiny: Path, spoil: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    right = weights.quantised

    def spoilt(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        numbers, scales = right(weight)
        return numbers, spoil(scales)

    monkeypatch.setattr(weights, "quantised", spoilt)
    reason = refused(tiny)
    assert "with weights=int8 differs" in reason


@compiled
@pytest.mark.parametrize("architecture", ["skylake-avx512", "icelake-server"])  # without bf16; without VNNI too
def test_the_kernels_compile_for_lesser_cpus(architecture: str) -> None:
    flags = [flag for flag in build.FLAGS if not flag.startswith("-march")]
    source = Path(build.__file__).with_name("decoder.cpp")
    subprocess.run(["g++", *flags, f"-march={architecture}", "-fsyntax-only", str(source)], check=True)
