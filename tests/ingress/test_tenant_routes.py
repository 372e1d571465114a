"""The admin API of tenants, on a real nats-server, without keys and with them."""

import secrets
import time
from typing import Any

import httpx
import pytest

from shared import audit, tenancy
from shared.audit import Actor
from shared.bus import Bus
from shared.settings import Settings
from shared.tenancy import NewKey, NewTenant

from .application import refusal, run

NO_LIMITS = {"requests_per_minute": None, "tokens_per_minute": None, "concurrency": None, "queue_max": None}


@pytest.fixture
def name() -> str:
    return f"team-{secrets.token_hex(4)}"


def test_the_life_of_a_tenant(nats_url: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenancy, "SETTLED_S", 0.0)

    async def work(client: httpx.AsyncClient, bus: Bus) -> None:
        made = await client.post("/v1/tenants", json={"name": name, "weight": 2, "limits": {"concurrency": 3}})
        assert made.status_code == 201
        entry = {"name": name, "weight": 2.0, "priority": 0, "limits": NO_LIMITS | {"concurrency": 3}, "keys": []}
        assert made.json() | entry == made.json()
        again = await client.post("/v1/tenants", json={"name": name})
        assert refusal(again) == (409, "tenant_exists", "name")
        assert again.headers["x-should-retry"] == "false"
        changed = await client.patch(f"/v1/tenants/{name}", json={"priority": 5, "limits": {"concurrency": None}})
        assert (changed.json()["weight"], changed.json()["priority"], changed.json()["limits"]) == (2.0, 5, NO_LIMITS)
        assert (await client.get(f"/v1/tenants/{name}")).json() == changed.json()
        assert changed.json() in (await client.get("/v1/tenants")).json()

        issued = await client.post(f"/v1/tenants/{name}/keys", json={"role": "deploy", "models": ["m"], "note": "ci"})
        assert (issued.status_code, issued.headers["cache-control"]) == (201, "no-store")
        key = issued.json()
        assert key | {"role": "deploy", "models": ["m"], "note": "ci", "state": "active", "tenant": name} == key
        assert key["key"].startswith("hr_")
        rotated = await client.post(f"/v1/tenants/{name}/keys/{key['id']}/rotate", json={"grace_seconds": 0})
        assert rotated.status_code == 201
        revoked = await client.delete(f"/v1/tenants/{name}/keys/{rotated.json()['id']}")
        assert revoked.json()["state"] == "revoked"
        shown = (await client.get(f"/v1/tenants/{name}")).json()
        assert [each["id"] for each in shown["keys"]] == [key["id"], rotated.json()["id"]]
        assert not {"key", "sha256"} & {field for each in shown["keys"] for field in each}
        gone = await client.delete(f"/v1/tenants/{name}")
        assert (gone.status_code, gone.json()["name"]) == (200, name)
        assert refusal(await client.get(f"/v1/tenants/{name}")) == (404, "tenant_not_found", "tenant")
        told = [each for each in await audit.read(bus, time.time() - 60) if each.target == name]
        assert [each.action for each in told if each.result == "ok"] == [
            "tenant.add",
            "tenant.change",
            "key.issue",
            "key.rotate",
            "key.revoke",
            "tenant.remove",
        ]
        assert {(each.tenant, each.by) for each in told} == {("local", "local")}

    run(Settings(nats_url=nats_url), work)


