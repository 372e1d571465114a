"""Raw sockets: when the head comes, keepalives, disconnects, slow and stalled clients, bodies in pieces, draining."""

import asyncio
import http.client
import json
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest

from shared.errors import EngineFailed, TooLarge, VersionFailed
from shared.wire import Usage

CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
STREAM = CHAT | {"stream": True}
NATIVE = {"input": "Hi", "stream": True}
CHAT_PATH, NATIVE_PATH = "/v1/chat/completions", "/v1/models/m/infer"
USAGE = Usage(5, 2, 0)


def chunks(received: bytes) -> list[bytes]:
    """The complete HTTP chunks of the first response in `received`; each is one write of the relay."""
    _, _, rest = received.partition(b"\r\n\r\n")
    found = []
    while b"\r\n" in rest:
        line, _, rest = rest.partition(b"\r\n")
        size = int(line, 16)
        if len(rest) < size + 2:
            break
        found.append(rest[:size])
        rest = rest[size + 2 :]
    return found


# -- the head ----------------------------------------------------------------------------------------------------------


def test_the_head_waits_for_the_first_token(front: Any, make: Any) -> None:
    with front.connect(CHAT_PATH, STREAM) as client:
        stream = front.stream()
        assert not client.has_data()
        front.call(stream.push, make.token("Hi"))
        assert client.read_until(b'"Hi"').startswith(b"HTTP/1.1 200 OK\r\n")
        assert b": keepalive" not in client.received
        front.call(stream.push, make.token("", finish="stop"))
        front.call(stream.finish, USAGE)
        client.read_until(b"0\r\n\r\n")
    assert client.received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert not stream.cancelled


def test_silence_brings_the_head_and_keepalives(front: Any, make: Any) -> None:
    with front.connect(CHAT_PATH, STREAM) as client:
        started = time.monotonic()
        assert client.read_until(b": keepalive\n\n").startswith(b"HTTP/1.1 200 OK\r\n")
        assert time.monotonic() - started > 0.9 * front.settings.head_hold_s
        client.read_until(b": keepalive\n\n\r\nd\r\n: keepalive\n\n")  # 13 bytes each, a chunk of its own
        assert b"data:" not in client.received
        stream = front.stream()
        front.call(stream.push, make.token("Hi", finish="stop"))
        front.call(stream.finish, USAGE)
        client.read_until(b"[DONE]")


def test_tokens_without_text_are_silence(front: Any, make: Any) -> None:
    with front.connect(CHAT_PATH, STREAM) as client:
        stream = front.stream()
        front.call(stream.push, make.token("Hi"))
        client.read_until(b'"Hi"')
        deadline = time.monotonic() + 10
        while b": keepalive" not in client.received:  # far more often than a keepalive is due
            assert time.monotonic() < deadline
            front.call(stream.push, make.token(""))
            client.has_data()
            time.sleep(0.01)
        assert time.monotonic() > deadline - 10 + 0.5 * front.settings.keepalive_s
        assert client.received.count(b"data:") == 2  # the role and one text


def test_an_error_within_the_hold_has_its_status(front: Any) -> None:
    with front.connect(CHAT_PATH, STREAM) as client:
        front.call(front.stream().fail, VersionFailed("weights are corrupt"))
        assert client.read_until(b"weights are corrupt").startswith(b"HTTP/1.1 503 ")


@pytest.mark.parametrize(("path", "body"), [(CHAT_PATH, STREAM), (NATIVE_PATH, NATIVE)])
def test_an_error_after_the_head_is_the_last_event(front: Any, make: Any, path: str, body: dict[str, Any]) -> None:
    with front.connect(path, body) as client:
        stream = front.stream()
        front.call(stream.push, make.token("Hel"))
        client.read_until(b'"Hel"')

        def last_words() -> None:
            stream.push(make.token("lo"))
            stream.fail(EngineFailed("it broke"))

        front.call(last_words)
        client.read_until(b"\r\n0\r\n\r\n")
    event = b'data: {"error":{"message":"it broke","type":"server_error","param":null,"code":"engine_failed"}}\n\n'
    assert client.received.endswith(event + b"\r\n0\r\n\r\n")
    assert b'"lo"' in client.received
    assert b"[DONE]" not in client.received
    assert b"finish_reason" not in client.received or b'"finish_reason":"' not in client.received


