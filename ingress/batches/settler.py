"""Takes the lines of a batch in order as their results come, writes these into segments, and tidies RES up behind itself."""

import asyncio
import logging
import time

from ingress.batches import life
from ingress.batches.asking import Asker, LineJob
from ingress.batches.pace import Pace
from ingress.batches.progress import Progress
from ingress.batches.record import BatchRecord
from ingress.batches.segments import Gathered
from ingress.files.store import Files
from shared import results, subjects, wire
from shared.bus import Bus
from shared.errors import Cancelled, HeadraceError
from shared.jobs import Jobs, end
from shared.results import Result
from shared.wire import WireError

log = logging.getLogger(__name__)

AT_ONCE = 32  # reads, or deletions
LOOK_S = 2.0  # between two looks at the first line, for news that was lost
TIDY_TRIES, TIDY_EVERY_S = 8, 1.0  # at the end: longer than a redelivery takes
STORED_S = 0.02  # after news of a result, until it is stored


class Settler:
    """Of one batch, for as long as this process leads."""

    def __init__(self, bus: Bus, files: Files, jobs: Jobs, asker: Asker, progress: Progress) -> None:
        self._bus, self._files, self._jobs, self._asker, self._progress = bus, files, jobs, asker, progress
        self._gathered = Gathered(bus.settings.batch_segment_lines_max)
        self._settled: list[LineJob] = []  # whose lines are gathered
        self._unpurged: list[LineJob] = []  # whose results are in RES, and lines are written
        self._looked_at = 0.0
        self._pace = Pace()

    async def run(self) -> None:
        """Until every line is written. Raises Superseded, Unavailable and ObjectsUnavailable."""
        progress = self._progress
        while not (progress.fed and not progress.ahead):
            for job, result in await self._next():
                line, is_answer = self._asker.tell(progress.record, job, result)
                progress.note(job, is_answer)
                self._gathered.add(line, is_answer)
                self._settled.append(job)
                if self._gathered.full:
                    await self._write()
                await self._pace.breathe()
        if self._settled:
            await self._write()

    async def tidy_up(self) -> None:
        """Delete the last results as well; those whose messages are still there after a while are left to their time."""
        for _ in range(TIDY_TRIES):
            await self._tidy()
            if not self._unpurged:
                return
            await asyncio.sleep(TIDY_EVERY_S)

    async def _next(self) -> list[tuple[LineJob, Result | None]]:
        """The next lines that are done, at least one; nothing when there will be no more."""
        progress = self._progress
        while progress.ahead or not progress.fed:
            known = self._known()
            first = progress.ahead[0] if progress.ahead else None
            if not known and first is not None and self._looks_at_first():
                known = [first]
            found = await asyncio.gather(*(self._result(job) for job in known))
            ready = 0
            while ready < len(known) and (found[ready] is not None or not _has_job(known[ready])):
                ready += 1
            if ready:
                return list(zip(progress.take(ready), found[:ready], strict=True))
            if known and known[0].done is not None:
                await asyncio.sleep(STORED_S)
            else:
                await progress.wait(
                    LOOK_S if progress.closes_in is None else min(LOOK_S, progress.closes_in + STORED_S)
                )
        return []

    def _known(self) -> list[LineJob]:
        """The first lines, as far as it is known that they are done."""
        known: list[LineJob] = []
        for job in self._progress.ahead:
            if len(known) == AT_ONCE or (_has_job(job) and job.done is None):
                break
            known.append(job)
        return known

    def _looks_at_first(self) -> bool:
        now = time.monotonic()
        if self._progress.closes_in == 0.0 or now - self._looked_at >= LOOK_S:
            self._looked_at = now
            return True
        return False

    async def _result(self, job: LineJob) -> Result | None:
        """What came of a line's job; of one that is to be given up: it gets a result, unless it has one."""
        if not _has_job(job):
            return None
        record = self._progress.record
        if self._progress.closes_in == 0.0:
            error = WireError(Cancelled.code, f"the batch is {record.end}")
            result = await end(self._bus, record.tenant, job.rid, job.version, error)
            await self._jobs.withdraw(job.sequence)
            await self._bus.publish(subjects.CANCEL_JOB, wire.encode(wire.About(job.rid, record.tenant)))
        else:
            found = await results.read_result(self._bus, record.tenant, job.rid)
            if found is None:
                return None
            result = found
        job.purgeable = result.version == job.version  # one that was moved has another message
        return result

    async def _write(self) -> None:
        gathered, settled = self._gathered, self._settled
        self._gathered, self._settled = Gathered(self._bus.settings.batch_segment_lines_max), []
        record = self._progress.record
        segment = await gathered.write(self._files, record)
        cursor, offset = record.cursor, settled[-1].end

        def wrote(record: BatchRecord) -> BatchRecord:
            assert record.cursor == cursor
            return life.written(record, gathered.lines, offset, gathered.failed, segment)

        await self._progress.update(wrote)
        self._progress.wrote(gathered.lines - gathered.failed, gathered.failed)
        self._unpurged += [job for job in settled if _has_job(job) and job.purgeable]
        await self._tidy()

    async def _tidy(self) -> None:
        """Delete results that are written, once their messages are gone: a worker that is given one again looks for it."""
        unpurged, self._unpurged = self._unpurged, []
        tenant = self._progress.record.tenant
        try:
            for first in range(0, len(unpurged), AT_ONCE):
                await asyncio.gather(*(self._purge(tenant, job) for job in unpurged[first : first + AT_ONCE]))
        except HeadraceError as error:
            log.info("results of batch %s are left to their time: %s", self._progress.record.id, error.message)

    async def _purge(self, tenant: str, job: LineJob) -> None:
        if job.sequence and await self._bus.get_message(subjects.JOB_STREAM, job.sequence) is not None:
            self._unpurged.append(job)
            return
        await self._bus.purge(subjects.RES_STREAM, subjects.result(tenant, job.rid))


def _has_job(job: LineJob) -> bool:
    return job.refusal is None and not job.unasked
