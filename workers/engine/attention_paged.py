"""Paged attention in plain torch: for the CPU, and correct on CUDA.

Keys and values lie head by head, [key heads, slots, D]: a contiguous run of blocks is then read in place, and gathering
the contexts of a whole batch gives contiguous matrices. Measured on SmolLM2-135M in bf16 (CPU, 2 threads, 32 sequences of
100 to 260 tokens), per layer: one fused SDPA call per sequence 1.57 ms, gathered and batched as below 0.57 ms. For one or
two sequences the fused call wins.
"""

from collections.abc import Sequence
from math import prod
from typing import cast

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from workers.engine.attention import Current, Variant
from workers.engine.batch import PackedBatch, Span
from workers.engine.blocks import BLOCK_TOKENS
from workers.engine.grouping import Group, Grouping, grouped


class Scratch:
    """Buffers that are made once and grow to the largest size asked for: allocating costs more than filling them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def get(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor with anything in it, valid until the next call with that name."""
        count = prod(shape)
        buffer = self._buffers.get((name, dtype))
        if buffer is None or buffer.numel() < count:
            buffer = self._buffers[(name, dtype)] = torch.empty(count, dtype=dtype, device=self._device)
        return buffer[:count].view(*shape)


class PagedLayer:
    """Keys and values of one layer, and attention over them."""

    def __init__(self, current: Current, scratch: Scratch, keys: torch.Tensor, values: torch.Tensor) -> None:
        """`keys` [key heads, slots, D] and `values` [key heads, slots, Dv]: finite, for a NaN would survive a mask."""
        self._current = current
        self._scratch = scratch
        self._keys = keys
        self._values = values

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, variant: Variant) -> torch.Tensor:
        batch = self._current.batch
        self._store(batch.slots, k, v)
        out = self._scratch.get("out", (q.shape[1], q.shape[0], v.shape[2]), q.dtype)
        grouping = _grouping(batch, variant.window)
        for group in grouping.groups:
            self._attend_group(q, out, group, variant)
        for span in grouping.alone:
            self._attend_single(q, out, span, variant)
        for span in batch.chunks:
            self._attend_chunk(q, out, span, variant)
        return out

    def _attend_group(self, q: torch.Tensor, out: torch.Tensor, group: Group, variant: Variant) -> None:
        heads, slots, key_dim = self._keys.shape
        value_dim = self._values.shape[2]
        sharing = q.shape[0] // heads  # query heads that share a key head
        matrices = heads * group.count
        rows = slice(group.first, group.first + group.count)
        keys, values = self._gathered(group.rows_by_head(heads, slots), q.dtype)
        queries = q[:, rows].unflatten(0, (heads, sharing)).transpose(1, 2).reshape(matrices, sharing, key_dim)
        scores = torch.bmm(queries, keys.view(matrices, group.length, key_dim).transpose(1, 2))
        weights = _weights(
            scores.view(heads, group.count, sharing, group.length), group.mask, variant, (heads, 1, sharing, 1)
        )
        weights = weights.view(matrices, sharing, group.length)
        attended = torch.bmm(weights, values.view(matrices, group.length, value_dim))
        attended = attended.view(heads, group.count, sharing, value_dim).transpose(0, 1)
        out[rows].view(group.count, heads, sharing, value_dim).copy_(attended)

    def _attend_single(self, q: torch.Tensor, out: torch.Tensor, span: Span, variant: Variant) -> None:
        heads = self._keys.shape[0]
        sharing = q.shape[0] // heads
        keys, values = self._context(span, _first_seen(span, variant.window), q.dtype)
        keys, values = keys.unsqueeze(0), values.unsqueeze(0)
        queries = q[:, span.row].view(1, heads, sharing, -1)  # rows of one matrix: all see the same keys
        if variant.softcap is None and variant.sinks is None:
            attended = scaled_dot_product_attention(queries, keys, values, scale=variant.scaling)
        else:
            scores = torch.matmul(queries, keys.transpose(2, 3))
            attended = torch.matmul(_weights(scores, None, variant, (1, heads, sharing, 1)), values)
        out[span.row].view(heads, sharing, -1).copy_(attended[0])

    def _attend_chunk(self, q: torch.Tensor, out: torch.Tensor, span: Span, variant: Variant) -> None:
        heads = self._keys.shape[0]
        sharing = q.shape[0] // heads
        first = _first_seen(span, variant.window)
        keys, values = self._context(span, first, q.dtype)
        # Key heads become the batch, and the query heads that share one its heads: nothing is repeated in memory.
        keys = keys.unsqueeze(1).expand(-1, sharing, -1, -1)
        values = values.unsqueeze(1).expand(-1, sharing, -1, -1)
        rows = slice(span.row, span.row + span.count)
        queries = q[:, rows].unflatten(0, (heads, sharing))
        causal = span.start == 0 and (variant.window is None or variant.window >= span.length)
        if variant.softcap is not None or variant.sinks is not None:
            scores = torch.matmul(queries, keys.transpose(2, 3))
            mask = _causal_mask(self._current.batch, span, first, variant.window, torch.float32)
            attended = torch.matmul(_weights(scores, mask, variant, (heads, sharing, 1, 1)), values)
        elif causal:
            attended = scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=variant.scaling)
        else:
            mask = _causal_mask(self._current.batch, span, first, variant.window, q.dtype)
            attended = scaled_dot_product_attention(queries, keys, values, mask, scale=variant.scaling)
        out[rows].view(span.count, heads, sharing, -1).copy_(attended.permute(2, 0, 1, 3))

    def _store(self, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Keep a step's keys and values, [key heads, tokens, D], in `slots` [tokens]."""
        self._keys.index_copy_(1, slots, k)
        self._values.index_copy_(1, slots, v)

    def _gathered(self, index: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows `index` of the caches, all heads behind one another: keys [n, D] and values [n, Dv]."""
        gathered = []
        for name, cache in (("keys", self._keys), ("values", self._values)):
            width = cache.shape[2]
            into = self._scratch.get(name, (index.numel(), width), dtype)
            gathered.append(torch.index_select(cache.view(-1, width), 0, index, out=into))
        return gathered[0], gathered[1]

    def _context(self, span: Span, first: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of positions `first` and on, [key heads, n, D]: in place where they are contiguous."""
        slots = context_slots(self._current.batch, span, first)
        if isinstance(slots, slice):
            return self._keys[:, slots], self._values[:, slots]
        gathered = []
        for name, cache in (("keys", self._keys), ("values", self._values)):
            into = self._scratch.get(name, (cache.shape[0], len(slots), cache.shape[2]), cache.dtype)
            gathered.append(torch.index_select(cache, 1, slots, out=into))
        return gathered[0], gathered[1]


def _weights(
    scores: torch.Tensor, mask: torch.Tensor | None, variant: Variant, sinks_shape: tuple[int, ...]
) -> torch.Tensor:
    """Softmax over the last axis, computed in float32 and returned in the dtype of `scores`."""
    dtype = scores.dtype
    if variant.softcap is not None:
        scores = (scores.float() * (variant.scaling / variant.softcap)).tanh_().mul_(variant.softcap)
        scores = scores if mask is None else scores.add_(mask)
    elif mask is not None:
        scores = torch.add(mask, scores, alpha=variant.scaling)
    else:
        scores = scores.float() * variant.scaling
    if variant.sinks is None:
        return torch.softmax(scores, -1).to(dtype)
    sinks = variant.sinks.float().view(sinks_shape).expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat([scores, sinks], -1), -1)[..., :-1].to(dtype)


def _first_seen(span: Span, window: int | None) -> int:
    """The oldest position that a query of `span` attends to."""
    return 0 if window is None else max(0, span.start - window + 1)


# What the layers of one forward have in common is computed by the first of them and kept with the batch.


def _grouping(batch: PackedBatch, window: int | None) -> Grouping:
    key = ("grouping", window)
    if key not in batch.shared:
        batch.shared[key] = grouped(batch.singles, window, batch.slots.device)
    return cast(Grouping, batch.shared[key])


def _causal_mask(batch: PackedBatch, span: Span, first: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
    """[count, n]: 0 where a query sees the position, -inf elsewhere; positions count from `first`."""
    key = ("mask", span.row, window, dtype)
    if key not in batch.shared:
        device = batch.slots.device
        queries = torch.arange(span.start, span.length, device=device).unsqueeze(1)
        keys = torch.arange(first, span.length, device=device)
        hidden = keys > queries
        if window is not None:
            hidden |= keys <= queries - window
        batch.shared[key] = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))
    return cast(torch.Tensor, batch.shared[key])


def context_slots(batch: PackedBatch, span: Span, first: int) -> slice | torch.Tensor:
    key = ("context", span.row, first)
    if key not in batch.shared:
        positions = np.arange(first, span.length)
        blocks = np.asarray(span.blocks, dtype=np.int64)
        slots = blocks[positions // BLOCK_TOKENS] * BLOCK_TOKENS + positions % BLOCK_TOKENS
        run = np.array_equal(slots, np.arange(slots[0], slots[0] + len(slots)))
        batch.shared[key] = (
            slice(int(slots[0]), int(slots[-1]) + 1) if run else torch.from_numpy(slots).to(batch.slots.device)
        )
    return cast(slice | torch.Tensor, batch.shared[key])
