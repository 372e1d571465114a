"""Our attention in transformers' models: one entry, registered once, that hands each call to what hangs on the module.

State is attached to the attention modules and never passed as keyword arguments: some models drop those, and their
names change between releases. No mask function is registered under our name, so models build no mask.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import AttentionInterface

from workers.engine.batch import PackedBatch

NAME = "headrace"
UNSUPPORTED = ("position_bias", "indices")  # arguments that change what is attended to
_ATTRIBUTE = "headrace_layer"


@dataclass(slots=True, frozen=True)
class Variant:
    """What a layer asks of attention beyond its tensors."""

    scaling: float
    window: int | None = None  # a query sees this many positions, its own included; None: all
    softcap: float | None = None
    sinks: torch.Tensor | None = None  # [query heads]: one more logit in each softmax, with no value


class Layer(Protocol):
    """One layer's attention. `q` is [query heads, tokens, D]; `k` [key heads, tokens, D]; `v` [key heads, tokens, Dv]."""

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, variant: Variant) -> torch.Tensor:
        """[tokens, query heads, Dv]"""


class Current:
    """The batch that is being computed: one object shared by all layers of a model."""

    batch: PackedBatch


def attach(module: torch.nn.Module, layer: Layer) -> None:
    setattr(module, _ATTRIBUTE, layer)


def detach(module: torch.nn.Module) -> None:
    """Forget the module's layer, if it has one, and with it the cache that the layer holds."""
    if hasattr(module, _ATTRIBUTE):
        delattr(module, _ATTRIBUTE)


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, query heads, tokens, D], rotated
    key: torch.Tensor,  # [1, key heads, tokens, D], rotated, not repeated
    value: torch.Tensor,  # [1, key heads, tokens, Dv]
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The function under our name in transformers' AttentionInterface: ([1, tokens, query heads, Dv], None)."""
    for name in UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise NotImplementedError(f"attention with {name}")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    layer: Layer = getattr(module, _ATTRIBUTE)
    return layer.attend(query[0], key[0], value[0], Variant(scale, sliding_window, softcap, s_aux)).unsqueeze(0), None


AttentionInterface.register(NAME, attend)
