"""Who may ask for what: tenants with their keys, limits and shares, as the bucket `tenants` holds them.

A key is `hr_` and 32 random bytes. It is told once, when it is made; what is stored is its sha256. Pure: time is passed in.
"""

import base64
import hashlib
import re
import secrets
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from shared import subjects
from shared.errors import BadRequest
from shared.stored import Stored, json

KEY_PREFIX = "hr_"
KEY_BYTES = 32
KEY_ID_BYTES = 6
KEYS_MAX = 100  # of a tenant, the ones that are over among them
KEY_MODELS_MAX = 64
RESERVED = {subjects.INGRESS_OWNER, subjects.LOCAL_TENANT}
NEVER = 0  # of a time in unix seconds

Role = Literal["infer", "deploy", "admin"]
RANKS: dict[Role, int] = {"infer": 0, "deploy": 1, "admin": 2}  # each may what those before it may

Weight = Annotated[float, Meta(gt=0, le=1000)]
Priority = Annotated[int, Meta(ge=-100, le=100)]
Count = Annotated[int, Meta(ge=1, le=10**12)]

_KEY = re.compile(rf"{KEY_PREFIX}[A-Za-z0-9_-]{{43}}")
_WEBHOOK_SECRET = re.compile(r"(whsec_)[A-Za-z0-9+/=]{32,}")  # as webhooks are signed with


class Limits(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, forbid_unknown_fields=True):
    """What a tenant may have of the fleet; None: what the settings say for everybody, which may be no limit."""

    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None  # prompt and output
    concurrency: Count | None = None  # requests that are published and not ended
    queue_max: Count | None = None  # requests that are published and not accepted by a worker


class ApiKey(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A key, less what it is itself. Times in unix seconds."""

    id: str  # may be shown and logged
    sha256: str  # of the key, in hex
    role: Role = "infer"
    models: tuple[str, ...] = ()  # what it may be used for; (): all
    created: int = 0
    expires: int = NEVER
    revoked: int = NEVER
    note: str = ""

    def state(self, now: float) -> Literal["active", "expired", "revoked"]:
        if self.revoked:
            return "revoked"
        return "expired" if self.expires and now >= self.expires else "active"

    def may(self, role: Role) -> bool:
        """Whether it can be used for what needs `role`."""
        return RANKS[self.role] >= RANKS[role]

    def may_use(self, model: str) -> bool:
        return not self.models or model in self.models


class Tenant(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A tenant, in the bucket `tenants` under key(name). Of what several want, each gets its part by weight."""

    name: str
    weight: Weight = 1.0
    priority: Priority = 0  # of two tenants the higher one goes first
    limits: Limits = Limits()
    keys: tuple[ApiKey, ...] = ()
    created: int = 0  # unix seconds

    def key(self, id_: str) -> ApiKey | None:
        return next((each for each in self.keys if each.id == id_), None)


encode = msgspec.json.encode
TENANTS = Stored(json(Tenant), "the record of a tenant", lambda each: (each.name,))
tenant_at = TENANTS.at


def check_name(name: str) -> None:
    """Raises BadRequest for a name that no tenant can have."""
    try:
        subjects.encode_token(name)
    except ValueError as error:
        raise BadRequest(f"tenant: {error}", param="name") from error
    if name in RESERVED:
        raise BadRequest(f"tenant: the name {name} is reserved", param="name")
    if "/" in name or name != name.strip() or not name.isprintable():
        raise BadRequest(f"tenant: {name!r} has a '/', white space at an end or a control character", param="name")


def redacted(text: str) -> str:
    """`text` with nothing of the keys, and of the secrets of webhooks, that are in it."""
    return _WEBHOOK_SECRET.sub(r"\1...", _KEY.sub(KEY_PREFIX + "...", text))


def new_key() -> str:
    """A key that nobody has."""
    return KEY_PREFIX + base64.urlsafe_b64encode(secrets.token_bytes(KEY_BYTES)).rstrip(b"=").decode()


def new_key_id() -> str:
    """What a key is called by: random, too, and says nothing of it."""
    return "k" + secrets.token_hex(KEY_ID_BYTES)


def is_key(text: str) -> bool:
    """Whether it has the shape of a key."""
    return _KEY.fullmatch(text) is not None


def sha256_of(key: str) -> str:
    """What is stored of a key: in hex. A key has 256 random bits, so one round of a plain hash does."""
    return hashlib.sha256(key.encode()).hexdigest()
