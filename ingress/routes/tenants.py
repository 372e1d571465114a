"""Tenants and their keys over HTTP, for keys of the role admin: what of the tenants `headrace tenants` does."""

import time
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from ingress import openapi
from ingress.body import read_json
from ingress.context import Context
from ingress.identity import caller_of, needs
from shared import tenancy
from shared.tenancy import NewKey, NewTenant, Rotation, TenantChanges
from shared.tenant_views import IssuedKey, KeyEntry, TenantEntry, issued_key, key_entry, tenant_entry

TENANTS = "/v1/tenants"
TENANT = "/v1/tenants/{tenant}"
KEYS = TENANT + "/keys"
KEY = KEYS + "/{key_id}"
NO_STORE = {"cache-control": "no-store"}  # an answer with a key in it


def router(context: Context) -> APIRouter:
    """The routes."""
    routes = APIRouter(dependencies=[needs("admin")])
    _add_tenants(routes, context)
    _add_keys(routes, context)
    return routes


def _add_tenants(routes: APIRouter, context: Context) -> None:
    bus = context.registrar.bus

    async def list_all() -> Response:
        now = time.time()
        return _json([tenant_entry(each, now) for each in await tenancy.list_all(bus)])

    async def add(request: Request) -> Response:
        asked = await read_json(context, request, msgspec.json.Decoder(NewTenant))
        return _json(tenant_entry(await tenancy.add(bus, caller_of(request).actor, asked), time.time()), 201)

    async def show(tenant: str) -> Response:
        return _json(tenant_entry(await tenancy.find(bus, tenant), time.time()))

    async def change(request: Request) -> Response:
        changes = await read_json(context, request, msgspec.json.Decoder(TenantChanges))
        changed = await tenancy.change(bus, caller_of(request).actor, request.path_params["tenant"], changes)
        return _json(tenant_entry(changed, time.time()))

    async def remove(request: Request, tenant: str) -> Response:
        context.check_accepting()
        return _json(tenant_entry(await tenancy.remove(bus, caller_of(request).actor, tenant), time.time()))

    routes.get(TENANTS, summary="The tenants", **openapi.answer(list[TenantEntry]))(list_all)
    made = openapi.told(NewTenant, TenantEntry, status=201)
    routes.post(TENANTS, summary="Add a tenant", status_code=201, **made)(add)
    routes.get(TENANT, summary="One tenant", **openapi.answer(TenantEntry))(show)
    changed = openapi.told(TenantChanges, TenantEntry, "tenant")
    routes.patch(TENANT, summary="Change a tenant's weight, priority and limits", **changed)(change)
    routes.delete(TENANT, summary="Remove a tenant and its keys", **openapi.answer(TenantEntry))(remove)


def _add_keys(routes: APIRouter, context: Context) -> None:
    bus = context.registrar.bus

    async def issue(request: Request) -> Response:
        asked = await read_json(context, request, msgspec.json.Decoder(NewKey))
        tenant = request.path_params["tenant"]
        issued = await tenancy.issue(bus, caller_of(request).actor, tenant, asked)
        return _json(issued_key(tenant, issued, time.time()), 201, NO_STORE)

    async def rotate(request: Request) -> Response:
        asked = await read_json(context, request, msgspec.json.Decoder(Rotation))
        tenant, id_ = request.path_params["tenant"], request.path_params["key_id"]
        issued = await tenancy.rotate(bus, caller_of(request).actor, tenant, id_, asked.grace_seconds)
        return _json(issued_key(tenant, issued, time.time()), 201, NO_STORE)

    async def revoke(request: Request, tenant: str, key_id: str) -> Response:
        context.check_accepting()
        revoked = await tenancy.revoke(bus, caller_of(request).actor, tenant, key_id)
        return _json(key_entry(revoked, time.time()))

    issued = openapi.told(NewKey, IssuedKey, "tenant", status=201)
    routes.post(KEYS, summary="Make a key", status_code=201, **issued)(issue)
    rotated = openapi.told(Rotation, IssuedKey, "tenant", "key_id", status=201)
    routes.post(KEY + "/rotate", summary="Replace a key by a new one", status_code=201, **rotated)(rotate)
    routes.delete(KEY, summary="Revoke a key", **openapi.answer(KeyEntry))(revoke)


def _json(data: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(data), status, headers, media_type="application/json")
