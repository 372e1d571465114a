"""The lease of a process: what it says of itself every second, until it goes."""

import asyncio
import logging
from collections.abc import Callable

from shared.background import end
from shared.bus import Bus
from shared.errors import Unavailable

log = logging.getLogger(__name__)


class LeaseKeeper:
    """Writes `current()` under `key` of `bucket` every `lease_every_s` and at once after `changed()`."""

    def __init__(self, bus: Bus, bucket: str, key: str, current: Callable[[], bytes]) -> None:
        self._bus, self._bucket, self._key, self._current = bus, bucket, key, current
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self.write()
        self._task = asyncio.create_task(self._run())

    def changed(self) -> None:
        self._changed.set()

    async def stop(self) -> None:
        """End the lease: the process is gone in good order."""
        await end(self._task)
        try:
            await self._bus.kv_delete(self._bucket, self._key)
        except Unavailable as error:
            log.warning("the lease is left to expire: %s", error.message)

    async def write(self) -> None:
        try:
            await self._bus.kv_put(self._bucket, self._key, self._current())
        except Unavailable as error:
            log.warning("the lease was not written: %s", error.message)

    async def _run(self) -> None:
        while True:
            try:
                async with asyncio.timeout(self._bus.settings.lease_every_s):
                    await self._changed.wait()
            except TimeoutError:
                pass
            self._changed.clear()
            await self.write()
