"""What is stored of a tenant goes with it, on a real bus and a real object store, and nothing of others does."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from shared import remains, subjects, tenancy, webhook_secrets
from shared.audit import Actor
from shared.bus import Bus
from shared.errors import ObjectsUnavailable, TenantExists, TenantNotFound
from shared.objects import ObjectStore
from shared.settings import Settings
from shared.tenancy import NewKey, NewTenant
from shared.webhook_secrets import SecretRotation
from shared.wire import HEADER_MSG_ID, new_id

ME = Actor("ops", "cli:me@here")
STREAMS = (subjects.JOB_STREAM, subjects.RES_STREAM, subjects.DLQ_STREAM)
GONE, STAYS = "a.b", ("a", "a.b.c", "b")


def on_bus(nats: Any, s3: Settings, work: Callable[[Bus, ObjectStore], Awaitable[None]]) -> None:
    async def main() -> None:
        settings = msgspec.structs.replace(s3, nats_url=nats.url, s3_bucket=f"remains-{new_id()[:12]}")
        bus = await Bus.connect(settings, "test")
        try:
            await bus.ensure()
            await work(bus, ObjectStore(settings))
        finally:
            await bus.close()

    asyncio.run(main())


async def fill(bus: Bus, objects: ObjectStore, tenant: str) -> None:
    """Something of the tenant wherever anything of tenants is stored."""
    for bucket in (*remains.BUCKETS, *remains.WATCHED):
        for each in ("one", "two"):
            await bus.kv_put(bucket, subjects.key(tenant, each), b"{}")
    for subject in (
        subjects.job("m", "v", tenant),
        subjects.result(tenant, "one"),
        subjects.checkpoint(tenant, "two"),
        subjects.dead_letter("m", "v", tenant),
        subjects.usage(tenant),
    ):
        await bus.publish_durable(subject, b"x", {HEADER_MSG_ID: new_id()})
    objects.ensure_bucket()
    for place in remains.PLACES:
        objects.put(f"{place}/{subjects.encode_token(tenant)}/one", b"x")


async def kept(bus: Bus, objects: ObjectStore, tenant: str) -> list[str]:
    """Where there is something of the tenant."""
    found = []
    for bucket in (*remains.BUCKETS, *remains.WATCHED):
        for each in await bus.kv_keys_below(bucket, tenant):
            if await bus.kv_get(bucket, subjects.key(tenant, each)) is not None:
                found.append(f"{bucket}/{each}")
    token = subjects.encode_token(tenant)
    for stream in (*STREAMS, subjects.USAGE_STREAM):
        found += [each for each in await bus.subject_counts(stream, ">") if token in each.split(".")]
    return found + [each.key for place in remains.PLACES for each in objects.list(f"{place}/{token}/")]


def test_all_of_a_tenant_goes_with_it_but_its_usage(
    nats_server: Any, s3_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tenancy, "SETTLED_S", 0.0)
    remove, removals = remains.remove, 0

    async def work(bus: Bus, objects: ObjectStore) -> None:
        async def remove_and_fill(bus: Bus, tenant: str) -> None:
            nonlocal removals
            await remove(bus, tenant)
            removals += 1
            assert await kept(bus, objects, GONE) == [subjects.usage(GONE)]
            if removals == 1:
                await fill(bus, objects, GONE)  # by who had begun before the keys were gone

        monkeypatch.setattr(remains, "remove", remove_and_fill)
        await tenancy.add(bus, ME, NewTenant(name=GONE))
        await webhook_secrets.rotate(bus, Actor(GONE, "k1"), SecretRotation())
        for tenant in (GONE, *STAYS):
            await fill(bus, objects, tenant)
        before = {tenant: await kept(bus, objects, tenant) for tenant in STAYS}
        assert all(len(each) == 19 for each in before.values()), before
        told: dict[str, set[str]] = {bucket: set() for bucket in remains.WATCHED}

        def follow(bucket: str) -> Callable[[str, bytes | None], None]:
            return lambda key, value: None if value else told[bucket].add(key)

        watches = [await bus.watch(bucket, follow(bucket)) for bucket in told]
        await tenancy.remove(bus, ME, GONE)
        assert removals == 2
        async with asyncio.timeout(5):
            while told != {bucket: {subjects.key(GONE, each) for each in ("one", "two")} for bucket in told}:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        for watch in watches:
            await watch.close()
        assert await kept(bus, objects, GONE) == [subjects.usage(GONE)]
        assert await webhook_secrets.find(bus, GONE) is None
        assert {tenant: await kept(bus, objects, tenant) for tenant in STAYS} == before

    on_bus(nats_server, s3_settings, work)


def test_a_removal_that_failed_is_repeated_and_the_name_is_not_free_before(
    nats_server: Any, s3_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tenancy, "SETTLED_S", 0.0)

    def away(_: ObjectStore, key: str) -> None:
        raise ObjectsUnavailable("the store is away")

    async def work(bus: Bus, objects: ObjectStore) -> None:
        await tenancy.add(bus, ME, NewTenant(name=GONE))
        await tenancy.issue(bus, ME, GONE, NewKey())
        await fill(bus, objects, GONE)
        with monkeypatch.context() as patched:
            patched.setattr(ObjectStore, "remove", away)
            with pytest.raises(ObjectsUnavailable):
                await tenancy.remove(bus, ME, GONE)
        assert (await tenancy.find(bus, GONE)).keys == ()
        with pytest.raises(TenantExists):
            await tenancy.add(bus, ME, NewTenant(name=GONE))
        await tenancy.remove(bus, ME, GONE)
        assert await kept(bus, objects, GONE) == [subjects.usage(GONE)]
        with pytest.raises(TenantNotFound):
            await tenancy.remove(bus, ME, GONE)
        await tenancy.add(bus, ME, NewTenant(name=GONE))

    on_bus(nats_server, s3_settings, work)


def test_without_files_the_object_store_is_not_asked(nats_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenancy, "SETTLED_S", 0.0)

    async def work(bus: Bus, _: ObjectStore) -> None:
        await tenancy.add(bus, ME, NewTenant(name=GONE))
        await tenancy.remove(bus, ME, GONE)

    on_bus(nats_server, Settings(s3_endpoint="http://127.0.0.1:1"), work)
