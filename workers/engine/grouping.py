"""Which one-token queries of a batch are attended together, and where their contexts lie."""

from dataclasses import dataclass, field

import numpy as np
import torch

from workers.engine.batch import Span
from workers.engine.blocks import BLOCK_TOKENS

GROUP_MIN = 3  # spans that are worth gathering
GROUP_WASTE_MAX = 1024  # padded positions in a group, all its spans together
GROUP_POSITIONS_MAX = 32_768  # positions in a group, padding included: bounds the scratch memory


@dataclass(slots=True)
class Group:
    """One-token spans that are attended together, padded to the longest."""

    first: int  # row in the batch
    count: int
    length: int
    slots: torch.Tensor  # [count * length] int64: of the contexts
    mask: torch.Tensor  # [count, 1, length] float32: 0, or -inf on padding
    rows: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)

    def rows_by_head(self, heads: int, slots: int) -> torch.Tensor:
        """[heads * count * length]: the contexts in a cache of `heads` times `slots` rows, head by head."""
        found = self.rows.get((heads, slots))
        if found is None:
            offsets = torch.arange(0, heads * slots, slots, device=self.slots.device).unsqueeze(1)
            found = self.rows[(heads, slots)] = (offsets + self.slots).view(-1)
        return found


@dataclass(slots=True)
class Grouping:
    groups: list[Group]
    alone: list[Span]


def grouped(singles: list[Span], window: int | None, device: torch.device) -> Grouping:
    """Group spans, given in the order of their length, so that little is padded; what stays in too small a group is alone."""
    result = Grouping([], [])
    end = len(singles)
    while end > 0:  # from the longest down
        length = seen(singles[end - 1], window)
        first = end - 1
        waste = 0
        while first > 0 and (end - first + 1) * length <= GROUP_POSITIONS_MAX:
            waste += length - seen(singles[first - 1], window)
            if waste > GROUP_WASTE_MAX:
                break
            first -= 1
        spans = singles[first:end]
        if len(spans) < GROUP_MIN:
            result.alone += spans
        else:
            result.groups.append(_group(spans, length, device))
        end = first
    return result


def seen(span: Span, window: int | None) -> int:
    """Positions that a one-token span attends to."""
    return span.length if window is None else min(span.length, window)


def _group(spans: list[Span], length: int, device: torch.device) -> Group:
    lengths = np.array([span.length for span in spans], dtype=np.int64)
    table = np.zeros((len(spans), -(-int(lengths.max()) // BLOCK_TOKENS)), dtype=np.int64)
    for row, span in enumerate(spans):
        table[row, : len(span.blocks)] = span.blocks[: table.shape[1]]
    positions = np.maximum(lengths - length, 0)[:, None] + np.arange(length)
    real = positions < lengths[:, None]
    positions = np.where(real, positions, 0)
    slots = np.take_along_axis(table, positions // BLOCK_TOKENS, axis=1) * BLOCK_TOKENS + positions % BLOCK_TOKENS
    mask = np.where(real, np.float32(0), np.float32(-np.inf))[:, None, :]
    return Group(
        first=spans[0].row,
        count=len(spans),
        length=length,
        slots=torch.from_numpy(slots.reshape(-1)).to(device),
        mask=torch.from_numpy(mask).to(device),
    )
