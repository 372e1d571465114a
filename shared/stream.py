"""The reader's end of one request: what a requester delivers, gathered until it is read."""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Protocol

import msgspec

from shared import wire
from shared.actions import Deliver
from shared.errors import Cancelled, HeadraceError
from shared.subjects import LANE_FAST

if TYPE_CHECKING:
    from shared.dispatch import Dispatcher
    from shared.lanes import Place
    from shared.requester import Requester


class Delta(msgspec.Struct, gc=False):
    """What a stream gained: at most one token of one choice, the text that it released, or only the choice's finish."""

    choice: int
    ids: list[int]
    text: str
    logprobs: list[wire.Logprob] | None
    finish: str | None
    vector: bytes = b""  # with the finish, of what is embedded


def deltas_of(part: Deliver) -> list[Delta]:
    """A delivery, token by token; its finish goes with the last one."""
    last = len(part.ids) - 1
    if last < 0:
        return [Delta(part.choice, [], "".join(part.text), None, part.finish, part.vector)]
    logprobs = part.logprobs
    return [
        Delta(
            part.choice,
            [token],
            part.text[index],
            logprobs[index : index + 1] if logprobs is not None else None,
            part.finish if index == last else None,
        )
        for index, token in enumerate(part.ids)
    ]


class Recorder(Protocol):
    """Sees all of a stream, whether it is read or not."""

    def deliver(self, part: Deliver) -> None: ...

    def end(self, error: HeadraceError | None) -> None:
        """The terminal; None: complete."""


class Stream:
    """The reader's end of one request. One reader; `cancel` or `leave` when it loses interest."""

    def __init__(
        self, dispatcher: "Dispatcher", request: wire.Request, tenant: str, requester: "Requester", body: bytes
    ) -> None:
        self.request = request
        self.rid = request.rid
        self.model, self.version, self.tenant = request.model, request.version, tenant
        self.body = body  # of the message; b"": not known
        self.usage: wire.Usage | None = None
        self.requester = requester
        self.accepted = False
        self.place: Place | None = None  # where it is queued, until it is accepted
        self.lane = LANE_FAST  # where it is published
        self.counted = False  # in the dispatcher's totals: it published the message, and that was stored
        self.ended = False
        self.revoked = False  # cancelled for everybody
        self.answered = False  # `guard` said that it must not run again
        self.recorder: Recorder | None = None
        self.guard: Callable[[], Awaitable[bool]] | None = None  # asked before a re-publish: may it run again?
        self._dispatcher = dispatcher
        self._left = False
        self._deltas: deque[Delta] = deque()
        self._unread = 0  # tokens in `_deltas`, and the alternatives that their log probabilities name
        self._error: HeadraceError | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def claims(self) -> int:
        """How many claims of workers have served it."""
        return self.requester.claims

    @property
    def error(self) -> HeadraceError | None:
        """What ended it; None also while it goes on."""
        return self._error

    @property
    def left(self) -> bool:
        """Whether its reader is gone."""
        return self._left

    @property
    def sequence(self) -> int:
        """Of its message in REQ, as far as is known; 0: not at all."""
        return self.requester.seq or 0

    async def next(self, timeout: float | None = None) -> list[Delta]:
        """All deltas there are, waiting for at least one; [] when `timeout` (seconds) passed first.

        Raises StopAsyncIteration once the stream is complete, or the HeadraceError that ended it.
        """
        if not self._deltas and not self.ended:
            loop = asyncio.get_running_loop()
            self._waiter = loop.create_future()
            timer = None if timeout is None else loop.call_later(timeout, self._wake)
            try:
                await self._waiter
            finally:
                self._waiter = None
                if timer is not None:
                    timer.cancel()
            if not self._deltas and not self.ended:
                return []
        if self._deltas:
            deltas = list(self._deltas)
            self._deltas.clear()
            self._unread = 0
            return deltas
        if self._error is not None:
            raise self._error
        raise StopAsyncIteration

    def cancel(self) -> None:
        """End the request: its slot is free within a step. Does nothing once the stream has ended."""
        if not self.ended:
            self._dispatcher.act(self, self.requester.cancel(time.monotonic()))

    def leave(self) -> None:
        """The reader is gone. A resumable or keyed request goes on for the grace, any other one is cancelled."""
        if not self.ended:
            self._left = True
            self._deltas.clear()
            self._dispatcher.act(self, self.requester.client_left(time.monotonic()))

    def move(self, version: str) -> None:
        """Be a request for another version."""
        request = wire.decode_request(self.body, {})
        self.request = msgspec.structs.replace(self.request, version=version)
        self.body = wire.encode(msgspec.structs.replace(request, version=version))
        self.version = version

    def deliver(self, part: Deliver) -> None:
        if part.usage is not None:
            self.usage = part.usage
        if self.recorder is not None:
            self.recorder.deliver(part)
        if self._left:
            return
        if len(part.ids) == 1:
            self._deltas.append(Delta(part.choice, part.ids, part.text[0], part.logprobs, part.finish))
        else:
            self._deltas.extend(deltas_of(part))
        self._wake()
        self._unread += len(part.ids)
        if part.logprobs is not None:
            self._unread += sum(len(each.top) for each in part.logprobs)
        if self._unread > self._dispatcher.unread_tokens_max:
            asyncio.get_running_loop().call_soon(self._give_up)  # behind its reader, who may be about to take it all

    def end(self, error: HeadraceError | None) -> None:
        self.ended, self._error = True, error
        if self.recorder is not None:
            self.recorder.end(error)
        self._wake()

    def _give_up(self) -> None:
        """End the request if its reader is too slow for what it asked for."""
        unread = self._unread
        if unread > self._dispatcher.unread_tokens_max and not self.ended:
            self.cancel()
            self._deltas.clear()
            self._unread = 0
            self._error = Cancelled(f"the client left {unread} tokens and alternatives unread, which is over the limit")

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
