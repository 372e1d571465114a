"""Messages that are given up: kept in the DLQ, with the reason."""

import logging
from collections.abc import Callable, Mapping

from shared import subjects, wire
from shared.bus import Bus
from shared.errors import HeadraceError
from workers.delivery import Delivery

log = logging.getLogger(__name__)

KEPT_HEADERS = (
    wire.HEADER_WIRE,
    wire.HEADER_MSG_ID,
    wire.HEADER_REPLY,
    wire.HEADER_GENERATION_MS,
    "Content-Type",
)
KEPT_HEADER_CHARACTERS_MAX = 512  # of each: a frame address has fewer
TERM = b"+TERM"

Out = Callable[[str, bytes], None]


async def dead_letter(bus: Bus, delivery: Delivery, reason: str, out: Out) -> None:
    """Bury a request."""
    headers = {
        wire.HEADER_REPLY: delivery.reply,
        wire.HEADER_GENERATION_MS: str(int(delivery.generation_s * 1000)),
    }
    if await keep_request(bus, delivery.request, delivery.tenant, headers, reason):
        out(delivery.handle, TERM)


async def keep_request(bus: Bus, request: wire.Request, tenant: str, headers: Mapping[str, str], reason: str) -> bool:
    """Put a request into the DLQ; whether it is there."""
    subject = subjects.dead_letter(request.model, request.version, tenant)
    return await _keep(
        bus, subject, wire.encode(request), {**headers, wire.HEADER_MSG_ID: f"{request.rid}.dlq"}, reason
    )


async def bury(
    bus: Bus, subject: str, data: bytes, headers: Mapping[str, str], handle: str, reason: str, out: Out
) -> None:
    """Keep the message in the DLQ, then end it in its stream. If it cannot be kept, it is delivered again."""
    if await _keep(bus, subject, data, headers, reason):
        out(handle, TERM)


async def _keep(bus: Bus, subject: str, data: bytes, headers: Mapping[str, str], reason: str) -> bool:
    kept = {name: headers[name][:KEPT_HEADER_CHARACTERS_MAX] for name in KEPT_HEADERS if headers.get(name)}
    kept.setdefault(wire.HEADER_MSG_ID, wire.new_id())
    kept[wire.HEADER_REASON] = " ".join(reason.split())[:500]
    if len(data) > bus.payload_bytes_max:  # it came from somebody who did not leave room for more headers
        data, kept[wire.HEADER_REASON] = b"", f"{kept[wire.HEADER_REASON]} ({len(data)} bytes, not kept)"
    try:
        await bus.publish_durable(subject, data, kept)
    except HeadraceError as error:
        log.warning("a message could not be kept in the DLQ: %s", error.message)
        return False
    return True
