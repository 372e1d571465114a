"""What the paged kernel computes, piece of work by piece of work, in plain torch: its plan is so tested without Triton."""

import torch

from workers.engine.attention import Variant
from workers.engine.attention_cuda import Cache
from workers.engine.attention_plan import Tiling
from workers.engine.batch_cuda import CudaCurrent
from workers.engine.blocks import BLOCK_TOKENS


class PlanLayer:
    def __init__(self, current: CudaCurrent, cache: Cache, tiling: Tiling) -> None:
        self._current = current
        self._cache = cache
        self._tiling = tiling

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, variant: Variant) -> torch.Tensor:
        batch, cache = self._current.batch, self._cache
        cache.keys[batch.slots] = k.transpose(0, 1)
        cache.values[batch.slots] = v.transpose(0, 1)
        out = q.new_full((q.shape[1], q.shape[0], v.shape[2]), float("nan"))
        partials = torch.full((batch.partial_rows, q.shape[0], v.shape[2]), float("nan"))
        peaks = torch.full((batch.partial_rows, q.shape[0]), float("nan"))
        for items, queries_max in ((batch.small, self._tiling.small), (batch.large, self._tiling.large)):
            for table, row, queries, position, begin, end, partial, _ in items.tolist():
                if queries == 0:
                    continue
                assert queries <= queries_max
                sinks = variant.sinks if partial < 0 else None
                at = torch.arange(begin, end)
                slots = batch.tables[table][at // BLOCK_TOKENS].long() * BLOCK_TOKENS + at % BLOCK_TOKENS
                keys, values = cache.keys[slots].transpose(0, 1), cache.values[slots].transpose(0, 1)
                own = position + torch.arange(queries)
                result, peak = piece(q[:, row : row + queries], keys, values, at, own, variant, sinks)
                if partial < 0:
                    out[row : row + queries] = result
                else:
                    partials[partial : partial + queries] = result
                    peaks[partial : partial + queries] = peak
        for row, first, splits, stride in batch.merges.tolist():
            if splits:
                of = first + stride * torch.arange(splits)
                scores = peaks[of]
                if variant.sinks is not None:
                    scores = torch.cat([scores, variant.sinks[None]])
                weights = scores.softmax(0)[:splits]
                out[row] = (weights.unsqueeze(2) * partials[of]).sum(0)
        return out.nan_to_num(0.0) if len(batch.lengths) == 0 else out  # idle rows of a bucket are computed by nobody


def piece(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    at: torch.Tensor,
    own: torch.Tensor,
    variant: Variant,
    sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """([queries, heads, Dv], log of the sum of exponentials [queries, heads]); 0 and -inf for a query that sees nothing."""
    sharing = q.shape[0] // keys.shape[0]
    scores = q @ keys.repeat_interleave(sharing, 0).transpose(1, 2) * variant.scaling
    if variant.softcap is not None:
        scores = torch.tanh(scores / variant.softcap) * variant.softcap
    hidden = at > own[:, None]
    if variant.window is not None:
        hidden |= at <= own[:, None] - variant.window
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, scores.shape[1], 1)], -1)
    weights = scores.softmax(-1).nan_to_num(0.0)[..., : len(at)]
    return (weights @ values.repeat_interleave(sharing, 0)).transpose(0, 1), scores.logsumexp(-1).T
