"""Paged KV memory as block numbers: who holds which, which are free, and what the full ones contain. No tensors here.

A full block can be known by a hash that covers its tokens, all tokens before them and a salt: equal hashes mean equal keys
and values. A known block outlives its holders for as long as its memory is not needed (after vLLM V1's prefix cache).
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

BLOCK_TOKENS = 16


def blocks_for(tokens: int) -> int:
    """Blocks that hold `tokens` tokens."""
    return -(-tokens // BLOCK_TOKENS)


def chain(before: bytes, tokens: list[int]) -> bytes:
    """The hash of a full block: `before` is that of the block before it, or the salt."""
    return hashlib.blake2b(before + array("q", tokens).tobytes(), digest_size=16).digest()


class Holder(Protocol):
    """On whose account blocks are held: `blocks` is kept here."""

    blocks: int


class BlockPool:
    """Blocks 0 .. total-1. Each is free, or held by one or more sequences (its reference count).

    A block is on the account of the first holder that took it, until nobody holds it. A free one is plain, or known by its
    hash: those are reused last, the one that was free for longest first.
    """

    def __init__(self, total: int) -> None:
        if total < 1:
            raise ValueError(f"a pool has at least 1 block, not {total}")
        self.total = total
        self.returned = 0  # blocks that became free so far: while it stays, what did not fit does not fit
        self._references = [0] * total
        self._holders: list[Holder | None] = [None] * total
        self._hashes: list[bytes | None] = [None] * total
        self._known: dict[bytes, int] = {}
        self._plain: dict[int, None] = dict.fromkeys(reversed(range(total)))  # the last one is taken first
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def free(self) -> int:
        return len(self._plain) + len(self._cached)

    @property
    def used(self) -> int:
        return self.total - self.free

    @property
    def cached(self) -> int:
        """Free blocks whose contents can still be matched."""
        return len(self._cached)

    def take(self, count: int, after: int, holder: Holder) -> list[int]:
        """Take `count` blocks, following `after` where those are plain: attention reads a contiguous run without a copy.

        The caller has made sure that `count` blocks are free.
        """
        assert 0 <= count <= self.free, f"{count} blocks wanted, {self.free} free"
        plain = self._plain
        if count == 1 and after + 1 in plain:  # most of the time, for a sequence that grows
            block = after + 1
            del plain[block]
            assert self._references[block] == 0, f"block {block} was free and held"
            self._references[block] = 1
            self._holders[block] = holder
            holder.blocks += 1
            return [block]
        taken: list[int] = []
        while plain and len(taken) < count:
            after += 1
            if after in plain:
                del plain[after]
            else:
                after, _ = plain.popitem()
            taken.append(after)
        if len(taken) < count:
            taken += sorted(self._evict() for _ in range(count - len(taken)))
        for block in taken:
            assert self._references[block] == 0, f"block {block} was free and held"
            self._references[block] = 1
            self._holders[block] = holder
        holder.blocks += count
        return taken

    def follows(self, block: int) -> bool:
        """Whether the block after `block` could be taken to go on where it ends."""
        return block + 1 in self._plain

    def give_back(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each of `blocks`, given in the order of their tokens; the last ones are forgotten first."""
        references, holders, hashes, plain, cached = (
            self._references,
            self._holders,
            self._hashes,
            self._plain,
            self._cached,
        )
        for block in reversed(blocks):
            count = references[block] - 1
            assert count >= 0, f"block {block} was given back twice"
            references[block] = count
            if count == 0:
                holder = holders[block]
                assert holder is not None, f"block {block} is on nobody's account"
                holder.blocks -= 1
                holders[block] = None
                self.returned += 1
                if hashes[block] is None:
                    plain[block] = None
                else:
                    cached[block] = None

    def find(self, hashes: Sequence[bytes]) -> list[int]:
        """The known blocks of the longest beginning of `hashes`; they are not taken."""
        found = []
        for each in hashes:
            block = self._known.get(each)
            if block is None:
                break
            found.append(block)
        return found

    def idle(self, blocks: Sequence[int]) -> int:
        """How many of `blocks` nobody holds."""
        references = self._references
        return sum(references[block] == 0 for block in blocks)

    def share(self, blocks: Sequence[int], holder: Holder) -> None:
        """Add one reference to each of `blocks`, which are known."""
        for block in blocks:
            assert self._hashes[block] is not None, f"block {block} is not known"
            if self._references[block] == 0:
                del self._cached[block]
                self._holders[block] = holder
                holder.blocks += 1
            self._references[block] += 1

    def register(self, block: int, content: bytes) -> None:
        """A held block is full and computed: it is known by `content` now, unless another one is already."""
        assert self._references[block] > 0, f"block {block} is free"
        assert self._hashes[block] is None, f"block {block} is known already"
        if content not in self._known:
            self._known[content] = block
            self._hashes[block] = content

    def forget(self, blocks: Sequence[int]) -> None:
        """The contents of these held blocks may be wrong: they are not matched again."""
        for block in blocks:
            known = self._hashes[block]
            if known is not None:
                del self._known[known]
                self._hashes[block] = None

    def writable(self, block: int) -> bool:
        """Whether the one sequence that holds it may write to it: nobody else reads it, now or later."""
        return self._references[block] == 1 and self._hashes[block] is None

    def check(self) -> None:
        """Assert that exactly the blocks without a reference are free. Cheap enough to run whenever the engine is idle."""
        unreferenced = self._references.count(0)
        assert unreferenced == self.free, f"{unreferenced} blocks are held by nobody, {self.free} are free"
        assert len(self._plain.keys() & self._cached.keys()) == 0, "a free block is plain and known"
        known = self.total - self._hashes.count(None)
        assert known == len(self._known), f"{known} blocks have a hash, {len(self._known)} hashes a block"

    def check_each(self) -> None:
        """Assert it of each block, for tests: what is free and known, and who holds what."""
        self.check()
        for content, block in self._known.items():
            assert self._hashes[block] == content, f"block {block} is known by another hash"
        for block in range(self.total):
            free, known = self._references[block] == 0, self._hashes[block] is not None
            assert (block in self._plain) == (free and not known), f"block {block}: free {free}, known {known}"
            assert (block in self._cached) == (free and known), f"block {block}: free {free}, known {known}"
            assert (self._holders[block] is None) == free, f"block {block}: free {free}, {self._holders[block]}"

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        self.forget([block])
        return block
