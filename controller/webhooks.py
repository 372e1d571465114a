"""Telling webhooks what they are to be told: the leader tries every notice until it is delivered or given up.

Level-triggered: what waits is in the bucket, the watch tells it, and what came of an attempt counts when the watch says so. A
controller that dies in an attempt leaves the notice as it was, and the next one tries it again, under the same id.
"""

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Awaitable, Callable

from msgspec.structs import replace

from controller.faults import point
from controller.metrics import Metrics
from controller.webhook_queue import Entry, Limits, WebhookQueue
from controller.webhook_sender import Attempt, Sender
from shared import notices, subjects, webhook_secrets, webhooks
from shared.background import Background, end
from shared.bus import Bus
from shared.errors import BadRequest, Internal, Unavailable
from shared.keyvalue import Watch
from shared.leadership import Leadership
from shared.notices import NOTICES, Event, Notice
from shared.settings import Settings
from shared.streams import NOTICE_MARGIN_S
from shared.webhooks import Webhook

log = logging.getLogger(__name__)

BACKOFF_FACTOR = 3.0
STEPS_MAX = 50  # of the backoff: far beyond any longest wait
JITTER = 0.25  # of a wait, more or less
LOOK_S = 0.5  # between two looks whether this controller leads
WRITE_RETRY_S = 0.5
WRITE_TRIES_MAX = 5  # each of which takes up to `publish_timeout_s`


