"""Answers held to the vendors' published documents, field by field.

OpenAI and Anthropic publish their APIs as OpenAPI documents, and the types of their SDKs for Python are generated from those:
the pinned SDKs are the record that the tests are held to. An SDK itself takes whatever comes; here nothing is converted,
nothing that is required may be missing, values that are enumerated are those, and a field that is not in the document is ours.
"""

from typing import Any

import pydantic
from openai.types import Completion, CompletionChoice
from openai.types.completion_choice import Logprobs

OURS = {"headrace"}  # what we add to an answer


class EchoedLogprobs(Logprobs):
    """The first token of an echoed prompt has no probability: the API has null there, its document does not say so."""

    token_logprobs: list[float | None] | None = None  # type: ignore[assignment]
    top_logprobs: list[dict[str, float] | None] | None = None  # type: ignore[assignment]


class EchoedChoice(CompletionChoice):
    logprobs: EchoedLogprobs | None = None


class EchoedCompletion(Completion):
    choices: list[EchoedChoice]  # type: ignore[assignment]


class ChunkChoice(EchoedChoice):
    """The document has one type for plain and streamed completions: in a stream the API has null until the last chunk."""

    finish_reason: str | None  # type: ignore[assignment]


class CompletionChunk(Completion):
    choices: list[ChunkChoice]  # type: ignore[assignment]


def documented(kind: Any, raw: str | bytes) -> Any:
    """`raw` JSON as a `kind`. Raises ValidationError or AssertionError for what its document does not have."""
    answer = pydantic.TypeAdapter(kind).validate_json(raw, strict=True)
    undocumented = _extra(answer) - OURS
    assert not undocumented, f"{type(answer).__name__} has no {sorted(undocumented)}"
    return answer


def _extra(value: Any) -> set[str]:
    """The names, anywhere in `value`, that its types do not have."""
    if isinstance(value, pydantic.BaseModel):
        inside = [getattr(value, name) for name in type(value).model_fields]
        return set(value.model_extra or {}).union(*map(_extra, inside))
    if isinstance(value, list):
        return set().union(*map(_extra, value))
    return set()
