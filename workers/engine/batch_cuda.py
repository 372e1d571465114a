"""A step plan as tensors on a GPU: filled in pinned host memory, sent in one copy that the host does not wait for.

All tensors of a batch are views of one device buffer that never moves, so that a captured graph finds them there again. Block
tables stay on the device from step to step, and only new blocks are sent: no step costs more as histories grow.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from workers.engine.attention_plan import ITEM_FIELDS, MERGE_FIELDS, SPLITS_MAX, Tiling, Work, plan_work
from workers.engine.batch import logit_rows_of
from workers.engine.blocks import BLOCK_TOKENS
from workers.engine.scheduler import Slice, StepPlan


@dataclass(slots=True)
class CudaBatch:
    """All slices of a step behind one another, in the order of the plan; a bucket's batch is padded with idle rows."""

    ids: torch.Tensor  # [1, tokens] int64
    positions: torch.Tensor  # [1, tokens] int64
    slots: torch.Tensor  # [tokens] int64: where each token's key and value go
    logit_rows: torch.Tensor  # [n] int64: the rows whose logits are wanted, see batch.logit_rows_of
    small: torch.Tensor  # [items, ITEM_FIELDS] int32, see attention_plan.py
    large: torch.Tensor  # [items, ITEM_FIELDS] int32
    merges: torch.Tensor  # [merges, MERGE_FIELDS] int32
    partial_rows: int
    tables: torch.Tensor  # [slots of the scheduler, blocks] int32
    table_rows: npt.NDArray[np.int64]  # of each slice
    counts: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]  # of the contexts, own tokens included
    shared: dict[object, object] = field(default_factory=dict)  # what the layers of one forward compute once


class CudaCurrent:
    """The batch that is being computed: one object shared by all layers of a model."""

    batch: CudaBatch


