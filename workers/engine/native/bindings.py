"""The compiled kernels as Python calls: the structures of decoder.cpp, field by field, and its functions."""

import ctypes
from ctypes import POINTER, Structure, c_float, c_int, c_long, c_void_p
from pathlib import Path
from typing import Any, ClassVar


class Matrix(Structure):
    _fields_: ClassVar = [
        ("panels", c_void_p),
        ("scales", c_void_p),
        ("bias", c_void_p),
        ("outputs", c_int),
        ("inputs", c_int),
    ]


class Layer(Structure):
    _fields_: ClassVar = [
        ("input_norm", c_void_p),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("attention_norm", c_void_p),
        ("qkv", Matrix),
        ("out", Matrix),
        ("gate_up", Matrix),
        ("down", Matrix),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("key_scales", c_void_p),
        ("value_scales", c_void_p),
        ("window", c_int),
    ]


class Model(Structure):
    _fields_: ClassVar = [
        ("hidden", c_int),
        ("intermediate", c_int),
        ("heads", c_int),
        ("key_heads", c_int),
        ("head_dim", c_int),
        ("rotary_dim", c_int),
        ("layers", c_int),
        ("vocabulary", c_int),
        ("activation", c_int),
        ("epsilon", c_float),
        ("scaling", c_float),
        ("slots", c_long),
        ("embedding", c_void_p),
        ("final_norm", c_void_p),
        ("head", Matrix),
        ("layer", POINTER(Layer)),
    ]


class Batch(Structure):
    _fields_: ClassVar = [
        ("tokens", c_int),
        ("spans", c_int),
        ("samples", c_int),
        ("ids", c_void_p),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("sampled", c_void_p),
        ("span", c_void_p),
        ("cosines", c_void_p),
        ("sines", c_void_p),
        ("logits", c_void_p),
        ("logits_stride", c_long),
    ]


class Library:
    """The functions of the shared object. `size`: bytes of an element, which is a float32 (4), a bf16 (2) or a whole number
    in 8 bits (1), 128 too high. `half` says that a model's elements are bf16 and not float32."""

    def __init__(self, path: Path) -> None:
        self._functions = functions = ctypes.CDLL(str(path))
        _declare(functions.headrace_packed_bytes, c_long, c_int, c_int, c_int)
        _declare(functions.headrace_pack, None, c_void_p, c_int, c_int, c_int, c_int, c_int, c_void_p, c_int)
        _declare(functions.headrace_decoder, c_void_p, POINTER(Model), c_int, c_int, c_int)
        _declare(functions.headrace_step, None, c_void_p, POINTER(Batch))
        _declare(functions.headrace_free, None, c_void_p)

    def packed_bytes(self, outputs: int, inputs: int, size: int) -> int:
        return int(self._functions.headrace_packed_bytes(outputs, inputs, size))

    def pack(
        self, weights: int, outputs: int, inputs: int, size: int, first: int, every: int, panels: int, threads: int
    ) -> None:
        """A row-major [outputs, inputs] matrix at `weights` becomes panels `first`, `first + every`, ... at `panels`."""
        self._functions.headrace_pack(weights, outputs, inputs, size, first, every, panels, threads)

    def decoder(self, model: Model, half: bool, tokens_max: int, threads: int) -> int:
        """A decoder of steps of up to `tokens_max` tokens; `free` it. What `model` points to must outlive it."""
        return int(self._functions.headrace_decoder(ctypes.byref(model), half, tokens_max, threads))

    def step(self, decoder: int, batch: Batch) -> None:
        """Compute a batch. Python runs on meanwhile: the interpreter's lock is free."""
        self._functions.headrace_step(decoder, ctypes.byref(batch))

    def free(self, decoder: int) -> None:
        self._functions.headrace_free(decoder)


def _declare(function: Any, result: Any, *arguments: Any) -> None:
    function.restype = result
    function.argtypes = arguments
