"""Real servers for every test: nats-server and SeaweedFS from their wheels, on free ports, ended with the test run."""

import asyncio
import secrets
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from headrace.stack import ports, servers
from shared.lifeline import die_with_parent
from shared.settings import Settings


class RunningServer:
    """A server of the local stack under a test's control; `start` after `kill` comes back on the same port."""

    def __init__(self, server: servers.Server, ready: Callable[[str], Awaitable[bool]], sockets: list[Path]) -> None:
        self.server = server
        self.url = server.url
        self._ready = ready
        self._sockets = sockets
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self, budget_s: float = 20.0) -> None:
        """Start the server and wait until it answers."""
        with open(Path(self.server.directory) / "server.log", "ab") as log:
            self._process = subprocess.Popen(
                self.server.argv,
                cwd=self.server.directory,
                env=servers.environment(self.server),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=die_with_parent(),
            )
        deadline = time.monotonic() + budget_s
        while not asyncio.run(self._answers()):
            assert self._process.poll() is None, f"{self.server.name} ended: {log.name}"
            assert time.monotonic() < deadline, f"{self.server.name} does not answer: {log.name}"
            time.sleep(0.02)

    async def _answers(self) -> bool:
        return await self._ready(self.url)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, SIGSTOP and SIGCONT for instance."""
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)
            self._process = None
        for socket in self._sockets:
            socket.unlink(missing_ok=True)


def _start_nats(directory: Path) -> RunningServer:
    return RunningServer(servers.nats(directory, ports.free_ports(1)[0]), servers.nats_ready, [])


def _start_objects(directory: Path, access_key: str, secret_key: str) -> RunningServer:
    chosen = servers.ObjectPorts(*ports.free_ports(5))
    server = servers.objects(directory, chosen, access_key, secret_key)
    return RunningServer(server, servers.s3_ready, servers.object_sockets(chosen))


@pytest.fixture(scope="session")
def nats_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A nats-server with JetStream that the whole run shares: use names of your own in it, and never stop it."""
    server = _start_nats(tmp_path_factory.mktemp("nats"))
    yield server.url
    server.kill()


@pytest.fixture
def nats_server(tmp_path: Path) -> Iterator[RunningServer]:
    """A nats-server of this test alone: empty, with `url`, `kill()`, `start()` (same port and store) and `signal()`."""
    server = _start_nats(tmp_path / "nats")
    yield server
    server.kill()


@pytest.fixture(scope="session")
def s3_settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Settings]:
    """Settings that reach a SeaweedFS which the whole run shares; the bucket is not made yet. Never stop it."""
    access_key, secret_key = secrets.token_hex(10), secrets.token_hex(20)
    server = _start_objects(tmp_path_factory.mktemp("objects"), access_key, secret_key)
    yield Settings(s3_endpoint=server.url, s3_access_key=access_key, s3_secret_key=secret_key)
    server.kill()


@pytest.fixture
def object_server(tmp_path: Path) -> Iterator[tuple[RunningServer, Settings]]:
    """A SeaweedFS of this test alone, with the settings that reach it."""
    access_key, secret_key = secrets.token_hex(10), secrets.token_hex(20)
    server = _start_objects(tmp_path / "objects", access_key, secret_key)
    yield server, Settings(s3_endpoint=server.url, s3_access_key=access_key, s3_secret_key=secret_key)
    server.kill()
