"""Who asks: from the API key of a request to its tenant, role and models. Fed by a watch, asked once per request.

What is known of a key is what the bucket `tenants` says of its hash. Identity comes from the key alone, never from a header
beside it.
"""

from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import Depends, Request

from shared import audit, subjects, tenants
from shared.errors import InvalidApiKey, ModelNotAllowed, RoleMissing
from shared.tenants import ApiKey, Role, Tenant

if TYPE_CHECKING:
    from shared.bus import Bus
    from shared.keyvalue import Watch

BEARER = b"bearer "
SCOPE_KEY = "headrace.caller"
OPEN_PATHS = frozenset({"/livez", "/readyz", "/health", "/metrics", "/docs", "/docs/oauth2-redirect", "/openapi.json"})

Headers = Mapping[bytes, bytes]


class Caller(msgspec.Struct, frozen=True):
    """Who a request is of."""

    tenant: str
    key: ApiKey
    by: str  # for the audit log

    @property
    def actor(self) -> audit.Actor:
        return audit.Actor(self.tenant, self.by)

    def check_role(self, role: Role) -> None:
        """Raises RoleMissing."""
        if not self.key.may(role):
            raise RoleMissing(f"the key {self.key.id} has the role {self.key.role}; this needs {role}")

    def may_use(self, model: str) -> bool:
        return self.key.may_use(model)

    def check_model(self, reference: str) -> None:
        """`reference` is a model, model@version or model@alias. Raises ModelNotAllowed, also for what does not exist."""
        if not self.key.may_use(reference.partition("@")[0]):
            raise ModelNotAllowed(f"the key {self.key.id} is not for this model", param="model")

    def may_see(self, models: tuple[str, ...]) -> bool:
        """Of what is of several models: whether the key may use each. (): it may be of any that there are."""
        return not self.key.models or (bool(models) and all(map(self.may_use, models)))

    def check_models(self, models: tuple[str, ...]) -> None:
        """Raises ModelNotAllowed where `may_see` says no."""
        if not self.may_see(models):
            raise ModelNotAllowed(f"the key {self.key.id} is not for all models that this is of", param="model")


# without keys everybody who reaches the loopback is one tenant and may do everything
LOCAL = Caller(subjects.LOCAL_TENANT, ApiKey(id="local", sha256="", role="admin"), "local")


NOBODY = Caller("", ApiKey(id="", sha256="", models=("",)), "")  # until a request said whose it is; no name is empty


class Identities:
    """The tenants and keys that are known now."""

    def __init__(self, require_keys: bool) -> None:
        self.require_keys = require_keys
        self._tenants: dict[str, Tenant] = {}
        self._callers: dict[str, Caller] = {}  # by the sha256 of the key
        self._watch: Watch | None = None

    async def start(self, bus: "Bus") -> None:
        """Returns when everything is known that the bucket holds now."""
        self._watch = await bus.watch(subjects.TENANTS_BUCKET, self.on_tenant)

    async def close(self) -> None:
        if self._watch is not None:
            await self._watch.close()

    @property
    def live(self) -> bool:
        """Whether changes arrive."""
        return self._watch is not None and self._watch.live

    def tenant(self, name: str) -> Tenant:
        """A tenant's weight, priority and limits; the defaults for one that has no record, such as `local`."""
        return self._tenants.get(name) or Tenant(name=name)

    def on_tenant(self, key: str, value: bytes | None) -> None:
        """A tenant's record is new, changed, or (None) deleted."""
        change = tenants.TENANTS.change(key, value)
        if change is None:
            return
        [name], record = change
        self._forget(name)
        if record is not None:
            self._tenants[name] = record
            for each in record.keys:
                self._callers.setdefault(each.sha256, Caller(name, each, each.id))

    def caller(self, headers: Headers, now: float) -> Caller:
        """Whose key the headers carry, `now` in unix seconds; without `require_keys` it is LOCAL. Raises InvalidApiKey."""
        if not self.require_keys:
            return LOCAL
        given = key_of(headers)
        if given is None:
            raise InvalidApiKey("no API key was given: send `Authorization: Bearer hr_...`")
        found = self._callers.get(tenants.sha256_of(given)) if tenants.is_key(given) else None
        if found is None:
            raise InvalidApiKey("the API key is not known")
        state = found.key.state(now)
        if state != "active":
            raise InvalidApiKey(f"the API key {found.key.id} is {state}")
        return found

    def has(self, caller: Caller) -> bool:
        """Whether the key is of its tenant still, valid or not: a tenant may be removed while something of it is served."""
        return not caller.key.sha256 or caller.key.sha256 in self._callers

    def caller_in(self, scope: MutableMapping[str, Any], now: float) -> Caller:
        """Whose a request is: whom it came with, which no header can say, or whose key it has. Raises InvalidApiKey."""
        known: Caller | None = scope.get(SCOPE_KEY)
        return known or self.caller(dict(scope["headers"]), now)

    def _forget(self, name: str) -> None:
        known = self._tenants.pop(name, None)
        for each in known.keys if known is not None else ():
            caller = self._callers.get(each.sha256)
            if caller is not None and caller.tenant == name:
                del self._callers[each.sha256]


def tenant_itself(tenant: str) -> Caller:
    """Who calls over NATS: its account says which tenant it is, and there is no key that could be held to less."""
    return Caller(tenant, ApiKey(id="nats", sha256="", role="infer"), "nats")


def key_of(headers: Headers) -> str | None:
    """The key of `Authorization: Bearer`, else of `x-api-key`, as it was sent; None: there is none."""
    given = headers.get(b"authorization")
    if given is not None:
        return given[len(BEARER) :].strip().decode("latin-1") if given[: len(BEARER)].lower() == BEARER else ""
    given = headers.get(b"x-api-key")
    return None if given is None else given.strip().decode("latin-1")


def caller_of(request: Request) -> Caller:
    """Who a request is of that has been let in."""
    found: Caller = request.scope[SCOPE_KEY]
    return found


def needs(role: Role) -> Any:
    """A dependency of a route, or of all of a router: whoever calls may do what needs `role`. Raises RoleMissing."""

    async def check_role(request: Request) -> None:
        caller_of(request).check_role(role)

    return Depends(check_role)
