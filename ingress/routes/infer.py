"""POST /v1/models/{model}/infer: the native shape. A stream is one event a token, numbered without gaps."""

import msgspec

from ingress.answers import Scope
from ingress.error_shapes import OPENAI, ErrorShape
from ingress.family import Admitted, Choice
from ingress.routes.openai import UsageBody, floored, token_text, usage_body
from ingress.schemas import InferBody
from ingress.sse import KEEPALIVE, Events, encode, event
from shared.dispatch import Delta
from shared.errors import HeadraceError
from shared.wire import Logprob, Usage

BEFORE_MODEL, AFTER_MODEL = "/v1/models/", "/infer"


class TopToken(msgspec.Struct):
    id: int
    token: str
    logprob: float


class TokenScore(msgspec.Struct):
    """What was asked for by `logprobs`: of the token, and of the most likely ones, best first."""

    id: int
    logprob: float
    top: list[TopToken]


class InferAnswer(msgspec.Struct, omit_defaults=True):
    id: str
    model: str
    version: str
    text: str
    finish_reason: str
    usage: UsageBody
    claims: int  # how many claims of workers served the request
    seed: int
    scores: list[TokenScore] | None = None


class LastEvent(msgspec.Struct):
    """The terminal event of a complete stream."""

    finish_reason: str
    usage: UsageBody
    claims: int
    seed: int
    id: str
    version: str


def score(one: Logprob) -> TokenScore:
    top = [TopToken(other.id, token_text(other.bytes), floored(other.logprob)) for other in one.top]
    return TokenScore(one.id, floored(one.logprob), top)


class InferEvents:
    """`{"token", "index"}` for every output token, those with no text of their own too; then the `LastEvent`."""

    keepalive = KEEPALIVE

    def __init__(self, admitted: Admitted) -> None:
        self.open_choices = 1
        self._request = admitted.request
        self._index = 0
        self._finish = ""

    def add(self, deltas: list[Delta], out: list[bytes]) -> None:
        for delta in deltas:
            if delta.ids:  # one token; else the delta is only a finish
                scored = b',"score":%b' % encode(score(delta.logprobs[0])) if delta.logprobs else b""
                out.append(b'data: {"token":%b,"index":%d%b}\n\n' % (encode(delta.text), self._index, scored))
                self._index += 1
            if delta.finish is not None:
                self.open_choices -= 1
                self._finish = delta.finish

    def closing(self, usage: Usage, claims: int) -> bytes:
        request = self._request
        return event(
            LastEvent(self._finish, usage_body(usage), claims, request.sampling.seed, request.rid, request.version)
        )

    def failure(self, error: HeadraceError) -> bytes | None:
        return None


class Infer:
    """The native family; one choice."""

    route, summary = BEFORE_MODEL + "{model}" + AFTER_MODEL, "Native inference"
    decoder, answer_type = msgspec.json.Decoder(InferBody), InferAnswer
    errors: ErrorShape = OPENAI

    def serves(self, path: str) -> bool:
        return path.startswith(BEFORE_MODEL) and path.endswith(AFTER_MODEL)

    def reference(self, body: InferBody, scope: Scope) -> str:
        path: str = scope["path"]  # unquoted: a model may come with slashes or with %2F
        return path[len(BEFORE_MODEL) : -len(AFTER_MODEL)]

    def events(self, admitted: Admitted) -> Events:
        return InferEvents(admitted)

    def plain(self, admitted: Admitted, choices: list[Choice], usage: Usage, claims: int) -> bytes:
        request, choice = admitted.request, choices[0]
        scores = [score(one) for one in choice.logprobs] if request.sampling.logprobs is not None else None
        return encode(
            InferAnswer(
                request.rid,
                admitted.reference,
                request.version,
                choice.text,
                choice.finish or "",
                usage_body(usage),
                claims,
                request.sampling.seed,
                scores,
            )
        )
