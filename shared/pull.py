"""Our own pull loop: credit is what the worker can take, never a timeout that hides a message.

One inbox per puller; each pull asks for `batch` messages for a few seconds with idle heartbeats. The server says the end
of a pull (408 with what is left of it, 409, missed heartbeats, reconnection), and only then is its credit asked for again.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable

import msgspec

from shared.bus import NO_RESPONDERS, Bus, Message, Subscription
from shared.streams import SECOND
from shared.wire import new_id

log = logging.getLogger(__name__)

PULLS_MAX = 8  # open at once: credit that comes back in ones is gathered into one pull
PENDING_HEADER = "Nats-Pending-Messages"
HEARTBEAT, TIMED_OUT = "100", "408"


class _Pull(msgspec.Struct):
    left: int
    heard: float
    ends: float


class Puller:
    """Pulls from one durable consumer as long as `free()` says that more can be taken.

    `on_message` gets each message (its `reply` is the ack subject). Call `pump()` whenever credit may have grown.
    """

    def __init__(
        self, bus: Bus, stream: str, consumer: str, free: Callable[[], int], on_message: Callable[[Message], None]
    ) -> None:
        self._bus, self._free, self._on_pulled = bus, free, on_message
        settings = bus.settings
        # the server refuses heartbeats that are more than half of the pull
        self._heartbeat_s = min(settings.pull_heartbeat_s, 0.4 * settings.pull_expires_s)
        self._next = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}"
        self._inbox = f"{bus.inbox}_pull.{new_id()}"
        self._pulls: dict[str, _Pull] = {}
        self._number = 0
        self._wake = asyncio.Event()
        self._retry_at = 0.0
        self._stopped = False
        self._subscription: Subscription | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._subscription = await self._bus.subscribe(self._inbox + ".*", self._on_message)
        self._bus.on_reconnect(self._reset)
        self._wake.set()
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Take no more messages: unsubscribing makes the server drop the open pulls. Returns when that is sure."""
        self._stopped = True
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        if self._subscription is not None:
            await self._subscription.unsubscribe()

    @property
    def outstanding(self) -> int:
        """Credit that the server holds."""
        return sum(pull.left for pull in self._pulls.values())

    @property
    def open(self) -> int:
        """Pulls that the server may still serve."""
        return len(self._pulls)

    def pump(self) -> None:
        """Credit may have grown: pull once what came back is worth a message of its own."""
        if not self._wake.is_set():
            outstanding = self.outstanding
            if self._free() - outstanding > outstanding // 4:
                self._wake.set()

    def _reset(self) -> None:
        self._pulls.clear()
        self._retry_at = 0.0
        self._wake.set()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._heartbeat_s / 2):
                    await self._wake.wait()
            self._wake.clear()
            now = loop.time()
            for inbox, pull in list(self._pulls.items()):
                if now - pull.heard > 2.5 * self._heartbeat_s or now > pull.ends or pull.left <= 0:
                    del self._pulls[inbox]
            credit = self._free() - self.outstanding
            if credit > 0 and len(self._pulls) < PULLS_MAX and now >= self._retry_at and self._bus.connected:
                await self._pull(credit, now)

    async def _pull(self, batch: int, now: float) -> None:
        settings = self._bus.settings
        self._number += 1
        inbox = f"{self._inbox}.{self._number}"
        self._pulls[inbox] = _Pull(batch, now, now + settings.pull_expires_s + self._heartbeat_s)
        body = msgspec.json.encode(
            {
                "batch": batch,
                "expires": int(settings.pull_expires_s * SECOND),
                "idle_heartbeat": int(self._heartbeat_s * SECOND),
            }
        )
        await self._bus.publish(self._next, body, reply=inbox)

    def _on_message(self, message: Message) -> None:
        now = asyncio.get_running_loop().time()
        if not message.status:
            # a message carries its own subject and does not name its pull: the oldest with credit left is debited
            for pull in self._pulls.values():
                pull.heard = now
                if pull.left > 0:
                    pull.left -= 1
                    if pull.left == 0:
                        self._wake.set()
                    break
            self._on_pulled(message)
            return
        pull_here = self._pulls.get(message.subject)
        if pull_here is None:
            return
        if message.status == HEARTBEAT:
            pull_here.heard = now
            return
        if message.status == NO_RESPONDERS or (message.status != TIMED_OUT and PENDING_HEADER not in message.headers):
            # no leader, or no consumer (it may be being created): try again a little later
            log.info("pull from %s: %s %s", self._next, message.status, message.headers.get("Description", ""))
            self._retry_at = now + 0.25
        del self._pulls[message.subject]
        self._wake.set()
