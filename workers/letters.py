"""Messages that are given up: kept in the DLQ, with the reason."""

import logging
from collections.abc import Awaitable, Callable, Mapping

import msgspec

from shared import subjects, wire
from shared.bus import Bus, PubAck
from shared.claim_check import ClaimCheck
from shared.errors import HeadraceError, StreamGone, TooLarge
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
Publish = Callable[[str, bytes, Mapping[str, str]], Awaitable[PubAck]]


async def dead_letter(claim_check: ClaimCheck, delivery: Delivery, reason: str, out: Out) -> None:
    """Bury a request."""
    headers = {
        wire.HEADER_REPLY: delivery.reply,
        wire.HEADER_GENERATION_MS: str(int(delivery.generation_s * 1000)),
    }
    if await keep_request(claim_check, delivery.request, delivery.tenant, headers, reason):
        out(delivery.handle, TERM)


async def keep_request(
    claim_check: ClaimCheck, request: wire.Request, tenant: str, headers: Mapping[str, str], reason: str
) -> bool:
    """Put a request into the DLQ, with its input if that is to be had; whether it is there."""
    subject = subjects.dead_letter(request.model, request.version, tenant)
    try:
        request = await claim_check.open(request, tenant)
    except (StreamGone, TooLarge) as error:
        reason = f"{reason} (its input is not kept: {error.message})"
        request = msgspec.structs.replace(request, stored=None)
    except HeadraceError as error:
        log.warning("request %s cannot be kept in the DLQ yet: %s", request.rid, error.message)
        return False
    named = {**headers, wire.HEADER_MSG_ID: f"{request.rid}.dlq"}
    return await _keep(claim_check.publish, subject, wire.encode(request), named, reason)


async def bury(
    bus: Bus, subject: str, data: bytes, headers: Mapping[str, str], handle: str, reason: str, out: Out
) -> None:
    """Keep the message in the DLQ, then end it in its stream. If it cannot be kept, it is delivered again."""
    if len(data) > bus.payload_bytes_max:  # it came from somebody who did not leave room for more headers
        data, reason = b"", f"{reason:.400} ({len(data)} bytes, not kept)"
    if await _keep(bus.publish_once, subject, data, headers, reason):
        out(handle, TERM)


async def _keep(publish: Publish, subject: str, data: bytes, headers: Mapping[str, str], reason: str) -> bool:
    kept = {name: headers[name][:KEPT_HEADER_CHARACTERS_MAX] for name in KEPT_HEADERS if headers.get(name)}
    kept.setdefault(wire.HEADER_MSG_ID, wire.new_id())
    kept[wire.HEADER_REASON] = " ".join(reason.split())[:500]
    try:
        await publish(subject, data, kept)
    except HeadraceError as error:
        log.warning("a message could not be kept in the DLQ: %s", error.message)
        return False
    return True
