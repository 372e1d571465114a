"""Making and changing tenants and their keys: what `headrace tenants` and `/v1/tenants` write, by compare-and-set.

Each change is in the audit log, by the `actor` who makes it.
"""

import asyncio
import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType
from msgspec.structs import replace

from shared import audit, config, registry, remains, subjects, tenants, webhook_secrets
from shared.audit import Actor
from shared.errors import ApiKeyNotFound, ApiKeyOver, BadRequest, TenantExists, TenantNotFound, Unavailable
from shared.tenants import ApiKey, Limits, Priority, Role, Tenant, Weight

if TYPE_CHECKING:
    from shared.bus import Bus

WRITE_TRIES_MAX = 10
GRACE_SECONDS = 3600.0
SECONDS_MAX = 10 * 365 * 24 * 3600.0
NOTE_CHARACTERS_MAX = 200
SETTLED_S = 15.0  # after a key is gone every ingress knows, and no write of one who did not is under way

Seconds = Annotated[float, Meta(gt=0, le=SECONDS_MAX)]


class NewTenant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `POST /v1/tenants` takes. It has no key yet."""

    name: str
    weight: Weight = 1.0
    priority: Priority = 0
    limits: Limits = Limits()


class TenantChanges(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `PATCH /v1/tenants/{tenant}` takes; of the limits, null is back to the default."""

    weight: Weight | UnsetType = UNSET
    priority: Priority | UnsetType = UNSET
    limits: dict[str, Any] = {}


class NewKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `POST /v1/tenants/{tenant}/keys` takes."""

    role: Role = "infer"
    models: Annotated[tuple[str, ...], Meta(max_length=tenants.KEY_MODELS_MAX)] = ()
    expires_seconds: Seconds | None = None  # from now; None: never
    note: Annotated[str, Meta(max_length=NOTE_CHARACTERS_MAX)] = ""


class Rotation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `POST /v1/tenants/{tenant}/keys/{id}/rotate` takes."""

    grace_seconds: Annotated[float, Meta(ge=0, le=SECONDS_MAX)] = GRACE_SECONDS  # the old key is still good for so long


class Issued(msgspec.Struct, frozen=True):
    """A key that was just made. `secret` is in no other place: whoever is told it now has it."""

    key: ApiKey
    secret: str

    def __repr__(self) -> str:
        return f"Issued({self.key.id})"


async def add(bus: "Bus", actor: Actor, asked: NewTenant) -> Tenant:
    """Make a tenant. Raises BadRequest (the name), TenantExists or Unavailable."""
    tenants.check_name(asked.name)
    tenant = Tenant(
        name=asked.name,
        weight=asked.weight,
        priority=asked.priority,
        limits=asked.limits,
        created=int(time.time()),
    )
    detail = {name: value for name, value in msgspec.to_builtins(asked).items() if name != "name"}
    async with audit.audited(bus, actor, "tenant.add", tenant.name, **detail):
        if await bus.kv_create(subjects.TENANTS_BUCKET, subjects.key(tenant.name), tenants.encode(tenant)) is None:
            raise TenantExists(f"there is a tenant {tenant.name}", param="name")
    return tenant


async def find(bus: "Bus", name: str) -> Tenant:
    """Raises TenantNotFound or Unavailable."""
    return (await _read(bus, name))[0]


async def list_all(bus: "Bus") -> list[Tenant]:
    """All tenants, by name."""
    found = await registry.read_bucket(bus, subjects.TENANTS_BUCKET, tenants.TENANTS)
    return sorted(found, key=lambda tenant: tenant.name)


async def change(bus: "Bus", actor: Actor, name: str, changes: TenantChanges) -> Tenant:
    """Change weight, priority and limits; the tenant afterwards. Raises BadRequest, TenantNotFound or Unavailable."""

    def changed(tenant: Tenant) -> Tenant:
        return replace(
            tenant,
            weight=tenant.weight if changes.weight is UNSET else changes.weight,
            priority=tenant.priority if changes.priority is UNSET else changes.priority,
            limits=config.merged(tenant.limits, changes.limits, "limits"),
        )

    async with audit.audited(bus, actor, "tenant.change", name, **msgspec.to_builtins(changes)):
        return await _write(bus, name, changed)


async def issue(bus: "Bus", actor: Actor, name: str, asked: NewKey) -> Issued:
    """Make a key. Raises BadRequest, TenantNotFound or Unavailable."""
    if asked.role == "admin" and asked.models:
        raise BadRequest("models: a key of the role admin can make keys for all of them", param="models")
    for model in asked.models:
        registry.check_name("models", model)
    now = time.time()
    issued = _issued(asked.role, asked.models, asked.note, now, asked.expires_seconds)
    async with audit.audited(bus, actor, "key.issue", name, key=issued.key.id, **msgspec.to_builtins(asked)):
        await _write(bus, name, lambda tenant: _with_key(tenant, issued.key, now))
    return issued


