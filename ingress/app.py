"""The ASGI application: the routes, and errors of every kind in one shape."""

import logging
import time

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match

from ingress import answers, openapi
from ingress.answers import Headers, Message, Receive, Scope, Send
from ingress.batches.views import BatchEntry, BatchList, NewBatch
from ingress.body import check_declared
from ingress.context import Context
from ingress.error_shapes import OPENAI, ErrorShape
from ingress.families import BATCHED, FAMILIES
from ingress.family import Family
from ingress.files.upload import FORM_BYTES
from ingress.identity import OPEN_PATHS, SCOPE_KEY
from ingress.inference import Inference
from ingress.job_views import Deleted, JobPage, JobView, NewJob
from ingress.registrar import AliasTarget, Changes, NewVersion, VersionConfig
from ingress.responses_exchange import ResponsesExchange
from ingress.routes import (
    batches,
    deployments,
    files,
    health,
    jobs,
    models,
    registry,
    stored_responses,
    streams,
    tenants,
    usage,
    webhooks,
)
from ingress.routes.responses import Responses
from shared import wire
from shared.deployment_views import DeploymentDetail, DeploymentEntry
from shared.errors import BadRequest, HeadraceError, Internal, MethodNotAllowed, NotFound
from shared.rollouts import NewDeployment
from shared.router import ModelEntry, VersionEntry
from shared.tenancy import NewKey, NewTenant, Rotation, TenantChanges
from shared.tenant_views import IssuedKey, KeyEntry, TenantEntry
from shared.usage import UsageSum
from shared.webhook_secrets import NewSecret, SecretRotation, SecretShown

log = logging.getLogger(__name__)

MODELS_PATH = "/v1/models"
METHODS = ("DELETE", "GET", "PATCH", "POST", "PUT")  # and HEAD


# what serves a POST of a family; the others are served by `Inference`
EXCHANGES: dict[str, type[Inference]] = {Responses.route: ResponsesExchange}


class App(FastAPI):
    """FastAPI for everything but inference, which is found first: its routing costs as much as serving a request."""

    def __init__(self, context: Context, families: tuple[Family, ...]) -> None:
        super().__init__(title="Headrace", redirect_slashes=False, redoc_url=None)
        self._context, self._families = context, families

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            for family in self._families:
                if family.serves(scope["path"]):
                    await _exchange(self._context, family)(scope, receive, send)
                    return
        if scope["type"] == "http":
            if scope["method"] == "HEAD" and _has_head(scope["path"]):
                scope = {**scope, "method": "GET"}  # the server sends the head alone
            shape = self.errors_at(scope["path"])
            identity = answers.request_id(dict(scope["headers"]).get(b"x-request-id"), wire.new_id())
            send = self._with_head(send, [(name, identity) for name in shape.id_headers])
            try:
                self._let_in(scope)
            except HeadraceError as error:
                data, headers = answers.error_answer(error, shape.body(error, identity.decode("ascii")))
                await send(answers.start(error.status, headers))
                await send(answers.body(data))
                return
        await super().__call__(scope, receive, send)

    def family_at(self, path: str) -> Family | None:
        """The family that serves a POST there."""
        return next((family for family in self._families if family.serves(path)), None)

    def serves(self, path: str) -> bool:
        """Whether there is a route, whatever its method."""
        asked = {"type": "http", "method": "GET", "path": path}
        return self.family_at(path) is not None or any(
            route.matches(asked)[0] is not Match.NONE for route in self.routes
        )

    def errors_at(self, path: str) -> ErrorShape:
        """How errors look there."""
        family = self.family_at(path)
        return OPENAI if family is None else family.errors

    def _with_head(self, send: Send, identity: Headers) -> Send:
        """`send`, with what every answer's head has; an inference that is resumed has it already."""
        started = time.monotonic()

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                given = message["headers"]
                if not any(name == b"x-request-id" for name, _ in given):
                    milliseconds = int((time.monotonic() - started) * 1000)
                    given = [*given, *identity, (b"openai-processing-ms", b"%d" % milliseconds)]
                if self._context.draining:
                    given = [*given, (b"connection", b"close")]
                message["headers"] = given
            await send(message)

        return sending

    def _let_in(self, scope: Scope) -> None:
        """Everything but what is open to all is somebody's. Raises TooLarge, BadRequest or InvalidApiKey."""
        if scope["path"] in OPEN_PATHS:
            return
        headers, context = dict(scope["headers"]), self._context
        is_upload = scope["method"] == "POST" and scope["path"] == files.FILES
        settings = context.settings
        bytes_max = settings.file_bytes_max + FORM_BYTES if is_upload else settings.request_bytes_max
        check_declared(headers.get(b"content-length"), bytes_max)
        scope[SCOPE_KEY] = context.identities.caller_in(scope, time.time())


