"""`GET /v1/usage`: one's own, and with the role admin everybody's."""

import time
from typing import Any

import httpx

from shared import subjects, tenancy, usage
from shared.audit import Actor
from shared.bus import Bus
from shared.settings import Settings
from shared.tenancy import NewKey, NewTenant
from shared.usage import UsageEvent
from shared.wire import HEADER_MSG_ID, new_id

from .application import refusal, run

ME = Actor("t", "k1")


def test_a_tenant_sees_its_own_and_an_admin_all(nats_server: Any) -> None:
    async def work(client: httpx.AsyncClient, bus: Bus) -> None:
        headers = {}
        for name, role in (("acme", "infer"), ("boss", "admin")):
            await tenancy.add(bus, ME, NewTenant(name=name))
            issued = await tenancy.issue(bus, ME, name, NewKey(role=role))  # type: ignore[arg-type]
            headers[name] = {"authorization": f"Bearer {issued.secret}"}
            event = UsageEvent(name, time.time(), "m", "v", "completed", 3, 1, 2, 0.0, 0.0)
            await bus.publish_durable(subjects.usage(name), usage.encode([event]), {HEADER_MSG_ID: new_id()})

        async def groups(who: str, **asked: Any) -> list[str]:
            answer = await client.get("/v1/usage", params={"by": "tenant"} | asked, headers=headers[who])
            assert answer.status_code == 200, answer.text
            return [each["group"] for each in answer.json()]

        assert await groups("acme") == await groups("acme", tenant="acme") == ["acme"]
        assert await groups("boss") == ["acme", "boss"]
        assert await groups("boss", tenant="acme") == ["acme"]
        assert await groups("boss", since=time.time() + 60) == []
        refused = await client.get("/v1/usage?tenant=boss", headers=headers["acme"])
        assert refusal(refused) == (403, "role_missing", None)
        for query, param in (("since=now", "since"), ("since=-1", "since"), ("by=hour", "by")):
            refused = await client.get(f"/v1/usage?{query}", headers=headers["acme"])
            assert refusal(refused) == (400, "invalid_request", param)
        assert (await client.get("/v1/usage")).status_code == 401

    run(Settings(nats_url=nats_server.url, require_keys=True), work)
