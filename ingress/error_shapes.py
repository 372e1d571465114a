"""Errors in the shape of the API that was asked: OpenAI's, which is the native one too, or Anthropic's."""

from typing import Any, Literal, Protocol

import msgspec

from ingress import sse
from shared.errors import HeadraceError

# of Anthropic's error types, by our status; those not listed are by the class of the status
TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ErrorBody(msgspec.Struct):
    """`code` is stable and listed in docs/errors.md, with its status; `message` is for people."""

    message: str
    type: str
    param: str | None
    code: str


class Error(msgspec.Struct):
    error: ErrorBody


class AnthropicError(msgspec.Struct):
    """Anthropic's shape; `param` and `code` are ours."""

    error: ErrorBody
    request_id: str | None
    type: Literal["error"] = "error"


class ErrorShape(Protocol):
    """How an API tells an error; `request_id` may be ""."""

    type: Any
    id_headers: tuple[bytes, ...]  # of an answer, with the request's id

    def body(self, error: HeadraceError, request_id: str) -> object:
        """The error as the whole answer."""

    def event(self, error: HeadraceError, request_id: str) -> bytes:
        """The error as the last event of a stream."""


class OpenAIShape:
    type: Any = Error
    id_headers: tuple[bytes, ...] = (b"x-request-id",)

    def body(self, error: HeadraceError, request_id: str) -> object:
        return error.body()

    def event(self, error: HeadraceError, request_id: str) -> bytes:
        return sse.error_event(error)


class AnthropicShape:
    type: Any = AnthropicError
    id_headers: tuple[bytes, ...] = (b"x-request-id", b"request-id")

    def body(self, error: HeadraceError, request_id: str) -> object:
        kind = TYPES.get(error.status, "invalid_request_error" if error.status < 499 else "api_error")
        return AnthropicError(ErrorBody(error.message, kind, error.param, error.code), request_id or None)

    def event(self, error: HeadraceError, request_id: str) -> bytes:
        return b"event: error\n" + sse.event(self.body(error, request_id))


OPENAI, ANTHROPIC = OpenAIShape(), AnthropicShape()
