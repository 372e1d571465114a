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


class Credit:
    """The pulls that the server holds of one puller, and when to ask for more. Pure: time is passed in, in seconds."""

    def __init__(self, heartbeat_s: float, expires_s: float) -> None:
        self._heartbeat_s, self._expires_s = heartbeat_s, expires_s
        self._pulls: dict[str, _Pull] = {}  # with credit left, oldest first
        self._spent: dict[str, float] = {}  # without, as far as is known here, and when they end
        self._retry_at = 0.0

    @property
    def outstanding(self) -> int:
        """Credit that the server holds."""
        return sum(pull.left for pull in self._pulls.values())

    @property
    def open(self) -> int:
        """Pulls that the server may still serve."""
        return len(self._pulls)

    def is_worth_a_pull(self, free: int) -> bool:
        """Whether so much has come back that it is worth a message of its own."""
        outstanding = self.outstanding
        return free - outstanding > outstanding // 4

    def next(self, free: int, now: float) -> int:
        """Messages to pull now, or 0. What the server has forgotten, or must have, is forgotten."""
        for name, pull in list(self._pulls.items()):
            if now - pull.heard > 2.5 * self._heartbeat_s or now > pull.ends:
                del self._pulls[name]
        while self._spent and now > self._spent[name := next(iter(self._spent))]:
            del self._spent[name]
        if self.open >= PULLS_MAX or now < self._retry_at:
            return 0
        return max(0, free - self.outstanding)

    def pulled(self, name: str, batch: int, now: float) -> None:
        """A pull is sent."""
        self._pulls[name] = _Pull(batch, now, now + self._expires_s + self._heartbeat_s)

    def message(self, now: float) -> bool:
        """A message came; whether it was the last of its pull.

        It carries its own subject and does not name its pull: the oldest with credit left is debited, though the server
        serves them in turn. In sum that is right, and `ended` sets it right when one of them ends.
        """
        for name, pull in self._pulls.items():
            pull.heard = now
            pull.left -= 1
            if pull.left == 0:
                del self._pulls[name]
                self._spent[name] = pull.ends
                return True
            break
        return False

    def heartbeat(self, name: str, now: float) -> bool:
        """The server still has this pull; whether it has credit left, as far as is known here."""
        if (pull := self._pulls.get(name)) is None:
            return False
        pull.heard = now
        return True

    def ended(self, name: str, left: int | None) -> bool:
        """The server ends a pull with so many messages `left`, if it says; False: it is one that is forgotten already.

        What was debited to it for messages of others is debited to those now: else they would seem to have credit that
        the server does not have, and pass it on to the pulls after them.
        """
        if (pull := self._pulls.pop(name, None)) is None and self._spent.pop(name, None) is None:
            return False
        wrong = 0 if left is None else left - (0 if pull is None else pull.left)
        for each, other in list(self._pulls.items()):
            taken = min(other.left, wrong)
            other.left -= taken
            wrong -= taken
            if other.left == 0:
                del self._pulls[each]
                self._spent[each] = other.ends
        return True

    def rest(self, until: float) -> None:
        """No pull before that."""
        self._retry_at = until

    def reset(self) -> None:
        """A new connection: the server has no pulls of ours."""
        self._pulls.clear()
        self._spent.clear()
        self._retry_at = 0.0


class Puller:
    """Pulls from one durable consumer, from `start` to `stop`, as long as `free()` says that more can be taken.

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
        self._credit = Credit(self._heartbeat_s, settings.pull_expires_s)
        self._number = 0
        self._stirred = 0.0  # when a pull was sent, or a message came
        self._wake = asyncio.Event()
        self._subscription: Subscription | None = None
        self._task: asyncio.Task[None] | None = None
        bus.on_reconnect(self._reset)

    async def start(self) -> None:
        self._subscription = await self._bus.subscribe(self._inbox + ".*", self._on_message)
        self._reset()
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Take no more messages: unsubscribing makes the server drop the open pulls. Returns when that is sure."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        if self._subscription is not None:
            await self._subscription.unsubscribe()
            self._subscription = None

    @property
    def outstanding(self) -> int:
        """Credit that the server holds."""
        return self._credit.outstanding

    @property
    def open(self) -> int:
        """Pulls that the server may still serve."""
        return self._credit.open

    def quiet_s(self, now: float) -> float:
        """For how long the server has had credit and no message for it; 0.0: it has no credit."""
        return now - self._stirred if self._credit.outstanding else 0.0

    def pump(self) -> None:
        """Credit may have grown: pull once what came back is worth a message of its own."""
        if not self._wake.is_set() and self._credit.is_worth_a_pull(self._free()):
            self._wake.set()

    def _reset(self) -> None:
        self._credit.reset()
        self._wake.set()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._heartbeat_s / 2):
                    await self._wake.wait()
            self._wake.clear()
            now = loop.time()
            batch = self._credit.next(self._free(), now)
            if batch > 0 and self._bus.connected:
                await self._pull(batch, now)

    async def _pull(self, batch: int, now: float) -> None:
        settings = self._bus.settings
        self._number += 1
        self._stirred = now
        inbox = f"{self._inbox}.{self._number}"
        self._credit.pulled(inbox, batch, now)
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
        credit = self._credit
        if not message.status:
            self._stirred = now
            if credit.message(now):
                self._wake.set()
            self._on_pulled(message)
            return
        if message.status == HEARTBEAT:
            credit.heartbeat(message.subject, now)
            return
        pending = message.headers.get(PENDING_HEADER, "")
        if not credit.ended(message.subject, int(pending) if pending.isdecimal() else None):
            return
        if message.status == NO_RESPONDERS or (message.status != TIMED_OUT and PENDING_HEADER not in message.headers):
            # no leader, or no consumer (it may be being created): try again a little later
            log.info("pull from %s: %s %s", self._next, message.status, message.headers.get("Description", ""))
            credit.rest(now + 0.25)
        self._wake.set()
