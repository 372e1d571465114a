"""A request to /v1/responses: it may go on after an earlier response, and its own may be kept."""

import time
from collections.abc import Sequence

import msgspec

from ingress.answers import Scope, Send
from ingress.family import Admitted, Choice, Family
from ingress.inference import Inference
from ingress.keys import Claimed
from ingress.position import Position
from ingress.relay import Source
from ingress.response_items import Item
from ingress.responses_body import ResponsesBody
from ingress.responses_store import KeptResponse, decode_ended, rid_of, with_ids
from ingress.routes.responses_events import completed
from ingress.routes.responses_shapes import decode_repeated
from ingress.schemas import Body
from ingress.sse import encode
from shared import wire
from shared.dispatch import Delta
from shared.errors import PreviousNotFound, TooLarge


class Gathered:
    """A source, and all that was read of it."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.rid = source.rid
        self.choice = Choice()

    @property
    def usage(self) -> wire.Usage | None:
        return self._source.usage

    @property
    def ended(self) -> bool:
        return self._source.ended

    @property
    def claims(self) -> int:
        return self._source.claims

    @property
    def sequence(self) -> int:
        return self._source.sequence

    @property
    def version(self) -> str:
        return self._source.version

    async def next(self, timeout: float | None = None) -> list[Delta]:
        deltas = await self._source.next(timeout)
        for delta in deltas:
            self.choice.add(delta)
        return deltas

    def leave(self) -> None:
        self._source.leave()


class ResponsesExchange(Inference):
    """One POST of a response."""

    _items: list[Item]  # all that the response comes from
    _keeps = False
    _answered: tuple[Admitted, Gathered] | None = None

    async def _serve_once(
        self, scope: Scope, headers: dict[bytes, bytes], body: Body, body_bytes: int, send: Send
    ) -> None:
        await self._prepare(body, body_bytes)
        await super()._serve_once(scope, headers, body, body_bytes, send)

    async def _serve_keyed(
        self, claim: Claimed, scope: Scope, headers: dict[bytes, bytes], body: Body, body_bytes: int, send: Send
    ) -> None:
        await self._prepare(body, body_bytes)
        await super()._serve_keyed(claim, scope, headers, body, body_bytes, send)

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
        if not await self._context.responses.keep(self._caller.tenant, self.rid, kept):
            told = decode_repeated(admitted.framing.repeated)
            told.store = False
            admitted.framing.repeated = encode(told)

    async def _prepare(self, body: Body, body_bytes: int) -> None:
        """Raises PreviousNotFound, BadRequest, Unsupported, TooLarge and Unavailable."""
        assert isinstance(body, ResponsesBody), "the family decodes nothing else"
        own = body.items()
        if body.previous_response_id is not None:
            body.continues(await self._history(body.previous_response_id))
        self._items = [*body.history, *own]
        size, size_max = body_bytes + _bytes(body.history), self._settings.response_bytes_max
        if body.store and size > size_max:
            raise TooLarge(f"store: a response is kept with its input, which has {size} bytes, the limit is {size_max}")
        if size > size_max:
            body.store = False
        self._keeps = body.store is not False

    async def _history(self, identity: str) -> list[Item]:
        """The items of an earlier response: those that it came from, and its output."""
        found = await self._context.responses.find(self._caller.tenant, rid_of(identity))
        if found is None:
            raise PreviousNotFound(
                f"there is no response `{identity[:64]}`, or it is not kept any more", param="previous_response_id"
            )
        return [*found.items, *decode_ended(found.response).output]


def _bytes(items: Sequence[Item]) -> int:
    return len(encode(items)) if items else 0