def test_an_error_after_a_silent_head_is_an_event(front: Any) -> None:
    with front.connect(CHAT_PATH, STREAM) as client:
        client.read_until(b": keepalive")
        front.call(front.stream().fail, VersionFailed("weights are corrupt"))
        client.read_until(b"\r\n0\r\n\r\n")
    assert b'"code":"version_failed"' in client.received


def test_a_plain_request_waits_in_silence(front: Any, make: Any) -> None:
    with front.connect(CHAT_PATH, CHAT) as client:
        stream = front.stream()
        front.call(stream.push, make.token("Hel"))
        time.sleep(2.5 * front.settings.keepalive_s)  # longer than the head is held and keepalives would come
        assert not client.has_data()
        front.call(stream.push, make.token("lo", finish="stop"))
        front.call(stream.finish, USAGE)
        assert b'"content":"Hello"' in client.read_until(b'"usage"')


def test_a_wake_up_is_one_write(front: Any, make: Any) -> None:
    with front.connect(NATIVE_PATH, NATIVE) as client:
        stream = front.stream()
        front.call(stream.push, *(make.token(f"t{index}") for index in range(10)))
        client.read_until(b'"t9"')
        assert len(chunks(client.received)) == 1
        front.call(stream.push, make.token("", finish="stop"))
        front.call(stream.finish, USAGE)
        client.read_until(b'"usage"')


def test_the_last_tokens_and_the_end_are_one_write(front: Any, make: Any) -> None:
    front.dispatcher.answer = make.says("Hel", "lo")
    with front.connect(CHAT_PATH, STREAM) as client:
        client.read_until(b"\r\n0\r\n\r\n")
    (whole, end) = chunks(client.received)
    assert whole.startswith(b"data: {")
    assert whole.endswith(b"data: [DONE]\n\n")
    assert end == b""


def test_a_connection_serves_one_request_after_the_other(front: Any, make: Any) -> None:
    front.dispatcher.answer = make.says("Hel", "lo")
    connection = http.client.HTTPConnection("127.0.0.1", front.port, timeout=10)
    for body in (STREAM, CHAT, {"model": "x"}, STREAM, CHAT):
        connection.request("POST", CHAT_PATH, json.dumps(body))
        response = connection.getresponse()
        data = response.read()
        assert response.status == (400 if body == {"model": "x"} else 200)
        assert data
    connection.close()
    assert len(front.dispatcher.streams) == 4
    assert not any(stream.cancelled for stream in front.dispatcher.streams)


# -- disconnects -------------------------------------------------------------------------------------------------------


def cancelled_soon(make: Any, stream: Any) -> None:
    before = time.monotonic()
    make.wait_for(lambda: stream.cancelled, "the request is cancelled")
    assert time.monotonic() - before < 1.0


@pytest.mark.parametrize(("path", "body"), [(CHAT_PATH, STREAM), (CHAT_PATH, CHAT), (NATIVE_PATH, {"input": "Hi"})])
def test_a_disconnect_before_the_first_token_cancels(front: Any, make: Any, path: str, body: dict[str, Any]) -> None:
    client = front.connect(path, body)
    stream = front.stream()
    client.close()
    cancelled_soon(make, stream)


def test_a_disconnect_while_keepalives_are_sent_cancels(front: Any, make: Any) -> None:
    client = front.connect(CHAT_PATH, STREAM)
    client.read_until(b": keepalive")
    client.close()
    cancelled_soon(make, front.stream())


@pytest.mark.parametrize("body", [STREAM, CHAT])
def test_a_disconnect_between_tokens_cancels(front: Any, make: Any, body: dict[str, Any]) -> None:
    client = front.connect(CHAT_PATH, body)
    stream = front.stream()
    front.call(stream.push, make.token("Hi"))
    make.wait_for(lambda: stream.taken, "the token is taken")
    client.close()
    cancelled_soon(make, stream)


def test_a_disconnect_while_publishing_cancels_after_the_ack(front: Any, make: Any) -> None:
    front.dispatcher.hold = front.call(asyncio.Event)
    client = front.connect(CHAT_PATH, STREAM)
    stream = front.stream()
    client.close()
    make.wait_for(lambda: all(exchange._client_gone for exchange in front.context.open), "the disconnect is noticed")
    assert not stream.cancelled
    front.call(front.dispatcher.hold.set)
    cancelled_soon(make, stream)


