"""A step plan as the tensors of one packed forward. Buffers are made once and reused by every step."""

from dataclasses import dataclass, field

import numpy as np
import torch

from workers.engine.blocks import BLOCK_TOKENS
from workers.engine.scheduler import Slice, StepPlan


@dataclass(slots=True)
class Span:
    """The rows of one slice in the packed batch, and where its context lies."""

    row: int  # of its first token
    count: int  # tokens computed in this step: the queries
    length: int  # tokens of context, its own included: the keys
    blocks: list[int]

    @property
    def start(self) -> int:
        """Position of its first token."""
        return self.length - self.count


@dataclass(slots=True)
class PackedBatch:
    """All sequences of a step behind one another, in one row of `tokens` tokens.

    One-token spans come first, in the order of their length: attention batches those of similar length, and each
    group is then a run of rows.
    """

    ids: torch.Tensor  # [1, tokens] int64
    positions: torch.Tensor  # [1, tokens] int64, from 0 in each sequence
    slots: torch.Tensor  # [tokens] int64: where each token's key and value go, block * BLOCK_TOKENS + offset
    logit_rows: torch.Tensor  # [n] int64: the rows whose logits are wanted, see logit_rows_of
    singles: list[Span]  # one query each
    chunks: list[Span]  # several queries each
    shared: dict[object, object] = field(default_factory=dict)  # what the layers of one forward compute once


class Packer:
    """Packs plans of up to `tokens_max` tokens and `rows_max` slices for `device`."""

    def __init__(self, tokens_max: int, device: torch.device) -> None:
        self._device = device
        self._buffer = torch.zeros((3, tokens_max), dtype=torch.int64)
        self._host = self._buffer.numpy()

    def pack(self, plan: StepPlan) -> PackedBatch:
        singles = sorted((part for part in plan.slices if part.count == 1), key=lambda part: part.start)
        chunks = [part for part in plan.slices if part.count > 1]
        ids, positions, slots = self._host
        last_rows: dict[int, int] = {}
        spans = []
        row = 0
        for part in singles:
            sequence, start = part.sequence, part.start
            ids[row] = sequence.tokens[start]
            positions[row] = start
            slots[row] = sequence.blocks[start // BLOCK_TOKENS] * BLOCK_TOKENS + start % BLOCK_TOKENS
            spans.append(Span(row, 1, start + 1, sequence.blocks))
            last_rows[id(part)] = row
            row += 1
        for part in chunks:
            spans.append(self._pack_chunk(part, row))
            row += part.count
            last_rows[id(part)] = row - 1
        wanted = logit_rows_of(plan.slices, [last_rows[id(part)] for part in plan.slices])
        logit_rows = torch.tensor(wanted, dtype=torch.int64)
        used = self._buffer[:, :row]
        if self._device.type != "cpu":  # blocking: the next step overwrites the buffer
            used, logit_rows = used.to(self._device), logit_rows.to(self._device)
        return PackedBatch(used[0:1], used[1:2], used[2], logit_rows, spans[: len(singles)], spans[len(singles) :])

    def _pack_chunk(self, part: Slice, row: int) -> Span:
        ids, positions, slots = self._host
        sequence, start, end = part.sequence, part.start, part.start + part.count
        rows = slice(row, row + part.count)
        ids[rows] = [*sequence.tokens[start:], *part.draft] if part.draft else sequence.tokens[start:end]
        positions[rows] = np.arange(start, end)
        blocks = np.asarray(sequence.blocks, dtype=np.int64)
        slots[rows] = blocks[positions[rows] // BLOCK_TOKENS] * BLOCK_TOKENS + positions[rows] % BLOCK_TOKENS
        return Span(row, part.count, end, sequence.blocks)


def logit_rows_of(slices: list[Slice], last_rows: list[int]) -> list[int]:
    """The rows whose logits are wanted, given the last row of each slice.

    First those that sample, in the order of the plan, each with those of its draft behind it; then those that score the
    prompt's tokens, slice by slice.
    """
    rows: list[int] = []
    for part, last in zip(slices, last_rows, strict=True):
        if part.samples:
            rows += range(last - len(part.draft), last + 1)
    for part, last in zip(slices, last_rows, strict=True):
        if scored := part.scored:
            before = last - part.count - part.start  # position p is in row before + 1 + p, and scores p + 1
            rows += range(before + scored.start, before + scored.stop)
    return rows
