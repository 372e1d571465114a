"""Tenants and keys as people and programs are shown them: without hashes, and with what is not set."""

import msgspec

from shared.tenancy import Issued
from shared.tenants import ApiKey, Limits, Role, Tenant


class LimitsEntry(msgspec.Struct, kw_only=True):
    """Null: what the settings say for everybody."""

    requests_per_minute: int | None
    tokens_per_minute: int | None
    concurrency: int | None
    queue_max: int | None


class KeyEntry(msgspec.Struct, kw_only=True):
    """A key. Times in unix seconds, 0: never."""

    id: str
    role: Role
    models: list[str]  # []: all
    state: str  # active | expired | revoked
    created: int
    expires: int
    revoked: int
    note: str


class TenantEntry(msgspec.Struct, kw_only=True):
    """A tenant."""

    name: str
    weight: float
    priority: int
    limits: LimitsEntry
    created: int  # unix seconds
    keys: list[KeyEntry]


class IssuedKey(KeyEntry, kw_only=True):
    """A key that was just made, with what it is: this is told once."""

    tenant: str
    key: str


def tenant_entry(tenant: Tenant, now: float) -> TenantEntry:
    limits = {name: getattr(tenant.limits, name) for name in Limits.__struct_fields__}
    return TenantEntry(
        name=tenant.name,
        weight=tenant.weight,
        priority=tenant.priority,
        limits=LimitsEntry(**limits),
        created=tenant.created,
        keys=[key_entry(key, now) for key in tenant.keys],
    )


def key_entry(key: ApiKey, now: float) -> KeyEntry:
    return KeyEntry(
        id=key.id,
        role=key.role,
        models=list(key.models),
        state=key.state(now),
        created=key.created,
        expires=key.expires,
        revoked=key.revoked,
        note=key.note,
    )


def issued_key(tenant: str, issued: Issued, now: float) -> IssuedKey:
    shown = key_entry(issued.key, now)
    return IssuedKey(
        tenant=tenant, key=issued.secret, **{name: getattr(shown, name) for name in KeyEntry.__struct_fields__}
    )
