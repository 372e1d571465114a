"""Batches as callers see them, and as they ask for them: OpenAI's shapes."""

import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from ingress.batches.record import BatchRecord, Problem, Status
from shared.errors import BadRequest, Unsupported
from shared.webhooks import Webhook, WebhookShown, shown

WINDOW_S_MAX = 24 * 3600
UNITS_S = {"s": 1, "m": 60, "h": 3600}
METADATA_MAX = 16

_window = re.compile(r"([1-9][0-9]{0,4})([smh])").fullmatch


class NewBatch(msgspec.Struct, kw_only=True):
    """What `POST /v1/batches` takes. `completion_window`: "24h", or less, in hours, minutes or seconds."""

    input_file_id: str
    endpoint: str
    completion_window: str = "24h"
    metadata: (
        Annotated[
            dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
            Meta(max_length=METADATA_MAX),
        ]
        | None
    ) = None
    webhook: Webhook | None = None  # is told of its end
    output_expires_after: Any = None

    def window_s(self) -> int:
        """Raises BadRequest and Unsupported."""
        if self.output_expires_after is not None:
            raise Unsupported(
                "output_expires_after: files are kept until they are deleted", param="output_expires_after"
            )
        found = _window(self.completion_window)
        seconds = int(found[1]) * UNITS_S[found[2]] if found else 0
        if not 0 < seconds <= WINDOW_S_MAX:
            raise BadRequest(
                f"completion_window: 24h, or less such as 30m, is expected, got {self.completion_window!r:.40}",
                param="completion_window",
            )
        return seconds


class ProblemList(msgspec.Struct):
    data: tuple[Problem, ...]
    object: Literal["list"] = "list"


class RequestCounts(msgspec.Struct):
    """Of the lines. `failed`: those of the error file."""

    total: int
    completed: int
    failed: int


class BatchEntry(msgspec.Struct):
    """A batch as callers see it."""

    id: str
    endpoint: str
    errors: ProblemList | None
    input_file_id: str
    completion_window: str
    status: Status
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, str] | None
    object: Literal["batch"] = "batch"
    webhook: WebhookShown | msgspec.UnsetType = msgspec.UNSET


class BatchList(msgspec.Struct):
    data: list[BatchEntry]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


def entry(record: BatchRecord) -> BatchEntry:
    """Files are named once they can be read."""
    completed, failed = record.completed + record.ahead_completed, record.failed + record.ahead_failed
    return BatchEntry(
        id=record.id,
        endpoint=record.endpoint,
        errors=ProblemList(record.errors) if record.errors else None,
        input_file_id=record.input_file_id,
        completion_window=record.completion_window,
        status=record.status,
        output_file_id=(record.output_file_id or None) if record.ended else None,
        error_file_id=(record.error_file_id or None) if record.ended else None,
        created_at=record.created_at,
        in_progress_at=record.in_progress_at or None,
        expires_at=record.expires_at,
        finalizing_at=record.finalizing_at or None,
        completed_at=record.completed_at or None,
        failed_at=record.failed_at or None,
        expired_at=record.expired_at or None,
        cancelling_at=record.cancelling_at or None,
        cancelled_at=record.cancelled_at or None,
        request_counts=RequestCounts(record.total, completed, failed),
        metadata=record.metadata,
        webhook=msgspec.UNSET if record.webhook is None else shown(record.webhook),
    )
