"""Fleets to break: that of tests/workers below HTTP, with what the faults need, and the pieces of bench/faults."""

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator

from shared import records, subjects, wire
from shared.bus import Bus
from shared.dispatch import Dispatcher
from shared.requester import Known
from shared.stream import Delta, Stream

from ..workers.conftest import Fleet, read, run_fleet

__all__ = ["run_fleet"]

FAST = {"ack_wait_s": 1.0, "in_progress_every_s": 0.3, "pull_expires_s": 1.0}  # a redelivery within two seconds
CONSUMER = subjects.consumer(subjects.LANE_FAST, subjects.requests_of_lane("m", "v", subjects.LANE_FAST))


async def workers_of(fleet: Fleet, count: int) -> list[str]:
    """Start so many workers and wait until they claim."""
    names = [fleet.spawn() for _ in range(count)]
    for name in names:
        await fleet.active(name)
    return names


async def answers(streams: list[Stream], heads: list[list[Delta]] | None = None) -> list[list[int]]:
    """All ids of choice 0 of each stream, what was read before (`heads`) included."""
    rests = await asyncio.gather(*(read(stream) for stream in streams))
    whole = [head + rest for head, rest in zip(heads or [[] for _ in streams], rests, strict=True)]
    return [[token for delta in deltas if delta.choice == 0 for token in delta.ids] for deltas in whole]


async def holder_of(fleet: Fleet, stream: Stream) -> str:
    """The worker that serves a stream."""
    deadline = time.monotonic() + 10
    while (worker := stream.requester.worker) is None:
        assert time.monotonic() < deadline, "nobody serves the stream"
        await asyncio.sleep(0.01)
    return worker


async def renewed(fleet: Fleet, worker: str, times: int) -> records.Lease:
    """The lease of a worker once it has been written so often from now on."""
    deadline = time.monotonic() + 15
    revisions: set[int] = set()
    while True:
        found = await fleet.bus.kv_get(subjects.WORKERS_BUCKET, worker)
        if found is not None:
            revisions.add(found[1])
            if len(revisions) > times:
                return records.decode_lease(found[0])
        assert time.monotonic() < deadline, f"the lease of {worker} is not renewed"
        await asyncio.sleep(0.05)


def stop(fleet: Fleet, worker: str) -> None:
    fleet.workers[worker].send_signal(signal.SIGSTOP)


def wake(fleet: Fleet, worker: str) -> None:
    fleet.workers[worker].send_signal(signal.SIGCONT)


class Elsewhere:
    """A second process of requesters, as far as the others can tell."""

    def __init__(self, bus: Bus, dispatcher: Dispatcher) -> None:
        self.bus, self.dispatcher = bus, dispatcher

    async def vanish(self) -> None:
        """End it as SIGKILL would: nobody is told."""
        await self.bus.close()
        await self.dispatcher.close()


@contextlib.asynccontextmanager
async def elsewhere(fleet: Fleet) -> AsyncIterator[Elsewhere]:
    bus = await Bus.connect(fleet.settings, "elsewhere")
    dispatcher = Dispatcher(bus, fleet.settings)
    await dispatcher.start()
    try:
        yield Elsewhere(bus, dispatcher)
    finally:
        await dispatcher.close()
        await bus.close()


async def read_along(where: Elsewhere, stream: Stream, head: list[Delta]) -> Stream:
    """A second reader of `stream`, which knows the position and the digest of what `head` holds."""
    ids = [token for delta in head for token in delta.ids]
    known = Known(next=[len(ids)], digest=[wire.digest(ids)])
    return await where.dispatcher.attach(
        stream.request, stream.tenant, stream.sequence, stream.body, 60.0, known, resumable=True
    )