def _has_head(path: str) -> bool:
    """Whether HEAD is GET without the body there; not where an answer is a stream, or waits for something."""
    return path in OPEN_PATHS or path.startswith(MODELS_PATH)


def build_app(context: Context) -> FastAPI:
    """The application of one ingress process."""
    families = FAMILIES
    app = App(context, families)
    for family in families:
        _document(app, context, family)
    app.include_router(registry.router(context))
    app.include_router(deployments.router(context))
    app.include_router(tenants.router(context))
    app.include_router(usage.router(context))
    app.include_router(files.router(context, context.files))
    app.include_router(batches.router(context, context.files, BATCHED))
    app.include_router(models.router(context))
    app.include_router(streams.router(context, families))
    app.include_router(jobs.router(context, families))
    app.include_router(webhooks.router(context))
    app.include_router(stored_responses.router(context))
    app.include_router(health.router(context))
    bodies = [type_ for family in families for type_ in (family.decoder.type, family.answer_type)]
    others = [models.ModelList, ModelEntry, VersionEntry, streams.Ended, NewVersion, AliasTarget, registry.Aliases]
    others += [Changes, VersionConfig, NewDeployment, DeploymentEntry, DeploymentDetail]
    others += [UsageSum, NewTenant, TenantChanges, TenantEntry, NewKey, Rotation, KeyEntry, IssuedKey]
    others += [NewJob, JobView, JobPage, Deleted, SecretRotation, NewSecret, SecretShown]
    others += [files.FileEntry, files.FileList, files.DeletedFile, NewBatch, BatchEntry, BatchList]
    others += [stored_responses.DeletedResponse, stored_responses.ItemList]
    openapi.install(app, [*bodies, *others])
    app.add_exception_handler(HeadraceError, _known)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(Exception, _unexpected)
    return app


def _exchange(context: Context, family: Family) -> Inference:
    return EXCHANGES.get(family.route, Inference)(context, family)


def _document(app: FastAPI, context: Context, family: Family) -> None:
    """Let FastAPI know the route too: for its documentation, and for the methods that it refuses."""

    async def inference(request: Request) -> Response:
        return _exchange(context, family)

    app.add_api_route(family.route, inference, methods=["POST"], **openapi.inference(family))


def _answer(error: HeadraceError, shape: ErrorShape = OPENAI) -> Response:
    data, headers = answers.error_answer(error, shape.body(error, ""))
    response = Response(data, error.status)
    response.raw_headers = headers
    return response


def _methods(app: FastAPI, scope: Scope) -> str:
    """What may be asked of a path, for the header Allow."""
    found = [
        method
        for method in METHODS
        if any(route.matches({**scope, "method": method})[0] is Match.FULL for route in app.routes)
    ]
    return ", ".join([*found, *(["HEAD"] if "GET" in found and _has_head(scope["path"]) else [])])


def _nearest(app: "App", path: str) -> str:
    """Where a path that is no route may have been meant to go, for people: a base URL lacks /v1, or ends in a slash."""
    meant = path.rstrip("/")
    tried = (meant, f"/v1{meant}")
    found = next((each for each in tried if app.serves(each)), None)
    return "" if found is None else f"; there is {found}"


async def _known(request: Request, error: Exception) -> Response:
    assert isinstance(error, HeadraceError)
    return _answer(error)


async def _http(request: Request, error: Exception) -> Response:
    app: App = request.app
    if isinstance(error, HTTPException) and error.status_code == MethodNotAllowed.status:
        refused = MethodNotAllowed(f"{request.method} is not a method of {request.url.path}")
        response = _answer(refused, app.errors_at(request.url.path))
        response.headers["allow"] = _methods(app, request.scope)
        return response
    path = request.url.path
    return _answer(NotFound(f"there is no route {path}{_nearest(app, path)}"))


async def _invalid(request: Request, error: Exception) -> Response:
    return _answer(BadRequest(str(error)))


async def _unexpected(request: Request, error: Exception) -> Response:
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return _answer(Internal("a defect of ours; the logs say more"))
