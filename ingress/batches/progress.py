"""A batch that is being run by this process: its record as it was written last, and the lines that are on their way."""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ingress.batches import life, store
from ingress.batches.asking import LineJob, number_of
from ingress.batches.record import BatchRecord
from shared.settings import Settings

if TYPE_CHECKING:
    from shared.bus import Bus

GRACE_S = 2.0  # after the end of a batch: what workers have may still come to something


class Superseded(Exception):
    """Another process has the batch, or the record is gone: this one has nothing more to say about it."""


class Progress:
    """Of one batch. `may_act` says whether this process still leads."""

    def __init__(
        self, bus: "Bus", settings: Settings, record: BatchRecord, revision: int, may_act: Callable[[], bool]
    ) -> None:
        self.record = record
        self.ahead: deque[LineJob] = deque()  # in order; the first one is the line that is written next
        self.fed = False  # no line will be added any more
        self._bus, self._settings = bus, settings
        self._revision, self._may_act = revision, may_act
        self._writing = asyncio.Lock()
        self._changed = asyncio.Event()
        self._expected: dict[int, LineJob] = {}  # jobs of which nothing is known yet, by line
        self._done = {True: 0, False: 0}  # answers and errors among the lines that are not written
        self._bytes = 0  # of the jobs of `_expected`, and what is kept of those of `ahead`
        self._closes_at: float | None = None  # monotonic

    # -- the record ----------------------------------------------------------------------------------------------------

    async def update(self, changed: Callable[[BatchRecord], BatchRecord]) -> None:
        """Write what `changed` makes of the record. Raises Superseded and Unavailable."""
        async with self._writing:
            while True:
                self.check_lead()
                new = changed(self.record)
                if new == self.record:
                    return
                revision = await store.update(self._bus, new, self._revision)
                if revision is not None:
                    self.record, self._revision = new, revision
                    break
                await self._reread(new)
        self._changed.set()

    async def refresh(self) -> None:
        """Take in what somebody else has written: that it is to be cancelled."""
        async with self._writing:
            await self._reread(self.record)
        self._changed.set()

    def check_lead(self) -> None:
        """Raises Superseded."""
        if not self._may_act():
            raise Superseded("another process runs the batches")

    async def _reread(self, attempted: BatchRecord) -> None:
        found, revision = await store.find(self._bus, self.record.tenant, self.record.id)
        if found != attempted and _less_cancel(found) != _less_cancel(self.record):
            raise Superseded(f"another process has changed batch {self.record.id}")
        self.record, self._revision = found, revision

    # -- lines ---------------------------------------------------------------------------------------------------------

    @property
    def ending(self) -> bool:
        """Nothing is submitted any more."""
        return self.record.end is not None

    @property
    def closes_in(self) -> float | None:
        """Seconds until what has no result is given one; None: it may take its time."""
        if not self.ending:
            return None
        if self._closes_at is None:
            self._closes_at = time.monotonic() + GRACE_S
        return max(0.0, self._closes_at - time.monotonic())

    @property
    def has_room(self) -> bool:
        """Whether more lines may be on their way."""
        settings = self._settings
        return len(self.ahead) < settings.batch_ahead_max and self._bytes < settings.batch_ahead_bytes_max

    def expect(self, job: LineJob) -> None:
        """Its job is about to be submitted, or is there: news of it may come from now on."""
        self._expected[job.number] = job
        self._bytes += job.bytes

    def add(self, job: LineJob) -> None:
        """The next line is on its way."""
        self.ahead.append(job)
        self._bytes += job.kept_bytes
        if job.refusal is not None and not job.unasked:
            self.note(job, False)
        self._changed.set()

    def take(self, count: int) -> list[LineJob]:
        """The first lines, which are about to be written."""
        taken = [self.ahead.popleft() for _ in range(count)]
        self._bytes -= sum(job.kept_bytes for job in taken)
        return taken

    def hear(self, rid: str, is_answer: bool) -> None:
        """A job has a result, or will have in a moment."""
        number = number_of(self.record, rid)
        job = self._expected.get(-1 if number is None else number)
        if job is not None:
            self.note(job, is_answer)
            self._changed.set()

    def note(self, job: LineJob, is_answer: bool) -> None:
        """What became of a line is known: an answer, or an error."""
        if self._expected.pop(job.number, None) is not None:
            self._bytes -= job.bytes
        if job.done is not None:
            self._done[job.done] -= 1
        job.done = is_answer
        self._done[is_answer] += 1

    def wrote(self, answers: int, errors: int) -> None:
        """So many lines are written."""
        self._done[True] -= answers
        self._done[False] -= errors

    def running(self) -> list[LineJob]:
        """Lines whose jobs have no result as far as is known."""
        return list(self._expected.values())

    def counted(self, record: BatchRecord) -> BatchRecord:
        """The record with what is done and not written."""
        return life.counted(record, self._done[True], self._done[False])

    def finish_feeding(self) -> None:
        self.fed = True
        self._changed.set()

    async def wait(self, seconds: float) -> None:
        """Until something changes, for so long at most."""
        self._changed.clear()
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        except TimeoutError:
            pass


def _less_cancel(record: BatchRecord) -> BatchRecord:
    """A record without what others than its runner write."""
    return replace(record, status="validating", cancelling_at=0, end=None)
