"""Tenants and keys: what may be made, and that everything is a compare-and-set that the audit log tells of."""

import asyncio
import hashlib
import re
import secrets
import time
from collections.abc import Awaitable, Callable

import msgspec
import pytest

from shared import audit, subjects, tenancy, tenants, webhook_secrets
from shared.audit import Actor
from shared.bus import Bus
from shared.errors import ApiKeyNotFound, ApiKeyOver, BadRequest, HeadraceError, TenantExists, TenantNotFound
from shared.settings import Settings
from shared.tenancy import NewKey, NewTenant, TenantChanges
from shared.tenants import ApiKey, Limits, Tenant
from shared.webhook_secrets import SecretRotation

ME = Actor("ops", "cli:me@here")


@pytest.fixture
def name() -> str:
    return f"team {secrets.token_hex(4)}"


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A removal waits for nobody."""
    monkeypatch.setattr(tenancy, "SETTLED_S", 0.0)


def on_bus(nats_url: str, work: Callable[[Bus], Awaitable[None]]) -> None:
    async def main() -> None:
        bus = await Bus.connect(Settings(nats_url=nats_url), "test")
        try:
            await bus.ensure()
            await work(bus)
        finally:
            await bus.close()

    asyncio.run(main())


def test_a_key_is_random_and_only_its_hash_is_stored(nats_url: str, name: str) -> None:
    async def work(bus: Bus) -> None:
        await tenancy.add(bus, ME, NewTenant(name=name))
        first, second = [await tenancy.issue(bus, ME, name, NewKey()) for _ in range(2)]
        assert first.secret != second.secret
        assert re.fullmatch("hr_[A-Za-z0-9_-]{43}", first.secret)
        assert first.key.sha256 == hashlib.sha256(first.secret.encode()).hexdigest()
        found = await bus.kv_get(subjects.TENANTS_BUCKET, subjects.key(name))
        assert found is not None
        for issued in (first, second):
            assert issued.secret.encode() not in found[0]
            assert issued.secret[3:] not in repr(issued) + str(issued)
        assert (await tenancy.find(bus, name)).keys == (first.key, second.key)

    on_bus(nats_url, work)


@pytest.mark.parametrize("name", ["ingress", "local", "", "a/b", " a", "a\n", "ü" * 65])
def test_names_that_no_tenant_can_have(nats_url: str, name: str) -> None:
    async def work(bus: Bus) -> None:
        with pytest.raises(BadRequest, match="tenant"):
            await tenancy.add(bus, ME, NewTenant(name=name))

    on_bus(nats_url, work)


def test_limits_are_changed_and_go_back_to_the_default(nats_url: str, name: str) -> None:
    async def work(bus: Bus) -> None:
        await tenancy.add(bus, ME, NewTenant(name=name, limits=Limits(concurrency=4)))
        with pytest.raises(TenantExists):
            await tenancy.add(bus, ME, NewTenant(name=name))
        changed = await tenancy.change(
            bus, ME, name, TenantChanges(weight=2.5, limits={"queue_max": 9, "concurrency": None})
        )
        assert (changed.weight, changed.priority, changed.limits) == (2.5, 0, Limits(queue_max=9))
        assert await tenancy.find(bus, name) == changed
        for wrong in ({"queue_max": 0}, {"colour": 1}, {"tokens_per_minute": "many"}):
            with pytest.raises(BadRequest) as refused:
                await tenancy.change(bus, ME, name, TenantChanges(limits=wrong))
            assert str(refused.value.param).startswith("limits")
        assert await tenancy.find(bus, name) == changed
        for missing in ("nobody", "", "x" * 200):
            with pytest.raises(TenantNotFound):
                await tenancy.change(bus, ME, missing, TenantChanges(weight=1.0))

    on_bus(nats_url, work)


def test_a_rotated_key_is_good_for_a_while_and_a_revoked_one_is_not(nats_url: str, name: str) -> None:
    async def work(bus: Bus) -> None:
        await tenancy.add(bus, ME, NewTenant(name=name))
        old = await tenancy.issue(bus, ME, name, NewKey(role="deploy", models=("m",), note="ci", expires_seconds=5000))
        new = await tenancy.rotate(bus, ME, name, old.key.id, 60)
        tenant, now = await tenancy.find(bus, name), time.time()
        before, after = tenant.keys
        assert (after.role, after.models, after.note) == ("deploy", ("m",), "ci")
        assert after.id == new.key.id != old.key.id
        assert now + 4990 < after.expires < now + 5010
        assert before.state(now) == "active"
        assert before.state(now + 62) == "expired"
        assert before.sha256 == old.key.sha256
        again = await tenancy.rotate(bus, ME, name, old.key.id, 9000)  # never later than it was
        assert (await tenancy.find(bus, name)).key(old.key.id) == before
        revoked = await tenancy.revoke(bus, ME, name, again.key.id)
        assert revoked.state(time.time()) == "revoked"
        assert await tenancy.revoke(bus, ME, name, again.key.id) == revoked
        with pytest.raises(ApiKeyOver, match="revoked"):
            await tenancy.rotate(bus, ME, name, again.key.id)
        for missing in ("k0", old.secret):
            with pytest.raises(ApiKeyNotFound) as refused:
                await tenancy.revoke(bus, ME, name, missing)
            assert missing not in str(refused.value)

    on_bus(nats_url, work)


def test_a_key_that_makes_keys_cannot_be_held_to_models(nats_url: str, name: str) -> None:
    async def work(bus: Bus) -> None:
        await tenancy.add(bus, ME, NewTenant(name=name))
        for wrong in (NewKey(role="admin", models=("m",)), NewKey(models=("m@v1",)), NewKey(models=("",))):
            with pytest.raises(BadRequest, match="models"):
                await tenancy.issue(bus, ME, name, wrong)

    on_bus(nats_url, work)


def test_many_who_write_at_once_lose_nothing(nats_url: str, name: str) -> None:
    async def work(bus: Bus) -> None:
        await tenancy.add(bus, ME, NewTenant(name=name))
        made = await asyncio.gather(*(tenancy.issue(bus, ME, name, NewKey()) for _ in range(8)))
        assert {key.id for key in (await tenancy.find(bus, name)).keys} == {issued.key.id for issued in made}

    on_bus(nats_url, work)


def test_keys_that_are_over_make_room_and_others_do_not() -> None:
    keys = tuple(ApiKey(id=f"k{number}", sha256="", revoked=int(number == 3)) for number in range(tenants.KEYS_MAX))
    tenant = tenancy._with_key(Tenant(name="t", keys=keys), ApiKey(id="new", sha256=""), 1.0)
    assert tenant.key("k3") is None
    assert tenant.keys[-1].id == "new"
    assert len(tenant.keys) == tenants.KEYS_MAX
    with pytest.raises(BadRequest, match="revoke one"):
        tenancy._with_key(tenant, ApiKey(id="newer", sha256=""), 1.0)


def test_what_signs_its_webhooks_goes_with_a_tenant(nats_url: str, name: str) -> None:
    async def work(bus: Bus) -> None:
        for _ in range(2):  # the second one of that name
            await tenancy.add(bus, ME, NewTenant(name=name))
            assert await webhook_secrets.find(bus, name) is None
            made = await webhook_secrets.rotate(bus, Actor(name, "k1"), SecretRotation())
            assert made.previous_until is None
            await tenancy.remove(bus, ME, name)

    on_bus(nats_url, work)


def test_every_change_is_in_the_audit_log_and_no_key_is(nats_url: str, name: str) -> None:
    async def work(bus: Bus) -> None:
        begun = time.time()
        await tenancy.add(bus, ME, NewTenant(name=name, weight=3.0))
        issued = await tenancy.issue(bus, ME, name, NewKey(note="laptop"))
        rotated = await tenancy.rotate(bus, ME, name, issued.key.id, 0)
        await tenancy.change(bus, ME, name, TenantChanges(priority=1))
        await tenancy.revoke(bus, ME, name, rotated.key.id)
        with pytest.raises(ApiKeyNotFound):
            await tenancy.revoke(bus, ME, name, issued.secret)  # a mistake that must not get it stored
        await tenancy.remove(bus, ME, name)
        with pytest.raises(HeadraceError):
            await tenancy.find(bus, name)
        told = [entry for entry in await audit.read(bus, begun - 5) if entry.target == name]
        assert [(entry.action, entry.result) for entry in told] == [
            ("tenant.add", "ok"),
            ("key.issue", "ok"),
            ("key.rotate", "ok"),
            ("tenant.change", "ok"),
            ("key.revoke", "ok"),
            ("key.revoke", "api_key_not_found"),
            ("tenant.remove", "ok"),
        ]
        assert {(entry.tenant, entry.by) for entry in told} == {("ops", "cli:me@here")}
        assert all(begun - 1 < entry.at < time.time() + 1 for entry in told)
        assert told[1].detail | {"key": issued.key.id, "note": "laptop", "role": "infer"} == told[1].detail
        assert told[2].detail == {"key": issued.key.id, "grace_seconds": 0, "new_key": rotated.key.id}
        written = msgspec.json.encode(told).decode()
        for secret in (issued, rotated):
            assert secret.secret[3:] not in written
            assert secret.key.sha256 not in written

    on_bus(nats_url, work)
