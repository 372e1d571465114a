"""The one door to an engine: by the source of a version. torch is imported only for a model that needs it."""

import os
from pathlib import Path

from shared import encoders
from shared.encoders import Encoder
from shared.records import EngineSettings
from workers.engine.request import Engine

SIMULATED = "sim:"
ENGINES = ("headrace", "vllm")
WEIGHTS = ("auto", "int8")


class LoadRefused(Exception):
    """The version cannot be served by this engine; the message says why, and another try would end the same way."""


def import_engine(source: str, engine: str = "headrace") -> None:
    """Import what `load_engine` needs for this source: seconds for a real model, that a cold start can spend beside a fetch."""
    if engine == "vllm":
        return  # its imports depend on how it is set up, and it refuses to be there in its own words
    if source.startswith(SIMULATED):
        import workers.engine.sim

        return
    # Read when torch is first imported. Threads that spin at each barrier wait for one another's time slices as soon as
    # the cores are shared with anything else: loading was 20 times slower so, a step 3 times.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    import workers.engine.model  # noqa: F401


def warm_up() -> None:
    """What any model needs, before one is known: the imports, and the device's first breath. Blocking, seconds."""
    import_engine("")
    import torch

    if torch.cuda.is_available():
        torch.zeros(1, device="cuda").cpu()


def check_settings(settings: EngineSettings) -> None:
    """Raises LoadRefused for settings that no source can be served with."""
    if settings.engine not in ENGINES:
        raise LoadRefused(f"engine is one of {', '.join(ENGINES)}; not {settings.engine!r}")
    if settings.weights not in WEIGHTS:
        raise LoadRefused(f"weights is one of {', '.join(WEIGHTS)}; not {settings.weights!r}")
    for name in ("max_model_len", "slots", "kv_blocks", "prefill_chunk", "tensor_parallel"):
        value = getattr(settings, name)
        if value is not None and value < 1:
            raise LoadRefused(f"{name} must be at least 1, not {value}")


def load_engine(
    source: str, directory: Path | None, settings: EngineSettings, threads: int, encoder: Encoder | None = None
) -> Engine:
    """The engine of a version, not yet started.

    `source` is "sim:<profile>", or anything else for a model whose files (Hugging Face layout, safetensors) are in
    `directory`. `threads` is for torch on the CPU; 0: the cores this process may use. `encoder`: how a model
    makes vectors, of one that does. Blocking, seconds. Raises LoadRefused.
    """
    check_settings(settings)
    if encoder is not None:
        return _load_encoder(source, directory, settings, threads, encoder)
    if source.startswith(SIMULATED):
        from workers.engine.sim import load_simulated

        return load_simulated(source.removeprefix(SIMULATED), settings)
    if directory is None:
        raise LoadRefused(f"the source {source!r} needs the directory of its files")
    if settings.engine == "vllm":
        if settings.weights != "auto":
            raise LoadRefused(f"weights={settings.weights} is for our own engine on a CPU, not for engine=vllm")
        from workers.engine.vllm_load import load_vllm

        return load_vllm(directory, settings)
    if settings.tensor_parallel > 1:
        raise LoadRefused("our engine runs on one device: tensor_parallel needs engine=vllm")
    import_engine(source)
    from workers.engine.model import load

    return load(directory, settings, threads)


def _load_encoder(
    source: str, directory: Path | None, settings: EngineSettings, threads: int, encoder: Encoder
) -> Engine:
    """The engine of a version that makes vectors. Raises LoadRefused."""
    if source == encoders.SIMULATED:
        from workers.engine.sim_encoder import load_simulated_encoder

        return load_simulated_encoder(settings, encoder)
    if directory is None:
        raise LoadRefused(f"the source {source!r} needs the directory of its files")
    defaults = EngineSettings()
    for name in ("engine", "weights", "tensor_parallel", "kv_dtype"):
        if getattr(settings, name) != getattr(defaults, name):
            raise LoadRefused(f"{name}={getattr(settings, name)} is for models that generate text")
    import_engine(source)
    from workers.engine.encoder_model import load

    return load(directory, settings, threads, encoder)
