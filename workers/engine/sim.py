"""The simulated engine: a clock instead of a model, deterministic words instead of language. For tests and benchmarks.

Everything but forward and sampling is the real engine: scheduling, blocks and prefix cache, fairness, pacing, text, events.
"""

import hashlib
import os
import re
import signal
import time
from array import array
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, get_args

import msgspec

from shared.errors import BadRequest, Unsupported
from shared.records import EngineSettings
from shared.wire import Grammar, Input, Logprob, TopLogprob
from workers.engine.blocks import BLOCK_TOKENS
from workers.engine.engine import BatchEngine, Drawn, Runner
from workers.engine.load import LoadRefused
from workers.engine.pacer import Cost
from workers.engine.request import EngineInfo
from workers.engine.sequence import Load, StepPlan, load_of
from workers.engine.sequence import Sequence as Choice
from workers.engine.text import TextStream

if TYPE_CHECKING:
    from workers.engine.grammar import Matcher

SYLLABLES = [consonant + vowel for consonant in "bdfghklmnprstvwz" for vowel in ("a", "e", "i", "o")]
WORDS = [f" {first}{second}" for first in SYLLABLES for second in SYLLABLES]
VOCABULARY_SIZE = len(WORDS)  # 4096
MAX_MODEL_LEN = 8192
MAX_TOKENS_DEFAULT = 64
DEADLY_WORD = "deadly"
_U64 = (1 << 64) - 1
FAULTY_ONE_IN = 20  # requests
LAGGING_STEPS = 3  # that a step with prefill takes as long as
SMOLLM2_CPU = Cost(step=14.0, decode=1.3, context=0.002, prefill=0.5, pair=0.0001)  # 135M parameters, bf16, 2 threads


Fault = Literal["none", "mortal", "unloadable", "fatal", "faulty", "lagging"]
"""How a profile misbehaves, as a bad version does:

mortal      a prompt that begins with DEADLY_WORD ends the process, as a fault in a kernel does
unloadable  the process ends while it loads, by an exception that nobody expects
fatal       the first step ends the process
faulty      one request in FAULTY_ONE_IN fails: which ones is a hash of prompt and seed
lagging     a step with prefill takes LAGGING_STEPS times as long
"""
FAULTS: tuple[Fault, ...] = get_args(Fault)[1:]


class Profile(msgspec.Struct, frozen=True):
    """What is simulated."""

    slots: int
    blocks: int
    step_ms: Callable[[Load], float] | None  # None: no time at all
    cost: Cost  # the same as the pacer knows it
    fault: Fault = "none"


class SimulatedFault(Exception):
    """A fault that was asked for by the profile's name."""


def by_sequences(points: Sequence[tuple[int, float]], slots: int, blocks: int) -> Profile:
    """A step's time depends on its number of sequences; prefill is folded into it."""
    sequences_ms = interpolated(points)
    decode = sequences_ms(slots) - sequences_ms(slots - 1)
    cost = Cost(step=sequences_ms(slots) - decode * slots, decode=decode)
    return Profile(slots, blocks, lambda load: sequences_ms(load.sequences), cost)


def interpolated(points: Sequence[tuple[int, float]]) -> Callable[[int], float]:
    """Linear between the points (sequences, ms), and beyond them as in the outermost two."""
    pairs = list(pairwise(points))

    def step_ms(sequences: int) -> float:
        (left, left_ms), (right, right_ms) = next((pair for pair in pairs if sequences <= pair[1][0]), pairs[-1])
        return left_ms + (sequences - left) * (right_ms - left_ms) / (right - left)

    return step_ms


