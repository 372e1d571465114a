"""Sequences of given lengths in one layer's cache, advanced in steps and compared with a plain softmax."""

from dataclasses import dataclass

import torch

from shared.wire import Sampling
from workers.engine.attention import Layer, Variant
from workers.engine.attention_cuda import Cache, new_cache, tiling_of
from workers.engine.batch_cuda import CudaCurrent, CudaPacker
from workers.engine.blocks import BLOCK_TOKENS, blocks_for
from workers.engine.gate import LayerShape
from workers.engine.scheduler import Sequence, Slice, StepPlan


@dataclass(frozen=True)
class Shape:
    heads: int = 2
    sharing: int = 3
    key_dim: int = 16
    value_dim: int = 16

    def layer(self) -> LayerShape:
        return LayerShape(
            torch.nn.Identity(), self.heads, self.key_dim, self.value_dim, self.heads * self.sharing, False
        )


def naive(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, variant: Variant) -> torch.Tensor:
    """One sequence, whole: q [query heads, n, D], k and v [heads, n, D]; [n, query heads, Dv] float32"""
    n = q.shape[1]
    q, k, v = (each.float() for each in (q, k, v))
    k, v = (each.repeat_interleave(q.shape[0] // k.shape[0], 0) for each in (k, v))
    scores = q @ k.transpose(1, 2) * variant.scaling
    if variant.softcap is not None:
        scores = torch.tanh(scores / variant.softcap) * variant.softcap
    at = torch.arange(n, device=q.device)
    distance = at[:, None] - at
    hidden = (distance < 0) | (distance >= (variant.window or n + 1))
    scores = scores.masked_fill(hidden, float("-inf"))
    if variant.sinks is not None:
        scores = torch.cat([scores, variant.sinks.float()[:, None, None].expand(-1, n, 1)], -1)
    return (scores.softmax(-1)[..., :n] @ v).transpose(0, 1)


class World:
    """`make` builds the layer under test from the current batch, a cache and the tiling."""

    def __init__(
        self,
        make: type[Layer],
        shape: Shape,
        lengths: list[int],
        variant: Variant,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        generator = torch.Generator().manual_seed(4)
        sizes = [
            (shape.heads * shape.sharing, shape.key_dim),
            (shape.heads, shape.key_dim),
            (shape.heads, shape.value_dim),
        ]
        self.tensors = [
            [torch.randn(heads, length, dim, generator=generator).to(device, dtype) for heads, dim in sizes]
            for length in lengths
        ]
        self.variant = variant
        self.current = CudaCurrent()
        blocks = sum(blocks_for(length) for length in lengths)
        self.cache: Cache = new_cache(shape.layer(), blocks + 1, kv_dtype or dtype, device)
        tiling = tiling_of([shape.layer()], dtype)
        self.layer = make(self.current, self.cache, tiling)  # type: ignore[call-arg]
        columns = max(blocks_for(length) for length in lengths)
        self.packer = CudaPacker(2 * sum(lengths), len(lengths), columns, blocks, tiling, device)
        free = torch.randperm(blocks, generator=generator).tolist()
        self.sequences = [
            Sequence(
                str(slot),
                "t",
                0,
                Sampling(),
                [0] * length,
                length,
                length + 1,
                blocks=[free.pop() for _ in range(blocks_for(length))],
                slot=slot,
            )
            for slot, length in enumerate(lengths)
        ]

    def step(self, counts: list[int], bucket: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute that many tokens of each sequence: ([tokens, query heads, Dv] as computed, and as a plain softmax)."""
        slices, inputs, expected = [], [], []
        for sequence, (q, k, v), count in zip(self.sequences, self.tensors, counts, strict=True):
            if count:
                start, end = sequence.computed, sequence.computed + count
                slices.append(Slice(sequence, start, count, True))
                sequence.computed = end
                inputs.append([each[:, start:end] for each in (q, k, v)])
                expected.append(naive(q[:, :end], k[:, :end], v[:, :end], self.variant)[start:])
        self.current.batch = self.packer.pack(StepPlan(slices), bucket)
        rows = self.current.batch.slots.numel()
        packed = [torch.cat(each, 1) for each in zip(*inputs, strict=True)]
        used = packed[0].shape[1]
        packed = [torch.nn.functional.pad(each, (0, 0, 0, rows - used)) for each in packed]
        out = self.layer.attend(packed[0], packed[1], packed[2], self.variant)
        return out[:used].float(), torch.cat(expected)

    def touched(self) -> set[int]:
        """The slots of the cache that hold anything."""
        return set(self.cache.keys.float().abs().amax((1, 2)).nonzero().view(-1).tolist())

    def owned(self) -> set[int]:
        return {
            sequence.blocks[position // BLOCK_TOKENS] * BLOCK_TOKENS + position % BLOCK_TOKENS
            for sequence in self.sequences
            for position in range(sequence.computed)
        }
