"""What the registry is told over HTTP: POST /v1/models/{model}/versions and PATCH of one, PUT and DELETE of an alias."""

from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from ingress import openapi
from ingress.body import read_json
from ingress.context import Context
from ingress.identity import caller_of, needs
from ingress.registrar import AliasTarget, Changes, NewVersion, VersionConfig
from shared.records import Route
from shared.router import VersionEntry

VERSIONS = "/v1/models/{model:path}/versions"
VERSION = "/v1/models/{model:path}/versions/{version}"
ALIAS = "/v1/models/{model:path}/aliases/{alias}"


class Aliases(msgspec.Struct):
    """Where the aliases of a model point."""

    model: str
    aliases: dict[str, str]


def router(context: Context) -> APIRouter:
    """The routes."""
    routes = APIRouter(dependencies=[needs("deploy")])

    async def register(request: Request) -> Response:
        asked = await read_json(context, request, msgspec.json.Decoder(NewVersion))
        record, route = await context.registrar.register(caller_of(request), request.path_params["model"], asked)
        weights = {weight.version: weight.basis_points for weight in route.weights} if route else {}
        entry = VersionEntry(
            record.version, weights.get(record.version, 0) / 100, record.state, record.reason, record.manifest_sha256
        )
        return _json(entry, 201 if record.state == "registered" else 200)

    async def configure(request: Request) -> Response:
        changes = await read_json(context, request, msgspec.json.Decoder(Changes))
        name, version = request.path_params["model"], request.path_params["version"]
        return _json(await context.registrar.configure(caller_of(request), name, version, changes))

    async def put_alias(request: Request) -> Response:
        target = await read_json(context, request, msgspec.json.Decoder(AliasTarget))
        return _aliases(await _set_alias(request, target.version))

    async def delete_alias(request: Request) -> Response:
        context.check_accepting()
        return _aliases(await _set_alias(request, None))

    async def _set_alias(request: Request, version: str | None) -> Route:
        model, alias = request.path_params["model"], request.path_params["alias"]
        return await context.registrar.set_alias(caller_of(request), model, alias, version)

    registered = openapi.told(NewVersion, VersionEntry, "model") | {"summary": "Register a version", "status_code": 201}
    routes.post(VERSIONS, **registered)(register)
    configured = openapi.told(Changes, VersionConfig, "model", "version") | {"summary": "Change a version's settings"}
    routes.patch(VERSION, **configured)(configure)
    moved = openapi.told(AliasTarget, Aliases, "model", "alias") | {"summary": "Point an alias at a version"}
    routes.put(ALIAS, **moved)(put_alias)
    routes.delete(ALIAS, **openapi.told(None, Aliases, "model", "alias"), summary="Remove an alias")(delete_alias)
    return routes


def _aliases(route: Route) -> Response:
    return _json(Aliases(route.model, route.aliases))


def _json(data: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(data), status, media_type="application/json")
