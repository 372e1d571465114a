"""Submits the lines of a batch as jobs, in order and no further ahead than the window allows; none of them twice.

A line's job has the same id whoever submits it. What the process before may have submitted is looked for before anything is
submitted again: in JOB first, then in RES, since a job leaves JOB only when its result is stored.
"""

import asyncio
import time
from collections.abc import AsyncIterator

import msgspec

from ingress.batches import life
from ingress.batches.asking import Asker, LineJob, number_of, rid_of
from ingress.batches.lines import Line, RawLine, decode_line
from ingress.batches.pace import Pace
from ingress.batches.progress import Progress
from ingress.batches.window import LOOK_EVERY_S, Window, waiting
from shared import results, subjects, wire
from shared.bus import Bus
from shared.errors import BadRequest, HeadraceError, QueueFull, TooLarge
from shared.jobs import Jobs
from shared.settings import MIB
from shared.wire import Malformed, Request

AT_ONCE = 32  # publishes, or reads
BYTES_AT_ONCE = 4 * MIB
INTENT_STEP = 512  # lines: so much of the record's `intent` is written ahead of them
LATER_S = 60.0  # jobs end by themselves so long after the batch's window, if nobody is there to end them
RETRY_S = 1.0  # after a refusal that is not for good


class _Stored(msgspec.Struct, frozen=True):
    """A line's message in JOB."""

    sequence: int
    version: str


class Feeder:
    """Of one batch, for as long as this process leads."""

    def __init__(self, bus: Bus, jobs: Jobs, asker: Asker, progress: Progress) -> None:
        self._bus, self._jobs, self._asker, self._progress = bus, jobs, asker, progress
        self._window = Window(bus.settings.batch_waiting_max)
        self._unsent: list[tuple[LineJob, Request]] = []
        self._pace = Pace()

    async def run(self, lines: AsyncIterator[RawLine]) -> None:
        """Show the progress every line from the cursor on.

        Raises Superseded, FileNotFound, Unavailable and ObjectsUnavailable.
        """
        progress = self._progress
        number, intent = progress.record.cursor, progress.record.intent
        stored = await self._stored() if intent > number else {}
        group: list[tuple[LineJob, Line]] = []
        size = 0
        async for raw in lines:
            line = decode_line(raw.data)
            group.append(
                (LineJob(number, rid_of(progress.record, number), line.custom_id, raw.end, len(raw.data)), line)
            )
            number, size = number + 1, size + len(raw.data)
            if len(group) == AT_ONCE or size >= BYTES_AT_ONCE or number in (intent, progress.record.total):
                if number <= intent:
                    await self._recognise([job for job, _ in group], stored)
                await self._take(group)
                group, size = [], 0
            await self._pace.breathe()

    async def _take(self, group: list[tuple[LineJob, Line]]) -> None:
        """Ask for what nobody has asked for yet, and pass all of it on."""
        for job, line in group:
            request = await self._admit(job, line)
            if request is not None:
                self._unsent.append((job, request))
            await self._pace.breathe()
        await self._send()
        for job, _ in group:
            self._progress.add(job)

    async def _admit(self, job: LineJob, line: Line) -> Request | None:
        """The request of a line, once there is room for it; None: there is nothing to submit."""
        progress = self._progress
        if job.done is not None or job.sequence:
            version = job.version
            self._ask(job, line)
            job.version, job.refusal = version or job.version, None  # it was asked, whatever is said of it now
            return None
        while True:
            request = self._ask(job, line)
            if progress.ending:
                job.unasked, job.refusal = True, None
                return None
            if request is None and not (job.refusal and job.refusal.retryable):
                return None
            if request is not None and progress.has_room and await self._has_room(request):
                await progress.update(lambda record: _intending(record, job.number + 1))
                if not progress.ending:
                    self._window.added((request.model, request.version))
                    return request
            await asyncio.sleep(RETRY_S if request is None else LOOK_EVERY_S)

    def _ask(self, job: LineJob, line: Line) -> Request | None:
        job.refusal = None
        try:
            return self._asker.ask(self._progress.record, job, line)
        except HeadraceError as error:
            job.refusal = error
            return None

    async def _has_room(self, request: Request) -> bool:
        queue = (request.model, request.version)
        if not self._window.has_room(queue):
            await self._send()
            self._window.seen(queue, await waiting(self._bus, *queue, self._progress.record.tenant))
        return self._window.has_room(queue)

    async def _send(self) -> None:
        unsent, self._unsent = self._unsent, []
        await asyncio.gather(*(self._submit(*each) for each in unsent))

    async def _submit(self, job: LineJob, request: Request) -> None:
        record = self._progress.record
        self._progress.expect(job)
        while True:
            self._progress.check_lead()
            try:
                deadline_s = record.expires_at + LATER_S - time.time()
                ticket = await self._jobs.submit(request, record.tenant, max(LATER_S, deadline_s))
            except QueueFull:
                if self._progress.ending:
                    job.unasked = True
                    return
                await asyncio.sleep(RETRY_S)
            except TooLarge as error:
                job.refusal = error
                return
            except Malformed as error:
                job.refusal = BadRequest(f"the request cannot be told on: {error}")
                return
            else:
                job.sequence = ticket.sequence
                return

    # -- what was submitted before -------------------------------------------------------------------------------------

    async def _stored(self) -> dict[int, _Stored]:
        """The batch's lines whose messages are in JOB."""
        found: dict[int, _Stored] = {}
        record, sequence = self._progress.record, 1
        jobs = subjects.jobs_of_tenant(record.tenant)
        while (message := await self._bus.next_message(subjects.JOB_STREAM, jobs, sequence)) is not None:
            rid = message.headers.get(wire.HEADER_MSG_ID, "").partition(".")[0]  # one that was moved has more after it
            number = number_of(record, rid)
            if number is not None:
                found[number] = _Stored(message.seq, subjects.place_of_job(message.subject)[1])
            sequence = message.seq + 1
        return found

    async def _recognise(self, group: list[LineJob], stored: dict[int, _Stored]) -> None:
        """Find out which lines of the group were submitted before."""
        progress = self._progress
        for job in group:
            if (at := stored.get(job.number)) is not None:
                job.sequence, job.version = at.sequence, at.version
                progress.expect(job)
        tenant = progress.record.tenant
        kept = await asyncio.gather(*(results.read_result(self._bus, tenant, job.rid) for job in group))
        for job, result in zip(group, kept, strict=True):
            if result is not None:
                progress.note(job, result.error is None)


def _intending(record: life.BatchRecord, intent: int) -> life.BatchRecord:
    if record.end is not None or record.intent >= intent:
        return record
    return life.intending(record, min(record.total, intent + INTENT_STEP))
