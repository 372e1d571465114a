"""One attempt goes to the address that was checked, or nowhere, whatever name servers and receivers do."""

import asyncio
import socket
import ssl
import threading
import time
from collections.abc import Coroutine
from email.utils import formatdate
from typing import Any

import pytest

from controller.webhook_sender import Attempt, Refused, Resolver, Sender
from shared.settings import Settings

from .webhook_receiver import OK, Received, receiving, status

HEADERS = {"webhook-id": "evt_1"}
NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # to read the system's authorities takes a while
LOOPBACK = Settings(webhook_private_hosts="*", webhook_answer_s=5.0)


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


async def post(url: str, settings: Settings = LOOPBACK, **of_sender: Any) -> Attempt:
    sender = Sender(settings, **{"context": NO_TLS} | of_sender)
    try:
        return await sender.post(url, HEADERS, b'{"a": 1}')
    finally:
        await sender.close()


class Names:
    """A name server: each look-up gets the next answer, the last one again and again."""

    def __init__(self, *answers: list[str]) -> None:
        self.answers, self.asked = list(answers), []  # type: ignore[var-annotated]

    async def resolve(self, host: str, port: int) -> list[str]:
        self.asked.append((host, port))
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


def test_a_post_arrives_as_it_was_signed() -> None:
    async def work() -> None:
        async with receiving() as receiver:
            assert await post(receiver.url) == Attempt(status=200)
            (got,) = receiver.received
            assert got.line == "POST /hook?a=b HTTP/1.1"
            assert (got.body, got.id) == (b'{"a": 1}', "evt_1")
            assert got.headers["host"] == f"127.0.0.1:{receiver.port}"
            assert got.headers["content-type"] == "application/json"

    run(work())


def test_the_connection_is_to_the_address_and_the_head_has_the_name() -> None:
    async def work() -> None:
        names = Names(["127.0.0.1"])
        async with receiving() as receiver:
            url = f"http://hooks.example:{receiver.port}/x"
            assert not (await post(url, resolve=names.resolve)).error
            assert receiver.received[0].headers["host"] == f"hooks.example:{receiver.port}"
            assert names.asked == [("hooks.example", receiver.port)]

    run(work())


@pytest.mark.parametrize(
    "addresses",
    [
        ["127.0.0.1"],
        ["::1"],
        ["::ffff:127.0.0.1"],
        ["10.0.0.7"],
        ["169.254.169.254"],
        ["64:ff9b::a9fe:a9fe"],
        ["0.0.0.0"],
        ["fe80::1%lo"],
        ["8.8.8.8", "127.0.0.1"],
        ["127.0.0.1", "8.8.8.8"],
    ],
)
def test_a_name_with_an_address_that_is_not_public_is_refused(addresses: list[str]) -> None:
    async def work() -> None:
        async with receiving() as receiver:
            url = f"http://hooks.example:{receiver.port}/"
            attempt = await post(url, Settings(webhook_connect_s=0.2), resolve=Names(addresses).resolve)
            assert "an address that nothing is sent to" in attempt.error
            assert receiver.connections == 0

    run(work())


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "127.1", "0x7f000001", "2130706433", "[::ffff:7f00:1]", "0"]
)
def test_the_loopback_is_refused_however_it_is_spelt(host: str) -> None:
    async def work() -> None:
        async with receiving() as receiver:
            attempt = await post(f"http://{host}:{receiver.port}/", Settings(webhook_private_hosts="hooks.internal"))
            assert attempt.error
            assert receiver.connections == 0

    run(work())


def test_hosts_that_are_named_may_be_private() -> None:
    async def work() -> None:
        async with receiving() as receiver:
            settings = Settings(webhook_private_hosts="hooks.internal, 127.0.0.1")
            assert not (await post(receiver.url, settings)).error
            names = Names(["127.0.0.1"])
            assert not (await post(f"http://hooks.internal:{receiver.port}/", settings, resolve=names.resolve)).error
            assert (await post(f"http://other.internal:{receiver.port}/", settings, resolve=names.resolve)).error

    run(work())


def test_a_name_that_is_bound_anew_gains_nothing() -> None:
    """What was checked is what is connected to: there is no second look-up that could say something else."""

    async def work() -> None:
        names = Names(["8.8.8.8"], ["127.0.0.1"])
        async with receiving() as receiver:
            settings = Settings(webhook_connect_s=0.2, webhook_answer_s=1.0)
            url = f"http://hooks.example:{receiver.port}/"
            assert (await post(url, settings, resolve=names.resolve)).error
            assert len(names.asked) == 1
            assert "an address that nothing is sent to" in (await post(url, settings, resolve=names.resolve)).error
            assert receiver.connections == 0

    run(work())


def test_the_next_address_is_tried_where_nobody_listens() -> None:
    async def work() -> None:
        async with receiving() as receiver:
            names = Names(["127.0.0.2", "127.0.0.1"])
            assert not (await post(f"http://hooks.example:{receiver.port}/", resolve=names.resolve)).error
            names = Names(["127.0.0.2", "127.0.0.3", "127.0.0.4", "127.0.0.5", "127.0.0.1"])
            attempt = await post(f"http://hooks.example:{receiver.port}/", resolve=names.resolve)
            assert attempt.error.startswith("ConnectError")

    run(work())


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
def test_redirects_are_not_followed(code: int) -> None:
    async def work() -> None:
        async with (
            receiving() as elsewhere,
            receiving(status(code, f"location: {elsewhere.url}", "set-cookie: a=b")) as receiver,
        ):
            assert await post(receiver.url) == Attempt(error=f"status {code}", status=code)
            assert (receiver.connections, elsewhere.connections) == (1, 0)

    run(work())


