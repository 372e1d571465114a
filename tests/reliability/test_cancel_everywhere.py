"""A request that ends early leaves nothing behind: in the queue, in its prefill or in its decode; plain or streamed; by its
client's leaving, through the API or by a deadline.
"""

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest

from shared import records, subjects
from shared.records import Version

from .conftest import SETTINGS, Ingress, Site

WAITS = "waits"  # a model without workers
PREFILL_TOKENS = 8000  # sixteen steps of the worker, of a tenth of a second each
ENDED = {
    "api": "cancelled",
    "queue": "queue_deadline",
    "prefill": "generation_deadline",
    "decode": "generation_deadline",
}


class Places(Site):
    """An ingress with a patient and one with short clocks, a slow worker, and a model that nobody serves."""

    hasty: Ingress

    async def build(self) -> None:
        await self.start()
        version = Version(model=WAITS, version="v", state="available", source=self.source)
        route = records.Route(WAITS, {}, [records.Weight("v", 10_000)])
        await self.bus.kv_put(subjects.MODELS_BUCKET, subjects.key(WAITS, "v"), records.encode(version))
        await self.bus.kv_put(subjects.ROUTES_BUCKET, subjects.key(WAITS), records.encode(route))
        await self.bus.ensure_consumer(WAITS, "v", subjects.LANE_FAST)
        self.first = await self.ingress()
        self.hasty = await self.ingress(queue_deadline_s=0.4, generation_deadline_s=0.8)
        await self.one_worker()

    async def rid(self, model: str) -> str:
        """Of the one request that is stored for a model."""
        message = await self.bus.next_message(subjects.REQ_STREAM, subjects.requests_of_version(model, "v"), 1)
        return "" if message is None else str(msgspec.msgpack.decode(message.data)["rid"])

    async def counters(self, url: str) -> dict[str, float]:
        lines = (await self.http.get(url + "/metrics")).text.splitlines()
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[:1] != "#")}

    async def lease(self) -> records.Lease:
        found = await self.bus.kv_get(subjects.WORKERS_BUCKET, self.one.name)
        assert found is not None
        return records.decode_lease(found[0])

    async def generated(self) -> float:
        counters = await self.counters(f"http://127.0.0.1:{(await self.lease()).metrics_port}")
        return sum(value for name, value in counters.items() if name.startswith("vllm:generation_tokens_total"))

    async def nothing_left(self) -> None:
        await self.idle()

        async def withdrawn() -> bool:
            return not await self.rid(WAITS)

        await self.until(withdrawn)
        for ingress in (self.first, self.hasty):

            async def down(ingress: Ingress = ingress) -> bool:
                counters = await self.counters(ingress.url)
                return counters["headrace_queued"] + counters["headrace_streams_open"] == 0

            await self.until(down)
            counters = await self.counters(ingress.url)
            ended = [value for name, value in counters.items() if name.startswith("headrace_ended_total")]
            assert counters["headrace_published_total"] == sum(ended)


@pytest.fixture(scope="module")
def places(nats_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Places]:
    places = Places(nats_url, tmp_path_factory.mktemp("places"), "places", "sim:fixed-100ms", SETTINGS)
    places.run(places.build())
    yield places
    places.run(places.stop())
    places.runner.close()


async def reached(places: Places, where: str, tokens_before: float) -> bool:
    if where == "queue":
        return bool(await places.rid(WAITS))
    if where == "prefill":
        return (await places.lease()).claims == 1
    return await places.generated() > tokens_before + 1


def code_of(answer: httpx.Response) -> str:
    """Of a plain error, or of the error event of a stream."""
    for line in answer.text.splitlines():
        event = line.removeprefix("data: ")
        if event.startswith("{") and "error" in (found := msgspec.json.decode(event)):
            return str(found["error"]["code"])
    raise AssertionError(f"no error in {answer.text[-300:]!r}")


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize("how", ["disconnect", "api", "deadline"])
@pytest.mark.parametrize("where", ["queue", "prefill", "decode"])
def test_nothing_is_left(places: Places, where: str, how: str, stream: bool) -> None:
    async def work() -> None:
        before = await places.generated()
        words = PREFILL_TOKENS if where == "prefill" else 3
        body: dict[str, Any] = {
            "model": WAITS if where == "queue" else places.model,
            "max_tokens": 150,
            "stream": stream,
        }
        body["prompt"] = " ".join([where, how, str(stream), *(f"word{number}" for number in range(words))])
        ingress = places.hasty if how == "deadline" else places.first
        async with httpx.AsyncClient(timeout=20) as client:
            asking = asyncio.create_task(client.post(ingress.url + "/v1/completions", json=body))
            if how != "deadline":
                await places.until(lambda: reached(places, where, before))
                assert not asking.done()
            if how == "disconnect":
                asking.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await asking
            elif how == "api":
                cancelled = await places.http.delete(f"{places.hasty.url}/v1/streams/{await places.rid(body['model'])}")
                assert (cancelled.status_code, cancelled.json()["status"]) == (200, "cancelled")
            if how != "disconnect":
                assert code_of(await asking) == ENDED["api" if how == "api" else where]
        await places.nothing_left()
        if where != "decode":
            assert await places.generated() == before

    places.run(work())


def test_the_paths_are_those_that_are_meant(places: Places) -> None:
    """A prefill takes longer than the clock that ends it; a decode has begun when its clock ends it."""

    async def work() -> None:
        before = await places.generated()
        body = {"model": places.model, "prompt": "three words here", "max_tokens": 150}
        answer = await places.http.post(places.hasty.url + "/v1/completions", json=body)
        assert code_of(answer) == "generation_deadline"
        await places.nothing_left()
        assert await places.generated() > before + 1

    places.run(work())
