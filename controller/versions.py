"""The life of version records: registered -> available | failed, and cleaning up after failed, retired and deleted ones.

Level-triggered: each step looks at what is there and starts what is missing, once per version at a time. Every write is a
compare-and-set, so that it never undoes what somebody else wrote meanwhile.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from msgspec.structs import replace

from controller.observer import Observer, VersionKey
from controller.starts import Starts
from controller.strays import end_jobs
from shared import records, subjects
from shared.background import end
from shared.bus import Bus
from shared.errors import HeadraceError, ObjectsUnavailable, Unavailable, VersionFailed, VersionRetired
from shared.records import Version
from shared.settings import Settings

log = logging.getLogger(__name__)

WRITE_TRIES_MAX = 5
RETRY_S = 1.0
DEFECT_RETRY_S = 30.0

Verify = Callable[[Version], None]


class Versions:
    """Owns the state and the reason of version records.

    `verify` raises ObjectsUnavailable when it cannot tell, another HeadraceError when the version's files are not as the
    record says. It may block: it runs in a thread.
    """

    def __init__(self, bus: Bus, observer: Observer, settings: Settings, verify: Verify) -> None:
        self._bus = bus
        self._observer = observer
        self._settings = settings
        self._verify = verify
        self._tasks: dict[VersionKey, asyncio.Task[None]] = {}
        self._not_before: dict[VersionKey, float] = {}
        self._cleaned: set[VersionKey] = set()

    async def close(self) -> None:
        """End what is under way."""
        await end(*self._tasks.values())

    def step(self, starts: Mapping[VersionKey, Starts], staffed: set[VersionKey], now: float) -> None:
        """Start what is due. `staffed` are the versions that still have workers."""
        self._tasks = {name: task for name, task in self._tasks.items() if not task.done()}
        observer = self._observer
        retired = {name for name, record in observer.records.items() if record.state == "retired"}
        self._cleaned &= retired
        for name in [*observer.records, *observer.removed]:
            if name in self._tasks or now < self._not_before.get(name, 0.0):
                continue
            work = self._due(name, starts.get(name, Starts()), name in staffed, now)
            if work is not None:
                self._tasks[name] = asyncio.create_task(self._guarded(name, work), name=f"version {name}")
        for name in self._not_before.keys() - observer.records.keys() - observer.removed:
            del self._not_before[name]

    def _due(self, name: VersionKey, starts: Starts, staffed: bool, now: float) -> Coroutine[Any, Any, None] | None:
        record = self._observer.records.get(name)
        settled = now - self._observer.state_since.get(name, now) >= self._settings.purge_after_s
        state = record.state if record else "deleted"
        if record is not None and state == "registered":
            return self._make_available(record)
        if record is not None and state == "available":
            if starts.hopeless:
                return self._write(name, "available", "failed", starts.reason)
            if record.reason != starts.reason:
                return self._write(name, "available", "available", starts.reason)
            if name in self._observer.without_consumer:
                return self._restore_consumer(name)
        elif state == "failed":
            lag = self._observer.lag.get(name)
            if settled and lag is not None and lag.total:
                return self._purge(name)
        elif state in ("retired", "deleted") and settled and not staffed and name not in self._cleaned:
            return self._clean(name)
        elif record is not None and name in self._cleaned:
            kept_since = time.time() - self._settings.retired_kept_s
            if state == "retired" and 0 < record.retired < kept_since:
                return self._forget(name)
        return None

    async def _guarded(self, name: VersionKey, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except (HeadraceError, TimeoutError) as error:
            self._not_before[name] = time.monotonic() + RETRY_S
            log.warning("%s@%s: %s; trying again", *name, error)
        except Exception:  # a defect, or a record that nobody foresaw: it must not stop the loop for the other versions
            self._not_before[name] = time.monotonic() + DEFECT_RETRY_S
            log.exception("%s@%s: trying again in %.0f s", *name, DEFECT_RETRY_S)

    async def _make_available(self, record: Version) -> None:
        name = (record.model, record.version)
        if record.source == "s3":
            try:
                await asyncio.to_thread(self._verify, record)
            except ObjectsUnavailable as error:
                await self._write(name, "registered", "registered", error.message)
                raise
            except HeadraceError as error:
                await self._write(name, "registered", "failed", error.message)
                return
        await self._bus.ensure_consumer(*name, subjects.LANE_FAST)
        await self._write(name, "registered", "available", "")

    async def _write(self, name: VersionKey, expected: str, state: str, reason: str) -> None:
        """Give the record `state` and `reason` if its state is still `expected`."""
        key = subjects.key(*name)
        for _ in range(WRITE_TRIES_MAX):
            found = await self._bus.kv_get(subjects.MODELS_BUCKET, key)
            if found is None:
                return
            record = records.decode_version(found[0])
            if record.state != expected or (record.state, record.reason) == (state, reason):
                return
            value = records.encode(replace(record, state=state, reason=reason))
            if await self._bus.kv_update(subjects.MODELS_BUCKET, key, value, found[1]) is not None:
                level = logging.ERROR if state == "failed" else logging.INFO
                log.log(level, "%s@%s: %s -> %s%s", *name, expected, state, f": {reason}" if reason else "")
                return
        raise Unavailable(f"the record of {name[0]}@{name[1]} changed with every try to write it")

    async def _restore_consumer(self, name: VersionKey) -> None:
        log.warning("%s@%s has no consumer; creating it", *name)
        await self._bus.ensure_consumer(*name, subjects.LANE_FAST)

    async def _purge(self, name: VersionKey) -> None:
        purged = await self._bus.purge(subjects.REQ_STREAM, subjects.requests_of_version(*name))
        record = self._observer.records.get(name)
        reason = record.reason if record is not None else ""
        ended = await end_jobs(self._bus, *name, VersionFailed(f"{name[0]}@{name[1]} cannot be loaded: {reason}"))
        log.warning("%s@%s failed: %d requests left in its queue were deleted, %d jobs ended", *name, purged, ended)

    async def _forget(self, name: VersionKey) -> None:
        key = subjects.key(*name)
        found = await self._bus.kv_get(subjects.MODELS_BUCKET, key)
        if found is not None and records.decode_version(found[0]).state == "retired":
            await self._bus.kv_delete(subjects.MODELS_BUCKET, key, found[1])
            log.info("%s@%s was removed long ago: its name is free", *name)

    async def _clean(self, name: VersionKey) -> None:
        await self._bus.purge(subjects.REQ_STREAM, subjects.requests_of_version(*name))
        await end_jobs(self._bus, *name, VersionRetired(f"{name[0]}@{name[1]} was taken out of service"))
        await self._bus.delete_consumer(*name, subjects.LANE_FAST)
        self._cleaned.add(name)
        self._observer.removed.discard(name)
        log.info("%s@%s is out of service: its queue and consumer are deleted", *name)
