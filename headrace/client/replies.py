"""A stream of an ingress's service as the client reads it: gone on with, at any ingress, when replies are lost."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from headrace.client.told import Ended, Token, last_told, scored
from headrace.client.transport import all_told
from shared import services, subjects, wire
from shared.bus import NO_RESPONDERS, Bus, Message
from shared.errors import Draining, Unavailable

SILENCE_MAX_S = 25.0  # an ingress breaks a silence every 10 s
AGAIN_S, AGAIN_MAX = 0.3, 60  # where nobody answers


class Replies:
    """Numbered replies with events of the native route, resumable by their ids."""

    def __init__(self, bus: Bus, tenant: str, subject: str, id: str, position: str = "") -> None:
        self.id, self.position = id, position
        self.ended: Ended | None = None
        self._bus, self._tenant, self._subject = bus, tenant, subject
        self._arrived: asyncio.Queue[Message] = asyncio.Queue()

    async def tokens(self) -> AsyncIterator[Token]:
        tries = 0
        while self.ended is None:
            before = self.position
            async for event in self._events():
                if "finish_reason" in event:
                    self.ended = last_told(event)
                    return
                yield scored(event["token"], event["index"], event.get("score"))
            tries = 0 if self.position != before else tries + 1
            if tries > AGAIN_MAX:
                raise Unavailable(f"no ingress goes on with {self.id}")
            await asyncio.sleep(AGAIN_S)

    async def cancel(self) -> None:
        """Nothing ends by not being read any more."""

    async def detach(self) -> None:
        """Likewise."""

    async def _events(self) -> AsyncIterator[dict[str, Any]]:
        """What comes on one address, until something is missing. Raises the error that is told."""
        address = subjects.frame_address(self._tenant, wire.new_id())
        self._arrived = asyncio.Queue()
        subscription = await self._bus.subscribe(address, self._arrived.put_nowait)
        headers = {wire.HEADER_REPLY: address}
        if self.position:
            headers[services.HEADER_LAST_EVENT_ID] = self.position
        try:
            await self._bus.publish(self._subject, msgspec.json.encode({"id": self.id}), address, headers)
            number = 0
            while (message := await self._next()) is not None:
                if message.headers.get(services.HEADER_NUMBER) != str(number):
                    return
                number += 1
                if services.HEADER_KEEPALIVE in message.headers:
                    continue
                if not message.data:
                    raise all_told(self.id)
                event = msgspec.json.decode(message.data)
                if (error := services.error_in(event)) is not None:
                    raise error
                self.position = message.headers.get(services.HEADER_EVENT_ID, self.position)
                yield event
        except Draining:
            return
        finally:
            await subscription.unsubscribe()

    async def _next(self) -> Message | None:
        try:
            async with asyncio.timeout(SILENCE_MAX_S):
                message = await self._arrived.get()
        except TimeoutError:
            return None
        return None if message.status == NO_RESPONDERS else message
