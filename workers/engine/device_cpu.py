"""A CPU: our own kernels where they have the model and the instructions, compiled in the background if they are not yet;
plain torch for everything else."""

import logging
import threading
from typing import Any

import torch

from shared.records import EngineSettings
from workers.engine import attention, gate
from workers.engine.batch import Packer
from workers.engine.device import Device, PlainDevice, new_caches
from workers.engine.gate import LayerShape
from workers.engine.linear import can_pack, pack_linears
from workers.engine.load import LoadRefused
from workers.engine.native import build, llama
from workers.engine.native.bindings import Library
from workers.engine.native.decoder import NativeDecoder
from workers.engine.native.runner import NativeRunner, UpgradingRunner
from workers.engine.native.weights import drop_weights
from workers.engine.sampler import Sampler

KERNELS = ("auto", "torch")
INT8_NEEDED = build.CPU_NEEDED | {"avx512_vnni"}

log = logging.getLogger(__name__)


def cpu_devices(
    model: Any, shapes: list[LayerShape], settings: EngineSettings, dtype: torch.dtype
) -> list[type[Device]]:
    """What can serve the model here, the best first; each is constructed like PlainDevice. Raises LoadRefused."""
    if settings.kernels not in KERNELS:
        raise LoadRefused(f"kernels is {' or '.join(KERNELS)}; not {settings.kernels!r}")
    if settings.weights == "int8":
        return [_int8_device(model, shapes, settings, dtype)]
    if settings.kernels == "torch" or not _instructions_for(dtype) or not llama.supported(model, shapes):
        return [TorchDevice]
    if build.find() is not None:
        return [NativeDevice, TorchDevice]
    return [CompilingDevice, TorchDevice] if build.can_build() else [TorchDevice]


def _int8_device(model: Any, shapes: list[LayerShape], settings: EngineSettings, dtype: torch.dtype) -> type[Device]:
    """Has the kernels compiled before anything is served: plain torch would serve other weights. Raises LoadRefused."""
    type_name = str(dtype).removeprefix("torch.")
    missing = (INT8_NEEDED | ({"avx512_bf16"} if dtype == torch.bfloat16 else set())) - build.cpu_flags()
    reason = None
    if settings.kernels == "torch":
        reason = "kernels=torch does without them"
    elif dtype not in (torch.float32, torch.bfloat16):
        reason = f"they do not compute in {type_name}"
    elif not llama.supported(model, shapes):
        reason = f"they do not compute this {type(model).__name__}"
    elif missing:
        reason = f"in {type_name} they need {', '.join(sorted(missing))}, which this CPU does not have"
    elif build.find() is None:
        try:
            build.build()
        except build.CannotBuild as error:
            reason = str(error)
    if reason is not None:
        raise LoadRefused(f"weights=int8 is served by our own CPU kernels only: {reason}")
    return NativeDevice


def _instructions_for(dtype: torch.dtype) -> bool:
    flags = build.cpu_flags()
    if dtype == torch.bfloat16:  # also where there is AMX: oneDNN's products differ with what else is in the batch
        return flags >= build.CPU_NEEDED | {"avx512_bf16"}
    return dtype == torch.float32 and flags >= build.CPU_NEEDED


class TorchDevice(PlainDevice):
    """Plain torch, its linear layers packed where that is faster."""

    def __init__(self, model: Any, shapes: list[LayerShape], sampler: Sampler, *rest: Any) -> None:
        super().__init__(model, shapes, sampler, *rest)
        if can_pack(self._device, self._dtype):
            pack_linears(model)


class NativeDevice(PlainDevice):
    """Our own kernels from the start. The weights are in memory once: the model's own go as they are packed."""

    keeps_weights = False

    def __init__(self, model: Any, shapes: list[LayerShape], sampler: Sampler, *rest: Any) -> None:
        super().__init__(model, shapes, sampler, *rest)
        self._model = model
        path = build.find()
        assert path is not None
        int8 = self._settings.weights == "int8"
        self._native = native_runner(Library(path), model, shapes, sampler, self._dtype, self._tokens_max, int8, True)
        self.runner = self._native

    def attach(self, blocks: int) -> None:
        self._caches = new_caches(self._shapes, blocks, self._dtype, self._device, self._int8)
        self._native.decoder.attach(self._caches, self._max_model_len)

    def finish(self) -> None:
        drop_weights(self._model)


class CompilingDevice(PlainDevice):
    """Plain torch until our own kernels have been compiled, which waits for the first requests to be served."""

    def __init__(self, model: Any, shapes: list[LayerShape], sampler: Sampler, *rest: Any) -> None:
        super().__init__(model, shapes, sampler, *rest)
        self._model = model
        self._sampler = sampler
        self._reference = gate.reference_logits(model)
        self._upgrading = UpgradingRunner(self.runner, self._retire)
        self.runner = self._upgrading

    def finish(self) -> None:
        threading.Thread(target=self._upgrade, name="kernels", daemon=True).start()

    def _upgrade(self) -> None:
        try:
            library = Library(build.build())
            native = native_runner(library, self._model, self._shapes, self._sampler, self._dtype, self._tokens_max)
            trial = new_caches(self._shapes, gate.BLOCKS, self._dtype, self._device, self._int8)
            native.decoder.attach(trial, self._max_model_len)
            gate.compare(self._model, native, self._reference, self._dtype, self._settings)
            native.decoder.attach(self._caches, self._max_model_len)
        except Exception:  # of a compiler, a linker or the gate: serving goes on
            log.warning("no compiled kernels: plain torch goes on", exc_info=True)
            if can_pack(self._device, self._dtype):
                pack_linears(self._model)
            return
        self._upgrading.offer(native)

    def _retire(self) -> None:
        for shape in self._shapes:
            attention.detach(shape.module)
        drop_weights(self._model)


def native_runner(
    library: Library,
    model: Any,
    shapes: list[LayerShape],
    sampler: Sampler,
    dtype: torch.dtype,
    tokens_max: int,
    int8: bool = False,
    consume: bool = False,
) -> NativeRunner:
    """Pack a supported model for our kernels; it keeps its own weights unless `consume`."""
    threads = torch.get_num_threads()
    parts = llama.parts_of(model, shapes, library, threads, int8, consume)
    decoder = NativeDecoder(library, parts, dtype, tokens_max, threads)
    return NativeRunner(decoder, Packer(tokens_max, torch.device("cpu")), sampler)
