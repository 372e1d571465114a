"""The uniform number behind each sampled token: a function of (seed, choice, index) and of nothing else.

So the draw is the same under batching, preemption, on another worker and on another device.
"""

import hashlib
import struct

_U64 = (1 << 64) - 1


def uniform(seed: int, choice: int, index: int) -> float:
    """In [0, 1): the top 53 bits of the first 8 bytes, little endian, of blake2b(seed:u64 || choice:u32 || index:u32)."""
    digest = hashlib.blake2b(struct.pack("<QII", seed & _U64, choice, index), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53
