"""What anybody might write into the buckets: nothing of it stops a loop, and what was good before stays."""

import json
import random
from typing import Any

import pytest
from msgspec.structs import replace

from shared import notices, records, registry, rollouts, subjects, tally, tenants, webhook_secrets
from shared.records import Lease, Route, ScalingDecision, Version, VersionLimits, Weight
from shared.rollouts import NewDeployment
from shared.stored import Stored
from shared.tenants import ApiKey, Limits, Tenant

from .conftest import MODEL, Target
from .corpus import HUGE, SEED, WHOLE, count, misfits, mutations, raw_json

WATCHED = VersionLimits(min_replicas=1)
VERSION = Version(model="h", version="v", state="available", source="sim:zero", limits=WATCHED, created=5)
ROUTE = Route("h", {"stable": "v"}, [Weight("v", 10_000)], {"w": "why"}, "d-1", 3, True)
LEASE = Lease(worker="h1", model="h", version="v", state="active", pid=1, host="nowhere", started=1.0, slots=4)
DEPLOYMENT = rollouts.plan_of(NewDeployment(model="h", version="w"), "d-1", "v", 5.0)
PROGRESS = rollouts.Progress(
    deployment="d-1",
    at=5.0,
    waits_for="rain",
    canary=rollouts.VersionProgress(active=1, needed=1, ended=0),
    stable=rollouts.VersionProgress(active=1, needed=1, ended=0),
)
TALLY = tally.VersionTally(model="h", version="v", deployment="d-1", tally=tally.Tally(ended=3, ttft={5: 1}))
INGRESS = tally.IngressLease(ingress="i1", pid=1, host="nowhere", started=1.0, tallies=[TALLY])
TENANT = Tenant(name="h", limits=Limits(concurrency=3), keys=(ApiKey(id="k1", sha256="0" * 64, models=("m",)),))
LATER = 4e9  # unix seconds: it is never too late to tell it
NOTICE = notices.Notice(
    id="evt_1",
    tenant="h",
    type="batch.completed",
    subject="batch_1",
    at=LATER,
    url="https://127.0.0.1/hook",  # nothing is sent there
    body="{}",
    secret="whsec_" + "A" * 32,
    attempts=1,
    due=1.0,
    error="it was down",
)
SECRET = webhook_secrets.TenantSecret(
    tenant="h", secret="whsec_" + "B" * 32, made=1.0, previous="whsec_" + "C" * 32, previous_until=LATER
)
DECISION = ScalingDecision(at=1.0, model="h", version="v", before=0, desired=1, reasons=["lag"])

STORED: list[tuple[str, str, Any, Stored[Any]]] = [
    (subjects.MODELS_BUCKET, subjects.key("h", "v"), VERSION, records.VERSIONS),
    (subjects.ROUTES_BUCKET, "h", ROUTE, records.ROUTES),
    (subjects.WORKERS_BUCKET, "h1", LEASE, records.LEASES),
    (subjects.DEPLOYMENTS_BUCKET, "d-1", DEPLOYMENT, rollouts.DEPLOYMENTS),
    (subjects.ROLLOUTS_BUCKET, "d-1", PROGRESS, rollouts.PROGRESS),
    (subjects.INGRESSES_BUCKET, "i1", INGRESS, tally.INGRESS_LEASES),
    (subjects.TENANTS_BUCKET, "h", TENANT, tenants.TENANTS),
    (subjects.NOTICES_BUCKET, subjects.key("h", "evt_1"), NOTICE, notices.NOTICES),
    (subjects.WEBHOOK_SECRETS_BUCKET, "h", SECRET, webhook_secrets.SECRETS),
    (subjects.DECISIONS_BUCKET, subjects.key("h", "v"), DECISION, records.DECISIONS),
]
ODD_KEYS = ["=FF", "=FF.v", "a.b.c.d", "=61", "x" * 200, "d-", "d-x", "d-" + "9" * 100, "h.=ZZ", "-", "_"]


def values(record: Any, cases: int) -> list[bytes]:
    """What might be there instead of a record."""
    good = records.encode(record)
    tree = json.loads(good)
    found = [*WHOLE, *mutations([good], cases, str(type(record)))]
    found += [records.encode(each) for each in misfits([tree], cases, str(type(record)))]
    return found


@pytest.mark.parametrize(("bucket", "key", "record", "kind"), STORED, ids=[each[0] for each in STORED])
def test_one_decoder_takes_or_refuses_whatever_is_stored(
    bucket: str, key: str, record: Any, kind: Stored[Any], caplog: pytest.LogCaptureFixture
) -> None:
    assert kind.change(key, records.encode(record)) == ((*subjects.names_of(key),), record)
    assert kind.change(key, None) == ((*subjects.names_of(key),), None)
    tree = json.loads(records.encode(record))
    refused = 0
    for raw in [*values(record, 400), *raw_json([tree])]:
        change = kind.change(key, raw)
        assert change is None or kind.at(key, records.encode(change.record)) == change.record
        refused += change is None
    assert refused > 200
    for odd in ODD_KEYS:
        assert kind.change(odd, records.encode(record)) is None or odd in ("-", "_")
    caplog.clear()
    for _ in range(3):  # a watch that is made anew tells all again
        assert kind.change(key, b"{") is None
    assert len(caplog.records) == 1


