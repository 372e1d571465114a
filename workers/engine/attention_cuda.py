"""Attention layers for a GPU over a paged cache, and which of them a model and a device can use.

`triton`: our paged kernel, every variant, 8-bit caches. `varlen`: torch's own FlashAttention over gathered keys and values, no
compiler needed; 16-bit types and full or sliding attention only. `torch`: attention_paged.py, for any device.
"""

import importlib.util
import inspect
from dataclasses import dataclass

import numpy as np
import torch

from workers.engine.attention import Variant
from workers.engine.attention_plan import Tiling
from workers.engine.batch_cuda import CudaBatch, CudaCurrent
from workers.engine.blocks import BLOCK_TOKENS
from workers.engine.gate import LayerShape
from workers.engine.load import LoadRefused

BACKENDS = ("auto", "triton", "varlen", "torch")
FLASH_HEAD_DIM_MAX = 256
SMALL_ROWS = 16  # the least that a matrix product takes
LARGE_ROWS = 64
WIDE_BYTES = 512  # of one query
WIDE_ROWS = 32


@dataclass(slots=True, frozen=True)
class Cache:
    """Keys and values of one layer, [slots, key heads, D]; with 8-bit types a scale for each token and head."""

    keys: torch.Tensor
    values: torch.Tensor
    key_scales: torch.Tensor | None = None  # [slots, key heads] float32
    value_scales: torch.Tensor | None = None


def new_cache(shape: LayerShape, blocks: int, dtype: torch.dtype, device: torch.device) -> Cache:
    """A cache of zeros for `blocks` blocks of one layer; `dtype` is that of the model, or of 8 bits."""
    slots = blocks * BLOCK_TOKENS
    keys = torch.zeros((slots, shape.heads, shape.key_dim), dtype=dtype, device=device)
    values = torch.zeros((slots, shape.heads, shape.value_dim), dtype=dtype, device=device)
    if dtype.itemsize > 1:
        return Cache(keys, values)
    scales = [torch.zeros((slots, shape.heads), dtype=torch.float32, device=device) for _ in range(2)]
    return Cache(keys, values, *scales)


def usable_backends(
    wanted: str, shapes: list[LayerShape], dtype: torch.dtype, kv_dtype: torch.dtype, capability: tuple[int, int]
) -> list[str]:
    """Those of `triton`, `varlen` and `torch` that can be had, the best first; only the one that is wanted, unless that is
    `auto`. Raises LoadRefused, with the reasons, if there is none.
    """
    if wanted not in BACKENDS:
        raise LoadRefused(f"attention is one of {', '.join(BACKENDS)}; not {wanted!r}")
    names = BACKENDS[1:] if wanted == "auto" else (wanted,)
    reasons = {name: _why_not(name, shapes, dtype, kv_dtype, capability) for name in names}
    usable = [name for name, reason in reasons.items() if reason is None]
    if not usable:
        raise LoadRefused("; ".join(f"attention={name}: {reason}" for name, reason in reasons.items()))
    return usable


