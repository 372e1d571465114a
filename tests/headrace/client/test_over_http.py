"""The client over HTTP against servers that break off where it hurts: what was told is told once, and the rest follows."""

import asyncio
import base64
import json
import struct
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from headrace import Client, HeadraceError
from headrace.client.over_http import OverHttp

RID = "a" * 32
LAST = {
    "finish_reason": "stop",
    "usage": {"prompt_tokens": 2, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 1}},
    "claims": 2,
    "seed": 7,
    "version": "v1",
}


def position(number: int) -> str:
    return f"{RID}.1.{number}.{'0' * 16}"


def head(status: int = 200, **headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status} X", "connection: close"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode()


def opened() -> bytes:
    return head(content_type="text/event-stream", x_headrace_last_event_id=position(0))


def token(number: int) -> bytes:
    return f"id: {position(number + 1)}\ndata: {json.dumps({'token': f't{number}', 'index': number})}\n\n".encode()


def last() -> bytes:
    return f"id: {position(4)}\ndata: {json.dumps(LAST)}\n\n".encode()


def error(code: str, status: int = 0, **headers: str) -> bytes:
    body = json.dumps({"error": {"message": "m", "type": "t", "param": "p", "code": code}})
    if not status:
        return f"data: {body}\n\n".encode()
    return head(status, content_length=str(len(body)), **headers) + body.encode()


class Server:
    """Gives each connection the next of its answers, cut off at its end; `asked` is what was asked for."""

    def __init__(self, answers: list[bytes]) -> None:
        self.answers = answers
        self.asked: list[tuple[str, str, str | None]] = []  # method, path, Last-Event-ID

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
        await reader.readexactly(int(headers.get("content-length", 0)))
        method, path, _ = lines[0].split(" ")
        self.asked.append((method, path, headers.get("last-event-id")))
        if self.answers:
            writer.write(self.answers.pop(0))
            await writer.drain()
        writer.close()

    @asynccontextmanager
    async def running(self) -> Any:
        server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()


def meet(answers: list[bytes], work: Callable[[Client], Awaitable[None]], before: str = "") -> Server:
    server = Server(answers)

    async def main() -> None:
        async with server.running() as url, Client(before + url) as client:
            await work(client)

    asyncio.run(main())
    return server


async def all_of(client: Client) -> None:
    stream = client.stream("org/m", "x", max_tokens=4)
    assert [each.text async for each in stream] == ["t0", "t1", "t2", "t3"]
    result = stream.result
    assert (result.text, result.finish_reason, result.claims, result.seed) == ("t0t1t2t3", "stop", 2, 7)
    assert (result.usage.prompt_tokens, result.usage.completion_tokens, result.usage.cached_tokens) == (2, 4, 1)
    assert (stream.id, stream.position) == (RID, position(4))


ASKED = ("POST", "/v1/models/org/m/infer", None)
WHOLE = [token(number) for number in range(4)]


@pytest.mark.parametrize(
    ("answers", "resumed"),
    [
        ([opened() + b"".join(WHOLE) + last()], []),
        ([b"", opened() + b": keepalive\n\n" + b"".join(WHOLE) + last()], [None]),  # nothing was told: asked anew
        ([opened(), opened() + b"".join(WHOLE) + last()], [position(0)]),
        ([opened() + WHOLE[0] + WHOLE[1][:30], opened() + b"".join(WHOLE[1:]) + last()], [position(1)]),
        (
            [opened() + WHOLE[0], b"", error("draining", 503), opened() + b"".join(WHOLE[1:]) + last()],
            [position(1)] * 3,
        ),
        ([opened() + WHOLE[0] + error("draining"), opened() + b"".join(WHOLE[1:]) + last()], [position(1)]),
        ([opened() + b"".join(WHOLE), opened() + last()], [position(4)]),
    ],
)
def test_a_stream_that_breaks_off_is_gone_on_with(answers: list[bytes], resumed: list[str | None]) -> None:
    server = meet(answers, all_of)
    again = [ASKED if each is None else ("GET", f"/v1/streams/{RID}", each) for each in resumed]
    assert server.asked == [ASKED, *again]


def test_another_ingress_is_asked_when_the_first_is_gone() -> None:
    meet([opened() + b"".join(WHOLE) + last()], all_of, before="http://127.0.0.1:9,")


