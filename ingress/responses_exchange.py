"""A request to /v1/responses: it may go on after an earlier response, may be kept, and may be of the background."""

import time

import msgspec

from ingress import answers
from ingress.answers import Scope, Send
from ingress.around import Around
from ingress.asked import PIN, SESSION, Asked
from ingress.detached import Order, admit_asked
from ingress.family import Admitted, Choice, Family
from ingress.inference import Inference, header_text
from ingress.job_source import admitted_of, open_source, version_of
from ingress.job_submission import submit
from ingress.job_views import deadline_s, kept_s
from ingress.keys import Claimed
from ingress.position import Position
from ingress.relay import Source
from ingress.response_items import Item
from ingress.responses_background import KIND, encode_items, items_of_record, look, response_of
from ingress.responses_body import ResponsesBody
from ingress.responses_store import KeptResponse, decode_ended, rid_of, with_ids
from ingress.responses_stream import After, Opened
from ingress.routes.responses_events import completed
from ingress.routes.responses_shapes import decode_repeated
from ingress.schemas import Body
from ingress.sse import encode
from shared import job_records
from shared.dispatch import Delta
from shared.errors import BadRequest, PreviousNotFound, ResponseNotFound, TooLarge, Unsupported
from shared.job_status import State

PREVIOUS = "previous_response_id"


class Gathered(Around[Source]):
    """A source, and all that was read of it."""

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self.choice = Choice()

    async def next(self, timeout: float | None = None) -> list[Delta]:
        deltas = await super().next(timeout)
        for delta in deltas:
            self.choice.add(delta)
        return deltas


class ResponsesExchange(Inference):
    """One POST of a response."""

    _items: list[Item]  # all that the response comes from
    _keeps = False
    _answered: tuple[Admitted, Gathered] | None = None

    async def _serve_once(
        self, scope: Scope, headers: dict[bytes, bytes], body: Body, body_bytes: int, send: Send
    ) -> None:
        prepared = await self._prepare(body, body_bytes)
        if prepared.background:
            await self._serve_background(None, scope, headers, prepared, body_bytes, send)
        else:
            await super()._serve_once(scope, headers, body, body_bytes, send)

    async def _serve_keyed(
        self, claim: Claimed, scope: Scope, headers: dict[bytes, bytes], body: Body, body_bytes: int, send: Send
    ) -> None:
        prepared = await self._prepare(body, body_bytes)
        if prepared.background:
            await self._serve_background(claim, scope, headers, prepared, body_bytes, send)
        else:
            await super()._serve_keyed(claim, scope, headers, body, body_bytes, send)

    # -- what it comes from ------------------------------------------------------------------------------------------------

    async def _prepare(self, body: Body, body_bytes: int) -> ResponsesBody:
        """Raises PreviousNotFound, ModelNotAllowed, BadRequest, Unsupported, TooLarge and Unavailable."""
        assert isinstance(body, ResponsesBody), "the family decodes nothing else"
        own = body.items()
        history = [] if body.previous_response_id is None else await self._history(body.previous_response_id)
        self._items = [*history, *own]
        if body.background and body.store is False:
            raise BadRequest("store: a response in the background is kept", param="store")
        if self._resumable and body.store:
            raise Unsupported("store: not together with X-Resumable; what is of the background is both", param="store")
        size, size_max = body_bytes + len(encode_items(history)), self._settings.response_bytes_max
        if size > size_max and (body.store or body.background):
            raise TooLarge(
                f"store: a response is kept with all that it comes from, {size} bytes; the limit is {size_max}"
            )
        wanted = body.store is not False and not (self._resumable and not body.background)
        keeps = wanted and size <= size_max
        self._keeps = keeps and not body.background  # else its record does
        body.prepare(history, keeps)
        return body

    async def _history(self, identity: str) -> list[Item]:
        """The items of an earlier response: those that it came from, and its output.

        Raises PreviousNotFound, and ModelNotAllowed: what one may not read is not told to a model either.
        """
        rid, tenant = rid_of(identity), self._caller.tenant
        found = await self._context.responses.find(tenant, rid) if rid else None
        if found is not None:
            ended = decode_ended(found.response)
            self._caller.check_model(ended.model)
            return [*found.items, *ended.output]
        state = await look(self._context, tenant, rid) if rid else None
        if state is None:
            raise PreviousNotFound(
                f"{PREVIOUS}: there is no response `{identity[:64]}`, or it is not kept any more", param=PREVIOUS
            )
        self._caller.check_model(state.record.request.model)
        if state.status != "completed":
            raise PreviousNotFound(f"{PREVIOUS}: that response is {state.status}", param=PREVIOUS)
        return [*items_of_record(state.record), *response_of(state).output]

    # -- what is kept of it ------------------------------------------------------------------------------------------------

    async def _answer(
        self, family: Family, admitted: Admitted, stream: Source, send: Send, seen: Position | None = None
    ) -> None:
        if self._keeps:
            stream = gathered = Gathered(stream)
            self._answered = admitted, gathered
        await super()._answer(family, admitted, stream, send, seen)

    async def _before_end(self) -> None:
        """What is told of a response in the end has to be true of it: that it is kept, or is not."""
        await super()._before_end()
        if self._answered is None:
            return
        admitted, gathered = self._answered
        assert gathered.usage is not None, "it is complete"
        admitted.ended_at = time.time()
        response = completed(admitted, gathered.choice, gathered.usage)
        kept = KeptResponse(msgspec.Raw(encode(response)), with_ids(self._items, self.rid))
        context, caller = self._context, self._caller
        if not (context.identities.has(caller) and await context.responses.keep(caller.tenant, self.rid, kept)):
            told = decode_repeated(admitted.framing.repeated)
            told.store = False
            admitted.framing.repeated = encode(told)

    # -- in the background -------------------------------------------------------------------------------------------------

    async def _serve_background(
        self,
        claim: Claimed | None,
        scope: Scope,
        headers: dict[bytes, bytes],
        body: ResponsesBody,
        body_bytes: int,
        send: Send,
    ) -> None:
        context, settings, tenant = self._context, self._settings, self._caller.tenant
        self._detachable, self._resumable, self._counts = True, False, False  # its worker tells what it comes to
        named = (header_text(headers, PIN), header_text(headers, SESSION))
        asked = Asked(self._family, body, body_bytes, scope["path"], *named)
        rid = job_records.new_job_id(time.time())
        order = Order(
            endpoint=scope["path"],
            kind=KIND,
            deadline_s=deadline_s(None, settings),
            keep_s=kept_s(None, settings),
            document=encode_items(with_ids(self._items, rid)),
        )
        self._interruptible = False  # between the record and the message there must be no end
        record = await submit(
            context,
            lambda rid: admit_asked(context, asked, tenant, rid),
            rid,
            tenant,
            order,
            claim,
            self._extra_headers,
        )
        self._interruptible = True
        self.rid = record.id
        self._is_of(record.request.model, record.request.version)
        state = State(record, "queued") if claim is None else await look(context, tenant, record.id)
        if state is None:
            raise ResponseNotFound("the response of this key was deleted")
        if not body.stream:
            await self._tell(encode(response_of(state)), send)
            return
        admitted = admitted_of(record, version_of(state))
        async with open_source(context.detached.bus, record) as source:
            await self._answer(After(-1), admitted, Opened(source, admitted), send)

    async def _tell(self, data: bytes, send: Send) -> None:
        self._head_sent = True
        await self._send(send, answers.start(200, answers.json_headers(data, self._timed_headers())))
        await self._send(send, answers.body(data))
