"""What the application says to a caller over NATS, as numbered replies."""

import asyncio
import json
from collections.abc import Awaitable, Callable

import msgspec
import pytest

from ingress import answers
from ingress.service_call import ServiceCall, as_json
from shared.errors import BadRequest, QueueFull, TooLarge

Reply = tuple[bytes, dict[str, str]]


def replies_of(work: Callable[[ServiceCall], Awaitable[None]], bytes_max: int = 1000) -> list[Reply]:
    sent: list[Reply] = []

    async def publish(data: bytes, headers: dict[str, str]) -> None:
        if len(data) > bytes_max:
            raise TooLarge("too large")
        sent.append((data, dict(headers)))

    asyncio.run(work(ServiceCall(publish)))
    return sent


def test_a_stream_is_one_reply_an_event_however_it_is_cut() -> None:
    text = (
        b': keepalive\n\nid: r.1.1.d\ndata: {"token":"a","index":0}\n\nid: r.1.1e.d\ndata: {"finish_reason":"stop"}\n\n'
    )

    async def work(call: ServiceCall) -> None:
        await call.send(answers.start(200, [*answers.STREAM, (b"x-headrace-version", b"v1"), (b"set-cookie", b"x")]))
        for at in range(0, len(text), 7):
            await call.send(answers.body(text[at : at + 7], more=at + 7 < len(text)))

    assert replies_of(work) == [
        (b"", {"Hr-Keepalive": "1", "Hr-Status": "200", "X-Headrace-Version": "v1", "Hr-Event": "0"}),
        (b'{"token":"a","index":0}', {"Hr-Event-Id": "r.1.1.d", "Hr-Event": "1"}),
        (b'{"finish_reason":"stop"}', {"Hr-Event-Id": "r.1.1e.d", "Hr-Event": "2", "Hr-End": "complete"}),
    ]


def test_a_plain_answer_is_one_reply() -> None:
    async def work(call: ServiceCall) -> None:
        await call.send(answers.start(200, answers.json_headers(b'{"text":"a"}', [])))
        await call.send(answers.body(b'{"te', more=True))
        await call.send(answers.body(b'xt":"a"}'))

    assert replies_of(work) == [(b'{"text":"a"}', {"Hr-Status": "200", "Hr-Event": "0", "Hr-End": "complete"})]


def test_an_answer_about_an_error_is_none() -> None:
    job = msgspec.json.encode({"status": "failed"} | QueueFull("full").body())

    async def work(call: ServiceCall) -> None:
        await call.send(answers.start(200, answers.json_headers(job, [])))
        await call.send(answers.body(job))

    assert replies_of(work) == [(job, {"Hr-Status": "200", "Hr-Event": "0", "Hr-End": "complete"})]


def test_an_error_says_so_in_its_headers_before_a_stream_and_in_it() -> None:
    async def before(call: ServiceCall) -> None:
        await call.refuse(QueueFull("full"))

    async def within(call: ServiceCall) -> None:
        await call.send(answers.start(200, answers.STREAM))
        await call.send(answers.body(b'data: {"token":"a","index":0}\n\n', more=True))
        await call.send(answers.body(b"data: " + msgspec.json.encode(QueueFull("full").body()) + b"\n\n"))

    for work, status in ((before, "429"), (within, None)):
        data, headers = replies_of(work)[-1]
        assert json.loads(data)["error"]["code"] == headers["Nats-Service-Error"] == "queue_full"
        assert (headers["Hr-End"], headers["Nats-Service-Error-Code"]) == ("error", "429")
        assert headers.get("Hr-Status") == status


def test_a_reply_over_the_limit_becomes_an_error_and_is_the_last() -> None:
    async def work(call: ServiceCall) -> None:
        await call.answer({"text": "x" * 2000})
        assert (await call.receive())["type"] == "http.disconnect"

    [(data, headers)] = replies_of(work)
    assert json.loads(data)["error"]["code"] == "request_too_large"
    assert headers["Hr-End"] == "error"


def test_the_application_reads_the_body_once_and_then_waits_for_the_caller_to_go() -> None:
    async def work(call: ServiceCall) -> None:
        call.asks(b"body")
        assert await call.receive() == {"type": "http.request", "body": b"body", "more_body": False}
        waiting = asyncio.create_task(call.receive())
        assert not (await asyncio.wait([waiting], timeout=0.01))[0]
        call.gone()
        assert (await waiting)["type"] == "http.disconnect"

    assert replies_of(work) == []


def test_msgpack_is_taken_as_json_would_be() -> None:
    body = {"input": [1, 2], "max_tokens": 3}
    assert json.loads(as_json(msgspec.msgpack.encode(body), "application/msgpack")) == body
    assert as_json(b"not looked at", "application/json") == b"not looked at"
    for bad in (b"", b"\xc1", b"\x81\xa1", b"\xd4\x05\x00"):
        with pytest.raises(BadRequest):
            as_json(bad, "application/msgpack")
