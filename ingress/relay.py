"""An answer that is relayed from a stream, from the request's first byte to its own last, as an ASGI response.

What the request is and where its stream comes from is said by `ingress.inference` and `ingress.resumption`.
"""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Coroutine
from typing import Any, Protocol

from starlette.responses import Response

from ingress import answers
from ingress.answers import Headers, Message, Receive, Scope, Send
from ingress.body import discard_body
from ingress.context import Context
from ingress.error_shapes import OPENAI, ErrorShape
from ingress.family import Admitted, Choice, Family
from ingress.identity import NOBODY
from ingress.metrics import DETACHED, OK, Served
from ingress.position import NumberedEvents, Position
from ingress.sse import Events
from shared import wire
from shared.dispatch import Delta
from shared.errors import BodyTimeout, Cancelled, HeadraceError, Internal

log = logging.getLogger(__name__)

DELTAS_PER_WRITE_MAX = 256  # what a slow reader left to gather is encoded and written in pieces


class Source(Protocol):
    """Where an answer comes from: a `shared.stream.Stream`, or an answer that was kept."""

    rid: str

    @property
    def usage(self) -> wire.Usage | None: ...

    @property
    def ended(self) -> bool: ...

    @property
    def claims(self) -> int: ...

    @property
    def sequence(self) -> int: ...

    @property
    def version(self) -> str:
        """Which serves it, as far as is known."""

    async def next(self, timeout: float | None = None) -> list[Delta]: ...

    def leave(self) -> None: ...


