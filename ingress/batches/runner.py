"""Which batches run, and where: in one ingress of all, the one that leads in this. The others wait to take its place."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Iterable, Mapping

from ingress.batches import store
from ingress.batches.announcing import announcer
from ingress.batches.asking import Asker
from ingress.batches.progress import Progress, Superseded
from ingress.batches.record import BATCHES, BatchRecord
from ingress.batches.run import BatchRun
from ingress.context import Context
from ingress.family import Family
from ingress.files.store import Files
from shared import subjects
from shared.background import end
from shared.bus import Bus
from shared.errors import BatchNotFound, HeadraceError, Unavailable
from shared.keyvalue import Watch
from shared.leadership import BATCHES as OFFICE
from shared.leadership import Leadership

log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
RETRY_S, RETRY_MAX_S = 1.0, 30.0  # after a run that failed; doubles with each

Name = tuple[str, str]  # tenant, batch


def choose(open_: Iterable[BatchRecord], running: Iterable[Name], running_max: int) -> list[Name]:
    """The batches to begin with: tenants take turns, and of a tenant's the oldest is first. Pure.

    The last place is for a tenant that has none: batches may run for a day, and those of one tenant would keep out all others.
    """
    taken = set(running)
    of_tenant = Counter(tenant for tenant, _ in taken)
    waiting = sorted((each.created_at, each.id, each.tenant) for each in open_ if (each.tenant, each.id) not in taken)
    chosen: list[Name] = []
    while waiting and len(taken) + len(chosen) < running_max:
        place = min(range(len(waiting)), key=lambda at: (of_tenant[waiting[at][2]], waiting[at]))
        if of_tenant[waiting[place][2]] and len(taken) + len(chosen) == running_max - 1:
            break
        _, batch, tenant = waiting.pop(place)
        of_tenant[tenant] += 1
        chosen.append((tenant, batch))
    return chosen


class BatchRunner:
    """That of one process."""

    def __init__(
        self,
        context: Context,
        bus: Bus,
        files: Files,
        families: Mapping[str, Family],
    ) -> None:
        self._context, self._bus, self._files, self._announce = context, bus, files, announcer(bus)
        self._asker = Asker(context, families)
        self._jobs = context.detached.jobs
        self._wake = asyncio.Event()
        self._leadership = Leadership(bus, OFFICE, context.settings.leader_ttl_s, self._wake.set)
        self._open: dict[Name, BatchRecord] = {}
        self._runs: dict[Name, tuple[BatchRun, asyncio.Task[None]]] = {}
        self._failures: dict[Name, tuple[int, float]] = {}  # in a row, and when to try again
        self._watch: Watch | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Raises Unavailable."""
        await self._leadership.start()
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Let go of everything; another process goes on with it."""
        await end(self._task)
        await self._stop()
        await self._leadership.close()

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            try:
                await self._step()
            except Unavailable as error:
                log.info("batches: %s", error.message)
            try:
                async with asyncio.timeout(LOOK_EVERY_S):
                    await self._wake.wait()
            except TimeoutError:
                continue

    async def _step(self) -> None:
        if not self._leadership.leads or self._context.draining:
            await self._stop()
            if self._context.draining:
                await self._leadership.close()
            return
        if self._watch is None:
            self._watch = await self._bus.watch(subjects.BATCHES_BUCKET, self._on_record)
        now = time.monotonic()
        held = [name for name, (_, at) in self._failures.items() if now < at and name not in self._runs]
        due = [each for each in self._open.values() if (each.tenant, each.id) not in held]
        for name in choose(due, self._runs, self._context.settings.batches_running_max):
            await self._begin(name)

    async def _begin(self, name: Name) -> None:
        try:
            record, revision = await store.find(self._bus, *name)
        except BatchNotFound:
            self._open.pop(name, None)
            return
        if record.over:
            self._open.pop(name, None)
            return
        progress = Progress(self._bus, self._bus.settings, record, revision, lambda: self._leadership.leads)
        run = BatchRun(self._bus, self._files, self._jobs, self._asker, progress, self._announce)
        self._runs[name] = run, asyncio.create_task(self._keep(name, run), name=f"batch {name[1]}")

    async def _keep(self, name: Name, run: BatchRun) -> None:
        """Run a batch; one that fails for now is tried again later."""
        try:
            await run.run()
        except* (HeadraceError, Superseded) as group:
            count = self._failures.get(name, (0, 0.0))[0]
            self._failures[name] = count + 1, time.monotonic() + min(RETRY_MAX_S, RETRY_S * 2**count)
            log.info("batch %s goes on later: %s", name[1], _first(group))
        except* Exception:
            self._failures[name] = 1, time.monotonic() + RETRY_MAX_S
            log.exception("batch %s failed here", name[1])
        else:
            self._failures.pop(name, None)
        finally:
            self._runs.pop(name, None)
            self._wake.set()

    async def _stop(self) -> None:
        """End all runs as they are."""
        await end(*(task for _, task in self._runs.values()))
        self._runs.clear()
        if self._watch is not None:
            await self._watch.close()
            self._watch = None
        self._open.clear()
        self._failures.clear()

    def _on_record(self, key: str, value: bytes | None) -> None:
        change = BATCHES.change(key, value)
        if change is None:
            return
        tenant, batch = change.names
        name, record = (tenant, batch), change.record
        if record is None or record.over:
            self._open.pop(name, None)
        else:
            self._open[name] = record
        if name in self._runs:
            self._runs[name][0].tell_changed()
        self._wake.set()


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
