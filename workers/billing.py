"""Writes what requests came to into the stream USAGE, and acknowledges their messages once that is stored.

What ends within GATHER_S is one message for each tenant, since the broker keeps the newest ones in its memory. Accounting
holds nothing up for long: after HOLD_S without an answer the messages are acknowledged all the same, and the events are
kept here and tried again.
"""

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from shared import subjects, usage
from shared.background import end
from shared.errors import HeadraceError
from shared.usage import UsageEvent
from shared.wire import HEADER_MSG_ID, new_id

if TYPE_CHECKING:
    from shared.bus import Bus

log = logging.getLogger(__name__)

GATHER_S = 0.01
HOLD_S = 2.0  # less than what is left of ack_wait after the last in-progress
AGAIN_S = 1.0
EVENTS_MAX = 1000  # of a message
KEPT_MAX = 1000  # messages that could not be stored


class Biller:
    """The events of one worker. `ack` acknowledges a message of REQ."""

    def __init__(self, bus: "Bus", ack: Callable[[str], None]) -> None:
        self._bus, self._ack = bus, ack
        self._events: dict[str, list[UsageEvent]] = {}  # by tenant
        self._handles: list[list[str]] = []
        self._kept: deque[tuple[str, bytes, str]] = deque()
        self._wanted = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Write what is here, as far as that goes at once."""
        await end(self._task)
        await self._flush()
        await self._try_kept()
        for subject, data, _ in self._kept:
            log.error("not accounted for: %s %s", subject, data.hex())

    def add(self, tenant: str, event: UsageEvent, handles: list[str]) -> None:
        """Write `event`, and then acknowledge its messages: those that are in `handles` when the loop goes on."""
        self._events.setdefault(tenant, []).append(event)
        self._handles.append(handles)
        self._wanted.set()

    async def _run(self) -> None:
        while True:
            try:
                async with asyncio.timeout(AGAIN_S if self._kept else None):
                    await self._wanted.wait()
            except TimeoutError:
                await self._try_kept()
                continue
            await asyncio.sleep(GATHER_S)
            await self._flush()

    async def _flush(self) -> None:
        self._wanted.clear()
        events, self._events = self._events, {}
        handles, self._handles = self._handles, []
        messages = [
            (subjects.usage(tenant), usage.encode(part), new_id())
            for tenant, each in events.items()
            for part in (each[first : first + EVENTS_MAX] for first in range(0, len(each), EVENTS_MAX))
        ]
        try:
            async with asyncio.timeout(HOLD_S):
                while messages:
                    await self._store(*messages[-1])
                    messages.pop()
        except (HeadraceError, TimeoutError) as error:
            log.error("%d messages with usage are kept, to be tried again: %r", len(messages), error)
        finally:  # also when this is cancelled
            self._kept += messages
            for handle in itertools.chain.from_iterable(handles):
                self._ack(handle)
        while len(self._kept) > KEPT_MAX:
            subject, data, _ = self._kept.popleft()
            log.error("not accounted for: %s %s", subject, data.hex())

    async def _try_kept(self) -> None:
        try:
            async with asyncio.timeout(HOLD_S):
                while self._kept:
                    await self._store(*self._kept[0])
                    self._kept.popleft()
        except (HeadraceError, TimeoutError) as error:
            log.info("usage is still kept: %r", error)

    async def _store(self, subject: str, data: bytes, message_id: str) -> None:
        await self._bus.publish_durable(subject, data, {HEADER_MSG_ID: message_id})
