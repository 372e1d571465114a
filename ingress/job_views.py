"""Jobs as HTTP shows and takes them."""

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from ingress.error_shapes import ErrorBody
from ingress.family import Family, decode_framing
from ingress.job_source import admitted_of, answer_of, version_of
from ingress.routes.openai import UsageBody, usage_body
from shared.errors import BadRequest, HeadraceError, by_code
from shared.job_records import Metadata
from shared.job_status import State, Status
from shared.jobs import TTL_MARGIN_S
from shared.settings import Settings
from shared.webhooks import Webhook, WebhookShown, shown

JOBS = "/v1/jobs"
ENDPOINT_CHARACTERS_MAX = 512
TTL_S_MIN = 60  # longer than a message can come back to a worker whose ack was lost


class NewJob(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A request to an inference route that nobody waits for."""

    endpoint: Annotated[str, Meta(max_length=ENDPOINT_CHARACTERS_MAX)]  # the route that `body` could be posted to
    body: msgspec.Raw
    webhook: Webhook | None = None
    metadata: Metadata = {}
    ttl_seconds: Annotated[int, Meta(ge=TTL_S_MIN)] | None = None  # how long it is kept after its end
    deadline_seconds: Annotated[int, Meta(ge=1)] | None = None  # after so long it ends as expired


class JobProgress(msgspec.Struct):
    """How far a job has come, as of a second ago."""

    tokens: int
    claims: int  # how many claims of workers have served it


class JobView(msgspec.Struct, kw_only=True):
    """A job. Times are unix seconds."""

    id: str
    object: Literal["job"] = "job"
    status: Status
    endpoint: str
    model: str  # as it was asked for
    version: str
    created_at: int
    deadline_at: int  # by then it has ended
    ended_at: int | None
    expires_at: int | None  # until then it is kept; null as long as it has not ended
    progress: JobProgress
    usage: UsageBody | None  # once it has ended, and something was computed
    error: ErrorBody | None  # of one that has not completed
    metadata: dict[str, str]
    webhook: WebhookShown | None
    result: msgspec.Raw | UnsetType | None = UNSET  # the answer of its endpoint; not in lists


class JobPage(msgspec.Struct, kw_only=True):
    """Jobs, the newest first."""

    object: Literal["list"] = "list"
    data: list[JobView]
    last_id: str | None  # the next page is `after` it
    has_more: bool


class Deleted(msgspec.Struct, kw_only=True):
    """What was done to a job: one that had ended is not kept any more, another one has ended."""

    id: str
    object: Literal["job"] = "job"
    status: Status
    deleted: bool


def view(state: State, family: Family | None = None) -> JobView:
    """`family`: of its endpoint, for the result to be part of it."""
    record, result = state.record, state.result
    error = None if result is None or result.error is None else by_code(result.error.code, result.error.message)
    answer: msgspec.Raw | UnsetType | None = UNSET
    if family is not None:
        answer = None
        if result is not None and error is None:
            answer = msgspec.Raw(answer_of(family, admitted_of(record, result.version), result).body)
    return JobView(
        id=record.id,
        status=state.status,
        endpoint=record.endpoint,
        model=decode_framing(record.request.framing).reference,
        version=version_of(state),
        created_at=int(record.created_at),
        deadline_at=int(record.deadline),
        ended_at=None if result is None else int(result.ended_at),
        expires_at=None if result is None else int(result.ended_at + record.keep_s),
        progress=JobProgress(state.tokens, state.claims),
        usage=None if result is None or result.usage is None else usage_body(result.usage),
        error=None if error is None else _error_body(error),
        metadata=record.metadata,
        webhook=None if record.webhook is None else shown(record.webhook),
        result=answer,
    )


def location(job_id: str) -> str:
    """The path of a job."""
    return f"{JOBS}/{job_id}"


def kept_s(asked: int | None, settings: Settings) -> int:
    """For how long a job is kept after its end. Raises BadRequest."""
    longest = int(min(settings.job_ttl_max_s, settings.result_kept_s))
    if asked is not None and asked > longest:
        raise BadRequest(f"ttl_seconds: at most {longest}, got {asked}", param="ttl_seconds")
    return min(int(settings.job_ttl_s), longest) if asked is None else asked


def deadline_s(asked: int | None, settings: Settings) -> float:
    """Within what a job has to end. Raises BadRequest."""
    longest = int(settings.job_max_age_s - TTL_MARGIN_S)
    if asked is not None and asked > longest:
        raise BadRequest(f"deadline_seconds: at most {longest}, got {asked}", param="deadline_seconds")
    return min(settings.job_deadline_s, longest) if asked is None else asked


def _error_body(error: HeadraceError) -> ErrorBody:
    return ErrorBody(error.message, error.type, error.param, error.code)
