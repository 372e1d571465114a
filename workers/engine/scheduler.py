"""Which tokens the next step computes. Pure: no torch, no clock, no thread.

One rule instead of two phases (after vLLM V1): the computed part of a sequence catches up with its tokens. A decode is a
sequence that lacks one token; a prompt, the rest of a chunked prompt, a resumed prefix and a preempted sequence all lack more.
`plan` and `commit` are the only places where a sequence moves on.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from shared.wire import Sampling
from workers.engine.blocks import BLOCK_TOKENS, BlockPool, blocks_for

NOTHING = range(0)


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice of one run, from the prompt to its last token."""

    key: str
    tenant: str
    choice: int
    sampling: Sampling
    tokens: list[int]  # prompt and output: the only truth
    prompt_length: int
    length_max: int  # tokens, prompt and output together
    computed: int = 0  # leading tokens whose keys and values are in `blocks`
    blocks: list[int] = field(default_factory=list)
    slot: int = -1  # -1: not in the batch
    failures: int = 0  # steps that raised with this sequence in them
    alone: bool = False  # such a step is being repeated with this sequence only
    memo: Any = None  # what the runner keeps with a sequence; it lives and ends with it
    runner: Any = None  # what computes it, where there is a choice: it stays with it to its end
    matcher: Any = None  # what its grammar lets come next (grammar.Matcher)
    score_from: int | None = None  # first position of the prompt whose log probability is still to be handed out

    @property
    def output_index(self) -> int:
        """Index of the output token that is sampled next."""
        return len(self.tokens) - self.prompt_length


@dataclass(slots=True)
class Slice:
    """Tokens `start` .. `start + count - 1` of a sequence, to be computed in this step."""

    sequence: Sequence
    start: int
    count: int
    samples: bool  # they reach the end: the next token is sampled

    @property
    def scored(self) -> range:
        """Positions of the prompt whose log probabilities are computed here and still to be handed out.

        What is computed at a position is of the token after it: that of the first token nobody computes.
        """
        first = self.sequence.score_from
        if first is None:
            return NOTHING
        return range(max(self.start + 1, first), min(self.start + self.count + 1, self.sequence.prompt_length))


@dataclass(slots=True)
class StepPlan:
    slices: list[Slice]
    preempted: int = 0


class Admission(Protocol):
    """The order in which waiting sequences enter the batch, and which one leaves it when memory runs out."""

    def __len__(self) -> int: ...

    def add(self, sequence: Sequence) -> None:
        """`sequence` begins to wait."""

    def put_back(self, sequence: Sequence) -> None:
        """`sequence` was in the batch and must wait again, before those that were not."""

    def head(self) -> Sequence | None:
        """Who is next, without taking it."""

    def remove(self, sequence: Sequence) -> None:
        """`sequence` waits no longer: it was admitted, or ended."""

    def victim(self, running: Iterable[Sequence]) -> Sequence:
        """Who leaves the batch; `running` is in the order of admission and not empty."""


