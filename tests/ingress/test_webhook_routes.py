"""The secret of a tenant's webhooks over HTTP, and webhooks of deployments: no secret is shown twice, or in the audit log."""

import base64
import secrets
import time
from typing import Any

import httpx
import msgspec
import pytest

from shared import audit, deployments, subjects, webhooks
from shared.bus import Bus
from shared.settings import Settings

from .application import refusal, run
from .test_deployment_routes import push

SECRET = "whsec_" + base64.b64encode(secrets.token_bytes(32)).decode()
URL = "https://hooks.example.com/a-path-that-is-nobodys"


@pytest.fixture
def settings(nats_url: str) -> Settings:
    return Settings(nats_url=nats_url)


def test_a_secret_is_told_once_and_signs_with_the_one_before_for_a_while(settings: Settings) -> None:
    async def work(client: httpx.AsyncClient, bus: Bus) -> None:
        begun = time.time()
        await bus.kv_delete(subjects.WEBHOOK_SECRETS_BUCKET, subjects.key(subjects.LOCAL_TENANT))
        assert refusal(await client.get("/v1/webhooks/secret")) == (404, "not_found", None)
        made = await client.post("/v1/webhooks/secret", json={})
        assert made.status_code == 201, made.text
        assert made.headers["cache-control"] == "no-store"
        assert made.json()["previous_until"] is None
        assert len(webhooks.secret_bytes(made.json()["secret"])) == 32
        other = (await client.post("/v1/webhooks/secret", json={"grace_seconds": 60})).json()
        assert other["secret"] != made.json()["secret"]
        assert 50 < other["previous_until"] - time.time() <= 60
        shown = await client.get("/v1/webhooks/secret")
        assert shown.json().keys() == {"made", "previous_until"}
        assert (await client.post("/v1/webhooks/secret", json={"grace_seconds": 0})).json()["previous_until"] is None
        for bad in ({"grace_seconds": -1}, {"grace_seconds": 1e9}, {"secret": SECRET}):
            assert refusal(await client.post("/v1/webhooks/secret", json=bad))[:2] == (400, "invalid_request")
        entries = [each for each in await audit.read(bus, begun) if each.action == "webhook_secret.rotate"]
        assert [each.target for each in entries] == [subjects.LOCAL_TENANT] * 3
        kept = msgspec.json.encode(entries).decode()
        assert not any(secret in kept for secret in (made.json()["secret"], other["secret"]))

    run(settings, work)


def test_a_deployment_keeps_its_webhook_to_itself(settings: Settings) -> None:
    async def work(client: httpx.AsyncClient, bus: Bus) -> None:
        model = f"r-{secrets.token_hex(4)}"
        await push(bus, model, "v1")
        await push(bus, model, "v2")
        wanted = {"url": URL, "secret": SECRET, "events": ["deployment.promoted"]}

        def asked(**changed: Any) -> dict[str, Any]:
            return {"model": model, "version": "v2", "webhook": wanted | changed}

        for changed, param in (
            ({"url": "http://169.254.169.254/"}, "webhook.url"),
            ({"secret": "whsec_short"}, "webhook.secret"),
            ({"events": ["deployment.done"]}, "webhook.events[0]"),
        ):
            refused = await client.post("/v1/deployments", json=asked(**changed))
            assert refusal(refused) == (400, "invalid_request", param)
            assert "whsec_short" not in refused.text
        made = await client.post("/v1/deployments", json=asked())
        assert made.status_code == 202
        id_ = made.json()["deployment_id"]
        shown = await client.get(f"/v1/deployments/{id_}")
        assert shown.json()["webhook"] == {"url": URL, "events": ["deployment.promoted"], "delivery": None}
        found = await deployments.find(bus, id_)
        assert found is not None
        assert found[0].tenant == subjects.LOCAL_TENANT
        assert found[0].webhook is not None
        assert found[0].webhook.secret == SECRET
        kept = msgspec.json.encode([each for each in await audit.read(bus, 0.0) if each.target == id_]).decode()
        assert '"webhook":"hooks.example.com"' in kept
        assert SECRET not in made.text + shown.text + kept + repr(found[0])
        assert "nobodys" not in kept

    run(settings, work)
