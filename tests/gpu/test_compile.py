"""The attention kernel compiles for GPUs that are not here, keeps within their shared memory and uses their matrix units."""

import inspect
from typing import Any

import pytest
import torch
from conftest import INTERPRETED

pytest.importorskip("triton", reason="triton is not installed")
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from workers.engine import kernels_triton
from workers.engine.attention_cuda import tiling_of
from workers.engine.attention_plan import ITEM_FIELDS
from workers.engine.attention_triton import launch_of, padded
from workers.engine.gate import LayerShape

pytestmark = pytest.mark.skipif(INTERPRETED, reason="TRITON_INTERPRET=1 compiles nothing")

NAMES = {
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.int8: "i8",
    torch.float8_e4m3fn: "fp8e4nv",
}
SHARED_BYTES = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024}
HALF, FP8 = torch.bfloat16, torch.float8_e4m3fn
CASES = [
    (capability, dtype, kv_dtype, dims, sharing)
    for capability in SHARED_BYTES
    for dtype, kv_dtype, dims, sharing in (
        (HALF, HALF, (128, 128), 4),
        (HALF, HALF, (192, 128), 1),
        (HALF, HALF, (512, 512), 2),
        (HALF, torch.int8, (64, 64), 3),
        (HALF, FP8, (128, 128), 8),
        (torch.float32, torch.float32, (256, 256), 4),
    )
    if not (kv_dtype is FP8 and capability < 89)
]


def compiled(
    capability: int, dtype: torch.dtype, kv_dtype: torch.dtype, dims: tuple[int, int], sharing: int, queries: int
) -> Any:
    launch = launch_of(queries, sharing, *dims, dtype.itemsize)
    quantised = kv_dtype.itemsize == 1
    model, cache = NAMES[dtype], NAMES[kv_dtype]
    pointers = {
        "q": model,
        "keys": cache,
        "values": cache,
        "key_scales": "fp32",
        "value_scales": "fp32",
        "sinks": model,
    }
    pointers |= {"out": model, "partial": "fp32", "partial_peaks": "fp32", "items": "i32", "tables": "i32"}
    numbers = {
        "scaling": "fp32",
        "softcap": "fp32",
        "q_head_stride": "i32",
        "q_row_stride": "i32",
        "table_stride": "i32",
    }
    constants: dict[str, Any] = {
        "HEADS": 8,
        "SHARING": sharing,
        "D": dims[0],
        "DV": dims[1],
        "D_PADDED": padded(dims[0]),
        "DV_PADDED": padded(dims[1]),
        "WINDOW": 1024,
        "SOFTCAP": True,
        "SINKS": True,
        "QUANTISED": quantised,
        "ITEM": ITEM_FIELDS,
        "BLOCK": 16,
        "ROWS": launch.rows,
        "KEYS": launch.keys,
        "PRECISION": "ieee",
    }
    if not quantised:
        constants |= {"key_scales": None, "value_scales": None}
    kernel = kernels_triton.attend
    names = list(inspect.signature(kernel.fn).parameters)
    signature = {
        name: "constexpr" if name in constants else f"*{pointers[name]}" if name in pointers else numbers[name]
        for name in names
    }
    aligned = [name for name in names if name not in constants and (name in pointers or "stride" in name)]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(
        kernel, signature, {(names.index(name),): value for name, value in constants.items()}, attributes
    )
    options = {"num_warps": launch.warps, "num_stages": launch.stages}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(("capability", "dtype", "kv_dtype", "dims", "sharing"), CASES)
def test_it_compiles(
    capability: int, dtype: torch.dtype, kv_dtype: torch.dtype, dims: tuple[int, int], sharing: int
) -> None:
    shape = LayerShape(torch.nn.Identity(), 8, *dims, 8 * sharing, True)
    tiling = tiling_of([shape], dtype)
    for queries in (tiling.small, tiling.large):
        kernel = compiled(capability, dtype, kv_dtype, dims, sharing, queries)
        assert kernel.metadata.shared <= SHARED_BYTES[capability]
        code = kernel.asm["ptx"]
        if dtype is HALF:
            assert "mma" in code
        assert "cp.async" in code, "keys and values are loaded ahead"
