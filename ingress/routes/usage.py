"""What requests came to, over HTTP: a tenant's own; with the role admin everybody's."""

import time

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from ingress import openapi
from ingress.context import Context
from ingress.identity import caller_of
from shared import usage
from shared.errors import BadRequest
from shared.usage import AT_MAX, SINCE_DEFAULT_S, UsageSum

USAGE = "/v1/usage"
PARAMETERS = [
    {"name": "since", "in": "query", "schema": {"type": "number"}, "description": "Unix seconds; else 30 days ago"},
    {"name": "by", "in": "query", "schema": {"type": "string", "enum": ["total", "day", "model", "tenant"]}},
    {"name": "tenant", "in": "query", "schema": {"type": "string"}, "description": "Of one tenant; `admin` alone"},
]


def router(context: Context) -> APIRouter:
    """The route."""
    routes = APIRouter()

    async def show(request: Request) -> Response:
        caller, asked = caller_of(request), request.query_params
        tenant = asked.get("tenant")
        if caller.key.may("admin"):
            whose = tenant
        elif tenant in (None, caller.tenant):
            whose = caller.tenant
        else:
            caller.check_role("admin")
        since = _since(asked.get("since"))
        if not caller.key.may("admin"):  # a tenant of that name that was removed is another one
            since = max(since, context.identities.tenant(caller.tenant).created)
        found = await usage.query(context.registrar.bus, since, whose, asked.get("by", "total"))  # type: ignore[arg-type]
        return Response(msgspec.json.encode(found), media_type="application/json")

    told = openapi.answer(list[UsageSum]) | {"openapi_extra": {"parameters": PARAMETERS}}
    routes.get(USAGE, summary="What requests came to", **told)(show)
    return routes


def _since(text: str | None) -> float:
    if text is None:
        return time.time() - SINCE_DEFAULT_S
    try:
        since = float(text)
    except ValueError:
        since = -1.0
    if not 0 <= since < AT_MAX:
        raise BadRequest("since: unix seconds are expected", param="since")
    return since
