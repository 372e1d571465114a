"""What has become of a job, read off what is stored of it: its message, its checkpoint and its result.

A job is over once its result was kept for as long as it says. A message goes once there is a result: what has neither is over,
too. One whose deadline passes unseen is ended by the controller, `controller.expiries`, long before its message goes by itself.
"""

import asyncio
import time
from typing import TYPE_CHECKING, Literal

import msgspec

from shared import job_records, results, subjects
from shared.claim_check import ClaimCheck
from shared.errors import Cancelled, GenerationDeadline, QueueDeadline
from shared.job_records import JobRecord
from shared.results import Checkpoint, Part, Result

if TYPE_CHECKING:
    from shared.bus import Bus

Status = Literal["queued", "running", "completed", "failed", "cancelled", "expired"]


class State(msgspec.Struct):
    """What has become of a job so far."""

    record: JobRecord
    status: Status
    checkpoint: Checkpoint | None = None
    result: Result | None = None  # once it has ended

    @property
    def parts(self) -> list[Part]:
        """Its choices, as far as they have come."""
        kept = self.result or self.checkpoint
        return [] if kept is None else kept.parts

    @property
    def tokens(self) -> int:
        return sum(len(part.ids) for part in self.parts)

    @property
    def claims(self) -> int:
        kept = self.result or self.checkpoint
        return 0 if kept is None else kept.claims


def status_of(result: Result) -> Status:
    """The status of a job that has ended."""
    if result.error is None:
        return "completed"
    if result.error.code == Cancelled.code:
        return "cancelled"
    return "expired" if result.error.code in (QueueDeadline.code, GenerationDeadline.code) else "failed"


async def look(bus: "Bus", tenant: str, job: str) -> State | None:
    """None: there is no such job, or it has ended and its time is over. Raises Unavailable."""
    sequence = -1
    while True:
        record, kept = await asyncio.gather(job_records.read(bus, tenant, job), results.read(bus, tenant, job))
        if record is None:
            return None
        if kept.result is not None:
            state = State(record, status_of(kept.result), result=kept.result)
            if time.time() < kept.result.ended_at + record.keep_s:
                return state
            await forget(bus, state)
            return None
        if kept.checkpoint is not None:
            return State(record, "running" if kept.checkpoint.held else "queued", kept.checkpoint)
        if record.sequence == 0 or await bus.get_message(subjects.JOB_STREAM, record.sequence) is not None:
            return State(record, "queued")
        if record.sequence == sequence:  # seen twice: neither has it ended meanwhile, nor was it moved
            await job_records.remove(bus, tenant, job)
            return None
        sequence = record.sequence


async def forget(bus: "Bus", state: State) -> None:
    """Delete a job that has ended. Raises Unavailable."""
    record = state.record
    # the message first: of a worker that died before its ack it is still there, and would be run again without the result
    await delete_message(bus, record)
    await results.forget(bus, record.tenant, record.id)
    await job_records.remove(bus, record.tenant, record.id)


async def delete_message(bus: "Bus", record: JobRecord) -> None:
    """Delete a job's message if it is still there, with the input that it may refer to. Raises Unavailable."""
    if record.sequence:
        await ClaimCheck(bus).delete(subjects.JOB_STREAM, record.sequence)