def test_nothing_of_the_environment_and_of_an_earlier_answer_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async with receiving() as proxy, receiving(status(200, "set-cookie: a=b")) as receiver:
            for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
                monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.port}")
            sender = Sender(LOOPBACK)
            for _ in range(2):
                assert not (await sender.post(receiver.url, HEADERS, b"{}")).error
            await sender.close()
            assert (proxy.connections, receiver.connections) == (0, 2)
            assert "cookie" not in receiver.received[1].headers

    run(work())


def test_a_receiver_that_says_nothing_is_given_up_in_time() -> None:
    async def silent(_: Received, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(30)

    async def work() -> None:
        async with receiving(silent) as receiver:
            settings = Settings(webhook_private_hosts="*", webhook_answer_s=0.3)
            assert await post(receiver.url, settings) == Attempt(error="no answer within 0.3 s")

    run(work())


def test_a_receiver_that_says_it_byte_by_byte_is_given_up_in_time() -> None:
    async def slow(_: Received, writer: asyncio.StreamWriter) -> None:
        for byte in OK * 100:
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0.05)

    async def work() -> None:
        async with receiving(slow) as receiver:
            settings = Settings(webhook_private_hosts="*", webhook_answer_s=0.5)
            assert await post(receiver.url, settings) == Attempt(error="no answer within 0.5 s")

    run(work())


def test_of_a_body_without_an_end_nothing_is_read() -> None:
    sent = 0

    async def endless(_: Received, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        while True:
            writer.write(b"10000\r\n" + bytes(65536) + b"\r\n")
            await writer.drain()
            sent += 65536

    async def work() -> None:
        async with receiving(endless) as receiver:
            assert await post(receiver.url) == Attempt(status=200)
        assert sent < 64 << 20

    run(work())


@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/1.1 200 OK\r\n" + b"a: " + b"x" * (1 << 20),
        b"not http at all\r\n\r\n",
        b"HTTP/1.1 999999 OK\r\n\r\n",
        b"",
        b"\x00" * 4096,
    ],
)
def test_an_answer_that_is_none_is_an_error(raw: bytes) -> None:
    async def answer(_: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(raw)

    async def work() -> None:
        async with receiving(answer) as receiver:
            assert (await post(receiver.url)).error

    run(work())


def test_what_a_receiver_asks_for_is_told() -> None:
    async def asked(code: int, *headers: str) -> Attempt:
        async with receiving(status(code, *headers)) as receiver:
            return await post(receiver.url)

    async def work() -> None:
        assert (await asked(503, "retry-after: 17")).retry_after_s == 17.0
        later = await asked(429, f"retry-after: {formatdate(time.time() + 100, usegmt=True)}")
        assert 80 < later.retry_after_s <= 100
        assert (await asked(429, "retry-after: soon")).retry_after_s == 0.0
        assert (await asked(503, "retry-after: -5")).retry_after_s == 0.0
        assert (await asked(500, "retry-after: 17")).retry_after_s == 0.0
        assert (await asked(410)).is_gone
        assert not (await asked(404)).is_gone
        assert not (await asked(204)).error

    run(work())


def test_names_that_are_none_are_errors() -> None:
    async def work() -> None:
        for url in ("http://no-such-host.invalid/", f"http://{'a' * 70}.example/", "http://a..b/", "http://%00/"):
            assert (await post(url)).error

    run(work())


def test_look_ups_that_do_not_end_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    held, known = threading.Event(), socket.getaddrinfo

    def slow(host: str, *arguments: Any, **options: Any) -> Any:
        if host == "slow.example":
            held.wait(30)
        return known("127.0.0.1", *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", slow)

    async def work() -> None:
        resolver = Resolver(2)
        for _ in range(2):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await resolver.resolve("slow.example", 80)
        with pytest.raises(Refused, match="2 names"):
            await resolver.resolve("fast.example", 80)
        held.set()
        async with asyncio.timeout(10):
            while True:
                try:
                    assert await resolver.resolve("fast.example", 80) == ["127.0.0.1"]
                    break
                except Refused:
                    await asyncio.sleep(0.01)

    run(work())


def test_certificates_are_verified_for_the_name(certificates: Any) -> None:
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(*certificates.server)
    trusting = ssl.create_default_context(cafile=certificates.ca)

    async def work() -> None:
        names = Names(["127.0.0.1"])
        async with receiving(ssl=server) as receiver:

            async def attempt(host: str, context: ssl.SSLContext | None) -> Attempt:
                return await post(f"https://{host}:{receiver.port}/", resolve=names.resolve, context=context)

            assert not (await attempt("localhost", trusting)).error
            assert not (await attempt("127.0.0.1", trusting)).error
            assert "CERTIFICATE_VERIFY_FAILED" in (await attempt("other.example", trusting)).error
            assert "CERTIFICATE_VERIFY_FAILED" in (await attempt("localhost", None)).error
            assert len(receiver.received) == 2

    run(work())
