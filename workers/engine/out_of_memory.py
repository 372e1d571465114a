"""What an exception of a step says of the device: that it ran out of memory, or that it is lost. Imports no torch."""

import gc
import sys

CPU_MESSAGE = "can't allocate memory"  # of torch's allocator for the CPU, which raises a RuntimeError
LOST_MESSAGES = ("illegal memory access", "device-side assert", "unspecified launch failure", "uncorrectable ECC")


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # torch's, for accelerators
        return True
    return isinstance(error, RuntimeError) and CPU_MESSAGE in str(error)


def is_lost(error: BaseException) -> bool:
    """Whether the process can use its device no more: each later call to it would raise the same."""
    return isinstance(error, RuntimeError) and any(message in str(error) for message in LOST_MESSAGES)


def give_back() -> None:
    """Return memory that torch keeps for later to the device; call it when the exception and its frames are gone."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()