class Webhooks:
    """Watches the notices, and sends while this controller leads."""

    def __init__(self, bus: Bus, leader: Leadership, settings: Settings, metrics: Metrics, sender: Sender) -> None:
        self._bus, self._leader, self._settings, self._metrics, self._sender = bus, leader, settings, metrics, sender
        self._queue = WebhookQueue(
            Limits(
                overall=settings.webhook_tries_max,
                per_tenant=settings.webhook_tries_per_tenant_max,
                per_host=settings.webhook_tries_per_host_max,
            )
        )
        self._notices: dict[str, Notice] = {}  # that wait, by key, as the watch told them
        self._changed = asyncio.Event()
        self._watch: Watch | None = None
        self._attempts = Background()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Returns when what waits at present is known. Raises Unavailable."""
        self._watch = await self._bus.watch(subjects.NOTICES_BUCKET, self._on_notice)
        self._task = asyncio.create_task(self._run(), name="webhooks")

    async def close(self) -> None:
        """What is being tried is tried again by the next leader."""
        await end(self._task)
        await self._attempts.close()
        if self._watch is not None:
            await self._watch.close()
        await self._sender.close()

    def waiting(self, tenant: str) -> int:
        """How many notices of a tenant wait, as far as the watch has told."""
        return self._queue.known(tenant)

    async def tell(self, tenant: str, webhook: Webhook, event: Event) -> None:
        """See to it that a webhook is told of an event: `notices.tell`, unless too many of the tenant's wait already.

        Raises Unavailable: then it is to be called again.
        """
        waiting_max = self._settings.webhook_waiting_per_tenant_max
        if self.waiting(tenant) >= waiting_max:
            host = webhooks.host_of(webhook.url)
            log.warning(
                "webhook: %s of %s is not told to %s: %d others wait", event.type, event.subject, host, waiting_max
            )
            self._metrics.webhook("given_up")
            return
        await notices.tell(self._bus, tenant, webhook, event)
        point("webhook_noticed")

    # -- what is known ---------------------------------------------------------------------------------------------------

    def _on_notice(self, key: str, value: bytes | None) -> None:
        change = NOTICES.change(key, value)
        if change is None:
            return
        if change.record is None or change.record.state != "waiting":
            self._notices.pop(key, None)
            self._queue.drop(key)
            return
        self._notices[key] = change.record
        if not self._queue.is_running(key):
            self._wait(key, change.record)

    def _wait(self, key: str, notice: Notice) -> None:
        host = webhooks.host_of(notice.url)
        self._queue.put(Entry(key=key, tenant=notice.tenant, host=host, due=notice.due))
        self._changed.set()

    # -- what is done ----------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            self._changed.clear()
            if self._leader.leads and self._bus.connected:
                for key in self._queue.take(time.time()):
                    self._attempts.do(self._try(key, self._notices[key]))
            self._metrics.webhooks_waiting(len(self._queue))
            due = self._queue.next_due()
            wait_s = LOOK_S if due is None else min(LOOK_S, max(0.0, due - time.time()))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()

    async def _try(self, key: str, notice: Notice) -> None:
        written = False
        try:
            written = await self._settle(notice)
        except Internal as error:  # written over: it would be told again and again, since what came of it has no place
            log.error("webhook: %r: %s", notice, error.message)
            if self._notices.get(key) is notice:
                del self._notices[key]
        except Unavailable as error:
            log.error("webhook: %r: %s", notice, error.message)
        finally:
            self._queue.done(key)
            self._go_on(key, notice, written)
            self._changed.set()

    def _go_on(self, key: str, before: Notice, written: bool) -> None:
        """After an attempt: what was written has come back already, or is still to come, or it is to be done again."""
        now = self._notices.get(key)
        if now is None:
            return
        if now.attempts > before.attempts:
            self._wait(key, now)
        elif not written and time.time() < before.at + self._settings.webhook_age_max_s + NOTICE_MARGIN_S:
            self._wait(key, replace(now, due=time.time() + WRITE_RETRY_S))
        elif not written:  # the bucket has dropped it by itself, which is not told
            del self._notices[key]

    async def _settle(self, notice: Notice) -> bool:
        """Try once, and write what came of it; whether that was written.

        Raises Internal when what is there by now cannot be read, and Unavailable when it is not known what to sign with.
        """
        bus, settings = self._bus, self._settings
        last = notice.at + settings.webhook_age_max_s
        if time.time() > last:
            return await self._give_up(notice, notice.error or "it could not be tried in time", attempted=False)
        attempt = await self._attempt(notice)
        if not attempt.error:
            point("webhook_delivered")
            self._metrics.webhook("delivered")
            return await _written(lambda: notices.end(bus, notice, "delivered"))
        self._metrics.webhook("failed")
        due = time.time() + wait_after(notice.attempts + 1, attempt.retry_after_s, settings, random.random())
        if attempt.is_gone or due > last:
            return await self._give_up(notice, attempt.error)
        log.info("webhook: %r: try %d failed: %s", notice, notice.attempts + 1, attempt.error)
        return await _written(lambda: notices.postpone(bus, notice, attempt.error, due))

    async def _give_up(self, notice: Notice, error: str, *, attempted: bool = True) -> bool:
        log.warning("webhook: %r is given up after %d tries: %s", notice, notice.attempts + attempted, error)
        self._metrics.webhook("given_up")
        return await _written(lambda: notices.end(self._bus, notice, "given_up", error, attempted=attempted))

    async def _attempt(self, notice: Notice) -> Attempt:
        now = time.time()
        own = notice.secret
        try:
            secrets = [own] if own is not None else await webhook_secrets.signing(self._bus, notice.tenant, now)
        except Internal as error:
            return Attempt(error=error.message)
        if not secrets:
            return Attempt(error="the tenant has no secret to sign with")
        body = notice.body.encode()
        try:
            headers = webhooks.signed(secrets, notice.id, int(now), body)
        except BadRequest as error:  # somebody else wrote it
            return Attempt(error=error.message)
        return await self._sender.post(notice.url, headers, body)


async def _written(write: Callable[[], Awaitable[bool]]) -> bool:
    """Write what came of an attempt, also when the bus is away for a while: else the receiver is told again for nothing."""
    for left in reversed(range(WRITE_TRIES_MAX)):
        try:
            return await write()
        except Unavailable as error:
            log.info("webhook: what came of a try is not written yet: %s", error.message)
            if left:
                await asyncio.sleep(WRITE_RETRY_S)
    return False


def wait_after(attempts: int, asked_s: float, settings: Settings, chance: float) -> float:
    """How long to wait after so many attempts that failed, in seconds: `asked_s` by the receiver, up to a bound.

    `chance`, of [0, 1), spreads those that failed together.
    """
    longest = settings.webhook_backoff_max_s
    steps = min(attempts - 1, STEPS_MAX)
    own_s = min(longest, settings.webhook_backoff_s * BACKOFF_FACTOR**steps) * (1 + JITTER * (2 * chance - 1))
    return max(own_s, min(asked_s, longest))