def test_a_disconnect_within_the_body_is_no_request(front: Any, make: Any) -> None:
    client = front.connect(CHAT_PATH, CHAT)
    make.wait_for(lambda: front.dispatcher.streams, "the first request")
    client.socket.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 50\r\n\r\n{")
    front.call(front.stream().push, make.token("Hi", finish="stop"))
    front.call(front.stream().finish, USAGE)
    client.read_until(b'"usage"')
    make.wait_for(lambda: len(front.context.open) == 1, "the second request is being read")
    client.close()
    make.wait_for(lambda: not front.context.open, "it is given up")
    assert len(front.dispatcher.streams) == 1


# -- slow clients ------------------------------------------------------------------------------------------------------


def test_a_slow_reader_waits_alone_and_misses_nothing(front: Any, make: Any) -> None:
    many = 40_000
    with front.connect(NATIVE_PATH, NATIVE) as slow:
        stream = front.stream()
        front.call(stream.push, *(make.token(" word") for _ in range(many)))  # about 1.6 MB of events
        make.wait_for(lambda: stream.taken == many, "the relay has them")
        front.call(stream.push, make.token(" more"))
        front.dispatcher.answer = make.says("Hi")
        for _ in range(20):
            started = time.monotonic()
            assert front.post(CHAT_PATH, CHAT).status == 200
            assert time.monotonic() - started < 0.5
        front.call(stream.push, make.token("", finish="stop"))
        front.call(stream.finish, USAGE)
        slow.read_until(b"\r\n0\r\n\r\n")
    events = [json.loads(line[6:]) for line in slow.received.split(b"\n") if line.startswith(b"data: {")]
    assert [event["index"] for event in events[:-1]] == list(range(many + 2))
    assert events[-3]["token"] == " more"
    assert max(map(len, chunks(slow.received))) < 32 * 1024  # never the whole backlog in one piece


def test_a_relay_waits_for_its_reader(front: Any, make: Any) -> None:
    """What a reader leaves unread stays below what the socket and one write hold: the rest is not even encoded."""
    with front.connect(NATIVE_PATH, NATIVE):
        stream = front.stream()
        pushed = 0
        for _ in range(200):  # up to 16 MB: more than any socket buffer of this machine takes
            front.call(stream.push, *(make.token(" word" * 16) for _ in range(1_000)))
            pushed += 1_000
            if not taken_soon(stream, pushed):
                break
        assert stream.taken < pushed
    make.wait_for(lambda: stream.cancelled, "the disconnect is noticed while a write waits")


def taken_soon(stream: Any, count: int) -> bool:
    deadline = time.monotonic() + 0.3
    while time.monotonic() < deadline:
        if stream.taken >= count:
            return True
        time.sleep(0.002)
    return False


def test_stalled_clients_are_given_up(start_front: Callable[..., Any], make: Any) -> None:
    front = start_front(write_stall_s=0.3, request_read_s=0.3)
    reader = front.connect(NATIVE_PATH, NATIVE)
    stream = front.stream()
    writer = front.connect(CHAT_PATH, CHAT)  # a whole request, then one whose body does not come
    front.call(front.stream(1).push, make.token("Hi", finish="stop"))
    front.call(front.stream(1).finish, USAGE)
    writer.read_until(b'"usage"')
    writer.socket.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 50\r\n\r\n{")
    for _ in range(200):
        front.call(stream.push, *(make.token(" word" * 16) for _ in range(1_000)))
    make.wait_for(lambda: stream.cancelled, "the client that does not read is given up")
    writer.read_until(b'"code":"request_timeout"')
    assert b"HTTP/1.1 408 Request Timeout" in writer.received
    reader.close()
    writer.close()


# -- bodies ------------------------------------------------------------------------------------------------------------


def chunked(*pieces: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)


CHUNKED_HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"


def test_a_body_may_come_in_pieces(front: Any, make: Any) -> None:
    front.dispatcher.answer = make.says("Hi")
    data = json.dumps(CHAT).encode()
    with front.connect(CHAT_PATH, CHAT) as client:
        client.read_until(b'"usage"')
        client.received = b""
        client.socket.sendall(CHUNKED_HEAD + chunked(data[:10]))
        client.socket.sendall(chunked(data[10:11], data[11:]) + b"0\r\n\r\n")
        assert client.read_until(b'"usage"').startswith(b"HTTP/1.1 200 ")


def test_a_chunked_body_over_the_limit_is_refused_while_it_comes(front: Any) -> None:
    limit = front.settings.request_bytes_max
    with front.connect("/v1/none", {}) as client:
        client.read_until(b"not_found")
        client.received = b""
        client.socket.sendall(CHUNKED_HEAD)
        for _ in range(5):
            client.socket.sendall(chunked(b" " * 50_000))
        client.read_until(b'"code":"request_too_large"')
        assert client.received.startswith(b"HTTP/1.1 413 ")
        assert b"connection: close" in client.received
        assert b"%d bytes" % limit in client.received
        client.socket.sendall(b"0\r\n\r\n")
        client.read_to_end()


def test_a_large_body_is_refused_by_its_length_alone(front: Any) -> None:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 10000000\r\n\r\n"
    with front.connect("/v1/none", {}) as client:
        client.read_until(b"not_found")
        client.received = b""
        client.socket.sendall(head)
        client.read_until(b'"code":"request_too_large"')
        assert b"10000000 bytes" in client.received
        assert b"200000 bytes" in client.received


def test_a_client_that_sends_ten_megabytes_reads_its_refusal(front: Any) -> None:
    answer = front.post(CHAT_PATH, CHAT | {"user": "x" * 10_000_000})
    assert (answer.status, answer.error["code"]) == (413, "request_too_large")


def test_a_refusal_by_the_bus_keeps_the_connection(front: Any, make: Any) -> None:
    front.dispatcher.refusal = TooLarge("a request of 1000 bytes is over the limit of 900 bytes")
    connection = http.client.HTTPConnection("127.0.0.1", front.port, timeout=3)
    for status in (413, 413):
        connection.request("POST", CHAT_PATH, json.dumps(CHAT))
        response = connection.getresponse()
        assert (response.status, response.headers["connection"]) == (status, None)
        assert b"over the limit of 900 bytes" in response.read()
        make.wait_for(lambda: not front.context.open, "the exchange has ended")
    connection.close()


def test_a_bad_content_length_reaches_no_route(front: Any) -> None:
    with front.connect("/v1/none", {}) as client:
        client.read_until(b"not_found")
        client.received = b""
        client.socket.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: many\r\n\r\n")
        client.read_to_end()
        assert client.received.startswith(b"HTTP/1.1 400 ")


# -- draining ----------------------------------------------------------------------------------------------------------


def test_a_drain_lets_streams_finish(start_front: Callable[..., Any], make: Any) -> None:
    front = start_front(drain_budget_s=30, drain_linger_s=1.0)
    client = front.connect(CHAT_PATH, STREAM)
    stream = front.stream()
    front.call(stream.push, make.token("Hel"))
    client.read_until(b'"Hel"')
    kept = http.client.HTTPConnection("127.0.0.1", front.port, timeout=10)
    kept.request("GET", "/livez")
    assert kept.getresponse().read()
    front.stop()
    make.wait_for(lambda: front.context.draining, "the drain has begun")
    answer = front.http("GET", "/readyz")  # it still listens, for who has not noticed
    assert (answer.status, answer.json["status"]) == (503, "draining")
    assert answer.headers["connection"] == "close"
    make.wait_for(lambda: not listens(front.port), "no more connections are taken")
    kept.request("POST", CHAT_PATH, json.dumps(CHAT))
    late = front.stream(1)
    for each in (stream, late):
        front.call(each.push, make.token("lo", finish="stop"))
        front.call(each.finish, USAGE)
    response = kept.getresponse()  # what comes on an open connection is served, and is the last on it
    assert (response.status, response.headers["connection"]) == (200, "close")
    assert b'"content":"lo"' in response.read()
    assert client.read_to_end().endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    client.close()
    kept.close()
    front.join()


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_a_drain_ends_what_takes_too_long_with_an_error(start_front: Callable[..., Any], make: Any) -> None:
    front = start_front(drain_budget_s=0.2, head_hold_s=0.05)
    streamed, plain = front.connect(CHAT_PATH, STREAM), front.connect(CHAT_PATH, CHAT)
    streamed.read_until(b": keepalive")
    make.wait_for(lambda: len(front.dispatcher.streams) == 2, "both are submitted")
    front.stop()
    streamed.read_to_end()
    plain.read_to_end()
    assert b'"code":"draining"' in streamed.received
    assert b"[DONE]" not in streamed.received
    assert plain.received.startswith(b"HTTP/1.1 503 ")
    assert b'"code":"draining"' in plain.received
    assert all(stream.cancelled for stream in front.dispatcher.streams)
    for client in (streamed, plain):
        client.close()
    front.join()
