"""Paged attention against a plain softmax over each sequence, in every variant and layout."""

import itertools

import pytest
import torch

from shared.wire import Sampling
from workers.engine.attention import Current, Variant
from workers.engine.attention_paged import PagedLayer, Scratch
from workers.engine.batch import Packer, Span
from workers.engine.blocks import BLOCK_TOKENS, blocks_for
from workers.engine.grouping import GROUP_MIN, GROUP_POSITIONS_MAX, GROUP_WASTE_MAX, grouped
from workers.engine.kv_int8 import LEVELS, Int8Layer, Quantised
from workers.engine.scheduler import Sequence, Slice, StepPlan

HEADS, SHARING, KEY_DIM, VALUE_DIM = 2, 3, 8, 6  # values may be of another size than keys
BLOCKS = 64
CPU = torch.device("cpu")
VARIANTS = {
    "plain": Variant(0.3),
    "window": Variant(0.3, window=5),
    "wide window": Variant(0.3, window=1000),
    "softcap": Variant(0.3, softcap=2.0),
    "sinks": Variant(0.3, sinks=torch.linspace(-2, 2, HEADS * SHARING)),
    "all": Variant(0.3, window=20, softcap=2.0, sinks=torch.linspace(-2, 2, HEADS * SHARING)),
}


def naive(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, variant: Variant) -> torch.Tensor:
    """One sequence, whole: q [heads * sharing, n, D], k and v [heads, n, D]; [n, heads * sharing, Dv]"""
    n = q.shape[1]
    k, v = (each.repeat_interleave(SHARING, 0) for each in (k, v))
    scores = q @ k.transpose(1, 2) * variant.scaling
    if variant.softcap is not None:
        scores = torch.tanh(scores / variant.softcap) * variant.softcap
    distance = torch.arange(n)[:, None] - torch.arange(n)
    hidden = (distance < 0) | (distance >= (variant.window or n + 1))
    scores = scores.masked_fill(hidden, float("-inf"))
    if variant.sinks is not None:
        scores = torch.cat([scores, variant.sinks[:, None, None].expand(-1, n, 1)], -1)
    return (scores.softmax(-1)[..., :n] @ v).transpose(0, 1)


class World:
    """Sequences of given lengths in one layer's cache, advanced in steps."""

    def __init__(self, lengths: list[int], variant: Variant, scattered: bool, int8: bool = False) -> None:
        torch.manual_seed(4)
        self.variant = variant
        self.current = Current()
        shapes = [(HEADS, BLOCKS * BLOCK_TOKENS, dim) for dim in (KEY_DIM, VALUE_DIM)]
        if int8:
            caches = [Quantised(shape, torch.float32, CPU) for shape in shapes]
            self.layer: PagedLayer = Int8Layer(self.current, Scratch(CPU), *caches)
        else:
            self.layer = PagedLayer(self.current, Scratch(CPU), *(torch.zeros(shape) for shape in shapes))
        self.packer = Packer(1000, CPU)
        free = list(range(BLOCKS))
        if scattered:
            free = free[::-2] + free[::2]
        self.sequences = []
        for index, length in enumerate(lengths):
            blocks = [free.pop(0) for _ in range(blocks_for(length))]
            self.sequences.append(
                Sequence(str(index), "t", 0, Sampling(), [0] * length, length, length + 1, blocks=blocks)
            )
        sizes = [(HEADS * SHARING, KEY_DIM), (HEADS, KEY_DIM), (HEADS, VALUE_DIM)]
        self.tensors = [[torch.randn(heads, length, dim) for heads, dim in sizes] for length in lengths]
        self.seen = [[q, *(rounded(each) if int8 else each for each in (k, v))] for q, k, v in self.tensors]

    def step(self, counts: list[int]) -> None:
        """Compute that many tokens of each sequence and compare them with the naive result."""
        slices, parts = [], []
        for sequence, given, seen, count in zip(self.sequences, self.tensors, self.seen, counts, strict=True):
            if count:
                start, end = sequence.computed, sequence.computed + count
                slices.append(Slice(sequence, start, count, True))
                sequence.computed = end
                q, k, v = (each[:, :end] for each in seen)
                parts.append(([each[:, start:end] for each in given], naive(q, k, v, self.variant)[start:]))
        batch = self.packer.pack(StepPlan(slices))
        self.current.batch = batch
        rows = batch.logit_rows.tolist()
        count = batch.slots.numel()
        packed = [torch.zeros(each.shape[0], count, each.shape[2]) for each in parts[0][0]]
        for part, row, (given, _) in zip(slices, rows, parts, strict=True):
            for into, each in zip(packed, given, strict=True):
                into[:, row - part.count + 1 : row + 1] = each
        out = self.layer.attend(*packed, self.variant)
        for part, row, (_, expected) in zip(slices, rows, parts, strict=True):
            torch.testing.assert_close(out[row - part.count + 1 : row + 1], expected, rtol=1e-4, atol=1e-5)


