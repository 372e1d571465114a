"""What a tenant's webhooks are signed with when they bring no secret of their own, in the bucket `webhook_secrets`.

A secret is told once, when it is made. It is kept as it is, since it signs: whoever reads the bucket can sign, as can whoever
reads a notice.
"""

import base64
import secrets
import time
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta, Struct

from shared import audit, records, subjects, webhooks
from shared.audit import Actor
from shared.errors import BadRequest, Unavailable
from shared.stored import Stored, json
from shared.webhooks import Webhook

if TYPE_CHECKING:
    from shared.bus import Bus

NEW_SECRET_BYTES = 32
GRACE_SECONDS = 86_400.0
GRACE_SECONDS_MAX = 30 * 86_400.0
WRITE_TRIES_MAX = 10


class SecretRotation(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `POST /v1/webhooks/secret` takes. For so long what is sent is signed with the old secret, too."""

    grace_seconds: Annotated[float, Meta(ge=0, le=GRACE_SECONDS_MAX)] = GRACE_SECONDS


class NewSecret(Struct, frozen=True, kw_only=True):
    """A secret that was just made: it is told this once."""

    secret: str
    previous_until: float | None  # unix seconds: until when the one before signs, too; null: there is none

    def __repr__(self) -> str:
        return "NewSecret(...)"


class SecretShown(Struct, frozen=True, kw_only=True):
    """That there is a secret, and since when."""

    made: float  # unix seconds
    previous_until: float | None


class TenantSecret(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """In the bucket `webhook_secrets` under key(tenant)."""

    tenant: str
    secret: str
    made: float  # unix seconds
    previous: str | None = None
    previous_until: float = 0.0  # unix seconds

    def good(self, now: float) -> list[str]:
        """What is signed with, the newest first."""
        return (
            [self.secret, self.previous] if self.previous is not None and now < self.previous_until else [self.secret]
        )

    def __repr__(self) -> str:
        return f"TenantSecret({self.tenant})"


SECRETS = Stored(json(TenantSecret), "the webhook secret of a tenant", lambda each: (each.tenant,))


async def check(bus: "Bus", tenant: str, webhook: Webhook, param: str = "webhook") -> None:
    """See that a tenant's webhook can be sent to and signed, before anything is promised. Raises BadRequest and Unavailable."""
    webhooks.check(webhook, bus.settings.webhook_private_hosts, param)
    if webhook.secret is None and await _read(bus, tenant) is None:
        raise BadRequest(
            f"{param}.secret: give one, or make one for all your webhooks with POST /v1/webhooks/secret",
            param=f"{param}.secret",
        )


async def find(bus: "Bus", tenant: str) -> SecretShown | None:
    """What may be shown of a tenant's secret; None: it has none. Raises Unavailable."""
    found = await _read(bus, tenant)
    if found is None:
        return None
    known, now = found[0], time.time()
    return SecretShown(made=known.made, previous_until=known.previous_until if len(known.good(now)) > 1 else None)


async def signing(bus: "Bus", tenant: str, now: float) -> list[str]:
    """What a tenant's webhooks are signed with at `now` (unix seconds): none, one, or two while it is rotated.

    Raises Unavailable, and Internal for what cannot be read.
    """
    found = await _read(bus, tenant)
    return [] if found is None else found[0].good(now)


async def rotate(bus: "Bus", actor: Actor, asked: SecretRotation) -> NewSecret:
    """Make a secret for the actor's tenant, the first one or another. Raises Unavailable."""
    tenant = actor.tenant
    async with audit.audited(bus, actor, "webhook_secret.rotate", tenant, grace_seconds=asked.grace_seconds):
        for _ in range(WRITE_TRIES_MAX):
            found, now = await _read(bus, tenant), time.time()
            before = found[0].secret if found is not None and asked.grace_seconds else None
            made = TenantSecret(
                tenant=tenant,
                secret=webhooks.SECRET_PREFIX + base64.b64encode(secrets.token_bytes(NEW_SECRET_BYTES)).decode(),
                made=now,
                previous=before,
                previous_until=now + asked.grace_seconds if before is not None else 0.0,
            )
            if await _write(bus, made, found[1] if found is not None else None):
                return NewSecret(secret=made.secret, previous_until=made.previous_until or None)
    raise Unavailable("others rotated the secret with every try to rotate it")


async def forget(bus: "Bus", tenant: str) -> None:
    """Delete a tenant's secret, if it has one. What waits to be signed with it is not sent. Raises Unavailable."""
    if await _read(bus, tenant) is not None:
        await bus.kv_delete(subjects.WEBHOOK_SECRETS_BUCKET, subjects.key(tenant))


async def _write(bus: "Bus", made: TenantSecret, revision: int | None) -> bool:
    bucket, key, value = subjects.WEBHOOK_SECRETS_BUCKET, subjects.key(made.tenant), records.encode(made)
    if revision is None:
        return await bus.kv_create(bucket, key, value) is not None
    return await bus.kv_update(bucket, key, value, revision) is not None


async def _read(bus: "Bus", tenant: str) -> tuple[TenantSecret, int] | None:
    key = subjects.key(tenant)
    found = await bus.kv_get(subjects.WEBHOOK_SECRETS_BUCKET, key)
    return (SECRETS.at(key, found[0]), found[1]) if found else None
