"""A TCP proxy that can be cut: one client's way to its server, as a network would be."""

import asyncio
import contextlib

CHUNK_BYTES = 1 << 16


class Proxy:
    """Forwards to `target`. `stall` lets no byte pass and closes nothing; `sever` closes all and refuses new connections."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._open = asyncio.Event()
        self._open.set()
        self._server: asyncio.Server | None = None
        self._links: set[asyncio.Task[None]] = set()
        self.port = 0

    async def start(self) -> None:
        """Listen; on the same port as before, if there was one."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        await self.sever()

    def stall(self) -> None:
        """A partition: what is sent goes nowhere, and nobody is told."""
        self._open.clear()

    async def sever(self) -> None:
        """A cut that both ends notice; `start` again."""
        if self._server is not None:
            self._server.close()
        for link in list(self._links):
            link.cancel()
        await asyncio.gather(*self._links, return_exceptions=True)

    def restore(self) -> None:
        """The end of a partition."""
        self._open.set()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = asyncio.current_task()
        assert link is not None
        self._links.add(link)
        upstream: asyncio.StreamWriter | None = None
        try:
            await self._open.wait()
            back, upstream = await asyncio.open_connection(*self._target)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pipe(reader, upstream))
                group.create_task(self._pipe(back, writer))
        except (OSError, asyncio.CancelledError, ExceptionGroup):
            pass  # one side is gone, or we end it: both are closed below
        finally:
            self._links.discard(link)
            for end in (writer, upstream):
                if end is not None:
                    end.transport.abort()

    async def _pipe(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            data = await reader.read(CHUNK_BYTES)
            await self._open.wait()
            if not data:
                raise ConnectionResetError("the other side closed")
            writer.write(data)
            with contextlib.suppress(TimeoutError):
                await writer.drain()
