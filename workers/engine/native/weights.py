"""A model's weights as the kernels read them: matrices in panels, in one piece of memory; vectors as floats."""

import mmap
from collections.abc import Sequence

import torch
from torch import nn

from workers.engine.native.bindings import Library, Matrix

PANEL_COLUMNS = 48  # kPanelColumns
LEVELS = 127
ZERO = 128  # what a weight of 0 is in 8 bits
PADDED = 96  # kPad: columns to which vectors are filled up with zeros


class Packing:
    """Packs matrices into memory that is taken once. It must live as long as what it returns is used."""

    def __init__(self, library: Library, dtype: torch.dtype, threads: int, matrices: Sequence[tuple[int, int]]) -> None:
        """`matrices`: (outputs, inputs) of all that will be packed; one that is interleaved counts as its parts. They are
        packed as `dtype`; torch.uint8: quantised."""
        self._library = library
        self._itemsize = dtype.itemsize
        self._threads = threads
        size = sum(library.packed_bytes(outputs, inputs, self._itemsize) for outputs, inputs in matrices)
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):  # each token reads all of it: small pages would miss the TLB all the time
            memory.madvise(mmap.MADV_HUGEPAGE)
        self._memory = torch.frombuffer(memory, dtype=torch.uint8)
        self._used = 0
        self._vectors: list[torch.Tensor] = []

    def joined(self, *layers: nn.Linear) -> Matrix:
        """Layers with the same inputs as one matrix, their outputs behind one another."""
        weight = torch.cat([layer.weight.detach() for layer in layers]) if len(layers) > 1 else layers[0].weight
        outputs, inputs = weight.shape
        panels = self._take(outputs, inputs)
        scales = self._pack(weight, 0, 1, panels)
        biases = [layer.bias for layer in layers if layer.bias is not None]
        bias = self.vector(torch.cat([*biases])) if biases else None
        return Matrix(panels, None if scales is None else self.vector(scales), bias, outputs, inputs)

    def interleaved(self, gate: nn.Linear, up: nn.Linear) -> Matrix:
        """Two layers of equal sizes: their panels take turns."""
        outputs, inputs = gate.weight.shape
        panels = self._take(outputs, inputs)
        self._take(outputs, inputs)
        scales = [self._pack(each.weight, index, 2, panels) for index, each in enumerate((gate, up))]
        return Matrix(panels, self._in_turn(scales), self._in_turn([gate.bias, up.bias]), outputs, inputs)

    def vector(self, values: torch.Tensor) -> int:
        """The address of `values` as floats, zeros behind them."""
        padded = nn.functional.pad(values.detach().float(), (0, -len(values) % PADDED)).contiguous()
        self._vectors.append(padded)
        return padded.data_ptr()

    def _in_turn(self, pair: Sequence[torch.Tensor | None]) -> int | None:
        """The address of two vectors whose panels take turns, if there are any."""
        panels = [
            nn.functional.pad(each.detach().float(), (0, -len(each) % PANEL_COLUMNS)).view(-1, PANEL_COLUMNS)
            for each in pair
            if each is not None
        ]
        return self.vector(torch.stack(panels, 1).view(-1)) if panels else None

    def _take(self, outputs: int, inputs: int) -> int:
        begin = self._used
        self._used += self._library.packed_bytes(outputs, inputs, self._itemsize)
        assert self._used <= len(self._memory), "more is packed than was announced"
        return self._memory.data_ptr() + begin

    def _pack(self, weight: torch.Tensor, first: int, every: int, panels: int) -> torch.Tensor | None:
        """The scales [outputs] of what is quantised."""
        weight, scales = weight.detach().contiguous(), None
        if self._itemsize == torch.uint8.itemsize:
            weight, scales = quantised(weight)
        outputs, inputs = weight.shape
        self._library.pack(weight.data_ptr(), outputs, inputs, self._itemsize, first, every, panels, self._threads)
        return scales


def quantised(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[outputs, inputs] in 8 bits, from 1 to 255 for numbers from -127 to 127, and the scales [outputs] of these."""
    exact = weight.float()
    scales = (exact.abs().amax(-1) / LEVELS).clamp(min=torch.finfo(torch.float32).tiny)
    return (exact / scales.unsqueeze(-1)).round_().add_(ZERO).to(torch.uint8), scales


def drop_weights(model: nn.Module) -> None:
    """Forget all parameters of a model that will compute nothing any more."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(parameter.detach()[:0].clone(), requires_grad=False))