class Fifo:
    """First come, first served; the newest leaves first."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[Sequence, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, sequence: Sequence) -> None:
        self._waiting[sequence] = None

    def put_back(self, sequence: Sequence) -> None:
        self._waiting[sequence] = None
        self._waiting.move_to_end(sequence, last=False)

    def head(self) -> Sequence | None:
        return next(iter(self._waiting), None)

    def remove(self, sequence: Sequence) -> None:
        self._waiting.pop(sequence, None)

    def victim(self, running: Iterable[Sequence]) -> Sequence:
        return list(running)[-1]


class Scheduler:
    """Slots and blocks, and the sequences that have or await them.

    Every sequence given to `add` must fit into the whole pool on its own (`fits`): then a plan is never empty while a
    sequence is here.
    """

    def __init__(self, pool: BlockPool, slots: int, prefill_chunk: int, admission: Admission) -> None:
        assert slots >= 1
        assert prefill_chunk >= 1
        self.pool = pool
        self.slots = slots
        self.running: OrderedDict[Sequence, None] = OrderedDict()  # in the order of admission
        self.preemptions = 0
        self.slots_limit = slots  # below `slots` once a step did not fit into memory
        self._prefill_chunk = prefill_chunk
        self._admission = admission
        self._suspects: OrderedDict[Sequence, None] = OrderedDict()
        self._free_slots = list(range(slots - 1, -1, -1))

    @property
    def waiting(self) -> int:
        return len(self._admission) + sum(suspect.slot < 0 for suspect in self._suspects)

    @property
    def idle(self) -> bool:
        return not (self.running or self._admission or self._suspects)

    def fits(self, length_max: int) -> bool:
        """Whether a sequence of that many tokens can ever be computed to its end."""
        return blocks_for(length_max) <= self.pool.total

    def add(self, sequence: Sequence) -> None:
        assert self.fits(sequence.length_max), f"{sequence.length_max} tokens can never fit"
        self._admission.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """A sequence ended: its slot and blocks are free from here on."""
        self._suspects.pop(sequence, None)
        if sequence.slot < 0:
            self._admission.remove(sequence)
        else:
            self._release(sequence)

    def plan(self, budget: int) -> StepPlan:
        """The next step, of about `budget` tokens: every decode, then unfinished prefills, then admissions."""
        if self._suspects:
            return self._plan_alone()
        preempted = self._grow()
        decodes: list[Slice] = []
        prefills: list[Sequence] = []
        for sequence in self.running:
            length = len(sequence.tokens)
            if length - sequence.computed == 1:
                decodes.append(Slice(sequence, length - 1, 1, True))
            else:
                prefills.append(sequence)
        left = max(1, min(self._prefill_chunk, budget - len(decodes)))
        slices = decodes
        for sequence in prefills:
            if left <= 0:
                break
            slices.append(_chunk(sequence, left))
            left -= slices[-1].count
        while left > 0 and not preempted and self._admit():
            slices.append(_chunk(next(reversed(self.running)), left))
            left -= slices[-1].count
        return StepPlan(slices, preempted)

    def commit(self, plan: StepPlan, tokens: list[int]) -> None:
        """The step is done: `tokens` were sampled, one for each slice that samples, in their order."""
        drawn = iter(tokens)
        for part in plan.slices:
            sequence = part.sequence
            sequence.computed = part.start + part.count
            if part.samples:
                sequence.tokens.append(next(drawn))
                if sequence.alone:
                    sequence.alone = False
                    del self._suspects[sequence]

    def suspect(self, sequence: Sequence) -> None:
        """A step with this sequence raised: compute it anew, alone, before anything else goes on."""
        sequence.failures += 1
        sequence.alone = True
        self._release(sequence)
        self._suspects[sequence] = None

    @property
    def limits(self) -> str:
        return f"{self.slots_limit} slots, {self._prefill_chunk} tokens of prompts"

    def shrink(self, plan: StepPlan) -> bool:
        """This step did not fit into memory: plan smaller ones from now on. False if there are none smaller."""
        prefill = sum(part.count for part in plan.slices if part.count > 1)
        if prefill:
            self._prefill_chunk = max(1, prefill // 2)
            return True
        if len(plan.slices) == 1:
            return False
        self.slots_limit = len(plan.slices) // 2
        while len(self.running) > self.slots_limit:
            self._preempt(self._admission.victim(self.running))
        return True

    def check(self) -> None:
        """Assert that every block and slot is either free or held by exactly one sequence in the batch."""
        self.pool.check()
        blocks = [block for sequence in self.running for block in sequence.blocks]
        assert len(set(blocks)) == len(blocks) == self.pool.used, f"{len(blocks)} blocks held, {self.pool.used} used"
        slots = [sequence.slot for sequence in self.running] + self._free_slots
        assert sorted(slots) == list(range(self.slots)), f"slots {sorted(slots)}"
        for sequence in self.running:
            assert sequence.computed < len(sequence.tokens) <= sequence.length_max
            assert sequence.computed <= len(sequence.blocks) * BLOCK_TOKENS

    def _grow(self) -> int:
        """A block for each decode that begins one; sequences leave the batch while there are too few. How many left."""
        preempted = 0
        for sequence in list(self.running):
            while sequence.slot >= 0 and len(sequence.tokens) > len(sequence.blocks) * BLOCK_TOKENS:
                if self.pool.free:
                    sequence.blocks += self.pool.take(1, sequence.blocks[-1])
                else:
                    self._preempt(self._admission.victim(self.running))
                    preempted += 1
        return preempted

    def _admit(self) -> bool:
        """Let the next sequence in, if it has a slot and the memory for all its tokens."""
        sequence = self._admission.head()
        if sequence is None or len(self.running) >= self.slots_limit:
            return False
        # Each running sequence soon needs a block more: without one left for each, admission would end in preemption.
        if blocks_for(len(sequence.tokens)) + len(self.running) > self.pool.free:
            return False
        self._admission.remove(sequence)
        self._enter(sequence)
        return True

    def _plan_alone(self) -> StepPlan:
        sequence = next(iter(self._suspects))
        preempted = 0
        if sequence.slot < 0:
            while blocks_for(len(sequence.tokens)) > self.pool.free:
                self._preempt(self._admission.victim(self.running))
                preempted += 1
            self._enter(sequence)
        return StepPlan([_chunk(sequence, self._prefill_chunk)], preempted)

    def _enter(self, sequence: Sequence) -> None:
        sequence.slot = self._free_slots.pop()
        home = sequence.slot * self.pool.total // self.slots  # where this slot's blocks are likely to be contiguous
        sequence.blocks = self.pool.take(blocks_for(len(sequence.tokens)), home - 1)
        self.running[sequence] = None

    def _preempt(self, sequence: Sequence) -> None:
        self.preemptions += 1
        self._release(sequence)
        self._admission.put_back(sequence)

    def _release(self, sequence: Sequence) -> None:
        del self.running[sequence]
        self.pool.give_back(sequence.blocks)
        self._free_slots.append(sequence.slot)
        sequence.blocks = []
        sequence.slot = -1
        sequence.computed = 0


def _chunk(sequence: Sequence, tokens_max: int) -> Slice:
    length = len(sequence.tokens)
    count = min(length - sequence.computed, tokens_max)
    return Slice(sequence, sequence.computed, count, sequence.computed + count == length)
