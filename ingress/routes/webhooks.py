"""What a tenant's webhooks are signed with: /v1/webhooks/secret."""

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from ingress import openapi
from ingress.body import read_json
from ingress.context import Context
from ingress.identity import caller_of, needs
from shared import webhook_secrets
from shared.errors import NotFound
from shared.webhook_secrets import NewSecret, SecretRotation, SecretShown

SECRET = "/v1/webhooks/secret"
NO_STORE = {"cache-control": "no-store"}  # an answer with a secret in it


def router(context: Context) -> APIRouter:
    """The routes."""
    routes = APIRouter(dependencies=[needs("infer")])
    bus = context.registrar.bus

    async def rotate(request: Request) -> Response:
        asked = await read_json(context, request, msgspec.json.Decoder(SecretRotation))
        made = await webhook_secrets.rotate(bus, caller_of(request).actor, asked)
        return Response(msgspec.json.encode(made), 201, NO_STORE, media_type="application/json")

    async def show(request: Request) -> Response:
        known = await webhook_secrets.find(bus, caller_of(request).tenant)
        if known is None:
            raise NotFound(f"there is no secret yet: POST {SECRET} makes one")
        return Response(msgspec.json.encode(known), media_type="application/json")

    made = openapi.told(SecretRotation, NewSecret, status=201)
    routes.post(SECRET, summary="Make the secret of your webhooks, or another one", status_code=201, **made)(rotate)
    routes.get(SECRET, summary="Since when there is one", **openapi.answer(SecretShown))(show)
    return routes
