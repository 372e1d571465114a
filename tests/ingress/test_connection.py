"""Connections whose clients send too much, too slowly, too early, or no HTTP."""

import json
import logging
import time
from collections.abc import Callable
from typing import Any

import pytest

BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": True}).encode()
LINE = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"
REQUEST = LINE + b"content-length: %d\r\n\r\n" % len(BODY) + BODY
LIVEZ = b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n"


@pytest.fixture(scope="module")
def strict(start_front: Callable[..., Any]) -> Any:
    return start_front(head_bytes_max=4000, request_read_s=0.4, http_connections_max=20)


def refusal(client: Any) -> dict[str, Any]:
    """The only answer of a connection that the front closes."""
    head, _, body = client.read_to_end().partition(b"\r\n\r\n")
    assert b"connection: close" in head
    error: dict[str, Any] = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert int(head.split()[1]) in (400, 408, 431, 503)
    return error


@pytest.mark.parametrize(
    ("sent", "more"),
    [
        (LINE + b"x-large: " + b"a" * 5000 + b"\r\n\r\n", b""),
        (LINE + b"".join(b"x-%d: a\r\n" % number for number in range(600)) + b"\r\n", b""),
        (b"GET /" + b"a" * 5000 + b" HTTP/1.1\r\nhost: x\r\n\r\n", b""),
        (LINE + b"x-large: ", b"a" * 5000),
        (LINE + b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n0\r\nx-trailer: ", b"a" * 5000),
        (LINE + b"transfer-encoding: chunked\r\n\r\n1;", b"e" * 5000),
    ],
    ids=["value", "many", "path", "unfinished", "trailer", "extension"],
)
def test_a_head_has_a_limit_in_bytes(strict: Any, raw: Callable[..., Any], make: Any, sent: bytes, more: bytes) -> None:
    with raw(strict.port, sent) as client:
        time.sleep(0.05 if more else 0)  # so that it comes in two pieces; in one, the limit is the piece's
        client.socket.sendall(more)
        assert refusal(client)["code"] == "headers_too_large"
    make.wait_for(lambda: not strict.context.open, "nothing is left open")


def test_a_body_may_be_larger_than_a_head(strict: Any, raw: Callable[..., Any], make: Any) -> None:
    strict.dispatcher.answer = make.says("hello")
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x" * 6000}]}).encode()
    for framed in (
        b"content-length: %d\r\n\r\n%b" % (len(body), body),
        b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\nx-trailer: 1\r\n\r\n" % (len(body), body),
    ):
        with raw(strict.port, LINE + b"x-most: " + b"a" * 3000 + b"\r\n" + framed) as client:
            assert b"hello" in client.read_until(b"finish_reason")


@pytest.mark.parametrize(
    ("before", "drip"),
    [
        (b"", b""),
        (LINE + b"x-slow: ", b"a"),
        (LIVEZ, b"\r\n"),
        (LIVEZ + b"GET /livez HTTP/1.1\r\nx-slow: ", b"a"),
        (b"GET / HTTP/1.1\r\nhost: x\r\ncontent-length: 9999\r\n\r\n", b"a"),
    ],
    ids=["silent", "header", "empty lines", "second", "body nobody reads"],
)
def test_a_head_has_a_limit_in_time(
    strict: Any, raw: Callable[..., Any], make: Any, before: bytes, drip: bytes
) -> None:
    begun = time.monotonic()
    with raw(strict.port, before + drip) as client:

        def ended() -> bool:
            try:
                client.socket.sendall(drip)
            except (BrokenPipeError, ConnectionResetError):
                return True
            return bool(client.closed())

        make.wait_for(ended, "the connection is closed")
        assert time.monotonic() - begun > 0.3


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(200)),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /livez HTTP/1.1\nhost: x\n\n",
        LINE + b"x: a\0b\r\n\r\n",
        LINE + b"content-length: 5\r\ncontent-length: 6\r\n\r\n",
        LINE + b"content-length: -1\r\n\r\n",
        LINE + b"content-length: 3\r\ntransfer-encoding: chunked\r\n\r\n",
        LINE + b"transfer-encoding: chunked\r\n\r\nzz\r\n",
        b"GET /livez HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n",
        LINE + b"connection: upgrade\r\nupgrade: h2c\r\ncontent-length: 2\r\n\r\n{}",
        b"CONNECT elsewhere:443 HTTP/1.1\r\nhost: x\r\n\r\n",
    ],
)
def test_what_is_no_http_is_refused_in_our_shape_and_fills_no_log(
    strict: Any, raw: Callable[..., Any], sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with raw(strict.port, sent) as client:
        assert refusal(client)["code"] == "invalid_request"
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_trailers_are_no_headers(front: Any, raw: Callable[..., Any], make: Any) -> None:
    front.dispatcher.answer = make.says("hello")
    chunked = b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n" % (len(BODY), BODY)
    with raw(front.port, LINE + chunked + b"x-version-pin: nowhere\r\n\r\n") as client:
        assert b"hello" in client.read_until(b"[DONE]")


def test_requests_ahead_of_their_answers_are_answered_in_order(front: Any, raw: Callable[..., Any], make: Any) -> None:
    front.dispatcher.answer = make.says("hello")
    with raw(front.port, REQUEST + LIVEZ + REQUEST) as client:
        make.wait_for(lambda: client.has_data() and client.received.count(b"[DONE]") == 2, "both answers")
        assert client.received.index(b"[DONE]") < client.received.index(b'"ok"') < client.received.rindex(b"[DONE]")


def test_to_http_1_0_an_answer_ends_with_its_connection(front: Any, raw: Callable[..., Any], make: Any) -> None:
    front.dispatcher.answer = make.says("Hel", "lo")
    for line, body in ((LINE, BODY), (LINE, BODY.replace(b"true", b"false")), (b"GET /v1/models HTTP/1.1\r\n", b"")):
        asked = line + b"content-length: %d\r\n" % len(body)
        with raw(front.port, asked + b"connection: close\r\n\r\n" + body) as client:
            newer = client.read_to_end()
        with raw(front.port, asked.replace(b"HTTP/1.1", b"HTTP/1.0") + b"\r\n" + body) as client:
            head, _, told = client.read_to_end().partition(b"\r\n\r\n")
        assert b"connection: close" in head
        assert b"transfer-encoding" not in head
        if b"transfer-encoding" in newer:
            assert told.startswith(b"data: {")
            assert told.endswith(b"data: [DONE]\n\n")
        else:
            assert int(head.partition(b"content-length: ")[2].split()[0]) == len(told)
            assert json.loads(told)


def test_a_client_that_leaves_is_noticed_by_every_request_of_its_connection(
    front: Any, raw: Callable[..., Any], make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    client = raw(front.port, REQUEST + REQUEST + LIVEZ)
    stream = front.stream()
    client.close()
    make.wait_for(lambda: stream.cancelled, "the request that is answered is cancelled")
    make.wait_for(lambda: not front.context.open, "nothing is left open")
    assert len(front.dispatcher.streams) == 1  # the others never began
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_only_so_many_requests_may_be_ahead_of_their_answers(front: Any, raw: Callable[..., Any], make: Any) -> None:
    with raw(front.port, REQUEST) as client:
        stream = front.stream()
        client.socket.sendall(LIVEZ * 40)
        make.wait_for(lambda: stream.cancelled, "the request is cancelled")
        client.read_to_end()


def test_connections_have_a_limit(strict: Any, raw: Callable[..., Any], make: Any) -> None:
    clients = [raw(strict.port, LIVEZ) for _ in range(20)]
    for client in clients:
        client.read_until(b'"ok"')
    with raw(strict.port, b"") as late:
        assert refusal(late)["code"] == "too_many_connections"
    for client in clients:
        client.close()

    def admitted() -> bool:
        with raw(strict.port, LIVEZ) as client:
            make.wait_for(client.has_data, "an answer")
            return b'"ok"' in client.received

    make.wait_for(admitted, "a place is free again")
