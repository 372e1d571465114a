"""GET /v1/models, /v1/models/{model} and /v1/models/{model}/versions. A model without replicas stays listed."""

from typing import Literal

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

from ingress import openapi
from ingress.context import Context
from shared.router import ModelEntry, VersionEntry


class ModelList(msgspec.Struct):
    data: list[ModelEntry]
    object: Literal["list"] = "list"


def _json(data: object) -> Response:
    return Response(msgspec.json.encode(data), media_type="application/json")


def router(context: Context) -> APIRouter:
    """The routes."""
    routes = APIRouter()

    @routes.get("/v1/models", summary="The models", **openapi.answer(ModelList))
    async def models() -> Response:
        return _json(ModelList(context.router.models()))

    @routes.get("/v1/models/{model:path}/versions", summary="A model's versions", **openapi.answer(list[VersionEntry]))
    async def versions(model: str) -> Response:
        return _json(context.router.versions(model))

    @routes.get("/v1/models/{model:path}", summary="One model", **openapi.answer(ModelEntry))
    async def model(model: str) -> Response:
        return _json(context.router.model(model))

    return routes
