"""How much of a batch is in the stream JOB at a time: as much as keeps what waits for workers at a bound, and no more.

What workers have taken does not count: they are fed however many they are. Nor does a tenant's window grow with the number
of its batches: what waits of all of them is one queue.
"""

from typing import TYPE_CHECKING

from shared import subjects

if TYPE_CHECKING:
    from shared.bus import Bus

LOOK_EVERY_S = 0.25  # at a queue that is full


class Window:
    """Pure: what waits in each queue, (model, version), as was seen last, and what was added since. Times are monotonic."""

    def __init__(self, waiting_max: int) -> None:
        self._waiting_max = waiting_max
        self._waiting: dict[tuple[str, str], int] = {}

    def has_room(self, queue: tuple[str, str]) -> bool:
        """Whether one more may be added; False too for a queue that was not looked at yet."""
        return self._waiting.get(queue, self._waiting_max) < self._waiting_max

    def seen(self, queue: tuple[str, str], waiting: int) -> None:
        self._waiting[queue] = waiting

    def added(self, queue: tuple[str, str]) -> None:
        self._waiting[queue] = self._waiting.get(queue, 0) + 1


async def waiting(bus: "Bus", model: str, version: str, tenant: str) -> int:
    """A tenant's jobs that wait for a worker of the version. Raises Unavailable."""
    info = await bus.consumer_info(subjects.JOB_STREAM, subjects.job_consumer(model, version, tenant))
    if info is not None:
        return info.num_pending
    counts = await bus.subject_counts(subjects.JOB_STREAM, subjects.job(model, version, tenant))
    return sum(counts.values())  # no worker has asked for them yet
