"""The events of a response in the background: from any number on, at any ingress, while it comes to be and after."""

from ingress.answers import Receive, Scope, Send
from ingress.around import Around
from ingress.context import Context
from ingress.family import Admitted
from ingress.identity import Caller
from ingress.job_source import JobSource, admitted_of, open_source, version_of
from ingress.relay import Exchange
from ingress.routes.responses import Responses
from ingress.routes.responses_events import ResponseEvents
from ingress.sse import Events
from shared.dispatch import Delta
from shared.job_status import State

OPENING = Delta(0, [], "", None, None)


class After(Responses):
    """The family, for a client that has all events up to a number."""

    def __init__(self, after: int) -> None:
        self._after = after

    def events(self, admitted: Admitted) -> Events:
        return ResponseEvents(admitted, self._after)


class Opened(Around[JobSource]):
    """A job as the source of a response: it is told of at once, though nobody has begun with it."""

    def __init__(self, source: JobSource, admitted: Admitted) -> None:
        super().__init__(source)
        self._admitted = admitted
        self._opened = False

    async def next(self, timeout: float | None = None) -> list[Delta]:
        if not self._opened:
            self._opened = True
            return [OPENING]
        try:
            return await super().next(timeout)
        finally:
            self._admitted.ended_at = self.source.ended_at


class BackgroundStream(Exchange):
    """One GET of the events."""

    def __init__(self, context: Context, route: str, caller: Caller, state: State, after: int) -> None:
        super().__init__(context, route)
        self.rid = state.record.id
        self._caller, self._state, self._after = caller, state, after
        self._streamed = self._body_read = self._detachable = True
        self._counts = False  # its worker tells what it comes to

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._identify(dict(scope["headers"]).get(b"x-request-id"))
        self._context.check_accepting()
        record, version = self._state.record, version_of(self._state)
        self._is_of(record.request.model, version)
        admitted = admitted_of(record, version)
        async with open_source(self._context.detached.bus, record) as source:
            answered = self._answer(After(self._after), admitted, Opened(source, admitted), send)
            await self._watched(receive, answered)
