"""What a scheduler moves: sequences, and the parts of them that a step computes. Data only."""

from dataclasses import dataclass, field
from typing import Any

from shared.wire import Sampling
from workers.engine.fairness import NOBODY, Account

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

    draft: tuple[int, ...] = ()  # guesses what comes next, for a step to verify at once
    lookup: Any = None  # where its drafts come from (drafts.Lookup)
    fresh: bool = False  # every token is computed: none is taken from the prefix cache
    cached: int = -1  # leading tokens that the prefix cache had when it first entered the batch; -1: it has not
    preemptions: int = 0
    account: Account[Any] = NOBODY
    hashes: list[bytes] = field(default_factory=list)  # of its leading full blocks, as far as they were needed
    awaits: "Sequence | None" = None  # the one that is computing most of what this one lacks
    awaited: int = 0  # tokens of that one that are worth waiting for
    lacked: int = -1  # what the pool had returned when this one last lacked memory,
    capped: bool = False  # because of its tenant's cap
    entered: int = 0  # the step in which it was admitted
    detached: bool = False  # nobody waits for it: it has what the others leave, and leaves first

    @property
    def output_index(self) -> int:
        """Index of the output token that is sampled next."""
        return len(self.tokens) - self.prompt_length


@dataclass(slots=True)
class Slice:
    """Tokens `start` .. `start + count - 1` of a sequence, to be computed in this step.

    The last of them may be a `draft`, of tokens that the sequence does not have: a step that samples then draws up to
    one token more than was guessed right.
    """

    sequence: Sequence
    start: int
    count: int
    samples: bool  # they reach the end: the next token is sampled
    draft: tuple[int, ...] = ()

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
class Load:
    """What a step costs time for."""

    sequences: int = 0
    decodes: int = 0  # sequences that lack one token, and tokens of drafts
    context: int = 0  # tokens that those attend to
    prefill: int = 0  # prompt tokens
    pairs: int = 0  # of a prompt token and a token that it attends to


def load_of(slices: list[Slice], known: Load | None = None) -> Load:
    """What a step of these slices costs time for. `known`: the load of the first of them, to which the others are added."""
    load = known or Load()
    parts = slices[load.sequences :] if known else slices
    load.sequences = len(slices)
    for part in parts:
        if part.samples and part.count == 1 + len(part.draft):
            load.decodes += part.count
            load.context += part.start + 1
        else:
            load.prefill += part.count
            load.pairs += part.count * part.start + part.count * (part.count + 1) // 2
    return load


@dataclass(slots=True)
class StepPlan:
    slices: list[Slice]
    preempted: int = 0
    load: Load | None = None  # where there is a bound on the time of a step