@pytest.mark.parametrize(
    ("answers", "code"),
    [
        ([error("queue_full", 429, retry_after_ms="1500")], "queue_full"),
        ([opened() + WHOLE[0] + error("engine_failed")], "engine_failed"),
        ([opened() + WHOLE[0], error("stream_not_found", 404)], "stream_not_found"),
        ([opened() + WHOLE[0], error("version_failed", 503)], "version_failed"),
        ([head(404, content_length="2") + b"no"], "internal_error"),
    ],
)
def test_what_is_no_accident_is_told(answers: list[bytes], code: str) -> None:
    async def work(client: Client) -> None:
        with pytest.raises(HeadraceError) as found:
            await client.generate("org/m", "x")
        assert found.value.code == code
        if code == "queue_full":
            assert (found.value.retry_after, found.value.param) == (1.5, "p")

    meet(answers, work)


def embedded() -> bytes:
    vectors = [base64.b64encode(struct.pack("<2f", number, 0.5)).decode() for number in range(2)]
    data = [{"object": "embedding", "index": index, "embedding": each} for index, each in enumerate(vectors)]
    usage = {"prompt_tokens": 5, "total_tokens": 5}
    body = json.dumps({"object": "list", "data": data, "model": "m", "usage": usage}).encode()
    return head(content_length=str(len(body)), x_headrace_version="v2") + body


@pytest.mark.parametrize("lost", [[], [b""], [embedded()[:-9]], [error("draining", 503)]])
def test_vectors_are_asked_for_again_when_their_answer_is_lost(lost: list[bytes]) -> None:
    async def work(client: Client) -> None:
        told = await client.embed("org/m", ["a", "b"], dimensions=2)
        assert (told.vectors, told.version, told.prompt_tokens) == ([[0.0, 0.5], [1.0, 0.5]], "v2", 5)

    server = meet([*lost, embedded()], work)
    assert server.asked == [("POST", "/v1/embeddings", None)] * (1 + len(lost))


def test_vectors_that_are_refused_or_garbled_are_not_asked_for_again() -> None:
    async def work(client: Client) -> None:
        for code in ("wrong_task", "bus_unavailable"):
            with pytest.raises(HeadraceError) as found:
                await client.embed("org/m", "a")
            assert found.value.code == code

    server = meet([error("wrong_task", 400), head(content_length="2") + b"no"], work)
    assert len(server.asked) == 2


def test_who_leaves_cancels_and_who_detaches_does_not() -> None:
    async def work(client: Client) -> None:
        tokens = aiter(client.stream("org/m", "x"))
        await anext(tokens)
        await tokens.aclose()  # what `break` does, in its own time
        detached = client.stream("org/m", "x")
        async for _ in detached:
            assert detached.detach() == position(1)
            break
        with pytest.raises(HeadraceError) as found:
            await client.cancel(RID)
        assert found.value.code == "bus_unavailable"  # an answer that is no JSON

    told = b'{"id": "", "status": "cancelled"}'
    ended = head(content_length=str(len(told))) + told
    garbage = head(content_length="2") + b"no"
    server = meet([opened() + b"".join(WHOLE), ended, opened() + b"".join(WHOLE), garbage], work)
    cancel = ("DELETE", f"/v1/streams/{RID}")
    assert server.asked == [ASKED, (*cancel, position(1)), ASKED, (*cancel, None)]


def test_a_generation_is_read_once_and_says_nothing_before() -> None:
    async def work(client: Client) -> None:
        stream = client.stream("org/m", "x")
        for what in ("id", "position", "result"):
            with pytest.raises(RuntimeError):
                getattr(stream, what)
        await stream.complete()
        with pytest.raises(RuntimeError):
            aiter(stream)

    meet([opened() + b"".join(WHOLE) + last()], work)


def test_what_is_told_to_its_end_is_not_gone_on_with() -> None:
    async def work(client: Client) -> None:
        with pytest.raises(HeadraceError) as found:
            await client.resume(position(4)).complete()
        assert found.value.code == "stream_not_found"

    meet([head(204)], work)


def test_urls_and_keys_that_do_not_fit_are_refused() -> None:
    for url, more in (("ftp://x", {}), ("nats://x", {"key": "k"}), ("http://x", {"nkey": "k"})):
        with pytest.raises(ValueError):  # noqa: PT011
            Client(url, **more)
    with pytest.raises(RuntimeError):
        asyncio.run(OverHttp("http://x", None).close())
