"""Several listeners on one port: who is given new connections when one of them goes, and after it has gone."""

import asyncio
import socket
import ssl
import time
from collections import Counter
from typing import Any

from ingress.listening import bind, keep_spreading, steer_away
from shared.settings import Settings

LISTENS = (socket.SOL_SOCKET, socket.SO_ACCEPTCONN)


class Listener:
    """An ingress as far as the port is concerned."""

    def __init__(self, name: str, port: int, connections: Counter[str], context: ssl.SSLContext | None = None) -> None:
        self._context = context
        self.bound = bind(Settings(http_port=port, reuse_port=True))
        self._name, self._connections = name, connections
        self._ports: set[int] = set()

    async def listen(self) -> "Listener":
        self._server = await asyncio.start_server(self._accept, sock=self.bound, ssl=self._context)
        return self

    def took(self, port: int) -> bool:
        return port in self._ports

    async def leave(self) -> None:
        await steer_away(self.bound, self.took, self._context is not None)
        self._server.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._ports.add(writer.get_extra_info("peername")[1])
        self._connections[self._name] += 1
        writer.write(b"x")
        writer.close()


def test_a_newcomer_gets_connections_though_another_one_was_steered_away_before() -> None:
    async def work() -> None:
        connections: Counter[str] = Counter()
        first = await Listener("first", 0, connections).listen()
        port = first.bound.getsockname()[1]
        second = await Listener("second", port, connections).listen()
        third = await Listener("third", port, connections).listen()
        assert await asked(port, connections) == {"first", "second", "third"}
        await first.leave()
        await asked(port, connections)
        fourth = Listener("fourth", port, connections)
        spreading = asyncio.create_task(keep_spreading(fourth.bound, lambda: fourth.bound.getsockopt(*LISTENS) == 1))
        await fourth.listen()
        deadline = time.monotonic() + 10
        while await asked(port, connections) != {"second", "third", "fourth"}:
            assert time.monotonic() < deadline, connections
        spreading.cancel()
        for listener in (second, third, fourth):
            await listener.leave()

    asyncio.run(work())


def test_nobody_is_lost_either_where_the_port_speaks_tls(certificates: Any) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificates.server)
    trusting = ssl.create_default_context(cafile=certificates.ca)

    async def work() -> None:
        connections: Counter[str] = Counter()
        first = await Listener("first", 0, connections, context).listen()
        port = first.bound.getsockname()[1]
        second = await Listener("second", port, connections, context).listen()
        await steer_away(first.bound, first.took, secured=True)
        assert await asked(port, connections, trusting, 20) == {"second"}
        await first.leave()
        await asked(port, connections, trusting, 20)
        await second.leave()

    asyncio.run(work())


async def asked(
    port: int, connections: Counter[str], context: ssl.SSLContext | None = None, times: int = 80
) -> set[str]:
    """Who answers when many ask; everybody who asks is answered."""
    connections.clear()
    for _ in range(times):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        assert await reader.read(1) == b"x"
        writer.close()
        await writer.wait_closed()
    return set(connections)