def profile_named(name: str) -> Profile:
    """`zero`, `a100-13b`, `smollm2-cpu`, `fixed-<n>ms`, or `<fault>-<n>ms`. Raises LoadRefused for another name."""
    if name == "zero":
        return Profile(256, 16_384, None, Cost(step=0.0))
    if name == "a100-13b":
        # 13 GB for keys and values of 0.8 MB a token
        return by_sequences([(20, 20.0), (45, 22.0), (80, 45.0)], 45, 16_250 // BLOCK_TOKENS)
    if name == "smollm2-cpu":
        return Profile(64, 16_384, SMOLLM2_CPU.ms, SMOLLM2_CPU)
    kind, dash, rest = name.partition("-")
    if dash and (match := re.fullmatch(r"(\d+)ms", rest)):
        cost = Cost(step=float(match[1]))
        if kind == "fixed":
            return Profile(256, 16_384, cost.ms, cost)
        for fault in FAULTS:
            if kind == fault:
                return Profile(256, 16_384, cost.ms, cost, fault)
    known = ["zero", "a100-13b", "smollm2-cpu", "fixed-<n>ms", *(f"{fault}-<n>ms" for fault in FAULTS)]
    raise LoadRefused(f"no simulated profile {name!r}: there are {', '.join(known[:-1])} and {known[-1]}")


class SimulatedText:
    """About one token a word; each id is one short word with a leading space."""

    vocabulary_size = VOCABULARY_SIZE
    end_ids: frozenset[int] = frozenset()
    special_ids: frozenset[int] = frozenset()

    def encode(self, prompt: Input) -> list[int]:
        if prompt.token_ids is not None:
            ids = prompt.token_ids
        elif prompt.prompt is not None:
            ids = [_word_id(word) for word in prompt.prompt.split()]
        else:
            words = (f"{each.role} {each.content or ''}".split() for each in prompt.messages or [])
            ids = [_word_id(word) for message in words for word in message]
        if not ids:
            raise BadRequest("the prompt is empty", param="messages" if prompt.messages is not None else "prompt")
        return ids

    def stream(self, prompt_ids: Sequence[int], shown: Sequence[str] = ()) -> TextStream:
        return _WORD_STREAM

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(WORDS[token] for token in ids)

    def matcher(self, grammar: Grammar) -> "Matcher":
        what = "tools" if grammar.kind == "tools" else "response_format"
        raise Unsupported(f"{what}: a simulated model cannot follow a grammar", param=what)

    def token_bytes(self, token: int) -> bytes:
        return WORDS[token].encode()


class _WordStream:
    """Every token is whole characters, so that one stream without state serves all outputs."""

    step = staticmethod(WORDS.__getitem__)

    def flush(self) -> str:
        return ""


_WORD_STREAM = _WordStream()


class SimulatedRunner(Runner):
    """Output token i of choice c is a hash of (prompt ids, seed, c, i); at temperature 0 of (prompt ids, i)."""

    def __init__(self, step_ms: Callable[[Load], float] | None, fault: Fault = "none") -> None:
        self._step_ms = step_ms
        self._deadly = _word_id(DEADLY_WORD) if fault == "mortal" else -1
        self._fault = fault

    def forward(self, plan: StepPlan) -> None:
        if self._step_ms is not None:
            step_ms = self._step_ms(plan.load or load_of(plan.slices))
            time.sleep((step_ms * LAGGING_STEPS if self._fault == "lagging" and _has_prefill(plan) else step_ms) / 1e3)
        if self._fault == "fatal" or (
            self._deadly >= 0 and any(part.sequence.tokens[0] == self._deadly for part in plan.slices)
        ):
            os.kill(os.getpid(), signal.SIGKILL)

    def sample(self, plan: StepPlan, computed: None) -> Drawn:
        tokens = []
        logprobs: list[Logprob | None] | None = None
        for part in plan.slices:
            if part.samples:
                sequence = part.sequence
                if sequence.memo is None:
                    sequence.memo = _base(sequence)
                mixed = sequence.memo + (len(sequence.tokens) - sequence.prompt_length) * 0x9E3779B97F4A7C15 & _U64
                token = ((mixed ^ mixed >> 31) * 0xBF58476D1CE4E5B9 & _U64) >> 52
                tokens.append(token)
                if sequence.sampling.logprobs is not None:
                    if logprobs is None:
                        logprobs = [None] * (len(tokens) - 1)
                    logprobs.append(_logprob(token, sequence.sampling.logprobs))
                elif logprobs is not None:
                    logprobs.append(None)
        return Drawn(tokens, logprobs, _prompt_logprobs(plan), _failed(plan) if self._fault == "faulty" else [])


def simulated_info(profile: str, settings: EngineSettings) -> EngineInfo:
    """What the engine of `sim:<profile>` can hold. Raises LoadRefused for a profile that does not exist."""
    simulated = profile_named(profile)
    blocks = settings.kv_blocks or simulated.blocks
    return EngineInfo(
        max_model_len=min(settings.max_model_len or MAX_MODEL_LEN, blocks * BLOCK_TOKENS),
        slots=settings.slots or simulated.slots,
        blocks_total=blocks,
        device="simulated",
        dtype="none",
    )


def load_simulated(profile: str, settings: EngineSettings) -> BatchEngine:
    """The engine of `sim:<profile>`. Raises LoadRefused for one that does not exist, SimulatedFault for an unloadable one."""
    simulated = profile_named(profile)
    if simulated.fault == "unloadable":
        raise SimulatedFault(f"sim:{profile} cannot be loaded")
    info = simulated_info(profile, settings)
    runner = SimulatedRunner(simulated.step_ms, simulated.fault)
    return BatchEngine(runner, SimulatedText(), info, settings, MAX_TOKENS_DEFAULT, simulated.cost)


def _word_id(word: str) -> int:
    return int.from_bytes(hashlib.blake2b(word.encode(), digest_size=2).digest(), "little") % VOCABULARY_SIZE


def _base(sequence: Choice) -> int:
    prompt = hashlib.blake2b(array("q", sequence.tokens[: sequence.prompt_length]).tobytes(), digest_size=8)
    if sequence.sampling.temperature > 0:
        prompt.update((sequence.sampling.seed & _U64).to_bytes(8, "little") + sequence.choice.to_bytes(4, "little"))
    return int.from_bytes(prompt.digest(), "little")


def _has_prefill(plan: StepPlan) -> bool:
    return any(part.start < part.sequence.prompt_length for part in plan.slices)


def _failed(plan: StepPlan) -> list[tuple[Choice, Exception]]:
    """The sequences of the plan whose request is to fail, when they have their first token."""
    return [
        (part.sequence, SimulatedFault("this request fails, as the profile asks for"))
        for part in plan.slices
        if part.samples and part.start < part.sequence.prompt_length and is_faulty(part.sequence)
    ]


def is_faulty(sequence: Choice) -> bool:
    """Whether `faulty` fails the request that the sequence is a choice of: one in FAULTY_ONE_IN, the same one in any worker."""
    digest = hashlib.blake2b(array("q", sequence.tokens[: sequence.prompt_length]).tobytes(), digest_size=8)
    digest.update((sequence.sampling.seed & _U64).to_bytes(8, "little"))
    return int.from_bytes(digest.digest(), "little") % FAULTY_ONE_IN == 0


def _prompt_logprobs(plan: StepPlan) -> list[list[Logprob]]:
    scored = [(part.sequence, part.scored) for part in plan.slices if part.sequence.score_from is not None]
    return [
        [_logprob(sequence.tokens[position], sequence.sampling.logprobs or 0) for position in positions]
        for sequence, positions in scored
        if positions
    ]


def _logprob(token: int, count: int) -> Logprob:
    top = [(token + 977 * rank) % VOCABULARY_SIZE for rank in range(count)]
    return Logprob(
        id=token,
        logprob=-0.5,
        bytes=WORDS[token].encode(),
        top=[TopLogprob(id=each, logprob=-0.5 - rank, bytes=WORDS[each].encode()) for rank, each in enumerate(top)],
    )
