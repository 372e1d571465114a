"""From a directory of weights to vLLM behind the `Engine` protocol. The extra `vllm` brings what is imported here."""

import logging
import os
import time
from pathlib import Path
from typing import Any

from transformers import AutoConfig, GenerationConfig

from shared.records import EngineSettings
from workers.engine.blocks import BLOCK_TOKENS
from workers.engine.load import LoadRefused
from workers.engine.request import EngineInfo
from workers.engine.tokenizer import HuggingFaceText, end_ids, load_tokenizer
from workers.engine.vllm_engine import VllmEngine

SLOTS = 256
KV_DTYPES = {"auto": "auto", "fp8": "fp8"}
DTYPES = ("auto", "float32", "bfloat16", "float16")

log = logging.getLogger(__name__)


def load_vllm(directory: Path, settings: EngineSettings) -> VllmEngine:
    """The engine of the model in `directory`. Raises LoadRefused with the reason. Blocking, up to minutes."""
    begin = time.monotonic()
    arguments = vllm_arguments(directory, settings)
    # In this process: the worker's end is then the engine's end. With several GPUs vLLM still starts a process for each.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        from vllm import EngineArgs, LLMEngine, SamplingParams
        from vllm.sampling_params import RequestOutputKind
    except ImportError as error:
        raise LoadRefused(f"engine=vllm needs the extra: pip install 'headrace[vllm]' ({error})") from error
    tokenizer = load_tokenizer(directory)
    imported = time.monotonic()
    try:
        llm = LLMEngine.from_engine_args(EngineArgs(**arguments))
    except Exception as error:  # whatever vLLM refuses, out of memory included: its message names the sizes
        raise LoadRefused(f"vLLM cannot load the model: {type(error).__name__}: {error}") from error
    config = llm.vllm_config
    tokens = config.cache_config.num_gpu_blocks * config.cache_config.block_size

    def make_params(**parameters: Any) -> Any:
        return SamplingParams(output_kind=RequestOutputKind.DELTA, **parameters)

    info = EngineInfo(
        max_model_len=min(config.model_config.max_model_len, tokens),
        slots=config.scheduler_config.max_num_seqs,
        blocks_total=tokens // BLOCK_TOKENS,
        device=f"vllm:{config.device_config.device_type}",
        dtype=str(config.model_config.dtype).removeprefix("torch."),
        load_seconds={
            "imports": round(imported - begin, 3),
            "weights": round(time.monotonic() - imported, 3),
        },
    )
    log.info("loaded %s: %s; a resumed run draws on freely from its prefix", directory.name, info)
    text = HuggingFaceText(tokenizer, config.model_config.get_vocab_size(), _end_ids(directory, tokenizer))
    return VllmEngine(llm, make_params, text, info)


def vllm_arguments(directory: Path, settings: EngineSettings) -> dict[str, Any]:
    """What vLLM's EngineArgs are given. Raises LoadRefused for a setting that it has no word for."""
    if settings.dtype not in DTYPES:
        raise LoadRefused(f"dtype is one of {', '.join(DTYPES)}; not {settings.dtype!r}")
    if settings.kv_dtype not in KV_DTYPES:
        raise LoadRefused(f"with engine=vllm kv_dtype is one of {', '.join(KV_DTYPES)}; not {settings.kv_dtype!r}")
    slots = settings.slots or SLOTS
    arguments: dict[str, Any] = {
        "model": str(directory),
        "tokenizer": str(directory),
        "dtype": settings.dtype,
        "kv_cache_dtype": KV_DTYPES[settings.kv_dtype],
        "max_num_seqs": slots,
        "max_num_batched_tokens": slots + settings.prefill_chunk,
        "tensor_parallel_size": settings.tensor_parallel,
        "enable_prefix_caching": True,
        "trust_remote_code": False,
        "disable_log_stats": True,
    }
    if settings.max_model_len is not None:
        arguments["max_model_len"] = settings.max_model_len
    if settings.kv_blocks is not None:
        arguments |= {"block_size": BLOCK_TOKENS, "num_gpu_blocks_override": settings.kv_blocks}
    return arguments


def _end_ids(directory: Path, tokenizer: Any) -> frozenset[int]:
    config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    generation = None
    if (directory / "generation_config.json").exists():
        generation = GenerationConfig.from_pretrained(directory, local_files_only=True)
    return end_ids(generation, config.get_text_config(), tokenizer)
