"""Decoders of the Llama kind as the kernels compute them: which models are, and what is read from them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from workers.engine.gate import LayerShape
from workers.engine.native.bindings import Layer, Library, Model
from workers.engine.native.weights import Packing, drop_weights

# Pre-norm layers, RMSNorm, rotary embeddings in halves, attention without softcap and sinks, a gated feed-forward part.
FAMILIES = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})
HEAD_DIM_MAX = 512  # kHeadDimMax of decoder.cpp
ACTIVATIONS = {"silu": 0, "swish": 0, "gelu_pytorch_tanh": 1}


@dataclass(slots=True)
class Parts:
    """What the kernels need of a model."""

    model: Model
    layers: Any  # an array of Layer
    rotary: Callable[[int], torch.Tensor]  # [2, positions, rotary_dim / 2]: cosines and sines of so many positions
    hidden: int
    vocabulary: int
    owned: list[Any]  # what `model` points to


def supported(model: Any, shapes: list[LayerShape]) -> bool:
    config = model.config
    return (
        type(model).__name__ in FAMILIES
        and config.hidden_act in ACTIVATIONS
        and not any(shape.special for shape in shapes)
        and len({(shape.heads, shape.key_dim, shape.value_dim, shape.query_heads) for shape in shapes}) == 1
        and shapes[0].key_dim == shapes[0].value_dim <= HEAD_DIM_MAX
    )


@torch.inference_mode()
def parts_of(
    model: Any, shapes: list[LayerShape], library: Library, threads: int, int8: bool = False, consume: bool = False
) -> Parts:
    """Pack a supported model, its matrices in 8 bits if so wanted. `consume`: each layer's own weights go once it is packed."""
    config, body = model.config, model.model
    embedding = body.embed_tokens.weight.detach().contiguous()
    packing = Packing(library, torch.uint8 if int8 else embedding.dtype, threads, _matrices(model))
    layers = (Layer * len(body.layers))()
    for index, (layer, each) in enumerate(zip(body.layers, shapes, strict=True)):
        layers[index] = _layer(layer, each, packing)
        if consume:
            drop_weights(layer)
    head = packing.joined(model.lm_head)
    if consume:
        drop_weights(model.lm_head)
    shape = shapes[0]
    rotary = _Rotary(body.rotary_emb)
    native = Model(
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        heads=shape.query_heads,
        key_heads=shape.heads,
        head_dim=shape.key_dim,
        rotary_dim=2 * rotary(1).shape[2],
        layers=len(layers),
        vocabulary=len(embedding),
        activation=ACTIVATIONS[config.hidden_act],
        epsilon=config.rms_norm_eps,
        scaling=body.layers[0].self_attn.scaling,
        embedding=embedding.data_ptr(),
        final_norm=packing.vector(body.norm.weight),
        head=head,
        layer=layers,
    )
    return Parts(native, layers, rotary, config.hidden_size, model.lm_head.out_features, [packing, embedding])


class _Rotary:
    """Cosines and sines of a model's rotary embedding, as it computes them itself but in float32."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module

    def __call__(self, positions: int) -> torch.Tensor:
        both = self._module(torch.zeros(1), torch.arange(positions).unsqueeze(0))
        half = both[0].shape[-1] // 2
        return torch.stack([each[0, :, :half] for each in both]).contiguous()


def _matrices(model: Any) -> list[tuple[int, int]]:
    found = []
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        inputs = attention.q_proj.in_features
        joined = sum(each.out_features for each in (attention.q_proj, attention.k_proj, attention.v_proj))
        found.append((joined, inputs))
        found += [
            (each.out_features, each.in_features)
            for each in (attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
        ]
    return [*found, (model.lm_head.out_features, model.lm_head.in_features)]


def _layer(layer: Any, shape: LayerShape, packing: Packing) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    return Layer(
        input_norm=packing.vector(layer.input_layernorm.weight),
        query_norm=None if norms[0] is None else packing.vector(norms[0].weight),
        key_norm=None if norms[1] is None else packing.vector(norms[1].weight),
        attention_norm=packing.vector(layer.post_attention_layernorm.weight),
        qkv=packing.joined(attention.q_proj, attention.k_proj, attention.v_proj),
        out=packing.joined(attention.o_proj),
        gate_up=packing.interleaved(mlp.gate_proj, mlp.up_proj),
        down=packing.joined(mlp.down_proj),
        window=shape.window or 0,
    )
