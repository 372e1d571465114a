"""What webhooks are told of the end of a batch."""

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from ingress.batches.record import BatchRecord, End
from shared import notices
from shared.webhooks import EventType

if TYPE_CHECKING:
    from shared.bus import Bus

EVENTS: dict[End, EventType] = {
    "completed": "batch.completed",
    "failed": "batch.failed",
    "expired": "batch.expired",
    "cancelled": "batch.cancelled",
}

Announce = Callable[[BatchRecord], Awaitable[None]]


def announcer(bus: "Bus") -> Announce:
    """What has to be told of a batch that is about to have ended. Told twice, of the same end, it is one event."""

    async def announce(record: BatchRecord) -> None:
        if record.webhook is None or record.end is None:
            return
        ended_at: int = getattr(record, f"{record.end}_at")
        data: dict[str, object] = {
            "id": record.id,
            "status": record.end,
            "request_counts": {"total": record.total, "completed": record.completed, "failed": record.failed},
            "ended_at": ended_at,
        }
        event = notices.Event(EVENTS[record.end], record.id, ended_at, data)
        await notices.tell(bus, record.tenant, record.webhook, event)

    return announce
