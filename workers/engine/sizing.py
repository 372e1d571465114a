"""Whether a model fits on a device, and how many blocks of keys and values fit beside it. No torch: sums only."""

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path

from workers.engine.blocks import BLOCK_TOKENS, blocks_for
from workers.engine.load import LoadRefused

MARGIN = 0.03  # of the device: fragments, the driver's own
BLOCKS_MIN = 16  # 256 tokens: with less there is no use in serving
FLOATING = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")
GIB = 2**30


@dataclass(slots=True, frozen=True)
class Room:
    """A device's memory, and what is taken of what is free, in bytes."""

    total: int
    free: int  # with the weights in place
    step: int  # the largest step, its sampling included
    graphs: int


def weight_bytes(directory: Path, itemsize: int) -> int:
    """Bytes of a model's weights, from the headers of its safetensors files; floating ones take `itemsize` each."""
    return sum(_file_bytes(path, itemsize) for path in directory.glob("*.safetensors"))


def refuse_weights(weights: int, free: int, where: str) -> None:
    """Raise LoadRefused, with the sum, for weights that a device cannot hold."""
    if weights > free:
        raise LoadRefused(f"out of memory: the weights take {gib(weights)}, and {gib(free)} of {where} are free")


def blocks_beside(room: Room, per_block: int, slots: int, max_model_len: int, wanted: int | None) -> int:
    """Blocks for `slots` sequences of full length, or what fits; `wanted`: exactly so many. Raises LoadRefused, with the
    sum, for less than is of use or wanted.
    """
    margin = int(room.total * MARGIN)
    left = room.free - room.step - room.graphs - margin
    fitting = max(0, left) // per_block
    most = slots * blocks_for(max_model_len)
    least = wanted or min(BLOCKS_MIN, blocks_for(max_model_len))
    if fitting < least:
        raise LoadRefused(
            f"out of memory: {gib(room.free)} of {gib(room.total)} are free beside the weights, of which a step takes"
            f" {gib(room.step)}, decode graphs {gib(room.graphs)} and a reserve {gib(margin)}; the {gib(max(0, left))} left"
            f" hold {fitting} blocks of {BLOCK_TOKENS} tokens ({per_block} bytes each), and {least} are needed."
            " Fewer slots, a smaller prefill_chunk or kv_dtype=int8 need less"
        )
    return wanted or min(fitting, most)


def gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"


def _file_bytes(path: Path, itemsize: int) -> int:
    whole = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        try:
            header = json.loads(file.read(min(length, whole)))
            return sum(
                prod(tensor["shape"]) * itemsize
                if tensor["dtype"] in FLOATING
                else tensor["data_offsets"][1] - tensor["data_offsets"][0]
                for name, tensor in header.items()
                if name != "__metadata__"
            )
        except (ValueError, KeyError, TypeError, AttributeError):  # a broken file: who loads it says what is wrong
            return whole
