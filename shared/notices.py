"""Notices: what webhooks are to be told, in the bucket `notices`, and what came of that.

Whoever sees that something has happened writes the notice, once, under an id that follows from what has happened: a second one,
after a crash for instance, changes nothing. The controller that leads sends what waits. What has ended stays for a while, less
what it said, so that nobody writes it again, and for whoever asks.
"""

import logging
import math
import time
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta, Struct
from msgspec.structs import replace

from shared import records, subjects, webhooks
from shared.stored import Stored, json
from shared.webhooks import Delivery, DeliveryState, EventType, Webhook

if TYPE_CHECKING:
    from shared.bus import Bus

log = logging.getLogger(__name__)

OPERATOR = subjects.INGRESS_OWNER  # whose deployments are: no tenant is called that
ERROR_CHARACTERS_MAX = 200
ATTEMPTS_MAX = 1_000_000
TIME_MAX = 1e11  # unix seconds

Time = Annotated[float, Meta(ge=0.0, le=TIME_MAX)]


class Event(Struct, frozen=True):
    """Something that has happened."""

    type: EventType
    subject: str  # the id of what it is about
    at: float  # unix seconds
    data: dict[str, object]  # ids and states, and never what was asked or answered
    serial: int = 0  # tells events of one type and subject apart


class Notice(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An event and where it is to be told, in the bucket `notices` under key(tenant, id)."""

    id: str  # the webhook-id
    tenant: str
    type: EventType
    subject: str  # the id of what it is about
    at: Time  # unix seconds, when it happened
    url: str  # of one that has ended: the host only
    body: str = ""  # of one that waits: what is sent, to the byte
    secret: str | None = None  # None: the tenant's
    state: DeliveryState = "waiting"
    attempts: Annotated[int, Meta(ge=0, le=ATTEMPTS_MAX)] = 0
    due: Time = 0.0  # unix seconds: when it is to be tried next
    error: str = ""  # of the last attempt
    ended: Time = 0.0  # unix seconds

    def __repr__(self) -> str:
        return f"{self.type} {self.id} of {self.subject} to {webhooks.host_of(self.url)}"


NOTICES = Stored(json(Notice), "a notice for a webhook", lambda each: (each.tenant, each.id), 2)


async def tell(bus: "Bus", tenant: str, webhook: Webhook, event: Event) -> Notice | None:
    """See to it that a webhook is told of an event, if it wants to be. The notice, if this is the call that wrote it.

    Raises Unavailable: then nothing is sure, and it is to be called again.
    """
    if not webhook.wants(event.type) or event.at < time.time() - bus.settings.webhook_age_max_s:
        return None
    id_ = webhooks.event_id(tenant, event.type, event.subject, event.serial)
    notice = Notice(
        id=id_,
        tenant=tenant,
        type=event.type,
        subject=event.subject,
        at=event.at,
        url=webhook.url,
        body=webhooks.body(id_, event.type, event.at, event.data).decode(),
        secret=webhook.secret,
        due=event.at,
    )
    return notice if await _write(bus, notice, 0) else None


async def find(bus: "Bus", tenant: str, id_: str) -> Notice | None:
    """What is known of a notice. Raises Unavailable, and Internal for what cannot be read."""
    found = await _read(bus, tenant, id_)
    return found[0] if found is not None else None


async def delivery(bus: "Bus", tenant: str, type_: EventType, subject: str) -> Delivery | None:
    """How far it is with telling of an event; None: nobody is to be told, is yet, or was for a while. Raises Unavailable."""
    notice = await find(bus, tenant, webhooks.event_id(tenant, type_, subject))
    if notice is None:
        return None
    return Delivery(id=notice.id, type=type_, state=notice.state, attempts=notice.attempts, error=notice.error or None)


async def postpone(bus: "Bus", notice: Notice, error: str, due: float) -> bool:
    """An attempt failed, and another is due; whether that is written: nobody else wrote of it meanwhile. Raises Unavailable."""
    attempts = notice.attempts + 1
    return await _change(bus, notice, replace(notice, attempts=attempts, error=error[:ERROR_CHARACTERS_MAX], due=due))


async def end(bus: "Bus", notice: Notice, state: DeliveryState, error: str = "", *, attempted: bool = True) -> bool:
    """It was delivered or given up; whether that is written. Raises Unavailable."""
    ended = replace(
        notice,
        url=webhooks.host_of(notice.url),
        body="",
        secret=None,
        state=state,
        attempts=notice.attempts + attempted,
        error=error[:ERROR_CHARACTERS_MAX],
        ended=time.time(),
    )
    return await _change(bus, notice, ended)


async def _change(bus: "Bus", before: Notice, after: Notice) -> bool:
    found = await _read(bus, before.tenant, before.id)
    if found is None or found[0].state != "waiting" or found[0].attempts != before.attempts:
        return False
    return await _write(bus, after, found[1])


async def _read(bus: "Bus", tenant: str, id_: str) -> tuple[Notice, int] | None:
    key = subjects.key(tenant, id_)
    found = await bus.kv_get(subjects.NOTICES_BUCKET, key)
    return None if found is None else (NOTICES.at(key, found[0]), found[1])


async def _write(bus: "Bus", notice: Notice, revision: int) -> bool:
    """One that waits stays as long as its bucket lets it. One that ended, until nobody can write it again."""
    settings, key = bus.settings, subjects.key(notice.tenant, notice.id)
    ttl_s = 0
    if notice.state != "waiting":
        left_s = notice.at + settings.webhook_age_max_s - time.time() if is_watched(notice.type) else 0.0
        ttl_s = max(1, math.ceil(max(left_s, 0.0) + settings.webhook_kept_s))
    return await bus.kv_update(subjects.NOTICES_BUCKET, key, records.encode(notice), revision, ttl_s) is not None


def is_watched(type_: EventType) -> bool:
    """Whether events of the type are read off records, by each controller that begins to lead; others are read once."""
    return type_.startswith(("batch.", "deployment."))
