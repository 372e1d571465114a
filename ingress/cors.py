"""Calls from web pages (CORS): which origins may read answers, by the setting `cors_origins`. By default none may.

Whoever opens a page must not hand it the models that need no key on this host's loopback: so it takes a setting.
"""

import re

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp

from ingress import answers
from shared.errors import BadRequest
from shared.settings import Settings, SettingsError

ANY = "*"
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")
# what a page may read of an answer's headers, beside the few that it always may
EXPOSED = (
    "x-request-id",
    "request-id",
    "x-headrace-version",
    "x-headrace-claims",
    "x-headrace-last-event-id",
    "openai-processing-ms",
    "idempotent-replayed",
    "location",
    "retry-after",
    "retry-after-ms",
    "x-should-retry",
    *(f"x-ratelimit-{part}-{of}" for of in ("requests", "tokens") for part in ("limit", "remaining", "reset")),
)
PREFLIGHT_S = 600  # how long a browser may remember what it was allowed
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#\s*]+")


class Pages(CORSMiddleware):
    """Starlette's, with refusals in the shape of our errors."""

    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        if response.status_code == 200:
            return response
        asked = f"{request_headers['access-control-request-method']} from pages of {request_headers['origin']}"
        error = BadRequest(f"{asked} is not allowed: `cors_origins` names who may call", param="origin")
        data, headers = answers.error_answer(error)
        refused = Response(data, error.status)
        refused.raw_headers = headers
        return refused


def origins(settings: Settings) -> list[str]:
    """The origins that may call. Raises SettingsError for what is none."""
    named = [each.strip() for each in settings.cors_origins.split(",") if each.strip()]
    for each in named:
        if each != ANY and not ORIGIN.fullmatch(each):
            raise SettingsError(f"cors_origins: `{each}` is no origin such as https://app.example, nor `{ANY}`")
    return named


def allow_pages(app: ASGIApp, settings: Settings) -> ASGIApp:
    """`app`, answering the preflights of pages that may call it. Raises SettingsError."""
    allowed = origins(settings)
    if not allowed:
        return app
    return Pages(
        app,
        allow_origins=allowed,
        allow_methods=METHODS,
        allow_headers=(ANY,),  # SDKs send some of their own
        allow_private_network=True,  # a page of a public address, and an ingress on this host
        expose_headers=EXPOSED,
        max_age=PREFLIGHT_S,
    )
