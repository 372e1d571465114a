"""One HTTP connection: uvicorn's, with the limits and the signs of life that it leaves open.

A head is limited in bytes and in time, and so is whatever else is no body (chunk extensions, trailers); requests ahead of their
answers and connections are counted; what is no HTTP is refused in the one shape of our errors; and when a client leaves,
every request of its connection learns of it, not only the last one. To HTTP/1.0, which has no chunks, an answer ends with its
connection.
"""

import math
import time
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from ingress import answers
from shared.errors import BadRequest, BodyTimeout, HeadersTooLarge, HeadraceError, TooManyConnections
from shared.settings import Settings

PIPELINED_MAX = 32


class Connection(HttpToolsProtocol):
    """The protocol of one client. `settings` is bound by `functools.partial`."""

    def __init__(self, settings: Settings, **given: Any) -> None:
        super().__init__(**given)
        self._settings = settings
        self._head_until = math.inf  # monotonic time until which a head must be complete
        self._unread = 0  # bytes that came and were no body, since the last head or piece of a body
        self._served: RequestResponseCycle | None = None  # what is being answered; `cycle` is what came last

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._head_until = time.monotonic() + self._settings.request_read_s
        if len(self.connections) > self._settings.http_connections_max:
            self._refuse(TooManyConnections(f"{self._settings.http_connections_max} connections are open here"))

    def connection_lost(self, exc: Exception | None) -> None:
        waiting = [cycle for cycle, _ in self.pipeline]
        self.pipeline.clear()
        for cycle in [self._served, *waiting] if self._served is not None else waiting:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        self._unread += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._refuse(error.__context__ if isinstance(error.__context__, HeadraceError) else BadRequest("no HTTP"))
            return
        except httptools.HttpParserUpgrade:  # refused in `on_headers_complete`
            return
        if self._unread > self._settings.head_bytes_max:
            self._refuse(self._too_large())
        elif self._head_until == math.inf and (self.cycle is None or self.cycle.response_complete):
            # it answers nothing any more and is no idle connection either: the next head has begun
            self._head_until = time.monotonic() + self._settings.request_read_s

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._head_until == math.inf:
            self._head_until = time.monotonic() + self._settings.request_read_s

    def on_headers_complete(self) -> None:
        self._head_until = math.inf
        if self.parser.should_upgrade():
            raise BadRequest("Upgrade: not served; send the request without it")
        if self._unread > self._settings.head_bytes_max and self._head_bytes() > self._settings.head_bytes_max:
            raise self._too_large()
        self._unread = 0
        super().on_headers_complete()
        self.headers = []  # what still comes are trailers: no headers of this request
        if len(self.pipeline) > PIPELINED_MAX:
            raise BadRequest(f"more than {PIPELINED_MAX} requests wait for their answers on this connection")

    def on_body(self, body: bytes) -> None:
        self._unread = 0
        super().on_body(body)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._served = cycle
        if cycle.scope["http_version"] == "1.0":
            _end_with_connection(cycle)
        super()._start_asgi_task(cycle, app)

    def check_head(self, now: float) -> None:
        """End the connection if its client is too slow with a head; called every second."""
        if now >= self._head_until and not self.transport.is_closing():
            self._refuse(BodyTimeout(f"the head did not arrive within {self._settings.request_read_s:g} s"))

    def _head_bytes(self) -> int:
        return len(self.url) + sum(len(name) + len(value) + len(": \r\n") for name, value in self.headers)

    def _too_large(self) -> HeadersTooLarge:
        return HeadersTooLarge(f"the head has more than {self._settings.head_bytes_max} bytes")

    def _refuse(self, error: HeadraceError) -> None:
        """Close the connection; with an answer, unless another one has begun."""
        served = self._served
        if served is not None and not served.response_complete:
            served.disconnected = True  # from here on it may say nothing
            served.message_event.set()
        if served is None or served.response_complete or not served.response_started:
            data, headers = answers.error_answer(error)
            lines = [b"%b: %b\r\n" % header for header in [*headers, (b"connection", b"close")]]
            self.transport.write(b"".join([STATUS_LINE[error.status], *lines, b"\r\n", data]))
        self.transport.close()


def _end_with_connection(cycle: RequestResponseCycle) -> None:
    """Have the answer of `cycle` written as it is: uvicorn would write one of unknown length in chunks."""
    send = cycle.send
    cycle.chunked_encoding = False

    async def sending(message: Any) -> None:
        cycle.expected_content_length = len(message.get("body", b""))  # so much is left to write, whatever still comes
        await send(message)

    cycle.send = sending  # type: ignore[method-assign]
