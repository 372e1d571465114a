"""GET /v1/streams/{rid}: go on with a resumable stream. POST /v1/streams/{rid}/cancel, or DELETE: end a request."""

import re
from typing import Any, Literal

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from ingress import openapi
from ingress.context import Context
from ingress.family import Family
from ingress.identity import caller_of, needs
from ingress.position import HEADER
from ingress.resumption import ROUTE, Resumption, position_of
from shared.errors import StreamNotFound

_is_rid = re.compile(r"[0-9a-f]{32}").fullmatch

PARAMETERS = [
    {"name": "rid", "in": "path", "required": True, "schema": {"type": "string", "pattern": "^[0-9a-f]{32}$"}},
    {"name": HEADER, "in": "header", "schema": {"type": "string"}},
]


class Ended(msgspec.Struct):
    """What a request that was to be cancelled has come to."""

    id: str
    status: Literal["cancelled", "finished"]


def router(context: Context, families: tuple[Family, ...]) -> APIRouter:
    """The routes."""
    routes = APIRouter(dependencies=[needs("infer")])
    stream: dict[str, Any] = {
        "summary": "Go on with a resumable stream",
        "responses": {
            200: {"description": "The rest of its events", "content": {"text/event-stream": {}}},
            204: {"description": "It is complete, and so was what the client has"},
        },
        "openapi_extra": {"parameters": PARAMETERS},
    }
    ended = openapi.answer(Ended) | {"summary": "End a request", "openapi_extra": {"parameters": PARAMETERS}}

    async def resume(request: Request) -> Response:
        return Resumption(context, families, _rid(request), caller_of(request))

    async def cancel(request: Request) -> Response:
        rid, caller = _rid(request), caller_of(request)
        position = position_of(dict(request.scope["headers"]), rid)
        sequence = 0 if position is None else position.sequence
        missing = StreamNotFound(f"there is no request {rid}, or there is not any more")
        if caller.key.models:
            located = await context.dispatcher.locate(rid, caller.tenant, sequence)
            if located is None:
                raise missing
            caller.check_model(located.request.model)
        status = await context.dispatcher.revoke(rid, caller.tenant, sequence)
        if not status:
            raise missing
        answer = Ended(rid, "cancelled" if status == b"cancelled" else "finished")
        return Response(msgspec.json.encode(answer), media_type="application/json")

    routes.get(ROUTE, **stream)(resume)
    routes.delete(ROUTE, **ended)(cancel)
    routes.post(ROUTE + "/cancel", **ended)(cancel)
    return routes


def _rid(request: Request) -> str:
    rid: str = request.path_params["rid"]
    if not _is_rid(rid):
        raise StreamNotFound("there is no request of such an id")
    return rid
