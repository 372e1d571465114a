"""What is kept of responses: whose they are, and what becomes of an answer that cannot be kept."""

import asyncio
from typing import Any

import httpx
import msgspec
import pytest

from ingress.response_items import CallItem, Item, MessageItem, OutputText
from ingress.responses_store import KeptResponse, ResponsesStore, rid_of, with_ids
from shared import subjects, tenancy
from shared.audit import Actor
from shared.bus import Bus
from shared.errors import QueueFull, Unavailable
from shared.settings import Settings
from shared.tenancy import NewKey, NewTenant

from .application import refusal, run

ME = Actor("t", "k1")
ITEMS: list[Item] = [
    MessageItem("", "user", [OutputText("Hi")]),
    CallItem("", "c", "f", "{}"),
    CallItem("mine", "d", "f", "{}"),
]


class Bucket:
    """One that takes a write once `open` is set; with an error it refuses it."""

    def __init__(self, error: Exception | None = None) -> None:
        self.open, self.error = asyncio.Event(), error
        self.written: list[str] = []

    async def kv_put(self, bucket: str, key: str, value: bytes) -> int:
        if self.error is not None:
            raise self.error
        await self.open.wait()
        self.written.append(key)
        return len(self.written)


def kept(text: str = "Hi") -> KeptResponse:
    return KeptResponse(msgspec.Raw(msgspec.json.encode({"text": text})), with_ids(ITEMS, "a" * 32))


def test_an_answer_waits_for_so_long_until_it_is_kept() -> None:
    async def work() -> None:
        bucket = Bucket()
        store = ResponsesStore(bucket, Settings(response_keep_wait_s=0.05))  # type: ignore[arg-type]
        assert not await store.keep("t", "a", kept())
        closing = asyncio.create_task(store.close())
        await asyncio.sleep(0)
        assert not closing.done()
        bucket.open.set()
        await closing
        assert bucket.written == [subjects.key("t", "a")]
        assert await store.keep("t", "b", kept())

    asyncio.run(work())


@pytest.mark.parametrize("error", [Unavailable("away"), QueueFull("full")])
def test_what_cannot_be_written_is_not_kept(error: Exception) -> None:
    async def work() -> None:
        store = ResponsesStore(Bucket(error), Settings())  # type: ignore[arg-type]
        assert not await store.keep("t", "a", kept())

    asyncio.run(work())


def test_what_is_too_large_is_not_kept() -> None:
    async def work() -> None:
        bucket = Bucket()
        bucket.open.set()
        store = ResponsesStore(bucket, Settings(response_bytes_max=1000))  # type: ignore[arg-type]
        assert await store.keep("t", "a", kept())
        assert not await store.keep("t", "b", kept("a" * 1000))
        assert bucket.written == [subjects.key("t", "a")]

    asyncio.run(work())


def test_items_have_ids_of_their_own_always_the_same() -> None:
    first, again, other = with_ids(ITEMS, "a" * 32), with_ids(ITEMS, "a" * 32), with_ids(ITEMS, "b" * 32)
    assert first == again
    assert [item.id[:4] for item in first] == ["msg_", "fc_" + first[1].id[3], "mine"]
    assert len({item.id for item in first + other}) == 5
    assert ITEMS[0].id == ""


@pytest.mark.parametrize(
    "identity", ["", "resp_", "a" * 32, "resp_" + "a" * 31, "resp_" + "g" * 32, "resp_" + "a" * 33]
)
def test_an_id_that_no_response_has(identity: str) -> None:
    assert rid_of(identity) == ""
    assert rid_of("resp_" + "a" * 32) == "a" * 32


def test_a_response_is_its_tenants(nats_server: Any) -> None:
    async def work(client: httpx.AsyncClient, bus: Bus) -> None:
        headers = {}
        for name, models in (("acme", []), ("other", []), ("narrow", ["another"])):
            tenant = "acme" if name == "narrow" else name
            if tenant == name:
                await tenancy.add(bus, ME, NewTenant(name=name))
            issued = await tenancy.issue(bus, ME, tenant, NewKey(models=models))
            headers[name] = {"authorization": f"Bearer {issued.secret}"}
        rid = "a" * 32
        response = {"id": f"resp_{rid}", "model": "m", "output": []}
        record = KeptResponse(msgspec.Raw(msgspec.json.encode(response)), with_ids(ITEMS, rid))
        assert await ResponsesStore(bus, bus.settings).keep("acme", rid, record)
        path = f"/v1/responses/resp_{rid}"
        calls = (("GET", path), ("GET", path + "/input_items"), ("POST", path + "/cancel"), ("DELETE", path))
        for method, url in calls:
            answer = await client.request(method, url, headers=headers["other"])
            assert refusal(answer) == (404, "response_not_found", None)
            assert (await client.request(method, url)).status_code == 401
            answer = await client.request(method, url, headers=headers["narrow"])
            assert refusal(answer) == (403, "model_not_allowed", "model")
        after = {"model": "another", "input": "Repeat it.", "previous_response_id": f"resp_{rid}"}
        answer = await client.post("/v1/responses", json=after, headers=headers["narrow"])
        assert refusal(answer) == (403, "model_not_allowed", "model")
        found = await client.get(path, headers=headers["acme"])
        assert (found.status_code, found.json()) == (200, response)
        assert (await client.delete(path, headers=headers["acme"])).json()["deleted"] is True
        assert (await client.get(path, headers=headers["acme"])).status_code == 404

    run(Settings(nats_url=nats_server.url, require_keys=True), work)
