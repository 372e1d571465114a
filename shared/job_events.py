"""What webhooks are told of a job that has ended, or of a response in the background, which is one. Pure, but for the last."""

from typing import TYPE_CHECKING

from shared import notices
from shared.job_records import JobRecord
from shared.job_status import State, status_of
from shared.results import Result
from shared.webhooks import Delivery, EventType

if TYPE_CHECKING:
    from shared.bus import Bus

RESPONSE_PREFIX = "resp_"
CUT = "length"  # the finish of a choice that has as many tokens as it may


def subject_of(record: JobRecord) -> str:
    """The id that its submitter knows it by."""
    return RESPONSE_PREFIX + record.id if record.kind == "response" else record.id


def type_of(record: JobRecord, result: Result) -> EventType:
    """The event that its end is."""
    status = status_of(result)
    if record.kind == "response":
        if status == "completed":
            is_cut = any(part.finish == CUT for part in result.parts)
            return "response.incomplete" if is_cut else "response.completed"
        return "response.cancelled" if status == "cancelled" else "response.failed"
    if status == "completed":
        return "job.completed"
    if status == "cancelled":
        return "job.cancelled"
    return "job.expired" if status == "expired" else "job.failed"


def data_of(record: JobRecord, result: Result) -> dict[str, object]:
    """Ids and states: never what was asked or answered."""
    return {
        "id": subject_of(record),
        "status": type_of(record, result).partition(".")[2],
        "model": record.request.model,
        "version": result.version,
        "ended_at": int(result.ended_at),
        "error": None if result.error is None else result.error.code,
    }


async def delivery(bus: "Bus", state: State) -> Delivery | None:
    """How far it is with telling the webhook of a job's end. Raises Unavailable."""
    record, result = state.record, state.result
    if record.webhook is None or result is None:
        return None
    return await notices.delivery(bus, record.tenant, type_of(record, result), subject_of(record))
