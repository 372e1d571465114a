"""Several prompts, or packs of inputs to embed, in one request: on the bus a request for each, towards the client one answer
with all their choices."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from itertools import accumulate
from typing import TYPE_CHECKING

from shared.errors import HeadraceError
from shared.wire import Request, Usage

if TYPE_CHECKING:
    from shared.dispatch import Dispatcher
    from shared.stream import Delta, Stream


class Several:
    """The streams of the prompts as one source. The choices of each follow those of the prompt before it."""

    def __init__(self, streams: "list[Stream]") -> None:
        self.rid, self.sequence = streams[0].rid, streams[0].sequence
        self._streams = streams
        self._open = len(streams)
        self._firsts = [0, *accumulate(stream.request.sampling.n for stream in streams)]  # choices before each
        self._deltas: list[Delta] = []
        self._error: HeadraceError | None = None
        self._changed = asyncio.Event()

    @property
    def version(self) -> str:
        """Of the first prompt; while a rollback moves what waits, another one may have another."""
        return self._streams[0].version

    @property
    def ended(self) -> bool:
        return self._open == 0 or self._error is not None

    @property
    def claims(self) -> int:
        """Of the prompt that had the most."""
        return max(stream.claims for stream in self._streams)

    @property
    def usage(self) -> Usage | None:
        """Of all prompts together; None until each has told its own."""
        total = Usage(0, 0)
        for stream in self._streams:
            if stream.usage is None:
                return None
            total.prompt_tokens += stream.usage.prompt_tokens
            total.completion_tokens += stream.usage.completion_tokens
            total.cached_tokens += stream.usage.cached_tokens
        return total

    async def next(self, timeout: float | None = None) -> "list[Delta]":
        """As `Stream.next`. The first error of a prompt ends them all."""
        if not self._deltas and not self.ended:
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await self._changed.wait()
        if self._deltas:
            deltas, self._deltas = self._deltas, []
            return deltas
        if self._error is not None:
            raise self._error
        if self.ended:
            raise StopAsyncIteration
        return []

    def leave(self) -> None:
        for stream in self._streams:
            stream.leave()

    async def pump(self, number: int) -> None:
        """Read one of the streams to its end."""
        stream = self._streams[number]
        first = self._firsts[number]
        try:
            while True:
                for delta in await stream.next():
                    delta.choice += first
                    self._deltas.append(delta)
                self._changed.set()
        except StopAsyncIteration:
            self._open -= 1
        except HeadraceError as error:
            self._error = self._error or error
        self._changed.set()


@contextlib.asynccontextmanager
async def submitted(dispatcher: "Dispatcher", requests: list[Request], tenant: str) -> AsyncIterator[Several]:
    """Store them all; their streams as one, read for as long as the block runs. Raises what `Dispatcher.submit` raises."""
    streams: list[Stream] = []
    pumps: list[asyncio.Task[None]] = []
    try:
        for request in requests:
            streams.append(await dispatcher.submit(request, tenant))
        several = Several(streams)
        pumps += [asyncio.create_task(several.pump(number)) for number in range(len(streams))]
        yield several
    finally:
        for stream in streams:
            stream.leave()
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
