"""All that is particular to a GPU when a model is loaded: attention, packing, the cache and its size, decode graphs."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch

from shared.records import EngineSettings
from shared.wire import Sampling
from workers.engine import attention, gate, sizing
from workers.engine.attention import Layer
from workers.engine.attention_cuda import Cache, VarlenLayer, new_cache, tiling_of, usable_backends
from workers.engine.attention_plan import SPLITS_MAX
from workers.engine.batch_cuda import CudaCurrent, CudaPacker
from workers.engine.blocks import BLOCK_TOKENS, blocks_for
from workers.engine.decode_graphs import GraphRecorder, buckets_up_to
from workers.engine.device import Device, PlainDevice
from workers.engine.gate import LayerShape
from workers.engine.load import LoadRefused
from workers.engine.runner_cuda import CudaRunner
from workers.engine.sampler import Sampler
from workers.engine.scheduler import Sequence

GRAPH_BYTES = 32 * 2**20  # one decode graph's own memory, about
IDLE_BLOCKS = 1  # of the cache: rows that only fill up a bucket write there
DEMANDING = Sampling(temperature=0.7, top_p=0.9, top_k=50, min_p=0.01, logprobs=5)  # all of the sampler's tensors

log = logging.getLogger(__name__)


def kv_dtype_of(settings: EngineSettings, dtype: torch.dtype) -> torch.dtype:
    """The type of keys and values. Raises LoadRefused for a name that is none."""
    known = {"auto": dtype, "int8": torch.int8, "fp8": torch.float8_e4m3fn}
    if settings.kv_dtype not in known:
        raise LoadRefused(f"kv_dtype is one of {', '.join(known)}; not {settings.kv_dtype!r}")
    return known[settings.kv_dtype]


def block_bytes(shapes: list[LayerShape], kv_dtype: torch.dtype) -> int:
    """Bytes of one block in all layers, scales included."""
    scales = 2 * torch.float32.itemsize if kv_dtype.itemsize == 1 else 0
    of_token = sum(each.heads * ((each.key_dim + each.value_dim) * kv_dtype.itemsize + scales) for each in shapes)
    return BLOCK_TOKENS * of_token


def cuda_devices(
    model: Any, shapes: list[LayerShape], settings: EngineSettings, dtype: torch.dtype
) -> list[Callable[..., Device]]:
    """What can serve the model on its GPU, the best first; each is called like PlainDevice. Raises LoadRefused."""
    capability = torch.cuda.get_device_capability(model.device)
    kv_dtype = kv_dtype_of(settings, dtype)
    names = usable_backends(settings.attention, shapes, dtype, kv_dtype, capability)
    log.info("attention that can be had: %s", ", ".join(names))
    kinds: dict[str, Callable[..., Device]] = {"triton": TritonDevice, "varlen": VarlenDevice, "torch": PlainDevice}
    return [kinds[name] for name in names]


class CudaDevice(ABC):
    """The `Device` of a GPU; which attention it has is for its kinds to say."""

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
        self._slots = slots
        self._max_model_len = max_model_len
        self.kv_dtype = kv_dtype_of(settings, dtype)
        self._tiling = tiling_of(shapes, dtype)
        self._current = CudaCurrent()
        self._tokens_max = max(slots + settings.prefill_chunk, gate.STEP_TOKENS_MAX)
        packer = CudaPacker(
            self._tokens_max,
            max(slots, len(gate.PROMPT_TOKENS)),
            max(blocks_for(max_model_len), gate.BLOCKS),
            gate.BLOCKS,
            self._tiling,
            self._device,
        )
        self.runner = CudaRunner(model, self._current, packer, sampler)

    def attach(self, blocks: int) -> None:
        """Give each attention layer its part of a cache of `blocks` blocks."""
        for shape in self._shapes:  # all of the old one first: both together may be more than there is
            attention.detach(shape.module)
        self.runner.packer.idle_block = blocks
        for shape in self._shapes:
            cache = new_cache(shape, blocks + IDLE_BLOCKS, self.kv_dtype, self._device)
            attention.attach(shape.module, self._layer(cache))

    def blocks(self) -> int:
        """Blocks that fit into the memory that is free, after a trial of the largest step. Raises LoadRefused."""
        step = self._trial_bytes()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        room = sizing.Room(total, free, step, self._graph_bytes())
        per_block = block_bytes(self._shapes, self.kv_dtype)
        blocks = sizing.blocks_beside(room, per_block, self._slots, self._max_model_len, self._settings.kv_blocks)
        log.info("memory: %s; %d blocks of %d bytes", room, blocks, per_block)
        return blocks

    def finish(self) -> None:  # noqa: B027  # a kind may leave it so
        """Nothing needs the final cache."""

    @abstractmethod
    def _layer(self, cache: Cache) -> Layer: ...

    def _graph_bytes(self) -> int:
        """What decode graphs will take."""
        return 0

    @torch.inference_mode()
    def _trial_bytes(self) -> int:
        """Bytes that the largest step takes at its peak, sampling included."""
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        batch = self.runner.packer.idle_batch(self._tokens_max, self._slots)
        logits = self.runner.compute(batch)
        rows = [Sequence("trial", "trial", 0, DEMANDING, [0], 1, 2) for _ in range(self._slots)]
        self.runner.sampler.draw(logits, rows)
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_allocated(self._device) - before + self._partial_bytes()

    def _partial_bytes(self) -> int:
        """What split tiles of a step take at most: an idle step has none."""
        widest = max(shape.query_heads * (shape.value_dim + 1) for shape in self._shapes)
        return self._slots * SPLITS_MAX * widest * torch.float32.itemsize


class VarlenDevice(CudaDevice):
    """With torch's own attention, whose lengths are the host's: it cannot be recorded."""

    def _layer(self, cache: Cache) -> Layer:
        return VarlenLayer(self._current, cache)


class TritonDevice(CudaDevice):
    """With our paged kernel, and decode steps from graphs."""

    def finish(self) -> None:
        """Record the decode graphs: they keep the cache's addresses."""
        self.runner.capture(self._slots, GraphRecorder())

    def _layer(self, cache: Cache) -> Layer:
        from workers.engine.attention_triton import TritonLayer  # triton belongs to the CUDA builds of torch only

        return TritonLayer(self._current, cache, self._tiling)

    def _graph_bytes(self) -> int:
        logits = self._slots * self.runner.model.config.get_text_config().vocab_size * torch.float32.itemsize
        return len(buckets_up_to(self._slots)) * GRAPH_BYTES + logits + self._partial_bytes()
