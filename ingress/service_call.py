"""One request over NATS as the ASGI application sees it: what it sends becomes numbered replies, each with one event."""

import asyncio
import logging
from collections.abc import Awaitable
from typing import Any, Protocol

import msgspec

from ingress.answers import Headers, Message
from shared.errors import BadRequest, HeadraceError
from shared.services import (
    COMPLETE,
    ERROR,
    ERROR_CODE,
    FAILED,
    HEADER_END,
    HEADER_EVENT_ID,
    HEADER_KEEPALIVE,
    HEADER_NUMBER,
    HEADER_STATUS,
    error_in,
)

log = logging.getLogger(__name__)

EVENT_ENDS = b"\n\n"
MSGPACK = "application/msgpack"
# of the caller's headers, what the application may see: nothing of them says who it is
TAKEN = frozenset({"x-version-pin", "x-session-id", "x-request-id", "x-resumable", "idempotency-key", "last-event-id"})
GIVEN = (
    "x-request-id",
    "x-headrace-",
    "x-ratelimit-",
    "x-should-retry",
    "retry-after",
    "idempotent-",
)  # of the answer, what the first reply has


class Publish(Protocol):
    def __call__(self, data: bytes, headers: dict[str, str]) -> Awaitable[object]:
        """Send one reply. Raises HeadraceError."""


class ServiceCall:
    """A caller, until it has its last reply or is gone."""

    def __init__(self, publish: Publish) -> None:
        self._publish = publish
        self._gone = asyncio.Event()
        self._body: bytes | None = None  # of the request, until the application has read it
        self._head: dict[str, str] = {}  # of the first reply
        self._status = 0
        self._streamed = False
        self._unsent = b""  # of a stream, what is no whole event yet
        self._number = 0

    def gone(self) -> None:
        """Nobody listens for the replies any more."""
        self._gone.set()

    def asks(self, body: bytes) -> None:
        """What the application is to read."""
        self._body = body

    async def answer(self, said: Any) -> None:
        """Answer without the application."""
        self._start(200, [])
        await self._reply(msgspec.json.encode(said), {}, last=True)

    async def receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start(message["status"], message["headers"])
            return
        self._unsent += message.get("body", b"")
        more = message.get("more_body", False)
        if not self._streamed:
            if not more:
                await self._reply(self._unsent, {}, last=True)
            return
        *events, self._unsent = self._unsent.split(EVENT_ENDS)
        for at, event in enumerate(events, start=1):
            await self._event(event, last=not more and at == len(events))

    async def refuse(self, error: HeadraceError) -> None:
        """Answer with an error that comes before there is anything to ask the application."""
        self._start(error.status, [])
        await self._reply(msgspec.json.encode(error.body()), {}, last=True)

    def _start(self, status: int, headers: Headers) -> None:
        self._status = status
        self._head = {HEADER_STATUS: str(status)}
        for raw_name, raw_value in headers:
            name, value = raw_name.decode("latin-1").lower(), raw_value.decode("latin-1")
            self._streamed |= name == "content-type" and value.startswith("text/event-stream")
            if name.startswith(GIVEN):
                self._head[name.title()] = value

    async def _event(self, event: bytes, last: bool) -> None:
        """A server-sent event, or the comment that breaks a silence."""
        data, headers = b"", {HEADER_KEEPALIVE: "1"}
        for line in event.split(b"\n"):
            if line.startswith(b"data: "):
                data = line[len(b"data: ") :]
                headers.pop(HEADER_KEEPALIVE, None)
            elif line.startswith(b"id: "):
                headers[HEADER_EVENT_ID] = line[len(b"id: ") :].decode()
        await self._reply(data, headers, last)

    async def _reply(self, data: bytes, headers: dict[str, str], last: bool) -> None:
        headers |= self._head
        headers[HEADER_NUMBER] = str(self._number)
        self._head = {}
        self._number += 1
        if last:
            # what a plain answer tells may have an error of its own: that of a job, for instance
            fails = self._streamed or self._status >= 400
            error = error_in(msgspec.json.decode(data or b"null")) if fails else None
            headers[HEADER_END] = COMPLETE if error is None else FAILED
            if error is not None:
                headers |= {ERROR_CODE: str(error.status), ERROR: error.code}
        try:
            await self._publish(data, headers)
        except HeadraceError as error:  # it is larger than a message may be
            log.warning("a reply cannot be sent: %s", error.message)
            headers |= {HEADER_END: FAILED, ERROR_CODE: str(error.status), ERROR: error.code}
            await self._publish(msgspec.json.encode(error.body()), headers)
            self.gone()


def as_json(data: bytes, content_type: str) -> bytes:
    """The body of a request, which may be msgpack. Raises BadRequest."""
    if not content_type.startswith(MSGPACK):
        return data
    try:
        return msgspec.json.encode(msgspec.msgpack.decode(data))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, TypeError) as error:
        raise BadRequest(f"the body is no msgpack that JSON could say: {error}") from None
