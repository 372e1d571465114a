"""A tiny model in our CPU kernels, and what it computes itself."""

from pathlib import Path
from typing import Any

import pytest
import torch

from shared.wire import Sampling
from workers.engine import attention, gate
from workers.engine.batch import Packer
from workers.engine.blocks import blocks_for
from workers.engine.device import new_caches
from workers.engine.device_cpu import INT8_NEEDED, _instructions_for
from workers.engine.native import build, llama
from workers.engine.native.bindings import Library
from workers.engine.native.decoder import NativeDecoder
from workers.engine.native.weights import ZERO, quantised
from workers.engine.scheduler import Sequence, Slice, StepPlan

CPU = torch.device("cpu")
BLOCKS = 60
LENGTH = 200  # more than three of the runs in which a context is read
DTYPES = [
    pytest.param(
        dtype,
        id=str(dtype).removeprefix("torch."),
        marks=pytest.mark.skipif(not _instructions_for(dtype), reason="no kernels for this CPU"),
    )
    for dtype in (torch.float32, torch.bfloat16)
]
# Nothing is a multiple of what the kernels work in: 48 columns, 16 lanes, 2 elements.
ODD = {"hidden_size": 44, "head_dim": 10, "intermediate_size": 51, "num_key_value_heads": 1, "vocab_size": 301}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "odd sizes": ("llama", ODD),
    "wide heads": ("llama", {"head_dim": 80}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "a gelu": ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "long rope": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "mistral": ("mistral", {"sliding_window": 70}),
}
GROUP = 32  # kGroup
needs_vnni = pytest.mark.skipif(not build.cpu_flags() >= INT8_NEEDED, reason="no kernels in 8 bits for this CPU")


def in_groups(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., inputs] in 8 bits as the kernels have it: numbers [..., groups, GROUP] and their scales [..., groups, 1]."""
    padded = torch.nn.functional.pad(x.float(), (0, -x.shape[-1] % GROUP)).unflatten(-1, (-1, GROUP))
    scales = (padded.abs().amax(-1, keepdim=True) / 127).clamp(min=torch.finfo(torch.float32).tiny)
    return (padded / scales).round(), scales


def quantise(model: Any) -> None:
    """Have a model compute with weights and activations in 8 bits, by plain torch."""

    def round_input(layer: torch.nn.Module, given: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        numbers, scales = in_groups(given[0])
        return ((numbers * scales).flatten(-2)[..., : given[0].shape[-1]].to(given[0].dtype),)

    for layer in model.modules():
        if isinstance(layer, torch.nn.Linear):
            numbers, scales = quantised(layer.weight.detach())
            exact = (numbers.float() - ZERO) * scales.unsqueeze(-1)
            layer.weight = torch.nn.Parameter(exact.to(layer.weight.dtype))  # not tied to an embedding any more
            layer.register_forward_pre_hook(round_input)


class Served:
    """A tiny model in our kernels, and what it computes itself."""

    def __init__(
        self, directory: Path, dtype: torch.dtype, threads: int = 2, int8: bool = False, int8_weights: bool = False
    ) -> None:
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation=attention.NAME)
        torch.manual_seed(0)
        for parameter in model.parameters():  # those that begin as zeros or ones would hide a mistake
            if parameter.dim() == 1:
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
        shapes = gate.probe(model, model.config.num_hidden_layers)
        assert llama.supported(model, shapes)
        library = Library(build.build())
        self.model = model
        self.vocabulary = model.config.vocab_size
        parts = llama.parts_of(model, shapes, library, threads, int8_weights)
        if int8_weights:
            quantise(model)
        self.decoder = NativeDecoder(library, parts, dtype, 800, threads)
        self.caches = new_caches(shapes, BLOCKS, dtype, CPU, int8)
        self.decoder.attach(self.caches, 512)
        self._packer = Packer(800, CPU)
        self._free = list(range(BLOCKS))[::-2] + list(range(BLOCKS))[::2]

    def sequence(self, length: int, salt: int = 0) -> Sequence:
        tokens = [(7919 * index + 13 + 101 * salt) % self.vocabulary for index in range(length)]
        blocks = [self._free.pop() for _ in range(blocks_for(length))]
        return Sequence("s", "t", 0, Sampling(), tokens, length, length + 1, blocks=blocks)

    @torch.inference_mode()
    def step(self, *parts: tuple[Sequence, int]) -> torch.Tensor:
        """Compute that many more tokens of each; the logits after the last of each."""
        slices = []
        for sequence, count in parts:
            slices.append(Slice(sequence, sequence.computed, count, True))
            sequence.computed += count
        return self.decoder.logits(self._packer.pack(StepPlan(slices))).clone()

    @torch.inference_mode()
    def own(self, sequence: Sequence) -> torch.Tensor:
        """[tokens, vocabulary]: the model's own logits, by its plain attention."""
        self.model.set_attn_implementation("eager")
        return self.model(input_ids=torch.tensor([sequence.tokens]), use_cache=False).logits[0].float()
