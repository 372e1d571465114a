"""Jobs whose version is out of service, and which no worker has: nobody but the leader looks after them.

They move to another version, or end with an error as their result. Whoever is told so twice, or by two, has one result.
"""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from controller.observer import VersionKey
from shared import job_records, jobs, subjects, wire
from shared.background import end
from shared.bus import Bus
from shared.claim_check import ClaimCheck
from shared.errors import HeadraceError, Unavailable
from shared.records import Route
from shared.router import destination, withdrawn
from shared.streams import StoredMessage
from shared.wire import WireError

log = logging.getLogger(__name__)

SCANNED_MAX = 1000  # messages that one call looks at
FIND_S = 0.5  # within which the worker that has a job says so
AT_ONCE = 64
EVERY_S = 1.0  # between two sweeps of a version


async def end_jobs(bus: Bus, model: str, version: str, error: HeadraceError) -> int:
    """End all jobs of a version that is gone; how many there were. Raises QueueFull and Unavailable."""
    ended = 0
    while waiting := await _waiting(bus, model, version):
        limit = asyncio.Semaphore(AT_ONCE)
        await asyncio.gather(*(_limited(limit, _end(bus, message, request, error)) for message, request in waiting))
        ended += len(waiting)
    return ended


async def rehome_jobs(bus: Bus, route: Route, old: str) -> int:
    """Move the jobs of a version that was rolled back, or end those that named it; how many. What a worker has is left alone.

    A job has no reader, so one that had come to something starts over. Raises QueueFull and Unavailable.
    """
    limit = asyncio.Semaphore(AT_ONCE)
    error = withdrawn(route.model, old, route.withdrawn.get(old, ""))

    async def look(message: StoredMessage, request: wire.Request) -> bool:
        about = wire.About(request.rid, subjects.tenant_of_request(message.subject))
        try:
            await bus.request(subjects.FIND_JOB, wire.encode(about), FIND_S)
        except Unavailable:
            target = destination(route, request.rid) if request.movable else None
            if target is None:
                await _end(bus, message, request, error)
            else:
                await _move(bus, message, request, target)
            return True
        return False

    waiting = await _waiting(bus, route.model, old)
    return sum(await asyncio.gather(*(_limited(limit, look(*each)) for each in waiting)))


class Strays:
    """Sweeps versions that were rolled back, one task for each."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._tasks: dict[VersionKey, asyncio.Task[None]] = {}
        self._next_at: dict[VersionKey, float] = {}

    def step(self, routes: dict[VersionKey, Route], now: float) -> None:
        """`routes`: of the versions that were rolled back and have jobs."""
        self._tasks = {name: task for name, task in self._tasks.items() if not task.done()}
        self._next_at = {name: at for name, at in self._next_at.items() if name in routes}
        for name, route in routes.items():
            if name not in self._tasks and now >= self._next_at.get(name, 0.0):
                self._next_at[name] = now + EVERY_S
                self._tasks[name] = asyncio.create_task(self._sweep(name, route), name=f"jobs of {name}")

    async def close(self) -> None:
        await end(*self._tasks.values())

    async def _sweep(self, name: VersionKey, route: Route) -> None:
        try:
            moved = await rehome_jobs(self._bus, route, name[1])
        except HeadraceError as error:
            log.info("%s@%s: its jobs wait: %s", *name, error.message)
        else:
            if moved:
                log.info("%s@%s was rolled back: %d of its jobs were moved or ended", *name, moved)


async def _limited(limit: asyncio.Semaphore, work: Coroutine[Any, Any, bool]) -> bool:
    async with limit:
        return await work


async def _waiting(bus: Bus, model: str, version: str) -> list[tuple[StoredMessage, wire.Request]]:
    """The oldest jobs of a version that are stored. What is none is deleted: no worker will ever take it."""
    found: list[tuple[StoredMessage, wire.Request]] = []
    sequence = 1
    while len(found) < SCANNED_MAX:
        message = await bus.next_message(subjects.JOB_STREAM, subjects.jobs_of_version(model, version), sequence)
        if message is None:
            break
        sequence = message.seq + 1
        try:
            request = wire.decode_request(message.data, message.headers, version)
            subjects.tenant_of_request(message.subject)
        except (wire.Malformed, ValueError) as error:
            log.warning("a message on %s is no job: %s", message.subject, error)
            await bus.delete_message(subjects.JOB_STREAM, message.seq)
            continue
        found.append((message, request))
    return found


async def _end(bus: Bus, message: StoredMessage, request: wire.Request, error: HeadraceError) -> bool:
    tenant = subjects.tenant_of_request(message.subject)
    keep_s = message.headers.get(wire.HEADER_KEEP, "")
    told = WireError(error.code, error.message, error.param)
    await jobs.end(bus, tenant, request.rid, request.version, told, int(keep_s) if keep_s.isdecimal() else 0)
    await ClaimCheck(bus).delete_read(subjects.JOB_STREAM, message)
    return True


async def _move(bus: Bus, message: StoredMessage, request: wire.Request, version: str) -> bool:
    """Publish the copy, and say so where the job is known, then delete what it was made of."""
    tenant = subjects.tenant_of_request(message.subject)
    headers = {name: value for name, value in message.headers.items() if name.startswith("Hr-")}
    if wire.HEADER_TTL in message.headers:
        headers[wire.HEADER_TTL] = message.headers[wire.HEADER_TTL]
    headers[wire.HEADER_MSG_ID] = wire.copy_id(request.rid, version, 0)
    request.version = version
    claim_check = ClaimCheck(bus)
    ack = await claim_check.copy(message, request, subjects.job(request.model, version, tenant), headers)
    await job_records.note(bus, tenant, request.rid, ack.seq, version)
    await claim_check.delete_read(subjects.JOB_STREAM, message)
    await bus.publish(subjects.wake(request.model, version))
    return True
