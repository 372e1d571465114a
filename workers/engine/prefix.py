"""The prefix cache: sequences that begin with the same tokens share the blocks of that beginning. Pure.

A block can be found once the step that completed it is done, by sequences of the same tenant only (or of all, if the model
says so: how fast an answer comes would tell what others have asked). What is about to be computed is known, too.
"""

from workers.engine.blocks import BLOCK_TOKENS, BlockPool, chain
from workers.engine.sequence import Sequence

MODES = ("tenant", "shared", "off")


class PrefixCache:
    """What sequences have to do with the known blocks of a pool. Blocks in part are never shared, so nothing is ever copied."""

    def __init__(self, pool: BlockPool, mode: str = "tenant") -> None:
        """`mode`: "tenant", "shared" by all tenants, or "off"."""
        assert mode in MODES, mode
        self.queries = 0  # tokens that were looked up for sequences that then entered the batch for the first time
        self.hits = 0
        self._pool = pool
        self._on = mode != "off"
        self._shared = mode == "shared"
        self._computing: dict[bytes, Sequence] = {}  # blocks that will be known soon, by hash

    def find(self, sequence: Sequence) -> list[int] | None:
        """The known blocks that `sequence` can begin with. None: it had better wait for another one.

        That is when one in the batch is computing most of what this one lacks. So the choices of a request share its
        prompt, and so do requests that begin alike and come together.
        """
        if not self._on or sequence.fresh:
            return []
        hashes = self._hash(sequence, (len(sequence.tokens) - 1) // BLOCK_TOKENS)  # one token is left: it samples
        found = self._pool.find(hashes)
        return None if self._comes_soon(sequence, hashes, len(found)) else found

    def is_awaited(self, sequence: Sequence) -> bool:
        """Whether what `sequence` waits for since `find` is still being computed."""
        other = sequence.awaits
        if other is None:
            return False
        if other.slot >= 0 and other.computed < sequence.awaited:
            return True
        sequence.awaits = None
        return False

    def entered(self, sequence: Sequence) -> None:
        """`sequence` is in the batch, its found blocks computed."""
        if sequence.cached < 0:
            sequence.cached = sequence.computed
            self.queries += len(sequence.tokens)
            self.hits += sequence.computed
        if self._on:
            first = sequence.computed // BLOCK_TOKENS
            for content in self._hash(sequence, len(sequence.tokens) // BLOCK_TOKENS)[first:]:
                self._computing.setdefault(content, sequence)

    def completed(self, sequence: Sequence, first: int, end: int) -> None:
        """Its blocks `first` .. `end - 1` are full since the step that was just done."""
        if not self._on:
            return
        hashes = self._hash(sequence, end)
        for index in range(first, end):
            self._pool.register(sequence.blocks[index], hashes[index])
            self._compute_no_more(sequence, hashes[index])

    def leaves(self, sequence: Sequence) -> None:
        """`sequence` is about to leave the batch, whether it is at its end or not."""
        for content in sequence.hashes[sequence.computed // BLOCK_TOKENS :]:
            self._compute_no_more(sequence, content)

    def check(self) -> None:
        """Assert that what is said to come soon does."""
        for sequence in self._computing.values():
            assert sequence.slot >= 0, "a block is to be computed by a sequence that is not in the batch"

    def _comes_soon(self, sequence: Sequence, hashes: list[bytes], found: int) -> bool:
        other = self._computing.get(hashes[found]) if found < len(hashes) else None
        if other is None or (other.detached and not sequence.detached):  # that one may have to leave any moment
            return False
        common = found
        while common < min(len(hashes), len(other.hashes)) and hashes[common] == other.hashes[common]:
            common += 1
        if 2 * (common - found) * BLOCK_TOKENS < len(sequence.tokens) - found * BLOCK_TOKENS:
            return False
        sequence.awaits, sequence.awaited = other, common * BLOCK_TOKENS
        return True

    def _hash(self, sequence: Sequence, count: int) -> list[bytes]:
        """The hashes of its first `count` blocks, which are full. Each is computed once."""
        hashes, tokens = sequence.hashes, sequence.tokens
        while len(hashes) < count:
            start = len(hashes) * BLOCK_TOKENS
            before = hashes[-1] if start else self._salt(sequence)
            hashes.append(chain(before, tokens[start : start + BLOCK_TOKENS]))
        return hashes if len(hashes) == count else hashes[:count]

    def _salt(self, sequence: Sequence) -> bytes:
        return b"shared" if self._shared else b"tenant:" + sequence.tenant.encode()

    def _compute_no_more(self, sequence: Sequence, content: bytes) -> None:
        if self._computing.get(content) is sequence:
            del self._computing[content]
