"""Cancel over HTTP: at any ingress, wherever the request is."""

import asyncio
from typing import Any

import msgspec

from shared import subjects

from .conftest import Site, Stream


async def cancel(site: Site, rid: str, method: str = "POST", **headers: str) -> tuple[int, Any]:
    url = f"{site.second.url}/v1/streams/{rid}" + ("/cancel" if method == "POST" else "")
    answer = await site.http.request(method, url, headers=headers)
    body = answer.json()
    return answer.status_code, body.get("status") or body["error"]["code"]


def test_a_cancel_ends_a_request_for_everybody_wherever_it_is(site: Site) -> None:
    async def work() -> None:
        running, url = Stream(), site.first.url + "/v1/chat/completions"
        body = site.body("chat", "running", 8000)[1]
        readers = [asyncio.create_task(site.read(running, "POST", url, json=body, headers={"x-resumable": "true"}))]

        async def some() -> bool:
            return len(running.events) > 5

        await site.until(some)
        other = Stream()
        other.id = running.id
        readers.append(asyncio.create_task(site.resume(site.second, other)))

        async def more() -> bool:
            return len(other.events) > 5

        await site.until(more)
        assert await cancel(site, running.id.split(".")[0]) == (200, "cancelled")
        await asyncio.gather(*readers)
        for stream in (running, other):
            assert stream.error is not None
            assert stream.error["code"] == "cancelled"
            assert not stream.done
        await site.idle()
        assert await cancel(site, running.id.split(".")[0], "DELETE") == (404, "stream_not_found")

    site.run(work())


def test_a_cancel_finds_what_is_queued_and_what_has_finished(site: Site) -> None:
    async def work() -> None:
        done = await site.begin(site.first, site.body("chat", "done", 3), x_resumable="true")
        assert await cancel(site, done.id.split(".")[0]) == (200, "finished")
        site.one.terminate()
        await asyncio.to_thread(site.one.popen.wait)
        queued, orphan = Stream(), Stream()
        path, body = site.body("chat", "queued", 5)
        readers = [
            asyncio.create_task(site.read(each, "POST", url + path, json=body, headers={"x-resumable": "true"}))
            for each, url in ((queued, site.second.url), (orphan, site.first.url))
        ]

        async def heads() -> bool:
            return bool(queued.id and orphan.id)

        await site.until(heads)
        assert await cancel(site, queued.id.split(".")[0], "DELETE") == (200, "cancelled")
        site.first.kill()  # nobody knows of that one's request any more, but the queue
        rid = orphan.id.split(".")[0]
        assert await cancel(site, rid) == (404, "stream_not_found")
        assert await cancel(site, rid, **{"last-event-id": orphan.id}) == (200, "cancelled")
        await asyncio.gather(*readers)
        assert queued.error is not None
        assert queued.error["code"] == "cancelled"
        assert await site.bus.next_message(subjects.REQ_STREAM, site.queue, 1) is None
        await asyncio.gather(site.one_worker(), site.both_ingresses())

    site.run(work())


def test_a_cancelled_key_stays_cancelled(site: Site) -> None:
    async def work() -> None:
        body = {"model": site.model, "prompt": "key", "max_tokens": 8000}
        headers = {"idempotency-key": "k-cancelled"}
        url = site.first.url + "/v1/completions"
        asking = asyncio.create_task(site.http.post(url, json=body, headers=headers))

        async def claimed() -> bool:
            return await site.bus.next_message(subjects.REQ_STREAM, site.queue, 1) is not None

        await site.until(claimed)
        message = await site.bus.next_message(subjects.REQ_STREAM, site.queue, 1)
        assert message is not None
        rid = msgspec.msgpack.decode(message.data)["rid"]
        assert await cancel(site, rid) == (200, "cancelled")
        for answer in (await asking, await site.http.post(url, json=body, headers=headers)):
            assert (answer.status_code, answer.json()["error"]["code"]) == (499, "cancelled")
        await site.idle()

    site.run(work())
