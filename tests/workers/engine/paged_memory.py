"""A fake model whose KV memory is checked: what a sequence reads must be what its own tokens wrote there."""

from typing import Any

from workers.engine.blocks import BLOCK_TOKENS
from workers.engine.engine import Drawn, Runner
from workers.engine.sequence import Sequence, Slice, StepPlan

VOCABULARY = 1000


def advance(state: int, token: int) -> int:
    """The state of a text after one more token; it depends on all of them."""
    return (state * 6364136223846793005 + token * 2862933555777941757 + 1442695040888963407) % (1 << 64)


def begin(owner: str) -> int:
    """The state of an empty text; `owner`: whose it is, where nobody else may read it."""
    return int.from_bytes(owner.encode(), "little") + 1


def drawn_token(state: int, choice: int, seed: int) -> int:
    return (advance(advance(state, choice), seed) >> 32) % VOCABULARY


def expected_output(owner: str, prompt: list[int], count: int, choice: int = 0, seed: int = 0) -> list[int]:
    """What the model gives for a prompt, whatever was computed, cached, shared or lost on the way."""
    state = begin(owner)
    for token in prompt:
        state = advance(state, token)
    output = []
    for _ in range(count):
        output.append(drawn_token(state, choice, seed))
        state = advance(state, output[-1])
    return output


class PagedMemory(Runner):
    """A runner. Each slot of the memory holds the state of the text up to its token."""

    def __init__(self, by_tenant: bool = True) -> None:
        self.slots: dict[int, int] = {}
        self.computed_tokens = 0
        self._by_tenant = by_tenant

    def forward(self, plan: StepPlan) -> list[tuple[Slice, list[int]]]:
        """Write the states of all slices; those of the rows from the last of the sequence's own tokens on, per slice."""
        written: dict[int, str] = {}
        rows = []
        for part in plan.slices:
            sequence = part.sequence
            state = self._read(sequence, part.start)
            tokens = [*sequence.tokens, *part.draft]
            states = []
            for position in range(part.start, part.start + part.count):
                state = advance(state, tokens[position])
                states.append(state)
                slot = _slot(sequence, position)
                assert slot not in written, f"{sequence.key} and {written[slot]} write to one slot"
                written[slot] = sequence.key
                self.slots[slot] = state
            rows.append((part, states[-1 - len(part.draft) :]))
            self.computed_tokens += part.count
        return rows

    def sample(self, plan: StepPlan, computed: list[tuple[Slice, list[int]]]) -> Drawn:
        tokens: list[int] = []
        counts: list[int] = []
        for part, states in computed:
            if part.samples:
                sequence = part.sequence
                drawn: list[int] = []
                for guess, state in zip([*part.draft, -1], states, strict=True):
                    drawn.append(drawn_token(state, sequence.choice, sequence.sampling.seed))
                    if drawn[-1] != guess:
                        break
                tokens += drawn
                counts.append(len(drawn))
        return Drawn(tokens, counts=counts if any(part.draft for part in plan.slices) else None)

    def spoil(self, plan: StepPlan) -> None:
        """A step that raises leaves anything where it was going to write."""
        for part in plan.slices:
            for position in range(part.start, part.start + part.count):
                self.slots[_slot(part.sequence, position)] = -1

    def _read(self, sequence: Sequence, end: int) -> int:
        state = begin(sequence.tenant if self._by_tenant else "")
        for position in range(end):
            state = advance(state, sequence.tokens[position])
            found = self.slots.get(_slot(sequence, position))
            assert found == state, f"{sequence.key} reads at {position} what it has not written"
        return state


def _slot(sequence: Any, position: int) -> int:
    block: int = sequence.blocks[position // BLOCK_TOKENS]
    return block * BLOCK_TOKENS + position % BLOCK_TOKENS
