"""The paged kernel's plan: every query meets every key once, whatever the tiles and splits, in every variant."""

import itertools

import numpy as np
import pytest
import torch
from paged_world import Shape, World
from plan_layer import PlanLayer

from shared.wire import Sampling
from workers.engine.attention import Variant
from workers.engine.attention_plan import SPLIT_KEYS_MIN, SPLIT_UNIT, SPLITS_MAX, Tiling, plan_work, split_keys
from workers.engine.scheduler import Sequence, Slice

CPU = torch.device("cpu")
SHAPE = Shape(heads=2, sharing=3, key_dim=8, value_dim=6)
SINKS = torch.linspace(-2, 2, 6)
VARIANTS = {
    "plain": Variant(0.3),
    "window": Variant(0.3, window=5),
    "softcap": Variant(0.3, softcap=2.0),
    "sinks": Variant(0.3, sinks=SINKS),
    "all": Variant(0.3, window=520, softcap=2.0, sinks=SINKS),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_the_planned_pieces_add_up_to_plain_attention(name: str) -> None:
    world = World(PlanLayer, SHAPE, [40, 37, 20, 33, 3, 640], VARIANTS[name], CPU)
    for counts in (
        [30, 17, 0, 1, 2, 600],  # first chunks
        [7, 17, 16, 30, 0, 20],  # later ones, in large tiles, unsplit
        [1, 1, 1, 1, 1, 1],  # decodes, one of them split
        [1, 1, 3, 1, 0, 15],  # a short slice, split
    ):
        got, expected = world.step(counts)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    assert world.touched() == world.owned()


def test_a_bucket_computes_the_same_and_writes_nowhere_else() -> None:
    world = World(PlanLayer, SHAPE, [20, 700, 9], VARIANTS["sinks"], CPU)
    world.step([19, 699, 8])
    got, expected = world.step([1, 1, 1], bucket=8)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    idle_slot = world.packer.idle_block * 16
    assert world.touched() - {idle_slot} == world.owned()


def slices(*parts: tuple[int, int]) -> list[Slice]:
    """(start, count) each"""
    return [
        Slice(Sequence(str(index), "t", 0, Sampling(), [0], 1, 2, slot=index), start, count, True)
        for index, (start, count) in enumerate(parts)
    ]


def covered(start: int, count: int, alone: bool = True) -> list[tuple[int, ...]]:
    """The pieces of a slice, as table row and packed row would not tell them apart."""
    others = slices((5, 1), (100, 300)) if not alone else []
    parts = [*others, *slices((start, count))]
    work = plan_work(parts, list(range(len(parts))), Tiling(5, 21))
    items = np.concatenate([work.small, work.large])
    first_row = sum(part.count for part in others)
    mine = items[items[:, 0] == len(others)]
    return sorted((row - first_row, *rest) for _, row, *rest, _, _ in mine.tolist())


@pytest.mark.parametrize(("start", "count"), [(0, 1), (3, 5), (0, 6), (4000, 1), (9000, 16), (9000, 17), (0, 400)])
def test_every_query_meets_every_key_before_it_once(start: int, count: int) -> None:
    met = np.zeros((count, start + count), dtype=int)
    for row, queries, position, begin, end in covered(start, count):
        assert position == start + row
        met[row : row + queries, begin:end] += 1
    for query in range(count):
        assert (met[query, : start + query + 1] == 1).all()


@pytest.mark.parametrize(("start", "count"), [(0, 1), (4000, 1), (9000, 16), (0, 400)])
def test_how_a_sequence_is_cut_does_not_depend_on_its_neighbours(start: int, count: int) -> None:
    assert covered(start, count) == covered(start, count, alone=False)


def test_partial_rows_are_used_once_and_merged_once() -> None:
    parts = slices((4000, 1), (10, 1), (9000, 16), (0, 300), (700, 1))
    work = plan_work(parts, list(range(len(parts))), Tiling(5, 21))
    items = np.concatenate([work.small, work.large]).tolist()
    pieces = [(partial, queries) for *_, queries, _, _, _, partial, _ in items if partial >= 0]
    written = list(itertools.chain.from_iterable(range(partial, partial + queries) for partial, queries in pieces))
    read = [first + split * stride for _, first, splits, stride in work.merges.tolist() for split in range(splits)]
    assert sorted(written) == sorted(read) == list(range(work.partial_rows))
    assert len(work.merges) == 1 + 16 + 1


def test_splits_are_bounded() -> None:
    lengths = np.arange(1, 200_000, 37)
    keys = split_keys(lengths)
    assert (keys % SPLIT_UNIT == 0).all()
    assert (keys >= SPLIT_KEYS_MIN).all()
    assert (-(-lengths // keys) <= SPLITS_MAX).all()
