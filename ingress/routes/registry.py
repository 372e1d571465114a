"""What the registry is told over HTTP: POST /v1/models/{model}/versions and PATCH of one, PUT and DELETE of an alias."""

import asyncio
from typing import Any, TypeVar

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from ingress import openapi
from ingress.body import read_body
from ingress.context import Context
from ingress.decoding import decode
from ingress.registrar import AliasTarget, Changes, NewVersion, VersionConfig
from shared.errors import BodyTimeout
from shared.records import Route
from shared.router import VersionEntry

VERSIONS = "/v1/models/{model:path}/versions"
VERSION = "/v1/models/{model:path}/versions/{version}"
ALIAS = "/v1/models/{model:path}/aliases/{alias}"

BodyType = TypeVar("BodyType", bound=msgspec.Struct)


class Aliases(msgspec.Struct):
    """Where the aliases of a model point."""

    model: str
    aliases: dict[str, str]


def router(context: Context) -> APIRouter:
    """The routes."""
    routes = APIRouter()

    async def register(request: Request) -> Response:
        asked = await _body(context, request, msgspec.json.Decoder(NewVersion))
        record, route = await context.registrar.register(request.path_params["model"], asked)
        weights = {weight.version: weight.basis_points for weight in route.weights} if route else {}
        entry = VersionEntry(
            record.version, weights.get(record.version, 0) / 100, record.state, record.reason, record.manifest_sha256
        )
        return _json(entry, 201 if record.state == "registered" else 200)

    async def configure(request: Request) -> Response:
        changes = await _body(context, request, msgspec.json.Decoder(Changes))
        name, version = request.path_params["model"], request.path_params["version"]
        return _json(await context.registrar.configure(name, version, changes))

    async def put_alias(request: Request) -> Response:
        target = await _body(context, request, msgspec.json.Decoder(AliasTarget))
        return _aliases(await _set_alias(request, target.version))

    async def delete_alias(request: Request) -> Response:
        context.check_accepting()
        return _aliases(await _set_alias(request, None))

    async def _set_alias(request: Request, version: str | None) -> Route:
        return await context.registrar.set_alias(request.path_params["model"], request.path_params["alias"], version)

    registered = openapi.told(NewVersion, VersionEntry, "model") | {"summary": "Register a version", "status_code": 201}
    routes.post(VERSIONS, **registered)(register)
    configured = openapi.told(Changes, VersionConfig, "model", "version") | {"summary": "Change a version's settings"}
    routes.patch(VERSION, **configured)(configure)
    moved = openapi.told(AliasTarget, Aliases, "model", "alias") | {"summary": "Point an alias at a version"}
    routes.put(ALIAS, **moved)(put_alias)
    routes.delete(ALIAS, **openapi.told(None, Aliases, "model", "alias"), summary="Remove an alias")(delete_alias)
    return routes


async def _body(context: Context, request: Request, decoder: "msgspec.json.Decoder[BodyType]") -> BodyType:
    """The decoded body of a request. Raises TooLarge, BodyTimeout, Cancelled or BadRequest."""
    context.check_accepting()
    declared = request.headers.get("content-length")
    try:
        async with asyncio.timeout(context.settings.request_read_s):
            raw = await read_body(
                declared.encode() if declared is not None else None, request.receive, context.settings.request_bytes_max
            )
    except TimeoutError:
        raise BodyTimeout("the body did not arrive in time") from None
    return decode(decoder, raw)


def _aliases(route: Route) -> Response:
    return _json(Aliases(route.model, route.aliases))


def _json(data: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(data), status, media_type="application/json")