def test_no_record_stops_a_loop(target: Target) -> None:
    async def scenario() -> None:
        rng = random.Random(SEED)
        for bucket, key, record, _ in STORED:
            for raw in [*WHOLE[:12], *rng.sample(values(record, 60), count(60))]:
                await target.bus.kv_put(bucket, key, raw)
            for odd in ODD_KEYS:
                await target.bus.kv_put(bucket, odd, rng.choice([b"", b"{", records.encode(record)]))
        await target.bus.kv_put(subjects.LEADER_BUCKET, "other", b"\xff")
        await target.answers()
        await target.registered("after-records")
        for bucket, *_ in STORED:
            for key in await target.bus.kv_keys(bucket):
                if key.startswith(("h", "d-", "i1")) or key in ODD_KEYS:
                    await target.bus.kv_delete(bucket, key)
        await target.registered("after-deletions")
        await target.answers()
        await target.settled()

    target.run(scenario())
    assert target.tracebacks() == ""


def test_a_good_record_that_is_overwritten_stays_in_force(target: Target) -> None:
    """Of the model that is served, of a deployment that goes on, and of the lead."""

    async def scenario() -> None:
        good = [
            (subjects.MODELS_BUCKET, subjects.key(MODEL, "v")),
            (subjects.ROUTES_BUCKET, MODEL),
        ]
        before = {place: await target.bus.kv_get(*place) for place in good}
        for version in ("one", "two"):
            record = Version(model="moving", version=version, state="registered", source="sim:zero")
            await registry.register(target.bus, record)
            await registry.wait_available(target.bus, "moving", version, 20)
        path, asked = target.first.url + "/v1/deployments", {"model": "moving", "version": "two"}
        made = await target.http.post(path, json=asked)
        assert made.status_code == 202, made.text
        id_ = made.json()["deployment_id"]
        for raw in (b"\xff", b"{", b"[" * 5000):
            for place in [*good, (subjects.ROUTES_BUCKET, "moving"), (subjects.DEPLOYMENTS_BUCKET, id_)]:
                await target.bus.kv_put(*place, raw)
            await target.answers()
            await target.registered(f"beside-{len(raw)}")
        listed = await target.http.get(path)
        assert (listed.status_code, listed.json()) == (200, [])
        shown = await target.http.get(f"{path}/{id_}")
        assert (shown.status_code, shown.json()["error"]["code"]) == (500, "internal_error")
        for place, found in before.items():
            assert found is not None
            await target.bus.kv_put(*place, found[0])
        await target.bus.kv_delete(subjects.ROUTES_BUCKET, "moving")
        await target.bus.kv_delete(subjects.DEPLOYMENTS_BUCKET, id_)
        await target.answers()
        await target.settled()

    target.run(scenario())
    assert target.tracebacks() == ""


EXTREMES: list[dict[str, Any]] = [
    *({"attempts": each} for each in (2**64 - 1, 2**63, -(2**63))),
    *({"at": each} for each in (1e308, -1e308)),
    *({"due": each} for each in (1e308, -1e308)),
    *(
        {"url": each}
        for each in ("", "x", "http://[", "ftp://a/", "https://\x00/", "http://a:99999/", "https://" + "a" * 9000)
    ),
    {"id": "evt_\r\nx: y"},
    {"id": "evt_é\u202e"},
    {"body": "x" * HUGE},
    *({"secret": each} for each in ("", "whsec_", "é", "whsec_" + "A" * 9000)),
    {"error": "x" * 9000},
]


def test_what_a_notice_says_does_not_keep_others_from_being_tried(target: Target) -> None:
    async def scenario() -> None:
        made = [replace(NOTICE, **({"id": f"evt_{number}"} | each)) for number, each in enumerate(EXTREMES)]
        unreadable = replace(NOTICE, tenant="no-secret", id="evt_unreadable", secret=None)
        good = replace(NOTICE, id="evt_good")
        await target.bus.kv_put(subjects.WEBHOOK_SECRETS_BUCKET, "no-secret", b"{")
        keys = [subjects.key(each.tenant, each.id) for each in [*made, unreadable, good]]
        for key, each in zip(keys, [*made, unreadable, good], strict=True):
            await target.bus.kv_put(subjects.NOTICES_BUCKET, key, records.encode(each))

        async def tried() -> bool:
            found = [await notices.find(target.bus, each.tenant, each.id) for each in (unreadable, good)]
            return all(each is not None and each.attempts > NOTICE.attempts for each in found)

        await target.until(tried, target.controller)
        for key in keys:
            await target.bus.kv_delete(subjects.NOTICES_BUCKET, key)
        await target.bus.kv_delete(subjects.WEBHOOK_SECRETS_BUCKET, "no-secret")
        await target.registered("after-notices")

    target.run(scenario())
    assert target.tracebacks() == ""
