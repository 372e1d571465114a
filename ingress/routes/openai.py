"""Pieces of OpenAI's shapes that chat and completions have in common."""

import msgspec

from ingress.sse import DONE, KEEPALIVE, encode, event
from shared.dispatch import Delta
from shared.errors import HeadraceError
from shared.wire import Logprob, Usage

LOGPROB_FLOOR = -9999.0  # JSON has no infinity


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class UsageBody(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class HeadraceBody(msgspec.Struct):
    """What is ours in an OpenAI answer."""

    claims: int  # how many claims of workers served the request


class UsageChunk(msgspec.Struct):
    """The last chunk of a stream that asked for its usage."""

    id: str
    object: str
    created: int
    model: str
    choices: list[None]
    usage: UsageBody
    headrace: HeadraceBody


def usage_body(usage: Usage) -> UsageBody:
    return UsageBody(
        usage.prompt_tokens,
        usage.completion_tokens,
        usage.prompt_tokens + usage.completion_tokens,
        PromptTokensDetails(usage.cached_tokens),
    )


def floored(logprob: float | None) -> float:
    """`logprob` as a number that JSON has."""
    return LOGPROB_FLOOR if logprob is None else max(logprob, LOGPROB_FLOOR)


def token_text(raw: bytes) -> str:
    """A token's bytes as text; a token may hold a part of a character."""
    return raw.decode("utf-8", "replace")


class ChunkEvents:
    """The chunks of OpenAI's two streaming shapes: all of a stream's are constant bytes around the encoded text.

    A subclass says how its choices look; its bytes are fields of a JSON object.
    """

    object_name: str
    opening: bytes  # fields of a choice's first chunk, b"": no such chunk
    before_text: bytes
    after_text: bytes
    finishing: bytes  # fields of the finish chunk
    keepalive = KEEPALIVE

    def __init__(self, identity: str, created: int, model: str, choices: int, include_usage: bool) -> None:
        self._identity = (identity, self.object_name, created, model)
        envelope = {"id": identity, "object": self.object_name, "created": created, "model": model}
        self._head = b"data: " + encode(envelope)[:-1] + b',"choices":['
        self._tail = b"]" + (b',"usage":null' if include_usage else b"") + b"}\n\n"
        self._prefixes = [b'%b{"index":%d,%b' % (self._head, choice, self.before_text) for choice in range(choices)]
        self._suffix = b'%b,"logprobs":null,"finish_reason":null}%b' % (self.after_text, self._tail)
        self._unopened = set(range(choices)) if self.opening else set()
        self._include_usage = include_usage
        self.open_choices = choices

    def add(self, deltas: list[Delta], out: list[bytes]) -> None:
        prefixes, suffix, unopened = self._prefixes, self._suffix, self._unopened
        for delta in deltas:
            choice = delta.choice
            if unopened and choice in unopened:
                unopened.remove(choice)
                out.append(self._chunk(choice, self.opening, b"null", b"null"))
            if delta.logprobs:
                fields = self.before_text + encode(delta.text) + self.after_text
                out.append(self._chunk(choice, fields, self.logprobs(delta), b"null"))
            elif delta.text:
                out.append(prefixes[choice] + encode(delta.text) + suffix)
            if delta.finish is not None:
                self.open_choices -= 1
                out.append(self._chunk(choice, self.finishing, b"null", encode(delta.finish)))

    def logprobs(self, delta: Delta) -> bytes:
        """The log probabilities of a delta that has some, as JSON."""
        raise NotImplementedError

    def closing(self, usage: Usage, claims: int) -> bytes:
        if not self._include_usage:
            return DONE
        return event(UsageChunk(*self._identity, [], usage_body(usage), HeadraceBody(claims))) + DONE

    def failure(self, error: HeadraceError) -> bytes | None:
        return None

    def _chunk(self, choice: int, fields: bytes, logprobs: bytes, finish: bytes) -> bytes:
        return b'%b{"index":%d,%b,"logprobs":%b,"finish_reason":%b}%b' % (
            self._head,
            choice,
            fields,
            logprobs,
            finish,
            self._tail,
        )


class TokenLogprob(msgspec.Struct):
    """A token of chat's log probabilities."""

    token: str
    logprob: float
    bytes: list[int]


class ContentLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[ContentLogprob]
    refusal: None = None


def chat_logprobs(given: list[Logprob]) -> ChatLogprobs:
    return ChatLogprobs(
        [
            ContentLogprob(
                token_text(one.bytes),
                floored(one.logprob),
                list(one.bytes),
                [TokenLogprob(token_text(top.bytes), floored(top.logprob), list(top.bytes)) for top in one.top],
            )
            for one in given
        ]
    )
