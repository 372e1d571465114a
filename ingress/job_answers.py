"""The answer of a job over HTTP: its events while it comes to be and after, or whole."""

from ingress import answers
from ingress.answers import Receive, Scope, Send
from ingress.context import Context
from ingress.family import Family, decode_framing
from ingress.identity import Caller
from ingress.job_source import admitted_of, open_source, version_of
from ingress.position import HEADER
from ingress.relay import Exchange
from ingress.resumption import position_of
from shared.errors import BadRequest
from shared.job_status import State


class JobAnswer(Exchange):
    """One GET of a job's events, or of its result once it has ended."""

    def __init__(
        self, context: Context, families: tuple[Family, ...], route: str, caller: Caller, state: State, streamed: bool
    ) -> None:
        super().__init__(context, route)
        self.rid = state.record.id
        self._caller, self._state = caller, state
        self._family = family_of(families, state)
        self._errors = self._family.errors
        self._streamed = self._resumable = streamed
        self._body_read = self._detachable = True
        self._counts = False  # its worker has told what it came to

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        self._identify(headers.get(b"x-request-id"))
        self._context.check_accepting()
        seen = position_of(headers, self.rid) if self._streamed else None
        if seen is not None and seen.complete:
            self._head_sent = True  # clients that reconnect by themselves take it as the end
            await send(answers.start(204, self._timed_headers()))
            await send(answers.body(b""))
            return
        record, version = self._state.record, version_of(self._state)
        if seen is not None and len(seen.choices) != record.request.sampling.n:
            raise BadRequest(f"{HEADER}: the job has {record.request.sampling.n} choices", param=HEADER)
        self._is_of(record.request.model, version)
        known = None if seen is None else seen.known
        async with open_source(self._context.detached.bus, record, known) as source:
            answered = self._answer(self._family, admitted_of(record, version), source, send, seen)
            await self._watched(receive, answered)


def family_of(families: tuple[Family, ...], state: State) -> Family:
    """The family of a job's endpoint."""
    route = decode_framing(state.record.request.framing).route
    return next(family for family in families if family.route == route)
