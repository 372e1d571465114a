"""What each program of the paged attention kernel does: pieces of work as rows of integers. numpy only.

A tile is up to a few queries of one sequence that are attended together. A tile with a long context is split by keys into
pieces whose results are merged afterwards. Where a tile is split depends on its own sequence only, so the order in
which its sum is formed does not depend on what else is in the batch.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from workers.engine.scheduler import Slice

Ints = npt.NDArray[np.int64]

ITEM_FIELDS = 8  # table row, first packed row, queries, position of the first query, first key, end key, partial row, 0
MERGE_FIELDS = 4  # packed row, first partial row, splits, partial rows from one split to the next
SPLIT_KEYS_MIN = 512
SPLITS_MAX = 16
SPLIT_UNIT = 64  # keys; a split ends at a multiple of it
SPLIT_QUERIES_MAX = 16  # a longer slice has tiles enough to fill a device
DIRECT = -1  # as partial row: the tile is not split, its result is final


@dataclass(slots=True, frozen=True)
class Tiling:
    """Queries in one tile: of slices with few queries, and of the others."""

    small: int
    large: int


@dataclass(slots=True, frozen=True)
class Work:
    """The pieces of one step. Rows of 0 do nothing."""

    small: npt.NDArray[np.int32]  # [n, ITEM_FIELDS]
    large: npt.NDArray[np.int32]  # [n, ITEM_FIELDS]
    merges: npt.NDArray[np.int32]  # [queries of split tiles, MERGE_FIELDS]
    partial_rows: int


def plan_work(slices: list[Slice], table_rows: list[int], tiling: Tiling) -> Work:
    """The work of `slices`, packed in this order; the block table of slice i is row `table_rows[i]` of the tables."""
    count = len(slices)
    counts = np.fromiter((part.count for part in slices), np.int64, count)
    starts = np.fromiter((part.start for part in slices), np.int64, count)
    tables = np.asarray(table_rows, dtype=np.int64)
    rows = np.cumsum(counts) - counts
    small = counts <= tiling.small
    few_items, few_merges, partial_rows = _pieces(
        *_tiles(tables[small], rows[small], counts[small], starts[small], tiling.small), 0
    )
    many_items, many_merges, partial_rows = _pieces(
        *_tiles(tables[~small], rows[~small], counts[~small], starts[~small], tiling.large), partial_rows
    )
    return Work(few_items, many_items, np.concatenate([few_merges, many_merges]), partial_rows)


def split_keys(lengths: Ints) -> Ints:
    """Keys in each split of contexts of `lengths` keys: at most SPLITS_MAX splits, none of them small."""
    size = np.maximum(SPLIT_KEYS_MIN, _ceil(lengths, SPLITS_MAX))
    return _ceil(size, SPLIT_UNIT) * SPLIT_UNIT


def _tiles(tables: Ints, rows: Ints, counts: Ints, starts: Ints, size: int) -> tuple[Ints, Ints]:
    """([n, 4]: table row, packed row, queries, position; [n]: keys in one split), slices cut into tiles of `size`."""
    per_slice = _ceil(counts, size)
    offsets = _ranges(per_slice) * size
    of = np.repeat(np.arange(len(counts)), per_slice)
    queries = np.minimum(counts[of] - offsets, size)
    tiles = np.stack([tables[of], rows[of] + offsets, queries, starts[of] + offsets], axis=1)
    lengths = starts + counts
    splits = np.where(counts <= SPLIT_QUERIES_MAX, split_keys(lengths), lengths)
    return tiles, splits[of]


def _pieces(tiles: Ints, split: Ints, partial_rows: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], int]:
    queries, ends = tiles[:, 2], tiles[:, 2] + tiles[:, 3]
    splits = _ceil(ends, split)
    partials = np.where(splits > 1, splits * queries, 0)
    bases = partial_rows + np.cumsum(partials) - partials
    of = np.repeat(np.arange(len(tiles)), splits)
    index = _ranges(splits)
    first = index * split[of]
    partial = np.where(splits[of] > 1, bases[of] + index * queries[of], DIRECT)
    end = np.minimum(first + split[of], ends[of])
    items = np.concatenate([tiles[of], np.stack([first, end, partial, np.zeros_like(of)], axis=1)], axis=1)
    merged = np.repeat(np.arange(len(tiles)), np.where(splits > 1, queries, 0))
    query = _ranges(np.where(splits > 1, queries, 0))
    merges = np.stack([tiles[merged, 1] + query, bases[merged] + query, splits[merged], queries[merged]], axis=1)
    return items.astype(np.int32), merges.astype(np.int32), partial_rows + int(partials.sum())


def _ceil(values: Ints, by: Ints | int) -> Ints:
    return np.asarray(-(-values // by))


def _ranges(counts: Ints) -> Ints:
    """0 .. n-1 for each n of `counts`, behind one another."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
