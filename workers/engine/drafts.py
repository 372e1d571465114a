"""Guesses of what comes next: what came after the same tokens earlier in the same text. Pure.

A decode step reads all weights for one token of each sequence; in a small batch a few rows more cost little beside that. So
a step may verify a draft, and keeps as much of it as is what it would have drawn anyway: no token is other than without.
After prompt lookup decoding (A. Saxena, 2023). Text that repeats nothing soon has no drafts any more.
"""

from collections.abc import Collection

from workers.engine.counts import penalises
from workers.engine.pacer import Pacer
from workers.engine.sequence import Sequence, StepPlan

DRAFT_MAX = 7  # tokens
ROWS_MAX = 8  # of a step with drafts: so many a product takes at once (native/product.h); more cost their full price
NGRAMS = (3, 2)  # tokens that must be the same, the best evidence first
INDEXED_MAX = 512  # tokens in one step: of a long prompt that is new here
REST_MAX = 64  # tokens that a sequence goes without drafts when several were all wrong


class Lookup:
    """The n-grams of one sequence, and how well it has been guessed so far."""

    def __init__(self) -> None:
        self.length = 2  # of the next draft at most
        self._after: dict[tuple[int, ...], int] = {}  # the position after the latest n-gram of those tokens
        self._indexed = 1  # leading tokens whose n-grams are known; the text's last one is never among them
        self._misses = 0  # drafts in a row of which nothing was right
        self._rests_until = 0  # tokens of the sequence

    def draft(self, tokens: list[int], length: int) -> tuple[int, ...]:
        """Up to `length` tokens that may follow `tokens`, which has only grown since the last call."""
        end = len(tokens) - 1
        stop = min(end, self._indexed + INDEXED_MAX)
        for position in range(self._indexed, stop):
            for n in NGRAMS:
                if position + 1 >= n:
                    self._after[tuple(tokens[position + 1 - n : position + 1])] = position + 1
        self._indexed = max(self._indexed, stop)
        if stop < end or end < self._rests_until:
            return ()
        for n in NGRAMS:
            found = self._after.get(tuple(tokens[-n:]))
            if found is not None:
                period = len(tokens) - found  # what followed may be followed by itself
                return tuple(tokens[found + place % period] for place in range(min(length, self.length)))
        return ()

    def learn(self, end: int, drafted: int, accepted: int) -> None:
        """Of a draft of so many tokens so many were right; the sequence has `end` tokens now."""
        self.length = min(DRAFT_MAX, max(self.length, 2 * drafted) if accepted == drafted else accepted + 1)
        self._misses = 0 if accepted else self._misses + 1
        if not accepted:
            self._rests_until = end + min(REST_MAX, 1 << (self._misses - 1))


class Drafter:
    """Sets the drafts of the next step, and counts what became of them."""

    def __init__(self) -> None:
        self.drafted = 0
        self.accepted = 0

    def propose(self, running: Collection[Sequence], pacer: Pacer) -> None:
        """Set the drafts of those in the batch, before a step is planned. None beside a prompt, whose step costs by the row."""
        room = ROWS_MAX - len(running)
        if room > 0 and pacer.bounds:
            context = sum(len(each.tokens) for each in running)
            while room > 0 and not pacer.admits(len(running) + room, context):
                room -= 1
        if any(len(each.tokens) - each.computed != 1 for each in running):
            room = 0
        for sequence in running:
            sequence.draft = self._draft(sequence, room) if room > 0 else ()
            room -= len(sequence.draft)

    def learn(self, plan: StepPlan, counts: list[int]) -> None:
        """A step is done; `counts`: tokens drawn for each slice that samples."""
        sampling = (part for part in plan.slices if part.samples)
        for part, count in zip(sampling, counts, strict=True):
            if part.draft:
                drafted, accepted = len(part.draft), count - 1
                self.drafted += drafted
                self.accepted += accepted
                part.sequence.lookup.learn(len(part.sequence.tokens), drafted, accepted)

    def _draft(self, sequence: Sequence, room: int) -> tuple[int, ...]:
        if sequence.matcher is not None or penalises(sequence.sampling):
            return ()  # what may follow a guess depends on it
        if sequence.lookup is None:
            sequence.lookup = Lookup()
        lookup: Lookup = sequence.lookup
        return lookup.draft(sequence.tokens, room)
