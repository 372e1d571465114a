"""Liveness, readiness and metrics."""

import os

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse, PlainTextResponse, Response

from ingress.context import Context


def router(context: Context) -> APIRouter:
    """The routes."""
    routes = APIRouter()

    @routes.get("/livez", summary="The event loop turns")
    async def livez() -> Response:
        return JSONResponse({"status": "ok"})

    async def readyz() -> Response:
        state = "draining" if context.draining else "ok" if context.bus_usable() else "bus_unavailable"
        # the process, too: several may share a port, and each answers for itself
        return JSONResponse({"status": state, "pid": os.getpid()}, 200 if state == "ok" else 503)

    routes.get("/readyz", summary="The bus is usable and draining has not begun")(readyz)
    routes.get("/health", summary="The same as /readyz")(readyz)

    @routes.get("/metrics", summary="Prometheus metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        return Response(context.metrics.exposition(), headers={"content-type": CONTENT_TYPE_LATEST})

    return routes
