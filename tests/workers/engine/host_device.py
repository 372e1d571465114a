"""The GPU's side of a model on the CPU: its packing, plan, buckets and runner, with stand-ins for kernel and graphs."""

from collections.abc import Callable

import pytest
from plan_layer import PlanLayer

from workers.engine import model
from workers.engine.attention import Layer
from workers.engine.attention_cuda import Cache
from workers.engine.device_cuda import TritonDevice

BLOCKS = 128


def repeat_eagerly(work: Callable[[], None]) -> Callable[[], None]:
    """A recorder whose recording computes anew: from the same memory, as a graph would."""
    return work


class HostDevice(TritonDevice):
    """`interpreted`: the kernel itself, in Triton's interpreter."""

    interpreted = False

    def blocks(self) -> int:
        return self._settings.kv_blocks or BLOCKS

    def finish(self) -> None:
        self.runner.capture(self._slots, repeat_eagerly)

    def _layer(self, cache: Cache) -> Layer:
        return super()._layer(cache) if self.interpreted else PlanLayer(self._current, cache, self._tiling)


def use_host_device(patch: pytest.MonkeyPatch, interpreted: bool = False) -> None:
    """Let `load` put models on a HostDevice."""
    patch.setattr(HostDevice, "interpreted", interpreted)
    patch.setattr(model, "_device_sides", lambda *arguments: [HostDevice])
