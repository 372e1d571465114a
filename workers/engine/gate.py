"""Whether a model can be served by packed paged attention. Found out at load, with the reason, instead of in wrong text."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shared.records import EngineSettings
from shared.wire import Sampling
from workers.engine.attention import NAME, Layer, Variant, attach
from workers.engine.engine import Runner
from workers.engine.load import LoadRefused
from workers.engine.scheduler import Sequence, Slice, StepPlan

OTHER_ENGINE = "vLLM may serve it (--set engine=vllm)"
LAYER_TYPES = {"full_attention", "sliding_attention"}
# Rotary embeddings that look at the longest position of the whole packed batch: one sequence would change the others.
ROPE_BY_LENGTH = ("dynamic", "longrope")
PROMPT_TOKENS = (24, 23, 21)  # more than one block
CHUNKS = ((16, 16, 16), (7, 6, 4), (1, 1, 1))  # of each prompt in each step
STEP_TOKENS_MAX = max(map(sum, CHUNKS))
BLOCKS = 6
BLOCK_TABLES = ([4, 1], [0, 2], [5, 3])  # not contiguous
ERROR_MAX = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.25}  # relative to the spread of the logits
WEIGHTS_ERROR_MAX = {"auto": 0.0, "int8": 0.25}  # of weights and activations in 8 bits
KV_ERROR_MAX = {"auto": 0.0, "int8": 0.25, "fp8": 0.5}  # of keys and values in 8 bits; what is wrong is off by more


@dataclass(slots=True)
class LayerShape:
    """What one attention layer stores for a token."""

    module: nn.Module
    heads: int
    key_dim: int
    value_dim: int
    query_heads: int
    special: bool  # its attention has a softcap or sinks
    window: int | None = None  # positions that a query sees; None: all


def refuse_by_config(config: Any, max_model_len: int | None) -> None:
    """Raise LoadRefused for what the configuration alone rules out. `max_model_len` None: the model's own."""
    if config.is_encoder_decoder:
        raise LoadRefused(f"{config.model_type} is an encoder-decoder, and only decoders are served")
    text = config.get_text_config()
    others = sorted(set(getattr(text, "layer_types", None) or []) - LAYER_TYPES)
    if others:
        kinds = ", ".join(others)
        raise LoadRefused(f"{config.model_type} has layers of type {kinds}, which keep other state; {OTHER_ENGINE}")
    for rope in _rope_parameters(text):
        kind = rope.get("rope_type") or rope.get("type") or "default"
        if any(name in kind for name in ROPE_BY_LENGTH):
            original = (
                rope.get("original_max_position_embeddings")
                or getattr(text, "original_max_position_embeddings", None)
                or text.max_position_embeddings
            )
            if (max_model_len or text.max_position_embeddings) > original:
                raise LoadRefused(
                    f"rotary embeddings of type {kind} depend on the longest sequence of a batch: set max_model_len to at"
                    f" most {original}, where they do not; beyond it {OTHER_ENGINE}"
                )


def no_interface(name: str) -> str:
    """The reason for a model whose attention cannot be replaced."""
    return f"{name} does not use transformers' attention interface in all layers; {OTHER_ENGINE}"


def probe(model: Any, layers: int) -> list[LayerShape]:
    """See that each of the `layers` layers calls our attention once; what each stores, in the order of the calls."""
    shapes: list[LayerShape] = []
    for module in model.modules():
        attach(module, _Probe(module, shapes))
    ids = torch.zeros((1, 2), dtype=torch.int64, device=model.device)
    positions = torch.arange(2, device=model.device).unsqueeze(0)
    with _refusing(model, "a packed forward"):
        model(input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=1)
    if len({id(shape.module) for shape in shapes}) != len(shapes) or len(shapes) != layers:
        raise LoadRefused(f"{no_interface(_name(model))} ({len(shapes)} calls in {layers} layers)")
    _check_windows(model, shapes)
    return shapes


def _check_windows(model: Any, shapes: list[LayerShape]) -> None:
    """Raise LoadRefused if layers have a window that they express by a mask, of which our attention sees nothing.

    The comparison of logits cannot tell: its prompt is shorter than most windows.
    """
    text = model.config.get_text_config()
    kinds = getattr(text, "layer_types", None)
    if kinds:
        expected = sum(kind == "sliding_attention" for kind in kinds)
    else:
        windowed = getattr(text, "sliding_window", None) and getattr(text, "use_sliding_window", True)
        expected = len(shapes) if windowed else 0
    seen = sum(shape.window is not None for shape in shapes)
    if seen < expected:
        raise LoadRefused(
            f"{expected} layers of {_name(model)} have a sliding window, and only {seen} of them ask the attention for it;"
            f" {OTHER_ENGINE}"
        )


