"""Rolling restarts under load: no client sees an error."""

import asyncio

import httpx
import pytest

from headrace.stack import ports

from .conftest import Ingress, Site

LIMITS = httpx.Limits(max_connections=None)


class Load:
    """Clients that ask one thing after the other, on connections that they keep or on new ones."""

    def __init__(self, site: Site, url: str) -> None:
        self.answered = 0
        self._site, self._url = site, url
        self._stop = asyncio.Event()

    async def run(self, keep: bool) -> None:
        body = {"model": self._site.model, "prompt": "hello", "max_tokens": 8, "temperature": 0}
        texts = set()
        async with httpx.AsyncClient(timeout=20, limits=LIMITS) as client:
            while not self._stop.is_set():
                headers = {} if keep else {"connection": "close"}
                answer = await client.post(self._url + "/v1/completions", json=body, headers=headers)
                assert answer.status_code == 200, answer.text
                texts.add(answer.json()["choices"][0]["text"])
                self.answered += 1
        assert len(texts) <= 1

    def stop(self) -> None:
        self._stop.set()


@pytest.mark.parametrize("restarts", [2])
def test_ingresses_and_workers_are_replaced_under_load_without_an_error(site: Site, restarts: int) -> None:
    async def work() -> None:
        port = ports.free_ports(1)[0]
        ingress = await site.ingress(port, reuse_port=True)
        load = Load(site, ingress.url)
        async with asyncio.TaskGroup() as group:
            for number in range(12):
                group.create_task(load.run(keep=number % 2 == 0))
            for _ in range(restarts):
                before = load.answered
                following: Ingress = await site.ingress(port, reuse_port=True)
                ingress.terminate()
                assert await asyncio.to_thread(ingress.popen.wait) == 0
                ingress = following
                old = site.one
                await site.one_worker()
                old.terminate()
                assert await asyncio.to_thread(old.popen.wait) == 0
                assert load.answered > before
            load.stop()
        assert load.answered > 50
        ingress.kill()
        await site.idle()

    site.run(work())


def test_readiness_drops_first_and_what_comes_within_the_linger_is_served(site: Site) -> None:
    async def work() -> None:
        old = await site.ingress(drain_linger_s=2.0)
        path, body = site.body("chat", "first", 60)
        streaming = asyncio.create_task(site.begin(old, (path, body)))

        async def not_ready() -> bool:
            return (await site.http.get(old.url + "/readyz")).status_code == 503

        assert not await not_ready()
        old.terminate()
        await site.until(not_ready)
        assert old.lives
        late = await site.begin(old, (path, body))  # of a client that has not noticed yet
        assert late.headers["connection"] == "close"
        assert late.done
        assert (await streaming).done
        assert await asyncio.to_thread(old.popen.wait) == 0
        await site.idle()

    site.run(work())


def test_a_stream_that_outlasts_the_drain_is_resumed_and_a_key_is_kept(site: Site) -> None:
    async def work() -> None:
        old = await site.ingress(drain_budget_s=0.6, drain_linger_s=0.1)
        request = site.body("chat", "long", 120, temperature=1)
        reading = asyncio.create_task(site.begin(old, request, x_resumable="true", idempotency_key="k-drain"))
        await asyncio.sleep(0.3)
        old.terminate()
        stream = await reading
        assert stream.error is not None
        assert stream.error["code"] == "draining"
        assert stream.events
        stream.error = None
        await site.resume(site.second, stream)
        assert stream.done
        again = await site.begin(site.first, request, idempotency_key="k-drain")
        assert [event["choices"] for event in again.events] == [event["choices"] for event in stream.events]
        assert await asyncio.to_thread(old.popen.wait) == 0
        await site.idle()

    site.run(work())
