"""What is stored of a batch: one record, however many lines it has."""

from typing import Literal

import msgspec

from shared.stored import Stored, json
from shared.webhooks import Webhook

Status = Literal["validating", "in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled"]
End = Literal["completed", "failed", "expired", "cancelled"]  # how a batch ends
ENDED: tuple[End, ...] = ("completed", "failed", "expired", "cancelled")


class Problem(msgspec.Struct, frozen=True):
    """What is wrong with a batch, at a line of its input if there is one to blame."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None  # 1: the first


class Segment(msgspec.Struct, frozen=True, array_like=True):
    """Results of consecutive lines, written together: the ends of two object keys (""; there is none) and their sizes."""

    output: str
    output_bytes: int
    errors: str
    errors_bytes: int


class BatchRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A batch, in the bucket `batches` under key(tenant, id). Times in unix seconds, 0: not yet.

    Lines before `cursor` are written, with their results in `segments`. None from `intent` on has been submitted.
    """

    id: str
    tenant: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    metadata: dict[str, str] | None = None
    webhook: Webhook | None = None
    # that lines may be of: what the key may use that made it, (): all; once validated, those that lines name
    models: tuple[str, ...] = ()
    status: Status = "validating"
    in_progress_at: int = 0
    finalizing_at: int = 0
    completed_at: int = 0
    failed_at: int = 0
    expired_at: int = 0
    cancelling_at: int = 0
    cancelled_at: int = 0
    errors: tuple[Problem, ...] = ()
    total: int = 0  # lines
    cursor: int = 0
    offset: int = 0  # of the line `cursor`, in bytes of the input
    intent: int = 0
    completed: int = 0  # of the lines before `cursor`
    failed: int = 0
    ahead_completed: int = 0  # of those that are done and not written, as of a moment ago
    ahead_failed: int = 0
    segments: tuple[Segment, ...] = ()
    end: End | None = None  # how it will end, or has: nothing is submitted any more
    output_file_id: str = ""
    error_file_id: str = ""

    @property
    def ended(self) -> bool:
        return self.status in ENDED

    @property
    def over(self) -> bool:
        """There is nothing left to do about it."""
        return self.ended and not self.segments


BATCHES = Stored(json(BatchRecord), "the record of a batch", lambda each: (each.tenant, each.id), 2)
encode = msgspec.json.encode