@pytest.mark.parametrize(
    ("method", "path", "body", "expected"),
    [
        ("POST", "", {"name": "ingress"}, (400, "invalid_request", "name")),
        ("POST", "", {"name": "local"}, (400, "invalid_request", "name")),
        ("POST", "", {"name": "a", "weight": 0}, (400, "invalid_request", "weight")),
        ("POST", "", {"name": "a", "colour": "red"}, (400, "invalid_request", None)),
        ("POST", "", {"name": "a", "keys": []}, (400, "invalid_request", None)),
        ("POST", "", {"name": "a", "limits": {"queue_max": -1}}, (400, "invalid_request", "limits.queue_max")),
        ("PATCH", "/{name}", {"limits": {"queue_max": 0}}, (400, "invalid_request", "limits.queue_max")),
        ("PATCH", "/{name}", {"limits": {"colour": 0}}, (400, "invalid_request", "limits")),
        ("PATCH", "/nobody", {}, (404, "tenant_not_found", "tenant")),
        ("POST", "/nobody/keys", {}, (404, "tenant_not_found", "tenant")),
        ("POST", "/{name}/keys", {"role": "root"}, (400, "invalid_request", "role")),
        ("POST", "/{name}/keys", {"expires_seconds": 0}, (400, "invalid_request", "expires_seconds")),
        ("POST", "/{name}/keys", {"role": "admin", "models": ["m"]}, (400, "invalid_request", "models")),
        ("POST", "/{name}/keys/k0/rotate", {}, (404, "api_key_not_found", "id")),
        ("DELETE", "/{name}/keys/k0", None, (404, "api_key_not_found", "id")),
    ],
)
def test_what_is_refused(nats_url: str, name: str, method: str, path: str, body: Any, expected: Any) -> None:
    async def work(client: httpx.AsyncClient, bus: Bus) -> None:
        await client.post("/v1/tenants", json={"name": name})
        answer = await client.request(method, f"/v1/tenants{path.format(name=name)}", json=body)
        assert refusal(answer) == expected

    run(Settings(nats_url=nats_url), work)


def test_with_keys_an_admin_does_it_and_the_log_says_which(nats_url: str, name: str) -> None:
    async def work(client: httpx.AsyncClient, bus: Bus) -> None:
        by_hand = Actor("local", "cli:test@here")
        await tenancy.add(bus, by_hand, NewTenant(name=name))
        admin = await tenancy.issue(bus, by_hand, name, NewKey(role="admin"))
        headers = {"authorization": f"Bearer {admin.secret}"}

        async def until(status: int, key: str, path: str = "/v1/models") -> httpx.Response:
            while (answer := await client.get(path, headers={"x-api-key": key})).status_code != status:
                assert time.time() < deadline, answer.text
            return answer

        deadline = time.time() + 10
        await until(200, admin.secret)
        issued = (await client.post(f"/v1/tenants/{name}/keys", json={}, headers=headers)).json()
        await until(200, issued["key"])
        assert refusal(await until(403, issued["key"], "/v1/tenants")) == (403, "role_missing", None)
        await client.delete(f"/v1/tenants/{name}/keys/{issued['id']}", headers=headers)
        assert refusal(await until(401, issued["key"])) == (401, "invalid_api_key", None)
        body = {"version": "v1", "source": "sim:zero"}
        assert (await client.post(f"/v1/models/{name}/versions", json=body, headers=headers)).status_code == 201
        alias = f"/v1/models/{name}/aliases/a"
        assert (await client.put(alias, json={"version": "v2"}, headers=headers)).status_code == 404
        assert (await client.put(alias, json={"version": "v1"}, headers=headers)).status_code == 200
        changes = {"limits": {"warm": 1}}
        changed = await client.patch(f"/v1/models/{name}/versions/v1", json=changes, headers=headers)
        assert changed.status_code == 200
        told = [each for each in await audit.read(bus, time.time() - 60) if each.by == admin.key.id]
        assert [(each.tenant, each.action, each.target, each.result) for each in told] == [
            (name, "key.issue", name, "ok"),
            (name, "key.revoke", name, "ok"),
            (name, "version.register", f"{name}@v1", "ok"),
            (name, "alias.set", f"{name}@a", "version_not_found"),
            (name, "alias.set", f"{name}@a", "ok"),
            (name, "version.change", f"{name}@v1", "ok"),
        ]
        assert told[-1].detail == {"limits": {"warm": 1}, "engine": {}}

    run(Settings(nats_url=nats_url, require_keys=True), work)
