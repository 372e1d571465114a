"""GET /v1/models, /v1/models/{model} and /v1/models/{model}/versions. A model without replicas stays listed; one that a key is
not for does not."""

from typing import Literal

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from ingress import openapi
from ingress.context import Context
from ingress.identity import caller_of, needs
from shared.router import ModelEntry, VersionEntry


class ModelList(msgspec.Struct):
    data: list[ModelEntry]
    object: Literal["list"] = "list"


def _json(data: object) -> Response:
    return Response(msgspec.json.encode(data), media_type="application/json")


def router(context: Context) -> APIRouter:
    """The routes."""
    routes = APIRouter()

    async def models(request: Request) -> Response:
        caller = caller_of(request)
        return _json(ModelList([entry for entry in context.router.models() if caller.may_use(entry.id)]))

    async def versions(request: Request, model: str) -> Response:
        caller_of(request).check_model(model)
        return _json(context.router.versions(model))

    async def model(request: Request, model: str) -> Response:
        caller_of(request).check_model(model)
        return _json(context.router.model(model))

    infer, deploy = [needs("infer")], [needs("deploy")]
    listed, one = openapi.answer(ModelList), openapi.answer(ModelEntry)
    of_model = openapi.answer(list[VersionEntry])
    routes.get("/v1/models", dependencies=infer, summary="The models", **listed)(models)
    routes.get("/v1/models/{model:path}/versions", dependencies=deploy, summary="A model's versions", **of_model)(
        versions
    )
    routes.get("/v1/models/{model:path}", dependencies=infer, summary="One model", **one)(model)
    return routes
