"""Rollouts over HTTP: POST and GET /v1/deployments, one of them, and what can be done to it."""

from typing import get_args

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from ingress import openapi
from ingress.body import read_json
from ingress.context import Context
from ingress.identity import caller_of, needs
from shared.deployment_views import DeploymentDetail, DeploymentEntry
from shared.rollouts import Command, NewDeployment

DEPLOYMENTS = "/v1/deployments"
DEPLOYMENT = "/v1/deployments/{deployment_id}"
COMMANDS: tuple[Command, ...] = get_args(Command)


def router(context: Context) -> APIRouter:
    """The routes."""
    routes = APIRouter(dependencies=[needs("deploy")])
    registrar = context.registrar

    async def create(request: Request) -> Response:
        asked = await read_json(context, request, msgspec.json.Decoder(NewDeployment))
        made = await registrar.deploy(caller_of(request), asked)
        return _json(made, 202, {"location": f"{DEPLOYMENTS}/{made.deployment_id}"})

    async def list_all(request: Request, model: str | None = None) -> Response:
        return _json(await registrar.deployments(caller_of(request), model))

    async def show(request: Request, deployment_id: str) -> Response:
        return _json(await registrar.deployment(caller_of(request), deployment_id))

    created = openapi.told(NewDeployment, DeploymentEntry, status=202)
    routes.post(DEPLOYMENTS, summary="Roll a version out", status_code=202, **created)(create)
    listed = openapi.answer(list[DeploymentEntry])
    routes.get(DEPLOYMENTS, summary="The deployments, the newest first", **listed)(list_all)
    routes.get(DEPLOYMENT, summary="One deployment, with its history", **openapi.answer(DeploymentDetail))(show)
    for command in COMMANDS:
        _add_command(routes, context, command)
    return routes


def _add_command(routes: APIRouter, context: Context, command: Command) -> None:
    async def obey(request: Request, deployment_id: str) -> Response:
        context.check_accepting()
        return _json(await context.registrar.command(caller_of(request), deployment_id, command))

    told = openapi.answer(DeploymentDetail) | {"summary": f"{command.capitalize()} a deployment"}
    routes.post(f"{DEPLOYMENT}/{command}", name=command, **told)(obey)


def _json(data: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(data), status, headers, media_type="application/json")
