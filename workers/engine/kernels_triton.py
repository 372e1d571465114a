"""The paged attention kernel in Triton, for decodes and chunks of prompts alike, and what it needs around it.

Each program of `attend` computes one piece of work (see attention_plan.py) for one key head, with all query heads that share
it as rows of one matrix. Online softmax after FlashAttention; splitting by keys, with a merge, after Flash-Decoding. Scores are
in units of log 2, for exp2 is what the hardware has.

Keys and values lie token by token, [slots, key heads, D]. A cache in 8 bits has a scale for each token and head.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def store(
    k,
    v,
    slots,
    keys,
    values,
    key_scales,
    value_scales,
    k_head_stride,
    k_row_stride,
    v_head_stride,
    v_row_stride,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    D_PADDED: tl.constexpr,
    DV_PADDED: tl.constexpr,
    LARGEST: tl.constexpr,  # of the cache's 8-bit type; 0: the cache has the type of k and v
    ROUNDED: tl.constexpr,  # that type is an integer
):
    """Program (row, head): one key and one value into their slot."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(slots + row) * HEADS + head
    d = tl.arange(0, D_PADDED)
    dv = tl.arange(0, DV_PADDED)
    key = tl.load(k + head * k_head_stride + row * k_row_stride + d, mask=d < D, other=0.0)
    value = tl.load(v + head * v_head_stride + row * v_row_stride + dv, mask=dv < DV, other=0.0)
    if LARGEST > 0:
        key = key.to(tl.float32)
        value = value.to(tl.float32)
        key_scale = tl.maximum(tl.max(tl.abs(key), 0) / LARGEST, 1e-12)
        value_scale = tl.maximum(tl.max(tl.abs(value), 0) / LARGEST, 1e-12)
        tl.store(key_scales + slot, key_scale)
        tl.store(value_scales + slot, value_scale)
        key = key / key_scale
        value = value / value_scale
        if ROUNDED:
            key = tl.floor(key + 0.5)
            value = tl.floor(value + 0.5)
    tl.store(keys + slot * D + d, key.to(keys.dtype.element_ty), mask=d < D)
    tl.store(values + slot * DV + dv, value.to(values.dtype.element_ty), mask=dv < DV)


