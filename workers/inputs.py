"""Inputs that are too large for the bus: fetched for each run, and removed once the message that refers to them is gone."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

from shared.background import Background
from shared.bus import Bus
from shared.claim_check import ClaimCheck
from shared.errors import ObjectsUnavailable
from shared.wire import Request

log = logging.getLogger(__name__)

OPEN_MAX = 4  # large inputs that are fetched, or being prepared, at the same time: the others wait where they are
AGAIN_S, AGAIN_MAX_S = 0.25, 2.0  # between tries while the store is away
HELD_MAX = 10_000  # messages that are remembered; what others refer to is removed by the controller's sweep
LAST_S = 2.0  # for what is still to be removed when the worker ends


class StoredInputs:
    """Those of one worker's claims and jobs."""

    def __init__(self, bus: Bus) -> None:
        self.claim_check = ClaimCheck(bus)
        self._retry_s = bus.settings.fetch_retry_s
        self._turn = asyncio.Semaphore(OPEN_MAX)
        self._held: dict[str, tuple[Request, str]] = {}  # by ack subject: the request and its tenant
        self._removing = Background()

    def hold(self, handle: str, request: Request, tenant: str) -> None:
        """A message was pulled; `handle` is its ack subject."""
        if request.stored is not None:
            self._held[handle] = (request, tenant)
            if len(self._held) > HELD_MAX:
                del self._held[next(iter(self._held))]

    def let_go(self, handle: str, ended: bool) -> None:
        """A message was handed back, or (`ended`) is gone by our word."""
        held = self._held.pop(handle, None)
        if held is not None and ended:
            self._removing.do(self.claim_check.discard(*held))

    @contextlib.asynccontextmanager
    async def opened(self, request: Request, tenant: str) -> AsyncIterator[Request]:
        """The whole request, for as long as it is being prepared. Raises ObjectsUnavailable, StreamGone and TooLarge.

        A store that does not answer is asked again for `fetch_retry_s`. Meanwhile the message is kept alive as any other.
        """
        if request.stored is None:
            yield request
            return
        async with self._turn:
            yield await self._fetch(request, tenant)

    async def close(self) -> None:
        """Remove what is to be removed, as far as that goes at once."""
        await self._removing.finish(LAST_S)
        self.claim_check.close()

    async def _fetch(self, request: Request, tenant: str) -> Request:
        loop = asyncio.get_running_loop()
        deadline, pause_s = loop.time() + self._retry_s, AGAIN_S
        while True:
            try:
                return await self.claim_check.open(request, tenant)
            except ObjectsUnavailable as error:
                if loop.time() + pause_s > deadline:
                    raise
                log.warning("the input of request %s: %s; trying again", request.rid, error.message)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, AGAIN_MAX_S)