def reference_logits(model: Any) -> torch.Tensor:
    """[len(PROMPT_TOKENS), vocabulary]: the model's own, with its plain eager attention and no packing."""
    ids = torch.tensor([prompt_ids(model.get_input_embeddings().num_embeddings)], device=model.device)
    rows = torch.tensor([length - 1 for length in PROMPT_TOKENS], device=model.device)
    with _refusing(model, "a plain forward"):
        model.set_attn_implementation("eager")
        logits = model(input_ids=ids, use_cache=False, logits_to_keep=rows).logits[0].float()
        model.set_attn_implementation(NAME)
    return logits


def compare(model: Any, runner: Runner, reference: torch.Tensor, dtype: torch.dtype, settings: EngineSettings) -> None:
    """Raise LoadRefused unless `runner`, packed, paged and in chunks, computes what the model computes."""
    error_max = max(ERROR_MAX[dtype], KV_ERROR_MAX[settings.kv_dtype], WEIGHTS_ERROR_MAX[settings.weights])
    prompt = prompt_ids(model.get_input_embeddings().num_embeddings)
    sequences = [
        _sequence(slot, prompt[:length], blocks)
        for slot, (length, blocks) in enumerate(zip(PROMPT_TOKENS, BLOCK_TABLES, strict=True))
    ]
    with _refusing(model, "a packed forward in chunks"):
        for counts in CHUNKS:
            plan = StepPlan([_advance(each, count) for each, count in zip(sequences, counts, strict=True)])
            logits = runner.forward(plan).float()
    spread = (reference - reference.mean(-1, keepdim=True)).norm(dim=-1)
    error = ((logits - reference).norm(dim=-1) / spread).max().item()
    if not error <= error_max and settings.weights != "auto":
        raise LoadRefused(
            f"{_name(model)} with weights={settings.weights} differs from {_name(model)} with its own (relative error"
            f" {error:.2g}, at most {error_max:.2g} is served)"
        )
    if not error <= error_max:
        raise LoadRefused(
            f"{_name(model)} computed in a packed batch differs from {_name(model)} alone (relative error {error:.2g},"
            f" at most {error_max:.2g} is rounding): it keeps state that packing breaks; {OTHER_ENGINE}"
        )


def prompt_ids(vocabulary_size: int) -> list[int]:
    """A fixed prompt of max(PROMPT_TOKENS) ids."""
    return [(7919 * index + 13) % vocabulary_size for index in range(max(PROMPT_TOKENS))]


class _Probe(Layer):
    def __init__(self, module: nn.Module, shapes: list[LayerShape]) -> None:
        self._module = module
        self._shapes = shapes

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, variant: Variant) -> torch.Tensor:
        special = variant.softcap is not None or variant.sinks is not None
        sizes = (k.shape[0], k.shape[2], v.shape[2], q.shape[0])
        self._shapes.append(LayerShape(self._module, *sizes, special, variant.window))
        return q.new_zeros((q.shape[1], q.shape[0], v.shape[2]))


@contextmanager
def _refusing(model: nn.Module, what: str) -> Iterator[None]:
    """Whatever a model raises when it is called so is the reason to refuse it."""
    try:
        yield
    except Exception as error:
        reason = f"{what} of {_name(model)} raised {type(error).__name__}: {error}"
        raise LoadRefused(f"{reason}; {OTHER_ENGINE}") from error


def _rope_parameters(config: Any) -> list[dict[str, Any]]:
    found = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    nested = [value for value in found.values() if isinstance(value, dict)]  # one per layer type
    return nested or [found]


def _sequence(slot: int, tokens: list[int], blocks: list[int]) -> Sequence:
    return Sequence("gate", "gate", 0, Sampling(), tokens, len(tokens), len(tokens) + 1, blocks=blocks, slot=slot)


def _advance(sequence: Sequence, count: int) -> Slice:
    start = sequence.computed
    sequence.computed += count
    return Slice(sequence, start, count, sequence.computed == len(sequence.tokens))


def _name(model: nn.Module) -> str:
    return type(model).__name__
