"""A model's weights as the kernels read them: matrices in panels, in one piece of memory; vectors as floats."""

import mmap
from collections.abc import Sequence

import torch
from torch import nn

from workers.engine.native.library import Library, Matrix

PANEL_COLUMNS = 48  # kPanelColumns
PADDED = 96  # kPad: columns to which vectors are filled up with zeros


class Packing:
    """Packs matrices into memory that is taken once. It must live as long as what it returns is used."""

    def __init__(self, library: Library, dtype: torch.dtype, threads: int, matrices: Sequence[tuple[int, int]]) -> None:
        """`matrices`: (outputs, inputs) of all that will be packed; one that is interleaved counts as its parts."""
        self._library = library
        self._half = dtype == torch.bfloat16
        self._threads = threads
        size = sum(library.packed_bytes(outputs, inputs, self._half) for outputs, inputs in matrices)
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
        self._pack(weight, 0, 1, panels)
        biases = [layer.bias for layer in layers if layer.bias is not None]
        return Matrix(panels, self.vector(torch.cat([*biases])) if biases else None, outputs, inputs)

    def interleaved(self, gate: nn.Linear, up: nn.Linear) -> Matrix:
        """Two layers of equal sizes: their panels take turns."""
        outputs, inputs = gate.weight.shape
        panels = self._take(outputs, inputs)
        self._take(outputs, inputs)
        self._pack(gate.weight, 0, 2, panels)
        self._pack(up.weight, 1, 2, panels)
        bias = None
        if gate.bias is not None:
            padded = [nn.functional.pad(each.bias.float(), (0, -outputs % PANEL_COLUMNS)) for each in (gate, up)]
            bias = self.vector(torch.stack([each.view(-1, PANEL_COLUMNS) for each in padded], 1).view(-1))
        return Matrix(panels, bias, outputs, inputs)

    def vector(self, values: torch.Tensor) -> int:
        """The address of `values` as floats, zeros behind them."""
        padded = nn.functional.pad(values.detach().float(), (0, -len(values) % PADDED)).contiguous()
        self._vectors.append(padded)
        return padded.data_ptr()

    def _take(self, outputs: int, inputs: int) -> int:
        begin = self._used
        self._used += self._library.packed_bytes(outputs, inputs, self._half)
        assert self._used <= len(self._memory), "more is packed than was announced"
        return self._memory.data_ptr() + begin

    def _pack(self, weight: torch.Tensor, first: int, every: int, panels: int) -> None:
        weight = weight.detach().contiguous()
        outputs, inputs = weight.shape
        self._library.pack(weight.data_ptr(), outputs, inputs, self._half, first, every, panels, self._threads)
