"""Jobs whose deadline passes where nobody sees it: no worker has them. The leader writes down that they have expired.

A worker that has a job ends it itself. After its deadline a message is worth only this: as long as it is stored and there
is no result, the job has not ended.
"""

import asyncio
import heapq
import logging
import time

from shared import job_records, job_status, jobs, subjects, wire
from shared.background import end
from shared.bus import Bus
from shared.errors import GenerationDeadline, HeadraceError, QueueDeadline, Unavailable
from shared.jobs import GONE_S
from shared.keyvalue import Watch
from shared.wire import WireError

log = logging.getLogger(__name__)

FIND_S = 0.5  # within which the worker that has a job says so
AGAIN_S = 5.0  # until the next look at one that a worker has, or that could not be ended
AT_ONCE = 64  # jobs of one sweep


class Expiries:
    """The deadlines of all jobs that have records, and a sweep of those that have passed."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._due: list[tuple[float, str, str]] = []  # a heap: when to look (unix seconds), tenant, id
        self._known: set[tuple[str, str]] = set()  # what is in it
        self._watch: Watch | None = None
        self._sweep: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Returns when the deadlines of all records are known that there are now."""
        self._watch = await self._bus.watch(subjects.JOBS_BUCKET, self.on_record)

    async def close(self) -> None:
        if self._watch is not None:
            await self._watch.close()
        await end(self._sweep)

    def on_record(self, key: str, value: bytes | None) -> None:
        """A job's record is new or changed."""
        change = job_records.JOBS.change(key, value)
        if change is not None and change.record is not None:
            record = change.record
            self._put(record.deadline + GONE_S, record.tenant, record.id)

    def step(self, now: float) -> None:
        """Look after the jobs that are due at `now` (unix seconds). Called by who leads, in every tick."""
        if self._sweep is not None and not self._sweep.done():
            return
        due: list[tuple[str, str]] = []
        while self._due and self._due[0][0] <= now and len(due) < AT_ONCE:
            _, *name = heapq.heappop(self._due)
            due.append((name[0], name[1]))
        self._known.difference_update(due)
        if due:
            self._sweep = asyncio.create_task(self._end_all(due), name="jobs that expired")

    def _put(self, at: float, tenant: str, job: str) -> None:
        if (tenant, job) not in self._known:
            self._known.add((tenant, job))
            heapq.heappush(self._due, (at, tenant, job))

    async def _end_all(self, due: list[tuple[str, str]]) -> None:
        await asyncio.gather(*(self._end_one(*each) for each in due))

    async def _end_one(self, tenant: str, job: str) -> None:
        try:
            is_over = await expire(self._bus, tenant, job)
        except HeadraceError as error:
            log.info("job %s has expired, and that cannot be written down yet: %s", job, error.message)
            is_over = False
        if not is_over:
            self._put(time.time() + AGAIN_S, tenant, job)


async def expire(bus: Bus, tenant: str, job: str) -> bool:
    """End a job whose deadline has passed, unless it has ended; False: a worker has it. Raises QueueFull and Unavailable."""
    state = await job_status.look(bus, tenant, job)
    if state is None or state.result is not None:
        return True
    record = state.record
    try:
        await bus.request(subjects.FIND_JOB, wire.encode(wire.About(job, tenant)), FIND_S)
    except Unavailable:
        told = (
            WireError(GenerationDeadline.code, "the job did not end in time")
            if state.tokens
            else WireError(QueueDeadline.code, "no worker had room for the job in time")
        )
        await jobs.end(bus, tenant, job, record.request.version, told, record.keep_s)
        await job_status.delete_message(bus, record)
        return True
    return False
