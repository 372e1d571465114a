"""TLS of the connections to NATS and to the object store, with real servers that ask for it."""

import asyncio
import http.server
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from headrace.stack import ports, servers
from shared import tls
from shared.bus import Bus
from shared.errors import ObjectsUnavailable
from shared.objects import ObjectStore
from shared.settings import Settings, SettingsError

REFUSED_WITHIN_S = 1.0


@pytest.fixture(scope="module")
def secured_nats(
    start_server: Callable[..., Any], certificates: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    """A nats-server that speaks TLS only, to clients that show a certificate of the authority."""
    directory = tmp_path_factory.mktemp("secured-nats")
    server = servers.nats(directory, ports.free_ports(1)[0])
    cert, key = certificates.server
    secured = f'tls {{ cert_file: "{cert}", key_file: "{key}", ca_file: "{certificates.ca}", verify: true }}\n'
    config = directory / "nats.conf"
    config.write_text(config.read_text().replace("127.0.0.1", "0.0.0.0") + secured)  # it has more than one name
    running = start_server(server, servers.nats_ready, [])
    yield running
    running.kill()


@pytest.fixture
def settings(secured_nats: Any, certificates: Any) -> Settings:
    cert, key = certificates.client
    url = secured_nats.url.replace("nats://", "tls://")
    return Settings(nats_url=url, nats_tls_ca=certificates.ca, nats_tls_cert=cert, nats_tls_key=key)


def connects(settings: Settings) -> BaseException | None:
    """What comes of a connection that stores and reads something; None: all went well."""

    async def main() -> None:
        async with asyncio.timeout(REFUSED_WITHIN_S):
            bus = await Bus.connect(settings, "test")
        await bus.ensure()
        await bus.kv_put("tenants", "a", b"1")
        assert await bus.kv_get("tenants", "a") is not None
        await bus.close()

    try:
        asyncio.run(main())
    except (OSError, SettingsError) as error:  # TimeoutError is one
        return error
    return None


def test_nats_over_tls_with_certificates_on_both_sides(settings: Settings) -> None:
    assert connects(settings) is None
    assert connects(replace(settings, nats_url=settings.nats_url.replace("127.0.0.1", "localhost"))) is None


def test_nothing_goes_to_a_server_of_another_authority_or_name(settings: Settings, certificates: Any) -> None:
    assert isinstance(connects(replace(settings, nats_tls_ca=certificates.other_ca)), TimeoutError)
    assert isinstance(connects(replace(settings, nats_tls_ca="")), TimeoutError)
    another_name = settings.nats_url.replace("127.0.0.1", "127.0.0.2")
    assert isinstance(connects(replace(settings, nats_url=another_name)), TimeoutError)


def test_a_client_without_a_certificate_is_refused(settings: Settings) -> None:
    assert isinstance(connects(replace(settings, nats_tls_cert="", nats_tls_key="")), TimeoutError)


def test_a_server_without_tls_gets_nothing_from_who_was_told_tls(settings: Settings, nats_url: str) -> None:
    async def main() -> tuple[bytes, BaseException | None]:
        """What a server reads that offers no TLS: as one in the middle would, to hear what is said."""
        heard = b""

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal heard
            writer.write(b'INFO {"server_id":"x","version":"2.15.1","max_payload":1048576,"proto":1}\r\n')
            heard += await reader.read()
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        told: BaseException | None = None
        try:
            async with asyncio.timeout(1.0):
                await Bus.connect(replace(settings, nats_url=f"tls://127.0.0.1:{port}"), "test")
        except TimeoutError as error:
            told = error
        server.close()
        return heard, told

    heard, told = asyncio.run(main())
    assert heard == b""
    assert isinstance(told, TimeoutError)
    assert isinstance(connects(replace(settings, nats_url=nats_url.replace("nats://", "tls://"))), TimeoutError)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"nats_tls_key": ""}, "nats_tls_cert is set and nats_tls_key is not"),
        ({"nats_tls_cert": ""}, "nats_tls_key is set and nats_tls_cert is not"),
        ({"nats_tls_ca": "/nonexistent.pem"}, "nats_tls_ca: /nonexistent.pem"),
        ({"nats_tls_cert": "/nonexistent.pem"}, "nats_tls_cert and nats_tls_key"),
        ({"nats_url": "tls://a:1,nats://b:1"}, "all of them, or none"),
        ({"nats_url": "nats://a:1"}, "begins with tls://"),
    ],
)
def test_settings_that_do_not_fit_are_named(settings: Settings, changed: dict[str, str], named: str) -> None:
    error = connects(msgspec.structs.replace(settings, **changed))
    assert isinstance(error, SettingsError)
    assert named in str(error)


def test_a_key_that_is_not_the_certificates_is_refused(certificates: Any) -> None:
    with pytest.raises(SettingsError, match="http_tls_cert and http_tls_key"):
        tls.load_pair(ssl.create_default_context(), certificates.server[0], certificates.client[1], "http_tls")


class _Store(http.server.BaseHTTPRequestHandler):
    """An S3 server as far as asking for an object goes."""

    def do_HEAD(self) -> None:
        self.send_response(200)
        self.send_header("content-length", "5")
        self.send_header("last-modified", "Mon, 01 Jan 2024 00:00:00 GMT")
        self.end_headers()

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-length", "5")
        self.end_headers()
        self.wfile.write(b"hello")

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def https_store(certificates: Any, tmp_path: Path) -> Iterator[Settings]:
    """Settings of a store that is reached by https."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Store)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificates.server)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    keys = {"s3_access_key": "a", "s3_secret_key": "s"}
    yield Settings(s3_endpoint=f"https://127.0.0.1:{server.server_port}", s3_tls_ca=certificates.ca, **keys)
    server.shutdown()
    thread.join()
    server.server_close()


def test_objects_over_https_of_a_known_authority_only(https_store: Settings, certificates: Any) -> None:
    assert ObjectStore(https_store).get("k") == b"hello"
    assert ObjectStore(https_store).stat("k").size == 5
    for ca in (certificates.other_ca, ""):
        with pytest.raises(ObjectsUnavailable, match="SSL"):
            ObjectStore(replace(https_store, s3_tls_ca=ca)).get("k")
