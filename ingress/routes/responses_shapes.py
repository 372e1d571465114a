"""OpenAI's response object."""

from typing import Literal

import msgspec

from ingress.family import Admitted
from ingress.response_items import CallItem, MessageItem
from ingress.responses_body import Repeated
from shared.errors import Cancelled, HeadraceError
from shared.wire import Usage

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
ErrorCode = Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]

decode_repeated = msgspec.json.Decoder(Repeated).decode


class InputTokensDetails(msgspec.Struct):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct):
    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(msgspec.Struct):
    """`code` is one of OpenAI's, `type` is ours, as docs/errors.md has it."""

    code: ErrorCode
    message: str
    param: str | None
    type: str


class IncompleteDetails(msgspec.Struct):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class Response(Repeated, kw_only=True):
    """All of a response. What it repeats of its request is of `Repeated`."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    model: str
    status: Status
    completed_at: int | None = None
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    output: list[MessageItem | CallItem] = msgspec.field(default_factory=list)
    usage: ResponseUsage | None = None


def response_id(rid: str) -> str:
    return f"resp_{rid}"


def begun(admitted: Admitted) -> Response:
    """A response that has no output yet: in the background it is queued first."""
    repeated = msgspec.structs.asdict(decode_repeated(admitted.framing.repeated))
    identity = response_id(admitted.request.rid)
    status: Status = "queued" if repeated["background"] else "in_progress"
    return Response(**repeated, id=identity, created_at=admitted.created, model=admitted.reference, status=status)


def usage_of(usage: Usage) -> ResponseUsage:
    spent = (usage.completion_tokens, OutputTokensDetails(), usage.prompt_tokens + usage.completion_tokens)
    return ResponseUsage(usage.prompt_tokens, InputTokensDetails(usage.cached_tokens), *spent)


def put_error(response: Response, error: HeadraceError) -> None:
    """`response` failed by `error`, or was cancelled."""
    if isinstance(error, Cancelled):
        response.status = "cancelled"
        return
    response.status = "failed"
    response.error = ResponseError(_code(error.status), error.message, error.param, error.code)


def _code(status: int) -> ErrorCode:
    if status >= 500:
        return "server_error"
    return "rate_limit_exceeded" if status == 429 else "invalid_prompt"
