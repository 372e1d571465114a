"""What a tenant had is not its successor's, by the routes of an ingress, on a real bus and a real object store."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest

from ingress.responses_store import KeptResponse, ResponsesStore
from shared import remains, subjects, tenancy, usage
from shared.audit import Actor
from shared.bus import Bus
from shared.objects import ObjectStore
from shared.settings import Settings
from shared.tenancy import NewKey, NewTenant
from shared.usage import UsageEvent
from shared.wire import HEADER_MSG_ID, new_id

from .application import refusal, run
from .test_job_routes import completed

ME = Actor("t", "k1")
LINE = b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "m", "prompt": "p"}}\n'
LISTS = ("/v1/files", "/v1/batches", "/v1/jobs", "/v1/usage")


@pytest.fixture
def own(nats_server: Any, s3_settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setattr(tenancy, "SETTLED_S", 0.0)
    servers: dict[str, Any] = {"nats_url": nats_server.url, "s3_bucket": f"gone-{new_id()[:12]}", "redis_url": ""}
    return msgspec.structs.replace(s3_settings, require_keys=True, **servers)


async def added(client: httpx.AsyncClient, bus: Bus) -> dict[str, str]:
    """The headers of a tenant that is new and known here."""
    await tenancy.add(bus, ME, NewTenant(name="acme"))
    headers = {"authorization": f"Bearer {(await tenancy.issue(bus, ME, 'acme', NewKey())).secret}"}
    await until(client, headers, 200)
    return headers


async def until(client: httpx.AsyncClient, headers: dict[str, str], status: int) -> None:
    deadline = time.monotonic() + 10
    while (await client.get("/v1/models", headers=headers)).status_code != status:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def test_who_is_called_like_a_removed_tenant_finds_nothing_of_it(own: Settings) -> None:
    async def work(client: httpx.AsyncClient, bus: Bus) -> None:
        headers = await added(client, bus)
        given: Any = {"data": {"purpose": "batch"}, "files": {"file": ("in.jsonl", LINE)}}
        file = (await client.post("/v1/files", headers=headers, **given)).json()["id"]
        asked = {"input_file_id": file, "endpoint": "/v1/completions"}
        batch = (await client.post("/v1/batches", headers=headers, json=asked)).json()["id"]
        job = await completed(bus, "acme")
        rid = "a" * 32
        response = {"id": f"resp_{rid}", "model": "m", "output": []}
        kept = KeptResponse(msgspec.Raw(msgspec.json.encode(response)), [])
        assert await ResponsesStore(bus, bus.settings).keep("acme", rid, kept)
        event = UsageEvent("u", time.time() - 5, "m", "v", "completed", 3, 1, 2, 0.0, 0.0)
        await bus.publish_durable(subjects.usage("acme"), usage.encode([event]), {HEADER_MSG_ID: new_id()})
        paths = (f"/v1/files/{file}", f"/v1/files/{file}/content", f"/v1/batches/{batch}", f"/v1/jobs/{job.id}")
        paths += (f"/v1/responses/resp_{rid}",)
        for path in paths:
            assert (await client.get(path, headers=headers)).status_code == 200

        await tenancy.remove(bus, ME, "acme")
        await until(client, headers, 401)
        headers = await added(client, bus)
        for path in paths:
            assert (await client.get(path, headers=headers)).status_code == 404, path
        for path in LISTS:
            found = (await client.get(path, headers=headers)).json()
            assert (found if path == "/v1/usage" else found["data"]) == [], path
        assert [each.group for each in await usage.query(bus, 0, "acme", "tenant")] == ["acme"], "it is accounted for"

    run(own, work)


def test_an_upload_that_ends_after_its_tenant_is_nobodys(own: Settings) -> None:
    async def work(client: httpx.AsyncClient, bus: Bus) -> None:
        headers = await added(client, bus)
        begun, removed = asyncio.Event(), asyncio.Event()

        async def form() -> AsyncIterator[bytes]:
            yield b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
            yield b'--x\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n' + LINE
            begun.set()
            await removed.wait()
            yield b"\r\n--x--\r\n"

        sent = headers | {"content-type": "multipart/form-data; boundary=x"}
        uploading = asyncio.create_task(client.post("/v1/files", headers=sent, content=form()))
        await begun.wait()
        await tenancy.remove(bus, ME, "acme")
        await until(client, headers, 401)
        headers = await added(client, bus)
        removed.set()
        assert refusal(await uploading) == (401, "invalid_api_key", None)
        assert (await client.get("/v1/files", headers=headers)).json()["data"] == []
        assert await asyncio.to_thread(ObjectStore(own).list, remains.PLACES[1]) == []

    run(own, work)
