"""How many blocks of keys and values a device takes."""

import mmap
from math import prod
from pathlib import Path

import psutil
import torch

from workers.engine.blocks import BLOCK_TOKENS, blocks_for
from workers.engine.gate import LayerShape
from workers.engine.load import LoadRefused

CPU_SHARE = 0.25  # of the memory that is free: the machine serves others too
CUDA_SHARE = 0.85
CGROUP = Path("/sys/fs/cgroup")


def block_bytes(layers: list[LayerShape], dtype: torch.dtype, int8: bool = False) -> int:
    """Bytes of one block in all layers; in 8 bits each key and each value has a scale of `dtype` beside it."""
    numbers = sum(layer.heads * (layer.key_dim + layer.value_dim) for layer in layers)
    scales = sum(2 * layer.heads for layer in layers)
    return BLOCK_TOKENS * (numbers + scales * dtype.itemsize if int8 else numbers * dtype.itemsize)


def blocks_that_fit(per_block: int, device: torch.device, slots: int, max_model_len: int) -> int:
    """Blocks for `slots` sequences of full length, or what the memory allows. Raises LoadRefused if it allows none."""
    cuda = device.type == "cuda"
    free = int(torch.cuda.mem_get_info(device)[0] * CUDA_SHARE if cuda else available() * CPU_SHARE)
    blocks = min(slots * blocks_for(max_model_len), free // per_block)
    if blocks < 1:
        raise LoadRefused(f"no memory for keys and values: {free} bytes may be used, one block has {per_block}")
    return blocks


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros; on the CPU the memory is taken as it is written, page by small page.

    torch.zeros would touch all of a large cache at once, and huge pages much of it at the first token of each slot.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def available() -> int:
    """Bytes that this process may still take: of the machine, and of its cgroup where that has a limit."""
    available = psutil.virtual_memory().available
    try:
        limit = int((CGROUP / "memory.max").read_text())
        used = int((CGROUP / "memory.current").read_text())
    except (OSError, ValueError):  # no cgroup of version 2, or no limit ("max")
        return available
    return min(available, max(0, limit - used))
