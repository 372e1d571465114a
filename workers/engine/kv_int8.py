"""Keys and values in 8 bits: whole numbers from -127 to 127 and one scale for each token and head.

Half the memory of bf16. A scale is a number of the model's own type, and a token is rounded with that very number: storing
it adds no error. What is attended to is unpacked into scratch memory first, so a step gets slower, not faster; see
docs/engine.md for how much, and for what it costs in accuracy.
"""

import torch

from workers.engine.attention import Current
from workers.engine.attention_paged import PagedLayer, Scratch, context_slots
from workers.engine.batch import Span
from workers.engine.memory import zeros

LEVELS = 127
KV_DTYPES = ("auto", "int8")  # that this side of the engine has
# A scale in bf16 may be rounded down by 2^-9 of itself: enlarged by more than that, the largest number still fits.
HEADROOM = 1 + 2**-8


class Quantised:
    """One cache of [key heads, slots, D], read and written as numbers of the model's type."""

    def __init__(self, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> None:
        self.numbers = zeros(shape, torch.int8, device)
        self.scales = zeros(shape[:2], dtype, device)

    @property
    def shape(self) -> torch.Size:
        return self.numbers.shape

    def store(self, slots: torch.Tensor, given: torch.Tensor) -> None:
        """`given` [key heads, tokens, D] into `slots` [tokens]."""
        exact = given.float()
        scales = (exact.abs().amax(-1) * (HEADROOM / LEVELS)).to(self.scales.dtype)
        divisors = scales.float().clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(-1)
        numbers = (exact / divisors).round_().clamp_(-LEVELS, LEVELS)
        self.numbers.index_copy_(1, slots, numbers.to(torch.int8))
        self.scales.index_copy_(1, slots, scales)


Cache = torch.Tensor | Quantised


class Int8Layer(PagedLayer):
    """A paged layer whose keys and values are quantised."""

    def __init__(self, current: Current, scratch: Scratch, keys: Quantised, values: Quantised) -> None:
        super().__init__(current, scratch, keys.numbers, values.numbers)
        self._caches = (("keys", keys), ("values", values))

    def _store(self, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        for (_, cache), given in zip(self._caches, (k, v), strict=True):
            cache.store(slots, given)

    def _gathered(self, index: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = (
            self._unpacked(
                name,
                self._select(name, cache.numbers.view(-1, cache.numbers.shape[2]), 0, index),
                self._select(f"{name} scales", cache.scales.view(-1), 0, index),
            )
            for name, cache in self._caches
        )
        return keys, values

    def _context(self, span: Span, first: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        slots = context_slots(self._current.batch, span, first)
        found = []
        for name, cache in self._caches:
            if isinstance(slots, slice):
                numbers, scales = cache.numbers[:, slots], cache.scales[:, slots]
            else:
                numbers = self._select(name, cache.numbers, 1, slots)
                scales = self._select(f"{name} scales", cache.scales, 1, slots)
            found.append(self._unpacked(name, numbers, scales))
        return found[0], found[1]

    def _select(self, name: str, cache: torch.Tensor, axis: int, index: torch.Tensor) -> torch.Tensor:
        shape = list(cache.shape)
        shape[axis] = index.numel()
        return torch.index_select(cache, axis, index, out=self._scratch.get(f"{name} packed", shape, cache.dtype))

    def _unpacked(self, name: str, numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """`numbers` [..., D] times `scales` [...], in the scales' type."""
        into = self._scratch.get(name, numbers.shape, scales.dtype)
        return into.copy_(numbers).mul_(scales.unsqueeze(-1))


def new_cache(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device, int8: bool) -> Cache:
    """A cache of [key heads, slots, D], read and written as `dtype`."""
    return Quantised(shape, dtype, device) if int8 else zeros(shape, dtype, device)


def paged_layer(current: Current, scratch: Scratch, keys: Cache, values: Cache) -> PagedLayer:
    """Attention over two caches of one kind."""
    if isinstance(keys, Quantised) and isinstance(values, Quantised):
        return Int8Layer(current, scratch, keys, values)
    assert isinstance(keys, torch.Tensor)
    assert isinstance(values, torch.Tensor)
    return PagedLayer(current, scratch, keys, values)