class Staging:
    """A device buffer of `size` bytes and two host buffers that fill it in turn: one is written while the other is read."""

    def __init__(self, size: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self.device = torch.zeros(size, dtype=torch.uint8, device=device)
        self._host = [torch.zeros(size, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
        self._copied = [torch.cuda.Event() if pinned else None for _ in range(2)]
        self._turn = 0

    def host(self) -> npt.NDArray[np.uint8]:
        """The buffer to fill next, with anything in it; waits until its last copy has been made."""
        self._turn = 1 - self._turn
        copied = self._copied[self._turn]
        if copied is not None:
            copied.synchronize()
        return self._host[self._turn].numpy()

    def send(self, used: int) -> None:
        """Copy the first `used` bytes of that buffer, after all that is queued on the device and before what comes next."""
        self.device[:used].copy_(self._host[self._turn][:used], non_blocking=True)
        copied = self._copied[self._turn]
        if copied is not None:
            copied.record()


class BlockTables:
    """The blocks of every sequence in the batch, a row for each slot of the scheduler, on host and device."""

    def __init__(self, rows: int, blocks_max: int, device: torch.device) -> None:
        self.host = np.zeros((rows, blocks_max), dtype=np.int32)
        self.device = torch.zeros((rows, blocks_max), dtype=torch.int32, device=device)
        # The list that a row was filled from, held so that no other can have its identity; and how much of it.
        self._filled: list[tuple[list[int], int]] = [([], 0) for _ in range(rows)]

    def update(self, slices: list[Slice]) -> None:
        """Bring the rows of these sequences up to date."""
        rows, columns = [], []
        for part in slices:
            blocks, row = part.sequence.blocks, part.sequence.slot
            known, filled = self._filled[row]
            if known is blocks and filled == len(blocks):
                continue
            if known is not blocks or filled > len(blocks):
                filled = 0
            self.host[row, filled : len(blocks)] = blocks[filled:]
            columns.append(np.arange(filled, len(blocks)))
            rows.append(np.full(len(blocks) - filled, row))
            self._filled[row] = (blocks, len(blocks))
        if rows:
            row_index, column_index = np.concatenate(rows), np.concatenate(columns)
            at = torch.from_numpy(row_index * self.host.shape[1] + column_index).to(self.device.device)
            values = torch.from_numpy(self.host[row_index, column_index]).to(self.device.device)
            self.device.view(-1).index_copy_(0, at, values)


class CudaPacker:
    """Packs plans of up to `tokens_max` tokens. Sequences must have a slot below `slots` and at most `blocks_max` blocks."""

    def __init__(
        self, tokens_max: int, slots: int, blocks_max: int, idle_block: int, tiling: Tiling, device: torch.device
    ) -> None:
        """`idle_block` is a block of the cache that no sequence has: rows that only fill up a bucket write to it."""
        self._tokens_max = tokens_max
        self._slots = slots
        self._tiling = tiling
        self.idle_block = idle_block
        self.tables = BlockTables(slots, blocks_max, device)
        self._longs = 3 * tokens_max + tokens_max + slots  # ids, positions, slots, logit rows
        self._ints = MERGE_FIELDS * tokens_max  # merges; behind them the items
        size = 8 * self._longs + 4 * self._ints + 4 * ITEM_FIELDS * SPLITS_MAX * tokens_max
        self._staging = Staging(size, device)

    def pack(self, plan: StepPlan, bucket: int | None = None) -> CudaBatch:
        """`bucket`: pad a plan that has one token for each slice to that many rows, as in `bucket_batch`."""
        slices = plan.slices
        self.tables.update(slices)
        table_rows = [part.sequence.slot for part in slices]
        work = plan_work(slices, table_rows, self._tiling)
        counts = np.fromiter((part.count for part in slices), np.int64, len(slices))
        starts = np.fromiter((part.start for part in slices), np.int64, len(slices))
        rows = np.repeat(np.asarray(table_rows, dtype=np.int64), counts)
        ends = np.cumsum(counts)
        positions = np.arange(ends[-1]) - np.repeat(ends - counts - starts, counts)
        ids = [token for part in slices for token in part.sequence.tokens[part.start : part.start + part.count]]
        slots = self.tables.host[rows, positions // BLOCK_TOKENS].astype(np.int64) * BLOCK_TOKENS
        slots += positions % BLOCK_TOKENS
        logit_rows = logit_rows_of(slices, (ends - 1).tolist())
        self._fill(ids, positions, slots, logit_rows, work, bucket)
        if bucket is not None:
            return self.bucket_batch(bucket)
        small, large, merges = len(work.small), len(work.large), len(work.merges)
        return self._views(
            int(ends[-1]),
            len(logit_rows),
            (small, large, merges),
            work.partial_rows,
            (np.asarray(table_rows), counts, starts + counts),
        )

    def bucket_batch(self, bucket: int) -> CudaBatch:
        """The padded batch of `bucket` rows, one token each, over whatever was packed last: its shapes never change."""
        nothing = np.zeros(0, dtype=np.int64)
        pieces = bucket * SPLITS_MAX
        return self._views(bucket, bucket, (pieces, 0, bucket), pieces, (nothing, nothing, nothing))

    def idle_batch(self, tokens: int, logit_rows: int) -> CudaBatch:
        """A batch of that size which does the work of a model, and none of attention."""
        self.fill_idle(tokens)
        longest = self.tables.host.shape[1] * BLOCK_TOKENS
        counts = np.full(self._slots, min(max(1, tokens // self._slots), longest))
        return self._views(tokens, logit_rows, (0, 0, 0), 0, (np.zeros_like(counts), counts, counts))

    def fill_idle(self, bucket: int) -> None:
        """Pack nothing at all, padded to `bucket` rows."""
        items = np.zeros((0, ITEM_FIELDS), dtype=np.int32)
        work = Work(items, items, np.zeros((0, MERGE_FIELDS), dtype=np.int32), 0)
        nothing = np.zeros(0, dtype=np.int64)
        self._fill([], nothing, nothing, [], work, bucket)

    def _fill(
        self,
        ids: list[int],
        positions: npt.NDArray[np.int64],
        slots: npt.NDArray[np.int64],
        logit_rows: list[int],
        work: Work,
        bucket: int | None,
    ) -> None:
        tokens = len(ids)
        rows = bucket or tokens
        assert tokens <= rows <= self._tokens_max, f"{tokens} tokens in {rows} rows of {self._tokens_max}"
        memory = self._staging.host()
        longs = memory[: 8 * self._longs].view(np.int64)
        ints = memory[8 * self._longs :].view(np.int32)
        idle = self.idle_block * BLOCK_TOKENS
        sections = ((np.asarray(ids, dtype=np.int64), 0), (positions, 0), (slots, idle))
        for section, (values, idle_value) in enumerate(sections):
            begin = section * self._tokens_max
            longs[begin : begin + tokens] = values
            longs[begin + tokens : begin + rows] = idle_value
        begin = 3 * self._tokens_max
        longs[begin : begin + len(logit_rows)] = logit_rows
        longs[begin + len(logit_rows) : begin + max(rows, len(logit_rows))] = 0
        merges = ints[: self._ints].reshape(-1, MERGE_FIELDS)
        merges[: len(work.merges)] = work.merges
        merges[len(work.merges) : rows] = 0
        items = ints[self._ints :].reshape(-1, ITEM_FIELDS)
        small, large = len(work.small), len(work.large)
        items[:small] = work.small
        items[small : small + large] = work.large
        used = small + large
        if bucket is not None:
            assert large == 0, "a bucket has one token for each slice"
            used = bucket * SPLITS_MAX
            items[small:used] = 0
        self._staging.send(8 * self._longs + 4 * (self._ints + used * ITEM_FIELDS))

    def _views(
        self,
        tokens: int,
        logit_rows: int,
        pieces: tuple[int, int, int],
        partial_rows: int,
        arrays: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]],
    ) -> CudaBatch:
        memory = self._staging.device
        longs = memory[: 8 * self._longs].view(torch.int64)
        ints = memory[8 * self._longs :].view(torch.int32)
        ids, positions, slots = longs[: 3 * self._tokens_max].view(3, -1)[:, :tokens]
        small, large, merges = pieces
        items = ints[self._ints :].view(-1, ITEM_FIELDS)
        return CudaBatch(
            ids=ids.unsqueeze(0),
            positions=positions.unsqueeze(0),
            slots=slots,
            logit_rows=longs[3 * self._tokens_max :][:logit_rows],
            small=items[:small],
            large=items[small : small + large],
            merges=ints[: self._ints].view(-1, MERGE_FIELDS)[:merges],
            partial_rows=partial_rows,
            tables=self.tables.device,
            table_rows=arrays[0],
            counts=arrays[1],
            lengths=arrays[2],
        )