def rounded(given: torch.Tensor) -> torch.Tensor:
    """[heads, n, D] as a cache of 8 bits gives it back."""
    cache = Quantised((given.shape[0], given.shape[1], given.shape[2]), given.dtype, CPU)
    cache.store(torch.arange(given.shape[1]), given)
    return cache.numbers.to(given.dtype) * cache.scales.unsqueeze(-1)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("name", list(VARIANTS))
def test_chunks_groups_and_single_tokens_equal_plain_attention(name: str, scattered: bool, int8: bool) -> None:
    world = World([40, 37, 20, 33, 3], VARIANTS[name], scattered, int8)
    world.step([30, 17, 0, 1, 2])  # first chunks, some of them the whole prompt
    world.step([7, 17, 16, 30, 0])  # later chunks, and across a block's edge
    world.step([1, 1, 1, 1, 1])  # a group
    world.step([1, 1, 0, 0, 0])  # too few for a group
    world.step([1, 1, 3, 1, 0])  # one-token and longer slices in one batch


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_number_in_eight_bits_is_off_by_half_a_level_at_most(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    given = torch.randn(3, 500, 64, dtype=dtype) * torch.logspace(-3, 2, 500).unsqueeze(-1).to(dtype)
    given[1, 7] = 0
    cache = Quantised((3, 500, 64), dtype, CPU)
    cache.store(torch.arange(500), given)
    level = cache.scales.float().unsqueeze(-1)
    assert (cache.numbers.float() * level - given.float()).abs().le(0.5001 * level).all()
    assert cache.numbers.abs().max() <= LEVELS
    biggest = cache.numbers[(given != 0).any(-1)].abs().amax(-1)
    assert biggest.min() >= LEVELS - 2  # nearly all levels are used
    assert (cache.numbers[1, 7] == 0).all()


def test_packing_puts_single_tokens_first_by_length_and_samples_in_the_order_of_the_plan() -> None:
    sequences = [
        Sequence(str(index), "t", 0, Sampling(), list(range(100, 150)), 50, 60, blocks=[9, 3, 5, 1])
        for index in range(3)
    ]
    plan = StepPlan(
        [Slice(sequences[0], 40, 3, True), Slice(sequences[1], 33, 1, True), Slice(sequences[2], 2, 1, True)]
    )
    batch = Packer(100, CPU).pack(plan)
    assert batch.ids.tolist() == [[102, 133, 140, 141, 142]]
    assert batch.positions.tolist() == [[2, 33, 40, 41, 42]]
    assert batch.slots.tolist() == [9 * 16 + 2, 5 * 16 + 1, 5 * 16 + 8, 5 * 16 + 9, 5 * 16 + 10]
    assert batch.logit_rows.tolist() == [4, 1, 0]
    assert [(span.row, span.length) for span in batch.singles] == [(0, 3), (1, 34)]
    assert [(span.row, span.start, span.count) for span in batch.chunks] == [(2, 40, 3)]


def spans(lengths: list[int]) -> list[Span]:
    return [Span(row, 1, length, list(range(blocks_for(length)))) for row, length in enumerate(sorted(lengths))]


@pytest.mark.parametrize(
    ("lengths", "sizes"),
    [
        ([100] * 5, [5]),
        ([100] * (GROUP_MIN - 1), []),
        ([100, 110, 120, 5000, 5000, 5000], [3, 3]),
        ([GROUP_POSITIONS_MAX // 4] * 10, [4, 4]),
        ([10, 20, 30, 40_000], [3]),
    ],
)
def test_spans_of_similar_length_form_groups(lengths: list[int], sizes: list[int]) -> None:
    grouping = grouped(spans(lengths), None, CPU)
    assert sorted(group.count for group in grouping.groups) == sorted(sizes)
    rows = [range(group.first, group.first + group.count) for group in grouping.groups]
    alone = [span.row for span in grouping.alone]
    assert sorted(itertools.chain(*rows, alone)) == list(range(len(lengths)))
    for group in grouping.groups:
        assert (group.mask == float("-inf")).sum() <= GROUP_WASTE_MAX
        assert group.count * group.length <= GROUP_POSITIONS_MAX


def test_a_window_bounds_what_is_gathered() -> None:
    (group,) = grouped(spans([50, 60, 3000]), 32, CPU).groups
    assert group.length == 32
    assert (group.mask == 0).all()
    assert group.slots.view(3, 32)[2].tolist() == list(range(2968, 3000))


def test_scratch_grows_and_is_reused() -> None:
    scratch = Scratch(CPU)
    first = scratch.get("a", (4, 4), torch.float32)
    assert scratch.get("a", (2, 2), torch.float32).data_ptr() == first.data_ptr()
    assert scratch.get("b", (2, 2), torch.float32).data_ptr() != first.data_ptr()
    assert scratch.get("a", (8, 8), torch.float32).shape == (8, 8)