class Exchange(Response):
    """Request and answer. Its task runs until the client has its answer, left, or `interrupt` ended it."""

    def __init__(self, context: Context, route: str) -> None:
        """`route` is the label of its metrics."""
        self.background = None
        self.rid = wire.new_id()
        self._context, self._route, self._settings = context, route, context.settings
        self._started = self._written = time.monotonic()
        self._caller = NOBODY
        self._extra_headers: Headers = []
        self._errors: ErrorShape = OPENAI
        self._request_id = ""
        self._served = Served()
        self._task: asyncio.Task[Any] | None = None
        self._interruption: HeadraceError | None = None
        self._interruptible = True
        self._client_until = math.inf  # monotonic time until which the client must send, or take what is sent
        self._client_gone = False
        self._body_read = self._head_sent = self._streamed = False
        self._counts = True  # its tokens are counted here
        self._resumable = False  # its events have ids
        self._detachable = False  # it goes on for a while when its client leaves
        self._out: list[bytes] = []  # events that are not written yet
        self._events: Events | None = None  # that are being told

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._task = asyncio.current_task()
        context = self._context
        context.open.add(self)
        code, status = Cancelled.code, Cancelled.status
        try:
            error = await self._outcome(scope, receive, send)
            left = self._detachable and self._client_gone
            status = 200 if error is None else Cancelled.status if left else error.status
            code = OK if error is None else DETACHED if left else error.code
            # half a plain answer cannot be turned into an error: its connection is cut
            if error is not None and not self._client_gone and (self._streamed or not self._head_sent):
                await self._fail(error, receive, send)
        finally:
            context.open.discard(self)
            context.metrics.finished(self._served, self._route, code, time.monotonic() - self._started)
            if self._counts:
                context.observations.finished(self._served, status)

    @property
    def task(self) -> asyncio.Task[Any]:
        """The task that serves the request."""
        assert self._task is not None, "an open exchange is being served"
        return self._task

    def interrupt(self, error: HeadraceError) -> None:
        """End the request with `error`, unless it ends already."""
        if self._interruption is None:
            self._interruption = error
            if self._interruptible:
                self.task.cancel()

    def check_client(self, now: float) -> None:
        """End the request if its client neither sends nor reads; called every second."""
        if now < self._client_until:
            return
        if self._head_sent:
            self._client_gone = True
            self.interrupt(Cancelled(f"the client read nothing for {self._settings.write_stall_s:g} s"))
        else:
            self.interrupt(BodyTimeout(f"the body did not arrive within {self._settings.request_read_s:g} s"))

    # -- the request ---------------------------------------------------------------------------------------------------

    async def _outcome(self, scope: Scope, receive: Receive, send: Send) -> HeadraceError | None:
        """Serve; None when the client has its answer, else what it has to be told."""
        try:
            await self._serve(scope, receive, send)
        except asyncio.CancelledError:
            if self._interruption is None:  # cancelled by the server, not by `interrupt`
                raise
            self.task.uncancel()
            return self._interruption
        except HeadraceError as error:
            return error
        except Exception:
            log.exception("request %s failed", self.rid)
            return Internal(f"a defect of ours; the logs say more about request {self.rid}")
        finally:
            self._interruptible = False
        return None

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the request and answer it. Raises HeadraceError for what the client has to be told."""
        raise NotImplementedError

    def _identify(self, given: bytes | None) -> None:
        """Begin the headers of the answer, with the id of the request: `given`, or one made of the rid."""
        identity = answers.request_id(given, self.rid)
        self._request_id = identity.decode("ascii")
        self._extra_headers = [(name, identity) for name in self._errors.id_headers]

    async def _watched(self, receive: Receive, work: Coroutine[Any, Any, None]) -> None:
        """Do `work` while looking out for the client's leaving. The request has been read."""
        watcher = asyncio.create_task(self._watch(receive))
        try:
            await work
        finally:
            watcher.cancel()
            await asyncio.wait((watcher,))

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._client_gone = True
        self.interrupt(Cancelled("the client left"))

    async def _answer(
        self, family: Family, admitted: Admitted, stream: Source, send: Send, seen: Position | None = None
    ) -> None:
        """Relay `stream`, from which nothing has been read. `seen`: the client has that much of it."""
        try:
            if self._interruption is not None:
                raise self._interruption
            self._interruptible = True
            if self._streamed:
                await self._relay(family, admitted, stream, send, seen)
            else:
                await self._gather(family, admitted, stream, send)
        finally:
            self._interruptible = False
            stream.leave()
            self._served.version = stream.version
            if self._counts:
                self._served.claims, self._served.usage = stream.claims, stream.usage

    def _is_of(self, model: str, version: str) -> None:
        self._served.model, self._served.version = model, version

    async def _before_end(self) -> None:
        """The stream is complete; its last bytes go out when this returns."""

    async def _next(self, stream: Source, seconds: float | None) -> list[Delta] | None:
        """What the stream gained; [] after `seconds` without; None when it is complete."""
        try:
            deltas = await stream.next(seconds)
        except StopAsyncIteration:
            return None
        if any(delta.ids for delta in deltas):
            self._served.gained(time.monotonic() - self._started)
        return deltas

    # -- the answer ----------------------------------------------------------------------------------------------------

    async def _relay(
        self, family: Family, admitted: Admitted, stream: Source, send: Send, seen: Position | None
    ) -> None:
        events, out = family.events(admitted), self._out
        if self._resumable:
            numbered = NumberedEvents(events, stream, admitted.request.sampling.n, seen)
            events = numbered
            if seen is None:  # from where to resume if not even the first event arrives
                self._extra_headers.append((b"x-headrace-last-event-id", numbered.id()))
        self._events = events
        # the head waits, so that an error that comes soon has its real status
        deltas = await self._next(stream, self._settings.head_hold_s)
        self._served.version = stream.version  # of one that waits it may change once more
        self._head_sent = True
        await self._send(send, answers.start(200, answers.STREAM + self._timed_headers()))
        while deltas is not None:
            if not deltas:
                out.append(events.keepalive)
            for first in range(0, len(deltas), DELTAS_PER_WRITE_MAX):
                if first:
                    await self._write(send)
                events.add(deltas[first : first + DELTAS_PER_WRITE_MAX], out)
            if out and not stream.ended:  # the last ones go with the closing events
                await self._write(send)
            # counted from the last byte: tokens whose text is held back are silence to the client
            quiet_s = time.monotonic() - self._written
            deltas = await self._next(stream, max(0.0, self._settings.keepalive_s - quiet_s))
        if events.open_choices:
            raise Internal(f"request {self.rid} is complete, but {events.open_choices} choices have no finish")
        await self._before_end()
        out.append(events.closing(_usage(stream), stream.claims))
        await self._write(send, more=False)

    async def _gather(self, family: Family, admitted: Admitted, stream: Source, send: Send) -> None:
        choices = [Choice() for _ in range(admitted.request.sampling.n)]
        while (deltas := await self._next(stream, None)) is not None:
            for delta in deltas:
                choices[delta.choice].add(delta)
        if any(choice.finish is None for choice in choices):
            raise Internal(f"request {self.rid} is complete, but a choice has no finish")
        await self._before_end()
        data = family.plain(admitted, choices, _usage(stream), stream.claims)
        self._served.version = stream.version
        headers = [*self._timed_headers(), (b"x-headrace-claims", b"%d" % stream.claims)]
        self._head_sent = True
        await self._send(send, answers.start(200, answers.json_headers(data, headers)))
        await self._send(send, answers.body(data))

    async def _fail(self, error: HeadraceError, receive: Receive, send: Send) -> None:
        if isinstance(error, Internal):
            log.error("request %s: %s: %s", self.rid, error.code, error.message)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.write_stall_s):
                if self._head_sent:
                    told = None if self._events is None else self._events.failure(error)
                    self._out.append(told or self._errors.event(error, self._request_id))
                    await self._write(send, more=False)
                    return
                data, headers = answers.error_answer(error, self._errors.body(error, self._request_id))
                headers += self._timed_headers()
                if self._body_read:
                    await send(answers.start(error.status, headers))
                    await send(answers.body(data))
                    return
                # the client is still sending: it reads its answer only if what it sends is taken
                await send(answers.start(error.status, [*headers, (b"connection", b"close")]))
                await send(answers.body(data, more=True))
                await discard_body(receive)
                await send(answers.body(b""))

    def _timed_headers(self) -> Headers:
        milliseconds = int((time.monotonic() - self._started) * 1000)
        headers = [*self._extra_headers, (b"openai-processing-ms", b"%d" % milliseconds)]
        if self._served.version:
            headers.append((b"x-headrace-version", self._served.version.encode()))
        if self._context.draining:
            headers.append((b"connection", b"close"))
        return headers

    async def _write(self, send: Send, more: bool = True) -> None:
        data = b"".join(self._out)
        self._out.clear()
        await self._send(send, answers.body(data, more))

    async def _send(self, send: Send, message: Message) -> None:
        self._written = time.monotonic()
        self._client_until = self._written + self._settings.write_stall_s
        await send(message)
        self._client_until = math.inf


def _usage(stream: Source) -> wire.Usage:
    if stream.usage is None:
        raise Internal(f"request {stream.rid} is complete, but its usage is unknown")
    return stream.usage
