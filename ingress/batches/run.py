"""Runs one batch from where its record says that it is to its end, or until another process has it."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec

from ingress.batches import life, segments
from ingress.batches.announcing import Announce
from ingress.batches.asking import Asker
from ingress.batches.feeder import Feeder
from ingress.batches.lines import RawLine, read_lines
from ingress.batches.progress import Progress
from ingress.batches.record import BatchRecord, Problem
from ingress.batches.settler import Settler
from ingress.batches.validation import Validator, validate
from ingress.files.store import FileRecord, Files
from shared import subjects, wire
from shared.bus import Bus, Message
from shared.errors import FileNotFound
from shared.jobs import Jobs
from shared.wire import Malformed, WireError

TICK_S = 1.0  # between two writes of how far it has come


class _Outcome(msgspec.Struct):
    """What counts of a `shared.results.Result`."""

    error: WireError | None = None


_decode_outcome = msgspec.msgpack.Decoder(_Outcome).decode


class BatchRun:
    """One batch, and whoever has the lead. `announce` is told of the end before the record says so, perhaps twice."""

    def __init__(
        self, bus: Bus, files: Files, jobs: Jobs, asker: Asker, progress: Progress, announce: Announce
    ) -> None:
        self._bus, self._files, self._jobs, self._asker = bus, files, jobs, asker
        self._progress, self._announce = progress, announce
        self._told = asyncio.Event()  # the record was changed by somebody

    def tell_changed(self) -> None:
        """The record has another revision than the one that this run knows of; it may be its own."""
        self._told.set()

    async def run(self) -> None:
        """Returns when the batch has ended. Raises Superseded and HeadraceError, in groups too."""
        progress = self._progress
        if progress.record.status == "validating":
            await self._within_window(self._validate())
        record = progress.record
        if record.ended:
            await self._tidy()
            return
        if record.end is not None and not record.total:
            await self._end(lambda record: life.stopped_before(record, _now()))
            return
        settler = Settler(self._bus, self._files, self._jobs, self._asker, progress)
        if not record.finalizing_at:
            await self._run_lines(settler)
            ids = segments.file_ids(progress.record)
            await progress.update(lambda record: life.finalizing(record, *ids, _now()))
        await segments.make_files(self._files, progress.record, progress.refresh)
        await self._end(lambda record: life.finished(record, _now()))
        await self._tidy()
        await settler.tidy_up()

    async def _tidy(self) -> None:
        if not self._progress.record.over:
            await segments.remove(self._files, self._progress.record)
            await self._progress.update(life.tidied)

    async def _end(self, ended: Callable[[BatchRecord], BatchRecord]) -> None:
        if (record := ended(self._progress.record)).ended:
            await self._announce(record)
        await self._progress.update(ended)

    # -- validating ----------------------------------------------------------------------------------------------------

    async def _validate(self) -> None:
        progress, settings = self._progress, self._bus.settings
        record = progress.record
        validator = Validator(
            record.endpoint,
            settings.batch_lines_max,
            settings.request_bytes_max,
            lambda reference: self._asker.why_not(record, reference),
        )
        try:
            await validate(validator, await self._lines(0))
        except FileNotFound as error:
            validator.problems.append(Problem(error.code, error.message, "input_file_id"))
        if validator.problems:
            await self._end(lambda record: _if_open(record, life.rejected, validator.problems, _now()))
        else:
            taken = (validator.lines, validator.models)
            await progress.update(lambda record: _if_open(record, life.validated, *taken, _now()))

    async def _lines(self, offset: int) -> AsyncIterator[RawLine]:
        """Raises FileNotFound."""
        record = self._progress.record
        file: FileRecord = await self._files.find(record.tenant, record.input_file_id)
        return read_lines(self._files, file, self._bus.settings.request_bytes_max, offset)

    async def _within_window(self, work: Awaitable[None]) -> None:
        """Do `work` until the batch is cancelled or its window is over."""
        working = asyncio.ensure_future(work)
        watching = asyncio.create_task(self._watch_until_ending())
        try:
            await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                await working
            else:
                await watching
        finally:
            for task in (working, watching):
                task.cancel()
            await asyncio.gather(working, watching, return_exceptions=True)

    async def _watch_until_ending(self) -> None:
        while not self._progress.ending:
            await self._tick(count=False)

    # -- running -------------------------------------------------------------------------------------------------------

    async def _run_lines(self, settler: Settler) -> None:
        progress = self._progress
        await self._see_to_window()
        news = await self._bus.subscribe(subjects.results_of_tenant(progress.record.tenant), self._on_result)
        try:
            async with asyncio.TaskGroup() as group:
                others = [group.create_task(self._feed()), group.create_task(self._watch())]
                await settler.run()
                for task in others:
                    task.cancel()
        finally:
            await news.unsubscribe()

    async def _feed(self) -> None:
        feeder = Feeder(self._bus, self._jobs, self._asker, self._progress)
        try:
            await feeder.run(await self._lines(self._progress.record.offset))
        except FileNotFound as error:
            problem = Problem(error.code, error.message, "input_file_id")
            await self._progress.update(lambda record: life.broken(record, problem))
        self._progress.finish_feeding()

    async def _watch(self) -> None:
        """Write how far it has come, and see to it that it ends in time."""
        stopped = False
        while True:
            if self._progress.ending and not stopped:
                stopped = True
                await self._stop_jobs()
            await self._tick(count=True)

    async def _tick(self, count: bool) -> None:
        progress = self._progress
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TICK_S):
                await self._told.wait()
        if self._told.is_set():
            self._told.clear()
            await progress.refresh()
        await self._see_to_window()
        if count:
            await progress.update(progress.counted)

    async def _see_to_window(self) -> None:
        if time.time() >= self._progress.record.expires_at:
            await self._progress.update(life.expired)

    async def _stop_jobs(self) -> None:
        """Ask workers to end what they have, so that it is accounted for; what they do not is ended by the settler."""
        tenant = self._progress.record.tenant
        for job in self._progress.running():
            await self._bus.publish(subjects.CANCEL_JOB, wire.encode(wire.About(job.rid, tenant)))

    def _on_result(self, message: Message) -> None:
        try:
            _, rid = subjects.place_of_result(message.subject)
            outcome = _decode_outcome(message.data)
        except (ValueError, msgspec.MsgspecError) as error:
            raise Malformed(f"no result: {error}") from None
        self._progress.hear(rid, outcome.error is None)


def _if_open(record: BatchRecord, changed: Callable[..., BatchRecord], *given: object) -> BatchRecord:
    """What becomes of a batch by its validation; one that ends meanwhile stays as it is."""
    return record if record.end is not None else changed(record, *given)


def _now() -> int:
    return int(time.time())
