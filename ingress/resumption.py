"""Going on with a resumable stream, wherever it began and whatever has died since."""

from ingress import answers
from ingress.answers import Receive, Scope, Send
from ingress.context import Context
from ingress.family import Admitted, Family, decode_framing
from ingress.identity import Caller
from ingress.position import HEADER, Position, parse
from ingress.relay import Exchange
from shared.errors import BadRequest, StreamNotFound

ROUTE = "/v1/streams/{rid}"


class Resumption(Exchange):
    """One GET of a stream. Without a Last-Event-ID it is told from its first event on."""

    def __init__(self, context: Context, families: tuple[Family, ...], rid: str, caller: Caller) -> None:
        super().__init__(context, ROUTE)
        self._caller = caller
        self._families = {family.route: family for family in families}
        self.rid = rid
        self._resumable = self._detachable = self._streamed = self._body_read = True

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        self._identify(headers.get(b"x-request-id"))
        self._context.check_accepting()
        seen = position_of(headers, self.rid)
        if seen is not None and seen.complete:
            self._head_sent = True  # clients that reconnect by themselves take it as the end
            await send(answers.start(204, self._timed_headers()))
            await send(answers.body(b""))
            return
        await self._watched(receive, self._attach(seen, send))

    async def _attach(self, seen: Position | None, send: Send) -> None:
        context, tenant = self._context, self._caller.tenant
        located = await context.dispatcher.locate(self.rid, tenant, 0 if seen is None else seen.sequence)
        if located is None or not located.request.framing:
            raise StreamNotFound(f"there is no resumable stream {self.rid}, or there is not any more")
        request = located.request
        self._caller.check_model(request.model)
        if seen is not None and len(seen.choices) != request.sampling.n:
            raise BadRequest(f"{HEADER}: the request has {request.sampling.n} choices", param=HEADER)
        framing = decode_framing(request.framing)
        family = self._families[framing.route]
        self._errors = family.errors
        self._is_of(request.model, request.version)
        self._interruptible = False
        stream = await context.dispatcher.attach(
            request,
            tenant,
            located.seq,
            located.body,
            located.queue_left_s,
            known=None if seen is None else seen.known,
            resumable=True,
        )
        await self._answer(family, Admitted(request, framing), stream, send, seen)


def position_of(headers: dict[bytes, bytes], rid: str) -> Position | None:
    """The position that a request's Last-Event-ID stands for; None: it has none. Raises BadRequest."""
    given = headers.get(HEADER.lower().encode())
    if given is None:
        return None
    position = parse(given.decode("latin-1"))
    if position.rid != rid:
        raise BadRequest(f"{HEADER}: it is of another stream", param=HEADER)
    return position
