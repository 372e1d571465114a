"""Where a request is that was published by somebody: in the queue, with a worker, or at another requester."""

import logging
import time

import msgspec

from shared import subjects, wire
from shared.bus import Bus
from shared.claim_check import ClaimCheck
from shared.errors import StreamGone, Unavailable
from shared.settings import Settings
from shared.streams import StoredMessage

log = logging.getLogger(__name__)

ATTEMPTS_MAX = 2  # of asking everybody


class Located(msgspec.Struct, frozen=True):
    """A request that can be attached to."""

    request: wire.Request
    seq: int
    body: bytes  # of its message, what it refers to included; b"": the message is gone, or what it refers to
    queue_left_s: float  # of its queue deadline, if nobody has taken it yet


async def locate(bus: Bus, claim_check: ClaimCheck, rid: str, tenant: str, seq: int, owner: str) -> Located | None:
    """The request, asked of the queue by its sequence (0: not known), then of everybody. None: nobody has it any more.

    `owner` of frame addresses: who asks. Only an ingress may look into the queue. Raises Unavailable.
    """
    settings = bus.settings
    stored = await _stored(bus, rid, tenant, seq, owner)
    if stored is None:
        found = await _ask_everybody(bus, settings, rid, tenant, owner)
        if found is None:
            return None
        if found.seq not in (0, seq):
            stored = await _stored(bus, rid, tenant, found.seq, owner)
        if stored is None:
            return Located(found.request, found.seq, b"", _least_s(settings))
    message, request = stored
    left_s = settings.queue_deadline_s
    deadline_ms = message.headers.get(wire.HEADER_QUEUE_DEADLINE, "")
    if deadline_ms.isdigit():
        left_s = int(deadline_ms) / 1000 - time.time()
    left_s = max(left_s, _least_s(settings))
    try:
        request = await claim_check.open(request, tenant)
    except (StreamGone, Unavailable) as error:  # a worker may have it all the same
        log.warning("request %s cannot be published again: %s", rid, error.message)
        return Located(request, message.seq, b"", left_s)
    return Located(request, message.seq, wire.encode(request), left_s)


def _least_s(settings: Settings) -> float:
    """How long to look, whatever the clocks say, for a worker that took it in time and may be at it still."""
    return 2 * settings.orphan_grace_s + 3 * settings.ack_wait_s


async def revoke(bus: Bus, claim_check: ClaimCheck, rid: str, tenant: str, seq: int, owner: str) -> bytes:
    """End a request for everybody: `wire.CANCELLED`, `wire.FINISHED`, or b"" when nobody has it. Raises Unavailable.

    A queued one is known to the requester that published it; where that one is gone, only its sequence finds it.
    """
    question = wire.encode(wire.About(rid, tenant))
    try:
        answer = await bus.request(subjects.cancel(owner), question, bus.settings.attach_timeout_s)
    except Unavailable:
        stored = await _stored(bus, rid, tenant, seq, owner)
        if stored is None:
            return b""
        await claim_check.delete_read(subjects.REQ_STREAM, stored[0])
        return wire.CANCELLED
    return answer.data


async def _stored(bus: Bus, rid: str, tenant: str, seq: int, owner: str) -> tuple[StoredMessage, wire.Request] | None:
    may_look = seq and owner == subjects.INGRESS_OWNER
    message = await bus.get_message(subjects.REQ_STREAM, seq) if may_look else None
    if message is None:
        return None
    try:
        if subjects.tenant_of_request(message.subject) != tenant:
            return None
        request = wire.decode_request(message.data, message.headers, subjects.version_of_request(message.subject))
    except ValueError:  # not a request, or of nobody
        return None
    return (message, request) if request.rid == rid else None


async def _ask_everybody(bus: Bus, settings: Settings, rid: str, tenant: str, owner: str) -> wire.Found | None:
    question = wire.encode(wire.About(rid, tenant))
    for _ in range(ATTEMPTS_MAX):
        try:
            answer = await bus.request(subjects.find(owner), question, settings.attach_timeout_s)
        except Unavailable as error:
            log.info("request %s: %s", rid, error.message)
            continue
        return wire.decode_found(answer.data)
    return None
