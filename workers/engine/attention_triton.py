"""Attention by our Triton kernels: how they are launched, and the layer that launches them."""

from dataclasses import dataclass

import torch
import triton

from workers.engine import kernels_triton
from workers.engine.attention import Variant
from workers.engine.attention_cuda import Cache
from workers.engine.attention_plan import ITEM_FIELDS, MERGE_FIELDS, SPLITS_MAX, Tiling
from workers.engine.batch_cuda import CudaBatch, CudaCurrent
from workers.engine.blocks import BLOCK_TOKENS

SHARED_BYTES_MAX = 64 * 1024  # of tiles; with what the compiler adds, the 99 KB of the smaller devices are not exceeded
KEYS_MAX = 64
STAGES = 3  # block tables are loaded two turns ahead, keys and values one


class TritonLayer:
    """One layer's attention by these kernels."""

    def __init__(self, current: CudaCurrent, cache: Cache, tiling: Tiling) -> None:
        self._current = current
        self._cache = cache
        self._tiling = tiling

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, variant: Variant) -> torch.Tensor:
        batch = self._current.batch
        q, k, v = (each if each.stride(2) == 1 else each.contiguous() for each in (q, k, v))
        store(k, v, batch.slots, self._cache)
        out = _output(batch, (q.shape[1], q.shape[0], v.shape[2]), q)
        partials = _partials(batch, q.shape[0], v.shape[2])
        for items, queries in ((batch.small, self._tiling.small), (batch.large, self._tiling.large)):
            if len(items):
                attend(q, self._cache, out, partials, items, batch.tables, queries, variant)
        if len(batch.merges):
            merge(partials, out, batch.merges, variant)
        return out


@dataclass(slots=True, frozen=True)
class Launch:
    """How a program of the attention kernel is laid out."""

    rows: int
    keys: int
    warps: int
    stages: int


def launch_of(queries: int, sharing: int, key_dim: int, value_dim: int, itemsize: int) -> Launch:
    """For tiles of `queries` queries: as many keys in a turn as fit, beside the queries, into shared memory."""
    rows = padded(queries * sharing)
    query_bytes = rows * padded(key_dim) * itemsize
    key_bytes = (padded(key_dim) + padded(value_dim)) * itemsize
    keys = KEYS_MAX
    while keys > 16 and query_bytes + keys * key_bytes > SHARED_BYTES_MAX:
        keys //= 2
    return Launch(rows, keys, 8 if rows * padded(value_dim) >= 8192 else 4, STAGES)


def store(k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, cache: Cache) -> None:
    """Write k [key heads, tokens, D] and v [key heads, tokens, Dv] to `slots` of the cache."""
    heads, tokens, key_dim = k.shape
    value_dim = v.shape[2]
    quantised = cache.key_scales is not None
    kernels_triton.store[(tokens, heads)](
        k,
        v,
        slots,
        cache.keys,
        cache.values,
        cache.key_scales,
        cache.value_scales,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        HEADS=heads,
        D=key_dim,
        DV=value_dim,
        D_PADDED=triton.next_power_of_2(key_dim),
        DV_PADDED=triton.next_power_of_2(value_dim),
        LARGEST=largest(cache.keys.dtype) if quantised else 0.0,
        ROUNDED=not cache.keys.dtype.is_floating_point,
        num_warps=1,
    )


def attend(
    q: torch.Tensor,
    cache: Cache,
    out: torch.Tensor,
    partials: tuple[torch.Tensor, torch.Tensor],
    items: torch.Tensor,
    tables: torch.Tensor,
    queries: int,
    variant: Variant,
) -> None:
    """Compute `items`, of up to `queries` queries each: q [query heads, tokens, D] into `out` or `partials`."""
    query_heads, _, key_dim = q.shape
    heads, value_dim = cache.values.shape[1:]
    sharing = query_heads // heads
    launch = launch_of(queries, sharing, key_dim, value_dim, q.element_size())
    kernels_triton.attend[(len(items), heads)](
        q,
        cache.keys,
        cache.values,
        cache.key_scales,
        cache.value_scales,
        variant.sinks,
        out,
        *partials,
        items,
        tables,
        variant.scaling,
        variant.softcap or 0.0,
        q.stride(0),
        q.stride(1),
        tables.stride(0),
        HEADS=heads,
        SHARING=sharing,
        D=key_dim,
        DV=value_dim,
        D_PADDED=padded(key_dim),
        DV_PADDED=padded(value_dim),
        WINDOW=variant.window or 0,
        SOFTCAP=variant.softcap is not None,
        SINKS=variant.sinks is not None,
        QUANTISED=cache.key_scales is not None,
        ITEM=ITEM_FIELDS,
        BLOCK=BLOCK_TOKENS,
        ROWS=launch.rows,
        KEYS=launch.keys,
        PRECISION="ieee",
        num_warps=launch.warps,
        num_stages=launch.stages,
    )


def merge(
    partials: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor, merges: torch.Tensor, variant: Variant
) -> None:
    """Sum up the queries of split tiles into `out`."""
    _, query_heads, value_dim = out.shape
    kernels_triton.merge[(len(merges), query_heads)](
        *partials,
        variant.sinks,
        out,
        merges,
        QUERY_HEADS=query_heads,
        DV=value_dim,
        DV_PADDED=triton.next_power_of_2(value_dim),
        SINKS=variant.sinks is not None,
        MERGE=MERGE_FIELDS,
        SPLITS=SPLITS_MAX,
        num_warps=2,
    )


def padded(size: int) -> int:
    """The extent of a matrix that `tl.dot` takes for `size`: a power of two, at least 16."""
    return max(16, triton.next_power_of_2(size))


def largest(dtype: torch.dtype) -> float:
    """The largest number of an 8-bit type."""
    return torch.finfo(dtype).max if dtype.is_floating_point else float(torch.iinfo(dtype).max)


def _output(batch: CudaBatch, shape: tuple[int, int, int], q: torch.Tensor) -> torch.Tensor:
    """[tokens, query heads, Dv], used by one layer after another. Rows that nobody computes stay 0: garbage in them would
    become NaN on its way through a model.
    """
    key = ("output", shape)
    found = batch.shared.get(key)
    if found is None:
        found = batch.shared[key] = torch.zeros(shape, dtype=q.dtype, device=q.device)
    assert isinstance(found, torch.Tensor)
    return found


def _partials(batch: CudaBatch, query_heads: int, value_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for the results of split tiles, used by one layer after another."""
    key = ("partials", query_heads, value_dim)
    found = batch.shared.get(key)
    if found is None:
        shape = (batch.partial_rows, query_heads, value_dim)
        results = torch.empty(shape, dtype=torch.float32, device=batch.tables.device)
        found = batch.shared[key] = (results, results.new_empty(shape[:2]))
    assert isinstance(found, tuple)
    return found