def tiling_of(shapes: list[LayerShape], dtype: torch.dtype) -> Tiling:
    """Queries in a tile, so that the query heads that share a key head fit into its rows in every layer."""
    sharing = max(shape.query_heads // shape.heads for shape in shapes)
    wide = max(shape.key_dim for shape in shapes) * dtype.itemsize > WIDE_BYTES
    return Tiling(max(1, SMALL_ROWS // sharing), max(1, (WIDE_ROWS if wide else LARGE_ROWS) // sharing))


class VarlenLayer:
    """One layer's attention by torch's FlashAttention, over keys and values that are gathered first."""

    def __init__(self, current: CudaCurrent, cache: Cache) -> None:
        self._current = current
        self._cache = cache

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, variant: Variant) -> torch.Tensor:
        from torch.nn.attention.varlen import varlen_attn

        if variant.softcap is not None or variant.sinks is not None:
            raise NotImplementedError("attention=varlen has no softcap and no sinks")
        batch, cache = self._current.batch, self._cache
        cache.keys.index_copy_(0, batch.slots, k.transpose(0, 1))
        cache.values.index_copy_(0, batch.slots, v.transpose(0, 1))
        lengths = _lengths(batch)
        left = -1 if variant.window is None else variant.window - 1
        out = varlen_attn(
            q.transpose(0, 1),
            cache.keys[lengths.slots],
            cache.values[lengths.slots],
            lengths.queries,
            lengths.keys,
            lengths.queries_max,
            lengths.keys_max,
            scale=variant.scaling,
            window_size=(left, 0),
            enable_gqa=q.shape[0] != k.shape[0],
        )
        assert isinstance(out, torch.Tensor)
        return out


@dataclass(slots=True, frozen=True)
class Lengths:
    """A batch as FlashAttention takes it. Queries stand at the end of their contexts."""

    queries: torch.Tensor  # [sequences + 1] int32: where each one's queries begin
    keys: torch.Tensor  # [sequences + 1] int32
    queries_max: int
    keys_max: int
    slots: torch.Tensor  # [all keys] int64: the contexts, one behind another


def lengths_of(batch: CudaBatch) -> Lengths:
    """The whole gather as one flat index, made on the device."""
    device = batch.tables.device
    key_ends = np.cumsum(batch.lengths)
    offsets = torch.from_numpy(np.stack([np.cumsum(batch.counts), key_ends])).to(device, torch.int32)
    offsets = torch.nn.functional.pad(offsets, (1, 0))
    total = int(key_ends[-1])
    of = torch.repeat_interleave(torch.from_numpy(batch.lengths).to(device), output_size=total)
    positions = torch.arange(total, device=device) - offsets[1][of]
    rows = torch.from_numpy(batch.table_rows).to(device)[of]
    blocks = batch.tables[rows, positions // BLOCK_TOKENS].long()
    slots = blocks * BLOCK_TOKENS + positions % BLOCK_TOKENS
    return Lengths(offsets[0], offsets[1], int(batch.counts.max()), int(batch.lengths.max()), slots)


def varlen_available() -> bool:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    return {"scale", "window_size", "enable_gqa"} <= inspect.signature(varlen_attn).parameters.keys()


def _why_not(
    name: str, shapes: list[LayerShape], dtype: torch.dtype, kv_dtype: torch.dtype, capability: tuple[int, int]
) -> str | None:
    if name == "torch":
        return None if kv_dtype == dtype else "keys and values are of the model's type"
    if capability < (8, 0):
        return f"needs a device of compute capability 8.0, this one has {capability[0]}.{capability[1]}"
    if name == "triton":
        if importlib.util.find_spec("triton") is None:
            return "triton is not installed"
        if kv_dtype == torch.float8_e4m3fn and capability < (8, 9):
            return "kv_dtype=fp8 needs a device of compute capability 8.9; int8 needs no more than 8.0"
        return None
    if not varlen_available():
        return "this torch has no varlen_attn with windows and grouped heads"
    if kv_dtype != dtype or dtype.itemsize != 2:
        return "keys and values are float16 or bfloat16, as the model is"
    if any(shape.key_dim != shape.value_dim for shape in shapes):
        return "keys and values have the same size"
    if any(shape.key_dim > FLASH_HEAD_DIM_MAX or shape.key_dim % 8 for shape in shapes):
        return f"heads have a size that is a multiple of 8, at most {FLASH_HEAD_DIM_MAX}"
    if any(shape.special for shape in shapes):
        return "softcap and sinks are not to be had"
    return None


def _lengths(batch: CudaBatch) -> Lengths:
    found = batch.shared.get("lengths")
    if found is None:
        found = batch.shared["lengths"] = lengths_of(batch)
    assert isinstance(found, Lengths)
    return found
