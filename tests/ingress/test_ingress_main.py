"""The process: its address, and its life with a real NATS."""

import asyncio
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ingress.listening import bind
from ingress.main import check_address
from shared import records, subjects
from shared.bus import Bus
from shared.settings import Settings, SettingsError, to_environment


@pytest.mark.parametrize(
    ("host", "insecure", "allowed"),
    [
        ("127.0.0.1", False, True),
        ("127.8.9.1", False, True),
        ("localhost", False, True),
        ("::1", False, True),
        ("0.0.0.0", False, False),
        ("::", False, False),
        ("10.0.0.5", False, False),
        ("example.com", False, False),
        ("0.0.0.0", True, True),
        ("example.com", True, True),
    ],
)
def test_other_hosts_are_let_in_only_on_purpose(host: str, insecure: bool, allowed: bool) -> None:
    settings = Settings(http_host=host, insecure=insecure)
    if allowed:
        check_address(settings)
        return
    with pytest.raises(SettingsError, match=r"HEADRACE_REQUIRE_KEYS.*HEADRACE_INSECURE"):
        check_address(settings)
    check_address(Settings(http_host=host, require_keys=True))


def test_a_taken_port_is_named() -> None:
    with bind(Settings(http_port=0)) as bound:
        bound.listen()
        port = bound.getsockname()[1]
        with pytest.raises(SettingsError, match=f"port {port}"):
            bind(Settings(http_port=port))


class Process:
    """An ingress process, spoken to over HTTP."""

    def __init__(self, nats_url: str, log: Any) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.settings = Settings(nats_url=nats_url, http_port=port, head_hold_s=0.1, keepalive_s=0.2, drain_budget_s=1)
        self.process = subprocess.Popen(
            [sys.executable, "-c", "from ingress.main import main; from shared.settings import load; main(load())"],
            env=os.environ | to_environment(self.settings),
            stderr=log,
        )

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.settings.http_port, timeout=10)

    def get(self, path: str) -> tuple[int, Any]:
        connection = self.connect()
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        except OSError:
            return 0, None
        finally:
            connection.close()

    def ask(self, model: str) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """A stream whose head has come; close both."""
        connection = self.connect()
        connection.request("POST", f"/v1/models/{model}/infer", json.dumps({"input": "Hi", "stream": True}))
        return connection, connection.getresponse()


@pytest.fixture
def process(nats_server: Any, tmp_path: Any) -> Iterator[Process]:
    with open(tmp_path / "ingress.log", "wb") as log:
        process = Process(nats_server.url, log)
        yield process
        process.process.kill()
        process.process.wait()


def test_the_life_of_a_process(process: Process, nats_server: Any, make: Any) -> None:
    wait_for: Callable[..., Any] = make.wait_for
    with asyncio.Runner() as runner:
        wait_for(lambda: process.get("/readyz")[0] == 200, "the process is ready")
        bus = runner.run(Bus.connect(process.settings, "test"))

        def put(bucket: str, key: str, record: Any) -> None:
            runner.run(bus.kv_put(bucket, key, records.encode(record)))

        def stored() -> int:
            return runner.run(bus.stream_info(subjects.REQ_STREAM)).messages

        # records arrive while it runs; one that cannot be read changes nothing
        put(subjects.MODELS_BUCKET, subjects.key("a/b", "v1"), make.version(model="a/b"))
        put(subjects.ROUTES_BUCKET, subjects.key("a/b"), make.route(("v1", 10_000), model="a/b"))
        runner.run(bus.kv_put(subjects.ROUTES_BUCKET, subjects.key("a/b"), b"{"))
        wait_for(lambda: process.get("/v1/models/a/b")[0] == 200, "the model is known")

        # nobody serves it: the request parks, and is deleted when its client leaves
        connection, response = process.ask("a%2Fb")
        assert (response.status, response.readline()) == (200, b": keepalive\n")
        assert stored() == 1
        response.close()
        connection.close()
        wait_for(lambda: stored() == 0, "the parked request is deleted")

        # a parked request ends with the reason when its version fails
        connection, response = process.ask("a%2Fb")
        failed = make.version(model="a/b", state="failed", reason="weights are corrupt")
        put(subjects.MODELS_BUCKET, subjects.key("a/b", "v1"), failed)
        told = wait_for(lambda: (line := response.readline()).startswith(b"data:") and line, "the error event")
        assert b'"code":"version_failed"' in told
        assert b"weights are corrupt" in told
        assert response.read() == b"\n"
        connection.close()
        runner.run(bus.kv_delete(subjects.MODELS_BUCKET, subjects.key("a/b", "v1")))
        wait_for(lambda: process.get("/v1/models/a/b")[0] == 404, "the model is gone")

        # without NATS it lives but is not ready; with NATS it is again
        nats_server.kill()
        wait_for(lambda: process.get("/readyz")[0] == 503, "not ready without NATS")
        assert process.get("/livez")[0] == 200
        nats_server.start()
        wait_for(lambda: process.get("/readyz")[0] == 200, "ready again")
        put(subjects.MODELS_BUCKET, subjects.key("c", "v1"), make.version(model="c"))
        wait_for(lambda: process.get("/v1/models/c")[0] == 200, "changes arrive again")

        process.process.send_signal(signal.SIGTERM)
        assert process.process.wait(5) == 0
        runner.run(bus.close())
