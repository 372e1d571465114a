"""Resumable streams: whatever dies, the client goes on at another ingress with the event after its last."""

import asyncio
from typing import Any

from .conftest import Site, Stream

TOKENS = 60
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("chat", {"n": 2, "temperature": 0.8, "seed": 5, "stream_options": {"include_usage": True}}),
    ("chat", {"logprobs": True, "top_logprobs": 2}),
    ("text", {"logprobs": 1, "n": 2, "temperature": 1, "seed": 9}),
    ("native", {"seed": 3}),
]


def requests(site: Site) -> list[tuple[str, dict[str, Any]]]:
    return [site.body(route, f"number {n}", TOKENS, **more) for n, (route, more) in enumerate(REQUESTS)]


async def undisturbed(site: Site) -> list[Stream]:
    """The streams as they are when nothing dies, without ids."""
    streams = await asyncio.gather(*(site.begin(site.second, request) for request in requests(site)))
    assert all(stream.done and not stream.id for stream in streams)
    return streams


def same(got: Stream, wanted: Stream) -> None:
    """The same events but for what names the request, one request throughout."""
    assert got.error is None
    assert got.done
    assert told(got) == told(wanted)
    assert len({(event["id"], event["created"]) for event in got.events if "choices" in event}) <= 1


def told(stream: Stream) -> list[list[Any]]:
    """What a client was told of each choice, and of the whole, without what is different for each request."""
    found: dict[int, list[Any]] = {}
    for event in stream.events:
        shared = {name: value for name, value in event.items() if name not in ("id", "created", "claims", "headrace")}
        for choice in shared.pop("choices", None) or [{"index": -1}]:
            found.setdefault(choice["index"], []).append((choice, shared))
    return [found[index] for index in sorted(found)]


def test_a_killed_ingress_is_replaced_by_another_one_without_a_seam(site: Site) -> None:
    async def work() -> None:
        wanted = await undisturbed(site)
        streams = await asyncio.gather(
            *(site.begin(site.first, each, 20 + 3 * n, x_resumable="true") for n, each in enumerate(requests(site)))
        )
        assert all(stream.status == 200 and stream.id and not stream.done for stream in streams)
        site.first.kill()
        await asyncio.gather(*(site.resume(site.second, stream, len(stream.events) + 15) for stream in streams))
        await asyncio.gather(
            *(site.resume(site.second, stream) for stream in streams)
        )  # left, and back at the same one
        for got, want in zip(streams, wanted, strict=True):
            same(got, want)
        await site.both_ingresses()
        await site.idle()

    site.run(work())


def test_ingress_and_worker_killed_together_are_a_pause(site: Site) -> None:
    async def work() -> None:
        wanted = await undisturbed(site)
        streams = await asyncio.gather(
            *(site.begin(site.first, each, 25, x_resumable="true") for each in requests(site))
        )
        site.first.kill()
        site.one.kill()
        resuming = [asyncio.create_task(site.resume(site.second, stream)) for stream in streams]
        await asyncio.gather(site.one_worker(), site.both_ingresses(), *resuming)
        for got, want in zip(streams, wanted, strict=True):
            same(got, want)
        await site.idle()

    site.run(work())


def test_a_worker_that_took_over_has_the_whole_stream_for_another_reader(site: Site) -> None:
    async def work() -> None:
        request = site.body("chat", "hello", 150)
        wanted = await site.begin(site.second, request)
        stream, url = Stream(), site.first.url + request[0]
        reading = asyncio.create_task(site.read(stream, "POST", url, json=request[1], headers={"x-resumable": "1"}))
        await site.until(lambda: has_seen(stream, 10))
        second = Stream()  # a reader from before the next worker begins
        second.id, second.events = stream.id, list(stream.events)
        site.one.kill()
        await site.one_worker()
        await site.until(lambda: has_seen(stream, len(second.events) + 10))
        await asyncio.gather(reading, site.resume(site.first, second))
        for got in (stream, second):
            same(got, wanted)
        assert stream.events == second.events
        await site.idle()

    site.run(work())


async def has_seen(stream: Stream, events: int) -> bool:
    return len(stream.events) >= events


def test_a_finished_stream_is_told_again_for_a_while(site: Site) -> None:
    async def work() -> None:
        streams = await asyncio.gather(*(site.begin(site.first, each, x_resumable="true") for each in requests(site)))
        assert all(stream.done for stream in streams)
        await site.idle()
        for stream in streams:
            url = f"{site.second.url}/v1/streams/{stream.id.split('.')[0]}"
            again, ended = Stream(), Stream()
            await site.read(again, "GET", url)
            same(again, stream)
            assert again.id == stream.id
            await site.read(ended, "GET", url, headers={"Last-Event-ID": stream.id})
            assert (ended.status, ended.events) == (204, [])
        url = f"{site.second.url}/v1/streams/{streams[0].id.split('.')[0]}"

        async def forgotten() -> bool:
            return (await failure(site, url)) == (404, "stream_not_found")

        await site.until(forgotten)

    site.run(work())


def test_a_client_that_does_not_come_back_is_waited_for_and_then_given_up(site: Site) -> None:
    async def work() -> None:
        stream = await site.begin(site.first, site.body("chat", "hello", 8000), 5, x_resumable="true")
        await asyncio.sleep(0.5)  # within the grace it goes on unseen
        await site.resume(site.first, stream, 60)
        assert len(stream.events) == 60
        await site.idle()
        assert await failure(site, stream_url(site, stream), stream.id) == (404, "stream_not_found")
        metrics = (await site.http.get(site.first.url + "/metrics")).text
        for route in ("/v1/chat/completions", "/v1/streams/{rid}"):
            assert f'code="detached",model="{site.model}",route="{route}",version="v"' in metrics

    site.run(work())


def test_what_cannot_be_resumed_is_a_clear_error(site: Site) -> None:
    async def work() -> None:
        stream = await site.begin(site.first, site.body("chat", "hello", 20), x_resumable="true")
        rid, sequence, position, digest = stream.id.split(".")
        assert position == "20fe"
        other = "0" * 32
        for name, last, wanted in (
            (rid, "nonsense", (400, "invalid_request")),
            (other, stream.id, (400, "invalid_request")),
            (rid, f"{rid}.{sequence}.3-4.{digest}-{digest}", (400, "invalid_request")),
            (other, f"{other}.{sequence}.3.{digest}", (404, "stream_not_found")),
            ("x", None, (404, "stream_not_found")),
        ):
            assert await failure(site, f"{site.second.url}/v1/streams/{name}", last) == wanted, last
        plain = await site.begin(site.first, site.body("chat", "hello", 20))
        assert not plain.id

    site.run(work())


def stream_url(site: Site, stream: Stream) -> str:
    return f"{site.second.url}/v1/streams/{stream.id.split('.')[0]}"


async def failure(site: Site, url: str, last_event_id: str | None = None) -> tuple[int, str | None]:
    """Status and code of the error that a GET is answered with."""
    answer = Stream()
    await site.read(answer, "GET", url, headers={} if last_event_id is None else {"Last-Event-ID": last_event_id})
    return answer.status, answer.error["code"] if answer.error else None
