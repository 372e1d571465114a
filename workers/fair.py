"""The worker's end of what waits by tenant, the lane fair and detached work: with credit that nothing before it has a use
for, it pulls from tenants' queues in turn.

A pull never waits: it takes what is there. So a tenant's backlog costs something only while there is one.
"""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable

import msgspec

from shared import subjects, wakes
from shared.background import end
from shared.bus import Bus, Message, Subscription
from shared.errors import Unavailable
from shared.records import Version
from shared.streams import delivery_of
from shared.wire import new_id
from workers.queues import TenantQueues
from workers.rhythm import Rhythm
from workers.turns import Turns

log = logging.getLogger(__name__)

PULL_S = 2.0  # the server says the end of a pull at once; after so long it is lost
RETRY_S = 0.25
NOTHING_LEFT = "404"


class FairPuller:
    """Pulls from the consumers of all tenants of a version, from `start` to `stop`."""

    def __init__(
        self,
        bus: Bus,
        version: Version,
        queues: TenantQueues,
        turns: Turns,
        spare_max: int,
        free: Callable[[], int],
        quiet_s: Callable[[float], float],
        held: Callable[[], Counter[str]],
        share: Callable[[int], list[tuple[str, int]]],
        on_message: Callable[[Message], None],
    ) -> None:
        """`spare_max`: slots that may be kept from backlogs. `free`: requests that can be taken. `quiet_s(now)`: for how long
        what comes first has had no use for its credit. `held`: messages of these queues that this worker has, by tenant.
        `share(credit)`: what to pull of whom."""
        self._bus, self._model, self._version = bus, version.model, version.version
        self._queues, self._turns, self._held = queues, turns, held
        self._rhythm = Rhythm(turns, spare_max, free, quiet_s, lambda: held().total())
        self._share, self._on_pulled = share, on_message
        self._inbox = f"{bus.inbox}_fair.{new_id()}"
        self._pulls: dict[str, tuple[str, float]] = {}  # inbox: tenant, when it is lost
        self._consumers: dict[str, float] = {}  # that are there, and when they were last pulled from
        self._number = 0
        self._ended = asyncio.Event()
        self._wake = asyncio.Event()
        self._subscriptions: list[Subscription] = []
        self._task: asyncio.Task[None] | None = None
        bus.on_reconnect(self._reset)

    async def start(self) -> None:
        self._subscriptions = [
            await self._bus.subscribe(self._inbox + ".*", self._on_message),
            await self._bus.subscribe(subjects.wake(self._model, self._version), self._on_hint),
        ]
        self._reset()
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Take no more messages. Returns when those that were asked for are here."""
        await end(self._task)
        self._task = None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PULL_S):
                while self._pulls and self._bus.connected:
                    self._ended.clear()
                    await self._ended.wait()
        for subscription in self._subscriptions:
            await subscription.unsubscribe()
        self._subscriptions = []

    def pump(self) -> None:
        """Credit may have grown."""
        if not self._wake.is_set() and self._rhythm.is_worth_a_turn(asyncio.get_running_loop().time()):
            self._wake.set()

    def fast_claimed(self) -> None:
        """A request was claimed from `fast`."""
        if self._rhythm.fast_claimed(asyncio.get_running_loop().time()):
            self._wake.set()

    def _reset(self) -> None:
        for inbox in list(self._pulls):
            self._end(inbox)
        self._consumers.clear()
        self._rhythm.look_by(0.0)
        self._wake.set()

    def _on_hint(self, message: Message) -> None:
        self._rhythm.hinted(self._queues.hinted(wakes.decode(message.data)), self._consumers)
        self._wake.set()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(self._rhythm.next_at(loop.time())):
                    await self._wake.wait()
            self._wake.clear()
            try:
                await self._turn(loop.time())
            except Unavailable as error:
                log.info("the queues %s: %s", self._queues.filter, error.message)
                await asyncio.sleep(RETRY_S)

    async def _turn(self, now: float) -> None:
        for inbox in [inbox for inbox, (_, lost_at) in self._pulls.items() if now > lost_at]:
            self._end(inbox)
        if self._rhythm.is_time_to_look(now):
            await self._look(now)
        credit = self._rhythm.credit(now)
        shared = self._share(credit)
        self._rhythm.shared(credit, len(shared))
        for tenant, count in shared:
            await self._pull(tenant, count, now)

    async def _look(self, now: float) -> None:
        stored = await self._bus.subject_counts(self._queues.stream, self._queues.filter)
        held = self._held() if stored else Counter()
        waiting = {}
        for subject, count in stored.items():
            with contextlib.suppress(ValueError):  # nobody's name
                tenant = subjects.tenant_of_request(subject)
                if subject == self._queues.subject(tenant):
                    waiting[tenant] = count - held.get(tenant, 0)
        self._turns.look(waiting)
        forgotten = now - self._bus.settings.fair_consumer_idle_s
        self._consumers = {tenant: used for tenant, used in self._consumers.items() if used > forgotten}

    async def _pull(self, tenant: str, count: int, now: float) -> None:
        idle_s = self._bus.settings.fair_consumer_idle_s / 2
        if now - self._consumers.get(tenant, -idle_s) >= idle_s:
            await self._queues.ensure(tenant)
        self._consumers[tenant] = now
        self._number += 1
        inbox = f"{self._inbox}.{self._number}"
        self._pulls[inbox] = (tenant, now + PULL_S)
        self._turns.pulled(tenant, count)
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{self._queues.stream}.{self._queues.consumer(tenant)}"
        await self._bus.publish(subject, msgspec.json.encode({"batch": count, "no_wait": True}), reply=inbox)

    def _on_message(self, message: Message) -> None:
        if not message.status:
            tenant = subjects.tenant_of_request(message.subject)
            self._rhythm.fair_claimed()
            if self._turns.message(tenant, delivery_of(message.reply).left):
                self._forget(tenant)
            self._on_pulled(message)
            return
        if message.subject in self._pulls:
            tenant, _ = self._pulls[message.subject]
            self._end(message.subject)
            if message.status != NOTHING_LEFT:
                log.info("pull from the backlog of %s: %s", tenant, message.status)
                self._consumers.pop(tenant, None)
                self._rhythm.look_by(asyncio.get_running_loop().time() + RETRY_S)
            self._wake.set()

    def _end(self, inbox: str) -> None:
        tenant, _ = self._pulls.pop(inbox)
        self._turns.ended(tenant)
        self._ended.set()

    def _forget(self, tenant: str) -> None:
        for inbox in [inbox for inbox, (whose, _) in self._pulls.items() if whose == tenant]:
            del self._pulls[inbox]
        self._ended.set()
        self._wake.set()
