"""/v1/files and /v1/batches over HTTP, on a real bus and a real object store; no batch runs here."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest
from msgspec.structs import replace

from ingress.batches import store
from ingress.batches.record import BatchRecord
from ingress.files.store import FileRecord, Files, object_key
from shared import tenancy
from shared.audit import Actor
from shared.bus import Bus
from shared.errors import ObjectsUnavailable
from shared.objects import ObjectStore
from shared.settings import Settings
from shared.tenancy import NewKey, NewTenant
from shared.wire import new_id

from ..application import refusal, run

ME = Actor("t", "k1")
LINE = b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "m", "prompt": "p"}}\n'


def settings(s3: Settings, nats: Any, **changed: Any) -> Settings:
    servers = {"nats_url": nats.url, "s3_bucket": f"files-{new_id()[:12]}", "redis_url": ""}
    return msgspec.structs.replace(s3, **(servers | changed))


async def upload(client: httpx.AsyncClient, lines: bytes = LINE, **more: Any) -> httpx.Response:
    given = {"data": {"purpose": "batch"}, "files": {"file": ("in.jsonl", lines)}} | more
    return await client.post("/v1/files", **given)


def test_files_are_uploaded_listed_read_and_deleted(nats_server: Any, s3_settings: Settings) -> None:
    own = settings(s3_settings, nats_server, files_max=4)
    store_ = ObjectStore(own)

    async def work(client: httpx.AsyncClient, bus: Bus) -> None:
        assert (await client.get("/v1/files")).json() == {
            "object": "list",
            "data": [],
            "first_id": None,
            "last_id": None,
            "has_more": False,
        }
        made = [(await upload(client, LINE * count)).json() for count in (1, 2, 3)]
        assert made[0] == {
            "id": made[0]["id"],
            "object": "file",
            "bytes": len(LINE),
            "created_at": made[0]["created_at"],
            "filename": "in.jsonl",
            "purpose": "batch",
            "status": "processed",
            "expires_at": None,
        }
        ids = [each["id"] for each in made]
        assert abs(time.time() - made[0]["created_at"]) < 60
        assert (await client.get(f"/v1/files/{ids[1]}")).json() == made[1]
        content = await client.get(f"/v1/files/{ids[1]}/content")
        assert (content.content, content.headers["content-length"]) == (LINE * 2, str(len(LINE) * 2))
        page = (await client.get("/v1/files", params={"limit": 2})).json()
        assert ([each["id"] for each in page["data"]], page["has_more"]) == ([ids[2], ids[1]], True)
        rest = (await client.get("/v1/files", params={"limit": 2, "after": page["last_id"]})).json()
        assert ([each["id"] for each in rest["data"]], rest["has_more"]) == ([ids[0]], False)
        oldest = (await client.get("/v1/files", params={"order": "asc", "purpose": "batch"})).json()
        assert [each["id"] for each in oldest["data"]] == ids
        assert (await client.get("/v1/files", params={"purpose": "batch_output"})).json()["data"] == []
        deleted = await client.delete(f"/v1/files/{ids[1]}")
        assert deleted.json() == {"id": ids[1], "object": "file", "deleted": True}
        for answer in (
            await client.get(f"/v1/files/{ids[1]}"),
            await client.get(f"/v1/files/{ids[1]}/content"),
            await client.delete(f"/v1/files/{ids[1]}"),
            await client.get("/v1/files/..%2F..%2Fetc"),
            await client.get("/v1/files/" + "x" * 300),
        ):
            assert refusal(answer)[:2] in ((404, "file_not_found"), (404, "not_found"))
        kept = [each.key for each in await asyncio.to_thread(store_.list, "")]
        assert kept == sorted(object_key("local", each) for each in (ids[0], ids[2]))
        for _ in range(2):
            assert (await upload(client)).status_code == 200
        assert refusal(await upload(client)) == (429, "too_many_files", None)

    run(own, work)


def test_a_refused_upload_leaves_nothing(nats_server: Any, s3_settings: Settings) -> None:
    own = settings(s3_settings, nats_server, file_bytes_max=100_000, request_read_s=0.5)
    store_ = ObjectStore(own)

    async def work(client: httpx.AsyncClient, bus: Bus) -> None:
        assert refusal(await upload(client, b"x" * 100_001)) == (413, "request_too_large", "file")
        assert refusal(await upload(client, b"x" * 300_000)) == (413, "request_too_large", None)
        assert refusal(await upload(client, data={"purpose": "fine-tune"})) == (400, "invalid_request", "purpose")
        assert refusal(await upload(client, data={})) == (400, "invalid_request", "purpose")
        assert refusal(await upload(client, b"")) == (400, "invalid_request", "file")
        assert refusal(await upload(client, files={}))[:2] == (400, "invalid_request")

        async def broken() -> AsyncIterator[bytes]:
            yield b'--x\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\nhalf'
            await asyncio.sleep(5)

        form = {"content-type": "multipart/form-data; boundary=x"}
        late = await client.post("/v1/files", content=broken(), headers=form)
        assert refusal(late)[:2] == (408, "request_timeout")
        assert (await client.get("/v1/files")).json()["data"] == []
        assert await asyncio.to_thread(store_.list, "") == []
        assert (await upload(client, b"x" * 100_000)).status_code == 200

    run(own, work)


def test_a_file_that_cannot_be_removed_now_is_there_as_before(
    nats_server: Any, s3_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = settings(s3_settings, nats_server)

    def away(_: ObjectStore, key: str) -> None:
        raise ObjectsUnavailable("the store is away")

    async def work(client: httpx.AsyncClient, bus: Bus) -> None:
        file_id = (await upload(client)).json()["id"]
        with monkeypatch.context() as patched:
            patched.setattr(ObjectStore, "remove", away)
            assert refusal(await client.delete(f"/v1/files/{file_id}"))[:2] == (503, "objects_unavailable")
        assert (await client.get(f"/v1/files/{file_id}/content")).status_code == 200
        assert (await client.delete(f"/v1/files/{file_id}")).status_code == 200
        assert await asyncio.to_thread(ObjectStore(own).list, "") == []

    run(own, work)


def test_batches_are_made_listed_and_cancelled(nats_server: Any, s3_settings: Settings) -> None:
    async def work(client: httpx.AsyncClient, bus: Bus) -> None:
        file = (await upload(client)).json()["id"]
        asked = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
        made = (await client.post("/v1/batches", json=asked | {"metadata": {"a": "b"}})).json()
        none = ("errors", "output_file_id", "error_file_id", "in_progress_at", "finalizing_at", "completed_at")
        none += ("failed_at", "expired_at", "cancelling_at", "cancelled_at")
        assert made == dict.fromkeys(none) | {
            "id": made["id"],
            "object": "batch",
            "endpoint": "/v1/completions",
            "input_file_id": file,
            "completion_window": "24h",
            "status": "validating",
            "created_at": made["created_at"],
            "expires_at": made["created_at"] + 86_400,
            "request_counts": {"total": 0, "completed": 0, "failed": 0},
            "metadata": {"a": "b"},
        }
        second = (await client.post("/v1/batches", json=asked | {"completion_window": "90s"})).json()
        assert second["expires_at"] == second["created_at"] + 90
        page = (await client.get("/v1/batches", params={"limit": 1})).json()
        assert ([each["id"] for each in page["data"]], page["has_more"]) == ([second["id"]], True)
        assert refusal(await client.delete(f"/v1/files/{file}")) == (409, "file_in_use", None)
        for _ in range(2):
            cancelled = await client.post(f"/v1/batches/{made['id']}/cancel")
            assert (cancelled.status_code, cancelled.json()["status"]) == (200, "cancelling")
        refused = [
            (asked | {"input_file_id": "file-none"}, (404, "file_not_found", None)),
            (asked | {"endpoint": "/v1/models"}, (400, "invalid_request", "endpoint")),
            (asked | {"completion_window": "25h"}, (400, "invalid_request", "completion_window")),
            (asked | {"completion_window": "soon"}, (400, "invalid_request", "completion_window")),
            (asked | {"metadata": {"a": 1}}, (400, "invalid_request", "metadata")),
            (asked | {"output_expires_after": {}}, (400, "unsupported_parameter", "output_expires_after")),
            (asked, (429, "too_many_batches", None)),
        ]
        for body, wanted in refused:
            assert refusal(await client.post("/v1/batches", json=body)) == wanted
        assert refusal(await client.get("/v1/batches/batch_none")) == (404, "batch_not_found", None)
        assert refusal(await client.get("/v1/batches?limit=0")) == (400, "invalid_request", "limit")

    run(settings(s3_settings, nats_server, batches_open_max=2), work)


def test_what_is_anothers_is_not_there(nats_server: Any, s3_settings: Settings) -> None:
    async def work(client: httpx.AsyncClient, bus: Bus) -> None:
        headers = {}
        for name in ("acme", ".."):
            await tenancy.add(bus, ME, NewTenant(name=name))
            issued = await tenancy.issue(bus, ME, name, NewKey(role="infer", models=("m",)))
            headers[name] = {"authorization": f"Bearer {issued.secret}"}
        mine, others = headers["acme"], headers[".."]
        file = (await upload(client, headers=mine)).json()["id"]
        asked = {"input_file_id": file, "endpoint": "/v1/completions"}
        batch = (await client.post("/v1/batches", json=asked, headers=mine)).json()["id"]
        record: BatchRecord = (await store.find(bus, "acme", batch))[0]
        assert record.models == ("m",)
        for method, path in (
            ("GET", f"/v1/files/{file}"),
            ("GET", f"/v1/files/{file}/content"),
            ("DELETE", f"/v1/files/{file}"),
            ("GET", f"/v1/batches/{batch}"),
            ("POST", f"/v1/batches/{batch}/cancel"),
        ):
            assert refusal(await client.request(method, path, headers=others))[0] == 404
            assert (await client.request(method, path)).status_code == 401
        assert refusal(await client.post("/v1/batches", json=asked, headers=others))[0] == 404
        assert (await client.get("/v1/files", headers=others)).json()["data"] == []
        assert (await client.get("/v1/batches", headers=others)).json()["data"] == []
        assert (await upload(client)).status_code == 401
        theirs = (await upload(client, headers=others)).json()["id"]
        assert object_key("..", theirs) == f"files/=2E=2E/{theirs}"
        assert (await client.get(f"/v1/files/{theirs}/content", headers=others)).content == LINE

    run(settings(s3_settings, nats_server, require_keys=True), work)


def test_a_key_that_is_held_to_models_has_files_and_batches_of_these_alone(
    nats_server: Any, s3_settings: Settings
) -> None:
    own = settings(s3_settings, nats_server, require_keys=True)

    async def work(client: httpx.AsyncClient, bus: Bus) -> None:
        await tenancy.add(bus, ME, NewTenant(name="acme"))
        keys = {}
        for name, models in (("wide", ()), ("m", ("m",)), ("other", ("other",)), ("both", ("m", "other"))):
            issued = await tenancy.issue(bus, ME, "acme", NewKey(models=models))
            keys[name] = {"authorization": f"Bearer {issued.secret}"}
        files = {name: (await upload(client, headers=headers)).json()["id"] for name, headers in keys.items()}
        made = {}
        for name in keys:
            asked = {"input_file_id": files[name], "endpoint": "/v1/completions"}
            made[name] = (await client.post("/v1/batches", json=asked, headers=keys[name])).json()["id"]
        output = FileRecord(
            id="file-made",
            tenant="acme",
            filename="o",
            purpose="batch_output",
            bytes=1,
            created_at=1,
            models=("m",),
        )
        await Files(bus, own).note(output)

        async def seen(name: str) -> tuple[set[str], set[str]]:
            """The keys whose files and whose batches are listed."""
            told = [
                {each["id"] for each in (await client.get(path, headers=keys[name])).json()["data"]}
                for path in ("/v1/files", "/v1/batches")
            ]
            return {each for each in files if files[each] in told[0]}, {each for each in made if made[each] in told[1]}

        sees = {"wide": set(keys), "m": {"m"}, "other": {"other"}, "both": {"m", "other", "both"}}
        for name, headers in keys.items():
            assert await seen(name) == (sees[name], sees[name])
            for whose in keys:
                for path in (f"/v1/files/{files[whose]}", f"/v1/batches/{made[whose]}"):
                    answer = await client.get(path, headers=headers)
                    assert answer.status_code == (200 if whose in sees[name] else 403), (name, whose, path)
        listed = {name: (await client.get("/v1/files?limit=100", headers=keys[name])).text for name in keys}
        assert [name for name in keys if output.id in listed[name]] == ["wide", "m", "both"]
        for method, path in (
            ("GET", f"/v1/files/{files['m']}/content"),
            ("DELETE", f"/v1/files/{files['m']}"),
            ("GET", f"/v1/files/{output.id}/content"),
            ("DELETE", f"/v1/files/{output.id}"),
            ("POST", f"/v1/batches/{made['m']}/cancel"),
        ):
            refused = await client.request(method, path, headers=keys["other"])
            assert refusal(refused) == (403, "model_not_allowed", "model")
        asked = {"input_file_id": files["wide"], "endpoint": "/v1/completions"}
        refused = await client.post("/v1/batches", json=asked, headers=keys["other"])
        assert refusal(refused) == (403, "model_not_allowed", "model")
        # once its lines are known, it is of the models that these name
        await store.change(bus, "acme", made["wide"], lambda record: replace(record, models=("m",)))
        assert (await seen("m"))[1] == {"m", "wide"}
        cancelled = await client.post(f"/v1/batches/{made['wide']}/cancel", headers=keys["m"])
        assert (cancelled.status_code, cancelled.json()["status"]) == (200, "cancelling")
        assert (await client.delete(f"/v1/files/{files['m']}", headers=keys["both"])).status_code == 409

    run(own, work)
