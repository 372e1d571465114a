"""Fleets to break: that of tests/workers below HTTP, with what the faults need, and the pieces of bench/faults."""

import asyncio
import signal
import time

from shared import subjects
from shared.stream import Delta, Stream

from ..workers.conftest import Fleet, read, run_fleet

__all__ = ["run_fleet"]

FAST = {"ack_wait_s": 2.0, "in_progress_every_s": 0.5, "pull_expires_s": 1.0}  # a redelivery within three seconds
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


def stop(fleet: Fleet, worker: str) -> None:
    fleet.workers[worker].send_signal(signal.SIGSTOP)


def wake(fleet: Fleet, worker: str) -> None:
    fleet.workers[worker].send_signal(signal.SIGCONT)
