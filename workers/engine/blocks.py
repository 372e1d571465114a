"""Paged KV memory as block numbers: who holds which, and which are free. No tensors here."""

from collections import OrderedDict
from collections.abc import Sequence

BLOCK_TOKENS = 16


def blocks_for(tokens: int) -> int:
    """Blocks that hold `tokens` tokens."""
    return -(-tokens // BLOCK_TOKENS)


class BlockPool:
    """Blocks 0 .. total-1. Each is free, or held by one or more sequences (its reference count).

    The free list is ordered: what may be reused first is at its front. A block that holds nothing worth keeping goes back to
    the front, so that one whose contents can still be matched (a hashed block) may wait at the back and be reused last.
    """

    def __init__(self, total: int) -> None:
        if total < 1:
            raise ValueError(f"a pool has at least 1 block, not {total}")
        self.total = total
        self._references = [0] * total
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(total))

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return self.total - len(self._free)

    def take(self, count: int, after: int) -> list[int]:
        """Take `count` blocks, following `after` where those are free: attention reads a contiguous run without a copy.

        The caller has made sure that `count` blocks are free.
        """
        assert 0 <= count <= len(self._free), f"{count} blocks wanted, {len(self._free)} free"
        taken = []
        for _ in range(count):
            after += 1
            if after in self._free:
                del self._free[after]
            else:
                after, _ = self._free.popitem(last=False)
            assert self._references[after] == 0, f"block {after} was free and held"
            self._references[after] = 1
            taken.append(after)
        return taken

    def give_back(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each of `blocks`, given in the order of their tokens; the last ones are reused last."""
        for block in reversed(blocks):
            count = self._references[block] - 1
            assert count >= 0, f"block {block} was given back twice"
            self._references[block] = count
            if count == 0:
                self._free[block] = None
                self._free.move_to_end(block, last=False)

    def check(self) -> None:
        """Assert that exactly the blocks without a reference are free. Cheap enough to run whenever the engine is idle."""
        unreferenced = self._references.count(0)
        assert unreferenced == len(self._free), f"{unreferenced} blocks are held by nobody, {len(self._free)} are free"
