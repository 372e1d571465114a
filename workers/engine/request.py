"""What goes into an engine and what comes out of it: data only, and the protocol that every engine keeps."""

import asyncio
from collections.abc import Callable
from typing import Protocol

import msgspec

from shared.wire import Embedding, Input, Logprob, Sampling, Usage


class TenantLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What a tenant may have of one engine."""

    weight: float = 1.0  # its share against the others'
    priority: int = 0  # of two that wait, the higher one goes first
    slots_max: int | None = None  # sequences in the batch; None: what is not reserved
    blocks_max: int | None = None  # KV blocks; None: what is not reserved


class Standing(msgspec.Struct, frozen=True):
    """Where a tenant stands with the ledger of an engine."""

    counter: float  # of two tenants of one priority, the smaller one is served next
    waiting: int  # sequences of the class that are not in the batch


class EngineRequest(msgspec.Struct, kw_only=True):
    """A prompt to continue, or inputs to embed. `key` names one run of it: a restarted generation has a fresh key."""

    key: str
    tenant: str
    prompt_ids: list[int]  # [] with `inputs`
    sampling: Sampling
    inputs: list[list[int]] = []  # ids of each: an engine of vectors takes these, one that generates prompt_ids
    dimensions: int = 0  # of their vectors; 0: the model's
    prefix: list[list[int]] = []  # per choice: ids handed out before (by another worker), an echo's too; [] = none
    limits: TenantLimits = TenantLimits()  # the tenant's, as of now
    admit_by: float | None = None  # time.monotonic() by which it should be in the batch; None: no matter when
    detached: bool = False  # nobody waits for it: it has what the others leave, and leaves the batch first


class Outside(msgspec.Struct, frozen=True):
    """Who has requests of a class that wait to be submitted."""

    tenants: dict[str, TenantLimits]
    detached: bool


Item = EngineRequest | str | Outside | None
"""What an engine's thread is told: a run, the key of one to cancel, who waits outside; None: look whether to stop."""


class TokenEvent(msgspec.Struct, kw_only=True):
    """What one step added to one choice of one run.

    `ids` are all sampled ids, end-of-sequence and stop tokens included; `text[i]` is the text that `ids[i]` released: ""
    while characters are incomplete or may become a stop string. What was held back is in the last `text` of the finish.
    A resumed run whose prefix is already complete has one event with no ids and a finish. The text released by the k-th
    id depends on the first k ids only, never on chunking, neighbours or where the run was resumed. So a choice with a
    prefix first has an event with nothing but `before`, the text of its prefix. A choice that is embedded has one event: no
    ids, its finish and its vector.
    """

    key: str
    choice: int
    ids: list[int] = []
    text: list[str] = []
    logprobs: list[Logprob] | None = None
    before: list[str] | None = None  # one text for each id of the prefix
    echo: bool = False  # the ids are of the prompt (Sampling.echo): they come before all others, and are not sampled
    finish: str | None = None  # "stop" | "length": this choice is complete
    usage: Usage | None = None  # with the finish of the last choice of the run
    error: tuple[str, str] | None = None  # (code of shared.errors, message): the whole run ended
    vector: bytes = b""  # float32, little-endian


class EngineInfo(msgspec.Struct, kw_only=True):
    """Fixed once the model is loaded."""

    max_model_len: int  # tokens, prompt and output together
    slots: int  # sequences that can be in the batch
    blocks_total: int  # of 16 tokens each
    device: str
    dtype: str
    load_seconds: dict[str, float] = {}  # by phase


class EngineStats(msgspec.Struct, kw_only=True):
    """A snapshot, consistent to within one step."""

    running: int
    waiting: int  # but for the detached ones
    blocks_used: int
    steps: int
    prompt_tokens: int
    generated_tokens: int
    preemptions: int
    step_started: float  # time.monotonic() when the step now running began; 0.0 between steps; -inf: the engine is lost
    step_ms: float = 0.0  # a moving mean
    blocks_cached: int = 0  # free, with contents that can still be matched
    cache_queries: int = 0  # prompt tokens looked up in the prefix cache
    cache_hits: int = 0  # of those, found
    blocked: bool = False  # as the engine's
    detached_waiting: int = 0  # detached sequences that are not in the batch
    late: tuple[str, ...] = ()  # runs that have not begun and will hardly be in the batch by their `admit_by`
    service: dict[str, int] = {}  # prompt tokens computed + 2 x generated, of a bounded number of tenants
    drafted: int = 0  # tokens guessed, for a step to verify
    accepted: int = 0  # of those, right
    jain: float = 1.0  # fairness of the service of tenants that wait: 1 is fair, 1 / n is all to one of n


class Engine(Protocol):
    """Continuous batching on a thread of its own. All methods but `prepare...` are cheap and called on the event loop."""

    info: EngineInfo

    def start(self, loop: asyncio.AbstractEventLoop, on_events: Callable[[list[TokenEvent]], None]) -> None:
        """Start the engine thread. After each step `on_events` runs once on `loop` with that step's events."""

    def stop(self) -> None:
        """End the thread after the current step and join it."""

    def prepare(self, prompt: Input, sampling: Sampling) -> list[int]:
        """Prompt ids of an input: chat template, tokenising, checks. Thread-safe and blocking: call it off the loop.

        Raises BadRequest, ContextLength (both numbers in its message), Unsupported, or WrongTask if it makes vectors.
        """

    def prepare_inputs(self, embedding: Embedding) -> list[list[int]]:
        """The same of inputs to embed. Raises WrongTask if it generates."""

    def submit(self, request: EngineRequest) -> None:
        """Queue a run. It starts at a step edge; it ends with a finish for each choice, an error, or `cancel`."""

    def cancel(self, key: str) -> None:
        """End a run at the next step edge: its slot and blocks are free then, and no more events come. Idempotent."""

    def standings(self, outside: dict[str, TenantLimits], detached: bool = False) -> dict[str, Standing]:
        """Of the tenants that have requests of a class which wait to be submitted: from now on they wait for the ledger, too.

        What they are owed is kept for them, while a tenant without anything waiting earns nothing.
        """

    @property
    def blocked(self) -> bool:
        """Whether a run waits for a slot, for memory or for a smaller batch: more would wait behind it."""

    def stats(self) -> EngineStats: ...
