"""What a requester puts around a request, and how long it waits for what: both from the settings."""

import math
import time

from shared import wire
from shared.requester import Requester
from shared.settings import Settings
from shared.terms import RequesterLimits

TTL_MARGIN_S = 60


def limits_of(settings: Settings, now: float, queue_left_s: float | None = None) -> RequesterLimits:
    """Of a requester that begins at `now`; `queue_left_s` is what is left of the time of one that was published before."""
    return RequesterLimits(
        silence_s=settings.silence_s,
        attach_timeout_s=settings.attach_timeout_s,
        seek_every_s=settings.seek_every_s,
        seek_every_max_s=settings.seek_every_max_s,
        ack_wait_s=settings.ack_wait_s,
        orphan_grace_s=settings.orphan_grace_s,
        nak_hold_s=settings.nak_hold_s,
        unserved_max_s=settings.ack_wait_s + settings.pull_expires_s + settings.seek_every_max_s,
        deaths_max=settings.deaths_max,
        queue_deadline=now + (settings.queue_deadline_s if queue_left_s is None else queue_left_s),
        generation_s=settings.generation_deadline_s,
    )


def headers_of(settings: Settings, requester: Requester, message_id: str, resume: bool) -> dict[str, str]:
    """Of a message that is published now."""
    now = time.monotonic()
    queue_ms = max(0, int((requester.limits.queue_deadline - now) * 1000))
    deadlines_s = settings.queue_deadline_s + settings.generation_deadline_s + settings.orphan_grace_s
    headers = {
        wire.HEADER_MSG_ID: message_id,
        wire.HEADER_TTL: str(math.ceil(deadlines_s) + TTL_MARGIN_S),
        wire.HEADER_WIRE: wire.WIRE_VERSION,
        wire.HEADER_REPLY: requester.reply,
        wire.HEADER_QUEUE_DEADLINE: str(int(time.time() * 1000) + queue_ms),
        wire.HEADER_QUEUE_MS: str(queue_ms),
        wire.HEADER_GENERATION_MS: str(int(requester.generation_left_s(now) * 1000)),
    }
    if resume:
        headers[wire.HEADER_RESUME] = "1"
    return headers
