"""Pulled messages become what the tables of claims and jobs take."""

import re
import time

from shared import subjects, wire
from shared.bus import Message
from shared.records import Version
from shared.streams import Delivery as Where
from shared.streams import delivery_of
from shared.wire import Malformed, Request
from workers.delivery import Delivery
from workers.jobs import JobDelivery

GENERATION_MS_DEFAULT = "600000"


def read_delivery(message: Message, version: Version) -> Delivery:
    """A message of REQ as the claim table takes it. Raises Malformed for what is no request of `version`."""
    headers = message.headers
    reply = headers.get(wire.HEADER_REPLY, "")
    if not re.match(wire.ADDRESS, reply):
        raise Malformed(f"{wire.HEADER_REPLY} is no frame address")
    generation_ms = headers.get(wire.HEADER_GENERATION_MS, GENERATION_MS_DEFAULT)
    if not re.fullmatch("[0-9]{1,12}", generation_ms):
        raise Malformed(f"{wire.HEADER_GENERATION_MS} is no number of milliseconds")
    queue_deadline = _time_of(message, wire.HEADER_QUEUE_DEADLINE)
    request, tenant, where = _read(message, version)
    if not subjects.may_have_frames(reply, tenant):
        raise Malformed(f"{wire.HEADER_REPLY} is another tenant's")
    return Delivery(
        request=request,
        tenant=tenant,
        seq=where.sequence,
        handle=message.reply,
        reply=reply,
        deliveries=where.delivered,
        resume=headers.get(wire.HEADER_RESUME) == "1",
        queued_ms=_queued_ms(where),
        generation_s=int(generation_ms) / 1000,
        queue_deadline=queue_deadline,
    )


def read_job(message: Message, version: Version, deadline_s: float) -> JobDelivery:
    """A message of JOB as the table of jobs takes it. Raises Malformed for what is no job of `version`.

    `deadline_s`: from its storing, of one that does not name its own.
    """
    deadline = _time_of(message, wire.HEADER_DEADLINE)
    keep_s = message.headers.get(wire.HEADER_KEEP, "0")
    if not re.fullmatch("[0-9]{1,9}", keep_s):
        raise Malformed(f"{wire.HEADER_KEEP} is no number of seconds")
    request, tenant, where = _read(message, version)
    if deadline is None:
        deadline = time.monotonic() + deadline_s - _queued_ms(where) / 1000
    return JobDelivery(
        request=request,
        tenant=tenant,
        seq=where.sequence,
        handle=message.reply,
        deliveries=where.delivered,
        queued_ms=_queued_ms(where),
        deadline=deadline,
        keep_s=int(keep_s),
    )


def _read(message: Message, version: Version) -> tuple[Request, str, Where]:
    headers = message.headers
    if headers.get(wire.HEADER_WIRE) != wire.WIRE_VERSION:
        raise Malformed(f"its wire version is {headers.get(wire.HEADER_WIRE)}, not {wire.WIRE_VERSION}")
    request = wire.decode_request(message.data, headers, version.version)
    if request.stored is not None and request.input != wire.Input():
        raise Malformed("it has an input, and refers to one")
    if (request.model, request.version) != (version.model, version.version):
        raise Malformed("its body is of another version than its subject")
    try:
        return request, subjects.tenant_of_request(message.subject), delivery_of(message.reply)
    except ValueError as error:
        raise Malformed(str(error)) from None


def _time_of(message: Message, header: str) -> float | None:
    """A monotonic time of a header in unix ms; None: it is not there. Raises Malformed."""
    value = message.headers.get(header, "")
    if not re.fullmatch("[0-9]{0,15}", value):
        raise Malformed(f"{header} is no time in milliseconds")
    return time.monotonic() + int(value) / 1e3 - time.time() if value else None


def _queued_ms(where: Where) -> int:
    return max(0, int(time.time() * 1000) - where.stored_ms)