@triton.jit
def attend(
    q,
    keys,
    values,
    key_scales,
    value_scales,
    sinks,
    out,
    partial,
    partial_peaks,
    items,
    tables,
    scaling,
    softcap,
    q_head_stride,
    q_row_stride,
    table_stride,
    HEADS: tl.constexpr,
    SHARING: tl.constexpr,  # query heads that share a key head
    D: tl.constexpr,
    DV: tl.constexpr,
    D_PADDED: tl.constexpr,
    DV_PADDED: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: none
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    QUANTISED: tl.constexpr,
    ITEM: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,  # of a tile: queries times SHARING, padded
    KEYS: tl.constexpr,  # in one turn of the loop
    PRECISION: tl.constexpr,
):
    fields = items + tl.program_id(0).to(tl.int64) * ITEM
    head = tl.program_id(1)
    queries = tl.load(fields + 2)
    if queries == 0:
        return
    table = tables + tl.load(fields).to(tl.int64) * table_stride
    first_row = tl.load(fields + 1)
    position = tl.load(fields + 3)
    begin = tl.load(fields + 4)
    end = tl.load(fields + 5)
    partial_row = tl.load(fields + 6)
    if WINDOW > 0:
        begin = tl.maximum(begin, position - WINDOW + 1)

    row = tl.arange(0, ROWS)
    token = row // SHARING
    query_head = head * SHARING + row % SHARING
    live = token < queries
    own = position + token
    packed_row = (first_row + token).to(tl.int64)
    d = tl.arange(0, D_PADDED)
    dv = tl.arange(0, DV_PADDED)
    query_at = q + query_head[:, None] * q_head_stride + packed_row[:, None] * q_row_stride + d[None, :]
    query = tl.load(query_at, mask=live[:, None] & (d < D)[None, :], other=0.0)

    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if SINKS:
        if partial_row < 0:
            peak = tl.load(sinks + query_head, mask=live, other=0.0).to(tl.float32) * LOG2E
            total += 1.0
    result = tl.zeros([ROWS, DV_PADDED], tl.float32)
    for first in range(begin, end, KEYS):
        at = first + tl.arange(0, KEYS)
        inside = at < end
        block = tl.load(table + at // BLOCK, mask=inside, other=0).to(tl.int64)
        slot = (block * BLOCK + at % BLOCK) * HEADS + head
        key = tl.load(keys + slot[None, :] * D + d[:, None], mask=inside[None, :] & (d < D)[:, None], other=0.0)
        scores = tl.dot(query, key.to(query.dtype), input_precision=PRECISION) * scaling
        if QUANTISED:
            scores *= tl.load(key_scales + slot, mask=inside, other=0.0)[None, :]
        if SOFTCAP:
            scores = softcap * (1.0 - 2.0 / (tl.exp(2.0 * scores / softcap) + 1.0))  # tanh, for any size
        seen = inside[None, :] & (at[None, :] <= own[:, None]) & live[:, None]
        if WINDOW > 0:
            seen = seen & (at[None, :] > own[:, None] - WINDOW)
        scores = tl.where(seen, scores * LOG2E, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        finite = tl.where(higher == float("-inf"), 0.0, higher)  # a row that has seen nothing yet
        weights = tl.exp2(scores - finite[:, None])
        decay = tl.exp2(peak - finite)
        total = total * decay + tl.sum(weights, 1)
        value = tl.load(values + slot[:, None] * DV + dv[None, :], mask=inside[:, None] & (dv < DV)[None, :], other=0.0)
        if QUANTISED:
            weights *= tl.load(value_scales + slot, mask=inside, other=0.0)[None, :]
        weights = weights.to(query.dtype)
        result = result * decay[:, None] + tl.dot(weights, value.to(query.dtype), input_precision=PRECISION)
        peak = higher

    sum_or_one = tl.where(total > 0.0, total, 1.0)
    result = result / sum_or_one[:, None]
    kept = live[:, None] & (dv < DV)[None, :]
    if partial_row < 0:
        at_out = out + (packed_row * (HEADS * SHARING) + query_head)[:, None] * DV + dv[None, :]
        tl.store(at_out, result.to(out.dtype.element_ty), mask=kept)
    else:
        at_partial = (partial_row + token).to(tl.int64) * (HEADS * SHARING) + query_head
        tl.store(partial + at_partial[:, None] * DV + dv[None, :], result, mask=kept)
        tl.store(
            partial_peaks + at_partial, tl.where(total > 0.0, peak + tl.log2(sum_or_one), float("-inf")), mask=live
        )


@triton.jit
def merge(
    partial,
    partial_peaks,
    sinks,
    out,
    merges,
    QUERY_HEADS: tl.constexpr,
    DV: tl.constexpr,
    DV_PADDED: tl.constexpr,
    SINKS: tl.constexpr,
    MERGE: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Program (query of a split tile, query head): its splits into one result."""
    fields = merges + tl.program_id(0).to(tl.int64) * MERGE
    head = tl.program_id(1)
    splits = tl.load(fields + 2)
    if splits == 0:
        return
    row = tl.load(fields).to(tl.int64)
    split = tl.arange(0, SPLITS)
    live = split < splits
    at = (tl.load(fields + 1) + split * tl.load(fields + 3)).to(tl.int64) * QUERY_HEADS + head
    peaks = tl.load(partial_peaks + at, mask=live, other=float("-inf"))
    peak = tl.max(peaks, 0)
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2E
        peak = tl.maximum(peak, sink)
    weights = tl.exp2(peaks - peak)
    total = tl.sum(weights, 0)
    if SINKS:
        total += tl.exp2(sink - peak)
    dv = tl.arange(0, DV_PADDED)
    parts = tl.load(partial + at[:, None] * DV + dv[None, :], mask=live[:, None] & (dv < DV)[None, :], other=0.0)
    result = tl.sum(parts * weights[:, None], 0) / total
    tl.store(out + (row * QUERY_HEADS + head) * DV + dv, result.to(out.dtype.element_ty), mask=dv < DV)
