"""The record of scaling decisions: what changed, why, and on which signals, in the history of a KV bucket."""

import asyncio
import logging
import time

from controller.autoscaler import Decision
from shared import records, subjects
from shared.background import end
from shared.bus import Bus
from shared.errors import Unavailable
from shared.records import ScalingDecision
from shared.registry import read_bucket

log = logging.getLogger(__name__)

UNWRITTEN_MAX = 1000


class Decisions:
    """Writes in the background: `note` never waits. What cannot be written is logged, and lost."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._unwritten: asyncio.Queue[ScalingDecision] = asyncio.Queue(UNWRITTEN_MAX)
        self._wanted: dict[tuple[str, str], tuple[int, int]] = {}
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to write."""
        self._task = asyncio.create_task(self._write_all(), name="decisions")

    async def close(self) -> None:
        """Write what is left, for a moment, and end."""
        if self._task is None:
            return
        if self._bus.connected:
            try:
                async with asyncio.timeout(1.0):
                    await self._unwritten.join()
            except TimeoutError:
                log.warning("%d scaling decisions are not recorded", self._unwritten.qsize())
        await end(self._task)

    async def recall(self) -> None:
        """Take in what was decided last, by another controller too. Raises Unavailable."""
        last = await read_bucket(self._bus, subjects.DECISIONS_BUCKET, records.DECISIONS)
        self._wanted = {(each.model, each.version): (each.desired, each.spares) for each in last}

    def note(self, decision: Decision) -> bool:
        """Record a decision if it wants another number of replicas or spares than the last one; whether it does."""
        name = (decision.model, decision.version)
        before, spares = self._wanted.get(name, (0, 0))
        if (before, spares) == (decision.desired, decision.spares):
            return False
        self._wanted[name] = (decision.desired, decision.spares)
        record = ScalingDecision(
            at=round(time.time(), 3),
            model=decision.model,
            version=decision.version,
            before=before,
            desired=decision.desired,
            spares=decision.spares,
            reasons=list(decision.reasons),
            signals=decision.signals,
        )
        try:
            self._unwritten.put_nowait(record)
        except asyncio.QueueFull:
            log.warning("a scaling decision is not recorded: %s", records.encode(record).decode())
        return True

    def forget(self, names: set[tuple[str, str]]) -> None:
        """Drop what is kept of all versions but these."""
        for name in self._wanted.keys() - names:
            del self._wanted[name]

    async def _write_all(self) -> None:
        while True:
            record = await self._unwritten.get()
            try:
                key = subjects.key(record.model, record.version)
                await self._bus.kv_put(subjects.DECISIONS_BUCKET, key, records.encode(record))
            except Unavailable as error:
                log.warning("a scaling decision is not recorded (%s): %s", error, records.encode(record).decode())
            finally:
                self._unwritten.task_done()


async def history(bus: Bus, model: str, version: str) -> list[ScalingDecision]:
    """The last decisions of a version, the newest last. Raises Unavailable."""
    key = subjects.key(model, version)
    changes = [records.DECISIONS.change(key, raw) for raw in await bus.kv_history(subjects.DECISIONS_BUCKET, key)]
    return [change.record for change in changes if change is not None and change.record is not None]
