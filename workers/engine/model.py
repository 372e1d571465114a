"""From a directory of weights to an engine: load, gate, make the linear layers fast, size the cache."""

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from shared.records import EngineSettings
from workers.engine import attention, gate, sizing
from workers.engine.blocks import BLOCK_TOKENS
from workers.engine.device import Device, PlainDevice
from workers.engine.device_cpu import cpu_devices
from workers.engine.engine import BatchEngine
from workers.engine.load import LoadRefused
from workers.engine.memory import available
from workers.engine.request import EngineInfo
from workers.engine.sampler import Sampler
from workers.engine.tokenizer import HuggingFaceText, end_ids, load_tokenizer

SLOTS_CPU = 64
SLOTS_CUDA = 256
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

log = logging.getLogger(__name__)


class Phases:
    """Seconds of each phase of a load, in their order."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        begin = time.monotonic()
        yield
        self.seconds[name] = round(time.monotonic() - begin, 3)


@torch.inference_mode()
def load(directory: Path, settings: EngineSettings, threads: int) -> BatchEngine:
    """The engine of the model in `directory` (Hugging Face layout, safetensors). Raises LoadRefused with the reason."""
    set_threads(threads)
    phases = Phases()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = _dtype(settings.dtype, device)
    disable_progress_bar()
    with phases("config"):
        config = _config(directory)
        gate.refuse_by_config(config, settings.max_model_len)
        max_model_len = _max_model_len(settings, config)
    with phases("tokenizer"):
        tokenizer = load_tokenizer(directory)
    with phases("weights"):
        sizing.refuse_weights(sizing.weight_bytes(directory, dtype.itemsize), *_free(device))
        model = _weights(directory, config, dtype, device).eval()
    with phases("gate"):
        shapes = gate.probe(model, config.get_text_config().num_hidden_layers)
        reference = gate.reference_logits(model)
    ends = end_ids(getattr(model, "generation_config", None), model.config.get_text_config(), tokenizer)
    text = HuggingFaceText(tokenizer, reference.shape[-1], ends)
    slots = settings.slots or (SLOTS_CPU if device.type == "cpu" else SLOTS_CUDA)
    sampler = Sampler(text.end_ids, text.token_bytes, text.special_ids)
    arguments = (model, shapes, sampler, settings, dtype, slots, max_model_len)
    sides = [partial(kind, *arguments) for kind in _device_sides(device, model, shapes, settings, dtype)]
    side = _fitting_side(
        sides, model, reference, dtype, settings, phases, partial(_weights, directory, config, dtype, device)
    )
    with phases("cache"):
        blocks = side.blocks()
        side.attach(blocks)
        side.finish()
    info = EngineInfo(
        max_model_len=min(max_model_len, blocks * BLOCK_TOKENS),
        slots=slots,
        blocks_total=blocks,
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        load_seconds=phases.seconds,
    )
    log.info("loaded %s: %s", directory.name, info)
    return BatchEngine(side.runner, text, info, settings)


def set_threads(threads: int) -> None:
    """Of torch on the CPU; 0: the cores that this process may use."""
    torch.set_num_threads(threads or len(os.sched_getaffinity(0)))


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name != "auto":
        if name not in DTYPES:
            raise LoadRefused(f"dtype is auto, {', '.join(DTYPES)}; not {name!r}")
        return DTYPES[name]
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    # Without instructions for it, bfloat16 is slower than float32.
    native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if native else torch.float32


def _config(directory: Path) -> Any:
    try:
        return AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise LoadRefused(f"config.json cannot be used: {error}") from error


def _max_model_len(settings: EngineSettings, config: Any) -> int:
    own = getattr(config.get_text_config(), "max_position_embeddings", None)
    wanted = settings.max_model_len or own
    if not wanted:
        raise LoadRefused("the model's configuration names no maximum length: set max_model_len")
    if own and wanted > own:
        raise LoadRefused(f"max_model_len is {wanted}, and the model's own limit {own}")
    return int(wanted)


def _weights(directory: Path, config: Any, dtype: torch.dtype, device: torch.device) -> Any:
    try:
        return AutoModelForCausalLM.from_pretrained(
            directory,
            config=config,
            dtype=dtype,
            attn_implementation=attention.NAME,
            device_map=None if device.type == "cpu" else {"": device},  # onto a GPU without a copy in the host's memory
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
        )
    except KeyError as error:
        if error.args != (attention.NAME,):
            raise LoadRefused(f"the weights cannot be loaded: no {error}") from error
        raise LoadRefused(gate.no_interface(config.model_type)) from error
    except Exception as error:  # a library's errors over files of any origin
        raise LoadRefused(f"the weights cannot be loaded: {type(error).__name__}: {error}") from error


def _device_sides(
    device: torch.device, model: Any, shapes: list[gate.LayerShape], settings: EngineSettings, dtype: torch.dtype
) -> Sequence[Callable[..., Device]]:
    """What can serve the model on the device, the best first."""
    if device.type != "cpu" and settings.weights != "auto":
        raise LoadRefused(
            f"weights={settings.weights} is served by our own CPU kernels only: the device is a {device.type}"
        )
    if device.type == "cuda":
        from workers.engine.device_cuda import cuda_devices

        return cuda_devices(model, shapes, settings, dtype)
    return cpu_devices(model, shapes, settings, dtype) if device.type == "cpu" else [PlainDevice]


def _fitting_side(
    sides: list[partial[Device]],
    model: Any,
    reference: torch.Tensor,
    dtype: torch.dtype,
    settings: EngineSettings,
    phases: Phases,
    load_again: Callable[[], Any],
) -> Device:
    """The first that computes what the model computes. Raises LoadRefused when none does.

    `load_again` brings the weights of a model that lost its own to one that was refused.
    """
    for index, make in enumerate(sides):
        with phases("pack"):
            side = make()
        with phases("check"):
            side.attach(gate.BLOCKS)
            try:
                gate.compare(model, side.runner, reference, dtype, settings)
            except LoadRefused as refused:
                if index == len(sides) - 1:
                    raise
                log.warning("%s does without %s: %s", type(model).__name__, make.func, refused)
                if not side.keeps_weights:
                    _give_weights(model, load_again())
                continue
        return side
    raise AssertionError("a device has no side")


def _give_weights(model: Any, loaded: Any) -> None:
    """Let a model have the parameters of another of its kind; its modules stay, for others hold them."""
    modules = dict(model.named_modules())
    for path, module in loaded.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            setattr(modules[path], name, parameter)


def _free(device: torch.device) -> tuple[int, str]:
    """Bytes that may be taken of a device, and what to call it."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return free, f"{torch.cuda.get_device_name(device)}'s {sizing.gib(total)}"
    return available(), "memory"