async def rotate(bus: "Bus", actor: Actor, name: str, id_: str, grace_seconds: float = GRACE_SECONDS) -> Issued:
    """Make a key like the one of `id_`, which is good for `grace_seconds` more.

    Raises TenantNotFound, ApiKeyNotFound, ApiKeyOver (revoked or expired), BadRequest or Unavailable.
    """
    now = time.time()
    made: list[Issued] = []

    def rotated(tenant: Tenant) -> Tenant:
        old = _key(tenant, id_)
        if old.state(now) != "active":
            raise ApiKeyOver(f"the key {id_} is {old.state(now)}: issue a new one", param="id")
        lives_s = float(old.expires - old.created) if old.expires else None
        made[:] = [_issued(old.role, old.models, old.note, now, lives_s)]
        last = math.ceil(now + grace_seconds) if grace_seconds else int(now)
        ending = replace(old, expires=min(last, old.expires) if old.expires else last)
        return _with_key(_replaced(tenant, ending), made[0].key, now)

    async with audit.audited(bus, actor, "key.rotate", name, key=id_, grace_seconds=grace_seconds) as note:
        await _write(bus, name, rotated)
        note.detail["new_key"] = made[0].key.id
    return made[0]


async def revoke(bus: "Bus", actor: Actor, name: str, id_: str) -> ApiKey:
    """End a key at once; one that was revoked before stays as it is. Raises TenantNotFound, ApiKeyNotFound or Unavailable."""

    def revoked(tenant: Tenant) -> Tenant:
        old = _key(tenant, id_)
        return tenant if old.revoked else _replaced(tenant, replace(old, revoked=int(time.time())))

    async with audit.audited(bus, actor, "key.revoke", name, key=id_):
        return _key(await _write(bus, name, revoked), id_)


async def remove(bus: "Bus", actor: Actor, name: str) -> Tenant:
    """Remove a tenant: its keys, then all that is stored under its name, so that who is called so later finds nothing of it.

    It takes `SETTLED_S`. The record goes last: where this fails or dies, it is there without keys, and is to be removed again.
    Raises TenantNotFound, ObjectsUnavailable or Unavailable.
    """
    async with audit.audited(bus, actor, "tenant.remove", name):
        tenant, _ = await _read(bus, name)
        await _write(bus, name, lambda each: replace(each, keys=()))
        await remains.remove(bus, name)  # ends what runs
        await asyncio.sleep(SETTLED_S)
        await remains.remove(bus, name)  # what was still being written
        await webhook_secrets.forget(bus, name)
        await bus.kv_delete(subjects.TENANTS_BUCKET, subjects.key(name))
    return tenant


def _issued(role: Role, models: tuple[str, ...], note: str, now: float, lives_s: float | None) -> Issued:
    secret = tenants.new_key()
    key = ApiKey(
        id=tenants.new_key_id(),
        sha256=tenants.sha256_of(secret),
        role=role,
        models=models,
        created=int(now),
        expires=tenants.NEVER if lives_s is None else math.ceil(now + lives_s),
        note=note,
    )
    return Issued(key, secret)


def _with_key(tenant: Tenant, key: ApiKey, now: float) -> Tenant:
    """Keys that are over are kept for people to look at, as long as there is room. Raises BadRequest."""
    keys = list(tenant.keys)
    while len(keys) >= tenants.KEYS_MAX:
        over = next((each for each in keys if each.state(now) != "active"), None)
        if over is None:
            raise BadRequest(f"{tenant.name} has {tenants.KEYS_MAX} keys: revoke one")
        keys.remove(over)
    return replace(tenant, keys=(*keys, key))


def _replaced(tenant: Tenant, key: ApiKey) -> Tenant:
    return replace(tenant, keys=tuple(key if each.id == key.id else each for each in tenant.keys))


def _key(tenant: Tenant, id_: str) -> ApiKey:
    found = tenant.key(id_)
    if found is None:
        raise ApiKeyNotFound(f"{tenant.name} has no key of that id", param="id")  # it may be a key: not told
    return found


async def _read(bus: "Bus", name: str) -> tuple[Tenant, int]:
    try:
        key = subjects.key(name)
    except ValueError:
        raise TenantNotFound("there is no tenant of such a name", param="tenant") from None
    found = await bus.kv_get(subjects.TENANTS_BUCKET, key)
    if found is None:
        raise TenantNotFound(f"there is no tenant {name}", param="tenant")
    return tenants.tenant_at(key, found[0]), found[1]


async def _write(bus: "Bus", name: str, changed: Callable[[Tenant], Tenant]) -> Tenant:
    """Read, change, write, until nobody was faster; the tenant afterwards."""
    for _ in range(WRITE_TRIES_MAX):
        before, revision = await _read(bus, name)
        after = changed(before)
        if after == before:
            return before
        written = await bus.kv_update(subjects.TENANTS_BUCKET, subjects.key(name), tenants.encode(after), revision)
        if written is not None:
            return after
    raise Unavailable(f"the record of {name} changed with every try to write it")
