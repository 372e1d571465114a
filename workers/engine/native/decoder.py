"""A decoder in our own kernels: a packed batch in, logits out."""

from collections.abc import Sequence

import numpy as np
import torch

from workers.engine.attention_paged import Scratch
from workers.engine.batch import PackedBatch
from workers.engine.kv_int8 import Cache, Quantised
from workers.engine.native.bindings import Batch, Library
from workers.engine.native.llama import Parts
from workers.engine.native.weights import PANEL_COLUMNS

ROTARY_POSITIONS_MIN = 1024  # of the first table; it doubles up to the model's length
_EMPTY = np.empty(0, dtype=np.int32)
SPAN = np.dtype([("row", "i4"), ("count", "i4"), ("length", "i4"), ("blocks", "u8")], align=True)


class BlockTables:
    """The blocks of sequences as arrays of int32. A sequence's list grows in place, and so does its array: no step converts
    what an earlier one did."""

    def __init__(self) -> None:
        # By identity of the list, which is held so that no other can have it: its array, and how much of it is filled.
        self._tables: dict[int, tuple[list[int], np.ndarray, int]] = {}
        self._touched: dict[int, tuple[list[int], np.ndarray, int]] = {}

    def begin_step(self) -> None:
        """Forget what the last step did not use."""
        self._tables, self._touched = self._touched, {}

    def address(self, blocks: list[int]) -> int:
        """Of an array with these blocks; valid in this step."""
        _, table, filled = self._tables.get(id(blocks), (blocks, _EMPTY, 0))
        if filled > len(blocks):
            filled = 0
        if len(blocks) > len(table):
            table = np.resize(table, 2 * len(blocks)) if len(table) else np.empty(2 * len(blocks), dtype=np.int32)
        table[filled : len(blocks)] = blocks[filled:]
        self._touched[id(blocks)] = (blocks, table, len(blocks))
        return table.ctypes.data


class NativeDecoder:
    """Computes batches over a cache of keys and values that it shares with whoever else has it.

    What a token's logits are depends on the tokens before it and on nothing else: neither on the rest of the batch, nor
    on the chunks in which they were computed. All sums are taken in one order.
    """

    def __init__(self, library: Library, parts: Parts, dtype: torch.dtype, tokens_max: int, threads: int) -> None:
        self._library = library
        self._parts = parts
        self._half = dtype == torch.bfloat16
        self._tokens_max = tokens_max
        self._threads = threads
        self._scratch = Scratch(torch.device("cpu"))
        self._tables = BlockTables()
        self._rotary = torch.empty(2, 0, 0)
        self._caches: Sequence[tuple[Cache, Cache]] = []
        self._positions_max = 0
        self._handle = 0

    def attach(self, caches: Sequence[tuple[Cache, Cache]], positions_max: int) -> None:
        """Use these keys and values, [key heads, slots, D] for each layer, for positions below `positions_max`."""
        self._release()
        self._caches = caches  # they are only pointed to from here on
        self._positions_max = positions_max
        for layer, (keys, values) in zip(self._parts.layers, caches, strict=True):
            layer.keys, layer.key_scales = _addresses(keys)
            layer.values, layer.value_scales = _addresses(values)
        self._parts.model.slots = caches[0][0].shape[1]
        self._handle = self._library.decoder(self._parts.model, self._half, self._tokens_max, self._threads)

    def logits(self, batch: PackedBatch) -> torch.Tensor:
        """[n, vocabulary] float32, of the rows batch.logit_rows; valid until the next call."""
        self._tables.begin_step()
        spans = np.array(
            [
                (span.row, span.count, span.length, self._tables.address(span.blocks))
                for span in (*batch.singles, *batch.chunks)
            ],
            dtype=SPAN,
        )
        rotary = self._rotary_for(int(spans["length"].max()))
        samples, vocabulary = len(batch.logit_rows), self._parts.vocabulary
        stride = vocabulary + -vocabulary % PANEL_COLUMNS
        logits = self._scratch.get("logits", (samples, stride), torch.float32)
        given = Batch(
            tokens=batch.ids.shape[1],
            spans=len(spans),
            samples=samples,
            ids=batch.ids.data_ptr(),
            positions=batch.positions.data_ptr(),
            slots=batch.slots.data_ptr(),
            sampled=batch.logit_rows.data_ptr(),
            span=spans.ctypes.data,
            cosines=rotary[0].data_ptr(),
            sines=rotary[1].data_ptr(),
            logits=logits.data_ptr(),
            logits_stride=stride,
        )
        self._library.step(self._handle, given)
        return logits[:, :vocabulary]

    def _rotary_for(self, positions: int) -> torch.Tensor:
        if positions > self._rotary.shape[1]:
            assert positions <= self._positions_max, f"position {positions - 1} of {self._positions_max}"
            size = max(ROTARY_POSITIONS_MIN, 1 << (positions - 1).bit_length())
            self._rotary = self._parts.rotary(min(size, self._positions_max))
        return self._rotary

    def _release(self) -> None:
        if self._handle:
            self._library.free(self._handle)
            self._handle = 0

    def __del__(self) -> None:
        self._release()


def _addresses(cache: Cache) -> tuple[int, int | None]:
    """Of its elements and of its scales, if it has any."""
    if isinstance(cache, Quantised):
        return cache.numbers.data_ptr(), cache.scales.data_ptr()
    return cache.data_ptr(), None
