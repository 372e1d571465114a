"""What a worker says to requesters: gathered per wake-up, one message per frame address."""

import asyncio
import logging
from collections.abc import Callable

from shared import wire
from shared.background import end
from shared.bus import NO_RESPONDERS, Bus, Message
from shared.errors import TooLarge

log = logging.getLogger(__name__)

Item = wire.Accepted | wire.Frame | wire.Ok | wire.Wait | wire.No

ADDRESSES_MAX = 16_384  # remembered for no-responders; the oldest go first


class Replier:
    """Sends items to frame addresses and tells which of them nobody listens on."""

    def __init__(self, bus: Bus, worker: str, on_gone: Callable[[str], None]) -> None:
        self._bus, self._worker, self._on_gone = bus, worker, on_gone
        self._inbox = f"{bus.inbox}_frames"
        self._outgoing: dict[str, list[Item]] = {}
        self._wake = asyncio.Event()
        self._numbers: dict[str, str] = {}  # address -> its reply subject
        self._addresses: dict[str, str] = {}  # and back
        self._number = 0
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self._bus.subscribe(self._inbox + ".*", self._on_status)
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        await self.flush()
        await end(self._task)

    def send(self, address: str, item: Item) -> None:
        """Queue an item; it leaves with all others of this wake-up."""
        items = self._outgoing.get(address)
        if items is None:
            self._outgoing[address] = [item]
            self._wake.set()
        else:
            items.append(item)

    async def flush(self) -> None:
        outgoing, self._outgoing = self._outgoing, {}
        for address, items in outgoing.items():
            reply = self._numbers.get(address) or self._remember(address)
            for data in wire.encode_batches(self._batch, items, self._bus.payload_bytes_max, wire.encoder_for(address)):
                try:
                    await self._bus.publish(address, data, reply=reply)
                except TooLarge as error:
                    log.error("%s is not told: %s", address, error.message)

    def _batch(self, items: list[Item]) -> wire.FromWorker:
        return wire.FromWorker(self._worker, items)

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            await self.flush()

    def _remember(self, address: str) -> str:
        self._number += 1
        reply = f"{self._inbox}.{self._number}"
        self._numbers[address] = reply
        self._addresses[reply] = address
        if len(self._numbers) > ADDRESSES_MAX:
            oldest = next(iter(self._numbers))
            del self._addresses[self._numbers.pop(oldest)]
        return reply

    def _on_status(self, message: Message) -> None:
        address = self._addresses.get(message.subject)
        if message.status == NO_RESPONDERS and address is not None:
            self._on_gone(address)
