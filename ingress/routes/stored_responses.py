"""What can be asked of a response that is kept: GET and DELETE /v1/responses/{id}, its input items, and its end."""

import re
from typing import Any, Literal

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response as Answer

from ingress import openapi
from ingress.context import Context
from ingress.identity import Caller, caller_of, needs
from ingress.response_items import Item
from ingress.responses_background import items_of_record, look, response_of
from ingress.responses_store import KeptResponse, decode_ended, rid_of
from ingress.responses_stream import BackgroundStream
from ingress.routes.responses_shapes import Response
from shared import job_status
from shared.errors import BadRequest, ResponseNotFound
from shared.job_status import State

ROUTE = "/v1/responses/{response_id}"
ITEMS_MAX, ITEMS_DEFAULT = 100, 20

IDENTITY = openapi.PATH_PARAMETER | {"name": "response_id"}
STREAMING = [
    {"name": "stream", "in": "query", "schema": {"type": "boolean"}, "description": "Only of one in the background"},
    {"name": "starting_after", "in": "query", "schema": {"type": "integer", "minimum": 0}},
]
PAGING = [
    {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": ITEMS_MAX}},
    {"name": "order", "in": "query", "schema": {"type": "string", "enum": ["asc", "desc"]}},
    {"name": "after", "in": "query", "schema": {"type": "string"}, "description": "The id of an item"},
]


class DeletedResponse(msgspec.Struct):
    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class ItemList(msgspec.Struct):
    data: list[Item]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


def router(context: Context) -> APIRouter:
    """The routes."""
    routes = APIRouter(dependencies=[needs("infer")])

    async def found(request: Request) -> KeptResponse | State:
        return await find(context, caller_of(request), request.path_params["response_id"])

    async def show(request: Request) -> Answer:
        kept, streamed = await found(request), request.query_params.get("stream") in ("true", "1")
        if isinstance(kept, State):
            if streamed:
                return BackgroundStream(context, ROUTE, caller_of(request), kept, _after(request))
            return _json(response_of(kept))
        if streamed:
            raise BadRequest("stream: only a response in the background is told again as a stream", param="stream")
        return _json(kept.response)

    async def items(request: Request) -> Answer:
        kept = await found(request)
        return _json(_page(items_of_record(kept.record) if isinstance(kept, State) else kept.items, request))

    async def cancel(request: Request) -> Answer:
        """One that has ended stays as it is."""
        kept = await found(request)
        if not isinstance(kept, State):
            raise BadRequest("only a response in the background can be cancelled")
        if kept.result is None:
            await context.detached.jobs.cancel(kept.record.ticket)
            kept = await found(request)
            assert isinstance(kept, State), "it stays of the background"
        return _json(response_of(kept))

    async def delete(request: Request) -> Answer:
        """One that has not ended is ended before."""
        kept, tenant, identity = await found(request), caller_of(request).tenant, request.path_params["response_id"]
        if isinstance(kept, State):
            if kept.result is None:
                await context.detached.jobs.cancel(kept.record.ticket)
            await job_status.forget(context.detached.bus, kept)
        else:
            await context.responses.delete(tenant, rid_of(identity))
        return _json(DeletedResponse(identity))

    told = _documented(Response, "A response that is kept", IDENTITY, *STREAMING)
    told["responses"][200]["content"]["text/event-stream"] = {}
    routes.get(ROUTE, **told)(show)
    routes.delete(ROUTE, **_documented(DeletedResponse, "Forget a response", IDENTITY))(delete)
    routes.get(ROUTE + "/input_items", **_documented(ItemList, "What a response came from", IDENTITY, *PAGING))(items)
    routes.post(ROUTE + "/cancel", **_documented(Response, "End a response in the background", IDENTITY))(cancel)
    return routes


async def find(context: Context, caller: Caller, identity: str) -> KeptResponse | State:
    """A response that is the caller's; a state: of the background. Raises ResponseNotFound and ModelNotAllowed."""
    rid = rid_of(identity)
    kept = await context.responses.find(caller.tenant, rid) if rid else None
    if kept is not None:
        caller.check_model(decode_ended(kept.response).model)
        return kept
    state = await look(context, caller.tenant, rid) if rid else None
    if state is None:
        raise ResponseNotFound(f"there is no response `{identity[:64]}`, or it is not kept any more")
    caller.check_model(state.record.request.model)
    return state


def _documented(answer_type: Any, summary: str, *parameters: dict[str, Any]) -> dict[str, Any]:
    return openapi.answer(answer_type) | {"summary": summary, "openapi_extra": {"parameters": list(parameters)}}


def _json(shown: object) -> Answer:
    return Answer(msgspec.json.encode(shown), media_type="application/json")


def _after(request: Request) -> int:
    """The number of the last event that the client has. Raises BadRequest."""
    text = request.query_params.get("starting_after")
    if text is None:
        return -1
    if not re.fullmatch("[0-9]{1,9}", text):
        raise BadRequest("starting_after: the number of an event is expected", param="starting_after")
    return int(text)


def _page(items: list[Item], request: Request) -> ItemList:
    """The newest first, unless `order` says otherwise. Raises BadRequest."""
    asked = request.query_params
    order, limit, after = asked.get("order", "desc"), asked.get("limit", str(ITEMS_DEFAULT)), asked.get("after")
    if order not in ("asc", "desc"):
        raise BadRequest("order: `asc` or `desc` is expected", param="order")
    if not re.fullmatch("[0-9]{1,9}", limit) or not 1 <= int(limit) <= ITEMS_MAX:
        raise BadRequest(f"limit: 1 to {ITEMS_MAX} is expected", param="limit")
    ordered = items if order == "asc" else items[::-1]
    first = 0
    if after is not None:
        first = next((number for number, item in enumerate(ordered, start=1) if item.id == after), -1)
        if first < 0:
            raise BadRequest("after: it is the id of no item of this response", param="after")
    page = ordered[first : first + int(limit)]
    more = first + len(page) < len(ordered)
    return ItemList(page, page[0].id if page else None, page[-1].id if page else None, more)
