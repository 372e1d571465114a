"""A receiver of webhooks on the loopback, as rude as a test wants it to be."""

import asyncio
import base64
import contextlib
import hashlib
import hmac
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

KEY = b"a key of twenty-four byte"
SECRET = "whsec_" + base64.b64encode(KEY).decode()
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"


class Received:
    """One request."""

    def __init__(self, head: str, body: bytes) -> None:
        self.line, *lines = head.split("\r\n")
        self.headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        self.body = body

    @property
    def id(self) -> str:
        return self.headers["webhook-id"]

    @property
    def event(self) -> Any:
        return json.loads(self.body)

    def is_signed(self, key: bytes = KEY) -> bool:
        """Whether one of its signatures is by that key."""
        content = f"{self.id}.{self.headers['webhook-timestamp']}.".encode() + self.body
        wanted = base64.b64encode(hmac.new(key, content, hashlib.sha256).digest()).decode()
        return f"v1,{wanted}" in self.headers["webhook-signature"].split(" ")


Answer = Callable[[Received, asyncio.StreamWriter], Awaitable[None]]


def status(code: int, *headers: str) -> Answer:
    """Answers with a status and no body."""

    async def answer(_: Received, writer: asyncio.StreamWriter) -> None:
        lines = "".join(f"{header}\r\n" for header in headers)
        writer.write(f"HTTP/1.1 {code} Said\r\n{lines}content-length: 0\r\n\r\n".encode())

    return answer


class Receiver:
    """Keeps what it gets. `answer` says what it does with each."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.received: list[Received] = []
        self.connections = 0
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook?a=b"

    @property
    def ids(self) -> list[str]:
        return [each.id for each in self.received]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            head = (await reader.readuntil(b"\r\n\r\n"))[:-4].decode()
            received = Received(head, b"")
            received.body = await reader.readexactly(int(received.headers["content-length"]))
            self.received.append(received)
            await self.answer(received, writer)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the other side had enough
        finally:
            writer.close()


@contextlib.asynccontextmanager
async def receiving(answer: Answer | None = None, port: int = 0, **options: Any) -> AsyncIterator[Receiver]:
    """A receiver as long as the body lasts; `options` of the server, `ssl` for instance."""
    receiver = Receiver(answer or status(200))
    server = await asyncio.start_server(receiver.serve, "127.0.0.1", port, **options)
    receiver.port = server.sockets[0].getsockname()[1]
    try:
        yield receiver
    finally:
        server.close()
