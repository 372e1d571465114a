"""What a client is told: tokens one by one, and what they came to."""

import struct
from typing import Any

import msgspec

FLOAT_BYTES = 4


class Candidate(msgspec.Struct, frozen=True):
    """A token that might have been chosen."""

    id: int
    text: str
    logprob: float


class Token(msgspec.Struct, frozen=True, kw_only=True):
    """One output token. Its text may be empty: half a character, or what may be the beginning of a stop string."""

    text: str
    index: int
    id: int | None = None  # over HTTP it is told with log probabilities only
    logprob: float | None = None
    top: tuple[Candidate, ...] = ()  # the most likely ones, best first


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """In tokens."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What a request came to. Of one that was resumed, `text` is the part that was told since."""

    id: str
    version: str
    text: str
    finish_reason: str
    usage: Usage
    claims: int  # of workers that served it; more than 1: it outlived one
    seed: int


class Embeddings(msgspec.Struct, frozen=True, kw_only=True):
    """The vectors of a request's inputs, in their order."""

    vectors: list[list[float]]
    version: str  # that of the first one, should a rollback come in between
    prompt_tokens: int


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """How a generation ended, as its transport knows it."""

    version: str
    finish_reason: str
    usage: Usage
    claims: int
    seed: int


def vector_of(data: bytes) -> list[float]:
    """The numbers of a vector: float32, little-endian."""
    return list(struct.unpack(f"<{len(data) // FLOAT_BYTES}f", data))


def usage_of(body: dict[str, Any]) -> Usage:
    """Of the shape of an answer over HTTP."""
    return Usage(
        prompt_tokens=body["prompt_tokens"],
        completion_tokens=body["completion_tokens"],
        cached_tokens=(body.get("prompt_tokens_details") or {}).get("cached_tokens", 0),
    )


def scored(text: str, index: int, score: dict[str, Any] | None) -> Token:
    """A token with what was asked for by `logprobs`, in the shape of the native route."""
    if score is None:
        return Token(text=text, index=index)
    top = tuple(Candidate(each["id"], each["token"], each["logprob"]) for each in score["top"])
    return Token(text=text, index=index, id=score["id"], logprob=score["logprob"], top=top)


def last_told(event: dict[str, Any]) -> Ended:
    """What the last event of the native route says."""
    return Ended(
        version=event["version"],
        finish_reason=event["finish_reason"],
        usage=usage_of(event["usage"]),
        claims=event["claims"],
        seed=event["seed"],
    )
