"""What tells one API shape from another: how its bodies are decoded and how its answers are written."""

from typing import Any, Protocol

import msgspec

from ingress.answers import Scope
from ingress.error_shapes import ErrorShape
from ingress.sse import Events
from shared import wire
from shared.dispatch import Delta


class Framing(msgspec.Struct):
    """How a request is answered. It travels with the request, so that any ingress can go on with the answer."""

    route: str  # of the family
    reference: str  # the model as the caller named it
    created: int  # unix seconds
    include_usage: bool
    streamed: bool
    tools: str = ""  # how calls are written in the output, of `shared.tools.DIALECTS`; "": it has none
    one_call: bool = False  # at most
    repeated: bytes = b""  # of the request, in the answer
    base64: bool = False  # vectors are written so


class Admitted(msgspec.Struct):
    """A published request, and how it is answered."""

    request: wire.Request
    framing: Framing
    parts: list[wire.Request] = []  # published instead of `request`, whose choices are those of all of them
    ended_at: float | None = None  # unix seconds, once that is known

    @property
    def reference(self) -> str:
        return self.framing.reference

    @property
    def created(self) -> int:
        return self.framing.created

    @property
    def include_usage(self) -> bool:
        return self.framing.include_usage


encode_framing = msgspec.msgpack.Encoder().encode
decode_framing = msgspec.msgpack.Decoder(Framing).decode


class Choice:
    """One choice of a plain answer, gathered."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.logprobs: list[wire.Logprob] = []
        self.finish: str | None = None
        self.vector = b""

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def add(self, delta: Delta) -> None:
        self.texts.append(delta.text)
        if delta.logprobs:
            self.logprobs += delta.logprobs
        if delta.finish is not None:
            self.finish = delta.finish
            self.vector = delta.vector


class Family(Protocol):
    """An API shape; `route` is its label in metrics."""

    route: str
    summary: str
    decoder: msgspec.json.Decoder[Any]
    errors: ErrorShape

    @property
    def answer_type(self) -> type:
        """The struct of a plain answer."""

    def serves(self, path: str) -> bool:
        """Whether a POST to `path` is of this family."""

    def reference(self, body: Any, scope: Scope) -> str:
        """The model that the request names."""

    def events(self, admitted: Admitted) -> Events: ...

    def plain(self, admitted: Admitted, choices: list[Choice], usage: wire.Usage, claims: int) -> bytes: ...


class OnePath:
    """The part of a family that has one path and whose bodies name the model."""

    route: str

    def serves(self, path: str) -> bool:
        return path == self.route

    def reference(self, body: Any, scope: Scope) -> str:
        model: str = body.model
        return model
