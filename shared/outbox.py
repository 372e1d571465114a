"""What requesters say to workers: gathered per worker and wake-up, and sent as one message."""

import asyncio
import logging
from collections.abc import Callable

from shared import subjects, wire
from shared.background import end
from shared.bus import NO_RESPONDERS, Bus, Message, Subscription
from shared.errors import TooLarge

log = logging.getLogger(__name__)

RELEASE_DELAY_S = 0.005  # a release waits this long for company; an attach takes along what waits


class Outbox:
    """Sends to workers, and tells which of them nobody is any more."""

    def __init__(self, bus: Bus, owner: str, on_gone: Callable[[str], None]) -> None:
        """`owner`: as the dispatcher's. `on_gone(worker)`: what was sent to it had no responders."""
        self._bus, self._owner, self._on_gone = bus, owner, on_gone
        self._replies = f"{bus.inbox}_ctl_{wire.new_id()}"  # NATS tells one subscriber only that nobody is there
        self._subscription: Subscription | None = None
        self._waiting: dict[str, list[wire.Attach | wire.Release]] = {}
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._subscription = await self._bus.subscribe(self._replies + ".*", self._on_status)
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Send what waits, and stop."""
        await self._flush()
        await end(self._task)
        if self._subscription is not None:
            await self._subscription.unsubscribe()

    def put(self, worker: str, item: wire.Attach | wire.Release) -> None:
        """It leaves with whatever else there is for the worker by then."""
        if isinstance(item, wire.Attach):
            self._wake.set()
        elif not self._waiting:
            asyncio.get_running_loop().call_later(RELEASE_DELAY_S, self._wake.set)
        self._waiting.setdefault(worker, []).append(item)

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            await self._flush()

    async def _flush(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for worker, items in waiting.items():
            for data in wire.encode_batches(wire.ToWorker, items, self._bus.payload_bytes_max):
                try:
                    subject = subjects.worker_control(worker, self._owner)
                    await self._bus.publish(subject, data, reply=f"{self._replies}.{worker}")
                except TooLarge as error:
                    log.error("worker %s is not told: %s", worker, error.message)

    def _on_status(self, message: Message) -> None:
        if message.status == NO_RESPONDERS:
            self._on_gone(message.subject.rsplit(".", 1)[1])
