"""What a model needs of the device that it runs on: a runner, attention with a cache, and how large the cache may be."""

from typing import Any, Protocol

import torch

from shared.records import EngineSettings
from workers.engine import attention, gate
from workers.engine.attention import Current
from workers.engine.attention_paged import Scratch
from workers.engine.batch import Packer
from workers.engine.blocks import BLOCK_TOKENS
from workers.engine.engine import Runner
from workers.engine.gate import LayerShape
from workers.engine.kv_int8 import KV_DTYPES, Cache, new_cache, paged_layer
from workers.engine.load import LoadRefused
from workers.engine.memory import block_bytes, blocks_that_fit
from workers.engine.runner import TorchRunner
from workers.engine.sampler import Sampler


class Device(Protocol):
    """`attach` a small cache and try the runner, then `attach` one of `blocks()` blocks, then `finish`.

    `keeps_weights` False: the model has lost its own, and needs them again if something else is to compute it.
    """

    keeps_weights: bool

    @property
    def runner(self) -> Runner: ...

    def attach(self, blocks: int) -> None:
        """Give each attention layer its part of a cache of `blocks` blocks."""

    def blocks(self) -> int:
        """Blocks that the free memory holds, or those that the settings ask for. Raises LoadRefused, with the sum."""

    def finish(self) -> None:
        """Prepare what needs the final cache."""


class PlainDevice:
    """Any device, by plain torch."""

    keeps_weights = True

    def __init__(
        self,
        model: Any,
        shapes: list[LayerShape],
        sampler: Sampler,
        settings: EngineSettings,
        dtype: torch.dtype,
        slots: int,
        max_model_len: int,
    ) -> None:
        self._device: torch.device = model.device
        self._shapes = shapes
        self._settings = settings
        self._dtype = dtype
        self._slots = slots
        self._max_model_len = max_model_len
        self._current = Current()
        self._tokens_max = max(slots + settings.prefill_chunk, gate.STEP_TOKENS_MAX)  # of a step
        self._int8 = quantises(settings)
        self._caches: list[tuple[Cache, Cache]] = []  # keys and values of each layer
        self.runner: Runner = TorchRunner(model, self._current, Packer(self._tokens_max, self._device), sampler)

    def attach(self, blocks: int) -> None:
        scratch = Scratch(self._device)
        self._caches = new_caches(self._shapes, blocks, self._dtype, self._device, self._int8)
        for shape, (keys, values) in zip(self._shapes, self._caches, strict=True):
            attention.attach(shape.module, paged_layer(self._current, scratch, keys, values))

    def blocks(self) -> int:
        per_block = block_bytes(self._shapes, self._dtype, self._int8)
        return self._settings.kv_blocks or blocks_that_fit(per_block, self._device, self._slots, self._max_model_len)

    def finish(self) -> None:
        """Nothing needs it."""


def quantises(settings: EngineSettings) -> bool:
    """Whether keys and values are kept in 8 bits. Raises LoadRefused."""
    if settings.kv_dtype not in KV_DTYPES:
        raise LoadRefused(f"without a GPU kv_dtype is one of {', '.join(KV_DTYPES)}; not {settings.kv_dtype!r}")
    return settings.kv_dtype == "int8"


def new_caches(
    shapes: list[LayerShape], blocks: int, dtype: torch.dtype, device: torch.device, int8: bool = False
) -> list[tuple[Cache, Cache]]:
    """Keys and values of each layer, [key heads, slots, D], for a cache of `blocks` blocks."""
    slots = blocks * BLOCK_TOKENS
    return [
        (
            new_cache((shape.heads, slots, shape.key_dim), dtype, device, int8),
            new_cache((shape.heads, slots, shape.value_dim), dtype, device, int8),
        )
        for shape in shapes
    ]
