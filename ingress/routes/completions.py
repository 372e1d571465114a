"""POST /v1/completions."""

import codecs

import msgspec

from ingress.error_shapes import OPENAI, ErrorShape
from ingress.family import Admitted, Choice, OnePath
from ingress.routes.openai import ChunkEvents, UsageBody, floored, token_text, usage_body
from ingress.schemas import CompletionBody
from ingress.sse import Events, encode
from shared.dispatch import Delta
from shared.wire import Logprob, Usage

PATH = "/v1/completions"


class CompletionLogprobs(msgspec.Struct):
    """Four lists of one entry a token; the first of an echoed prompt has no probability."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None


class CompletionAnswer(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageBody
    object: str = "text_completion"


class TextOffsets:
    """Where each token of one choice begins in its text, in characters; a token may hold a part of one."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._characters = 0

    def next(self, token: Logprob) -> int:
        offset = self._characters
        if not token.special:
            self._characters += len(self._decoder.decode(token.bytes))
        return offset

    def skip(self, text: str) -> None:
        """A token of which only the text is known, told before the stream was resumed."""
        self._characters += len(text)


def shape_logprobs(given: list[Logprob], offsets: TextOffsets, top: int) -> CompletionLogprobs:
    return CompletionLogprobs(
        [token_text(one.bytes) for one in given],
        [None if one.logprob is None else floored(one.logprob) for one in given],
        [_top(one) for one in given] if top else None,
        [offsets.next(one) for one in given],
    )


def _top(one: Logprob) -> dict[str, float] | None:
    if one.logprob is None:
        return None
    return {token_text(other.bytes): floored(other.logprob) for other in one.top}


class CompletionEvents(ChunkEvents):
    object_name = "text_completion"
    opening = b""
    before_text = b'"text":'
    after_text = b""
    finishing = b'"text":""'

    def __init__(self, identity: str, admitted: Admitted) -> None:
        sampling = admitted.request.sampling
        super().__init__(identity, admitted.created, admitted.reference, sampling.n, admitted.include_usage)
        self._offsets = [TextOffsets() for _ in range(sampling.n)]
        self._top = sampling.logprobs or 0
        self._scored = sampling.logprobs is not None

    def add(self, deltas: list[Delta], out: list[bytes]) -> None:
        if self._scored:
            for delta in deltas:
                if not delta.logprobs:
                    self._offsets[delta.choice].skip(delta.text)
        super().add(deltas, out)

    def logprobs(self, delta: Delta) -> bytes:
        return encode(shape_logprobs(delta.logprobs or [], self._offsets[delta.choice], self._top))


class Completions(OnePath):
    """The completions family: `text`."""

    route, summary = PATH, "Text completion, as OpenAI has it"
    decoder, answer_type = msgspec.json.Decoder(CompletionBody), CompletionAnswer
    errors: ErrorShape = OPENAI

    def events(self, admitted: Admitted) -> Events:
        return CompletionEvents(_id(admitted), admitted)

    def plain(self, admitted: Admitted, choices: list[Choice], usage: Usage, claims: int) -> bytes:
        top = admitted.request.sampling.logprobs
        answers = [
            CompletionChoice(
                index,
                choice.text,
                None if top is None else shape_logprobs(choice.logprobs, TextOffsets(), top),
                choice.finish,
            )
            for index, choice in enumerate(choices)
        ]
        return encode(CompletionAnswer(_id(admitted), admitted.created, admitted.reference, answers, usage_body(usage)))


def _id(admitted: Admitted) -> str:
    return f"cmpl-{admitted.request.rid}"
