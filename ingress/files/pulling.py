"""What arrives on the event loop, as a file that a thread reads: nothing is read ahead of what the thread asks for."""

import asyncio
import io
from collections.abc import AsyncIterator
from concurrent.futures import CancelledError, Future

from shared.errors import Cancelled


class Pulled(io.RawIOBase):
    """Made on the loop, read by one thread. `read(n)` gives n bytes, fewer at the end only."""

    def __init__(self, chunks: AsyncIterator[bytes]) -> None:
        self._chunks, self._loop = chunks, asyncio.get_running_loop()
        self._held = bytearray()
        self._ended = self._stopped = False
        self._pulling: Future[bytes | None] | None = None

    def stop(self) -> None:
        """Nobody waits for it any more: the thread's read ends with Cancelled."""
        self._stopped = True
        if self._pulling is not None:
            self._pulling.cancel()

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        """Raises what the chunks raise, and Cancelled."""
        held = self._held
        while not self._ended and (size < 0 or len(held) < size):
            chunk = self._pull()
            if chunk is None:
                self._ended = True
            else:
                held += chunk
        data = bytes(held if size < 0 else held[:size])
        del held[: len(data)]
        return data

    def _pull(self) -> bytes | None:
        self._pulling = asyncio.run_coroutine_threadsafe(self._next(), self._loop)
        if self._stopped:
            self._pulling.cancel()
        try:
            return self._pulling.result()
        except CancelledError:
            raise Cancelled("the upload was given up") from None

    async def _next(self) -> bytes | None:
        return await anext(self._chunks, None)
