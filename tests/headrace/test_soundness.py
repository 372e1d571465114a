"""A server that runs and does not work any more is started again, once its disk has room."""

import asyncio
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from headrace.stack import servers, state, supervisor
from headrace.stack.plan import Plan
from headrace.stack.process import Command
from headrace.stack.state import StackState
from headrace.stack.supervisor import Supervisor
from shared.settings import Settings

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


def test_a_server_is_started_again_once_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "SOUND_EVERY_S", 0.02)
    said: list[str] = []
    room = 0

    async def sound() -> bool:
        return restarts() > 0

    def restarts() -> int:
        found = state.read(tmp_path)
        return found.processes["server"].restarts if found and "server" in found.processes else 0

    monkeypatch.setattr(supervisor.shutil, "disk_usage", lambda _path: type("Usage", (), {"free": room}))
    server = Command(name="server", argv=SLEEP, env={}, sound=sound)
    plan = Plan(
        settings=Settings(drain_budget_s=0.1),
        servers=[server],
        processes=[],
        demo=replace(server, name="demo"),
        state=StackState(pid=0, started=0, http="", nats="", s3_endpoint="", s3_access_key="", s3_secret_key=""),
    )

    async def until(condition: Any) -> None:
        deadline = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < deadline, said
            await asyncio.sleep(0.01)

    async def main() -> None:
        nonlocal room
        with state.acquire(tmp_path) as lock:
            stack = Supervisor(tmp_path, lock, plan, said.append)
            running = asyncio.create_task(stack.run(False, lambda: None))
            await until(lambda: any("is full" in line for line in said))
            assert restarts() == 0
            room = 1 << 30
            await until(lambda: restarts() == 1)
            stack.stop()
            await running

    asyncio.run(main())
    assert len([line for line in said if "is full" in line]) == 1
    assert len([line for line in said if "there is room" in line]) == 1


def test_a_nats_server_tells_how_it_is(tmp_path: Path) -> None:
    async def main() -> None:
        assert await servers.nats_sound(1)  # nobody answers there: that is for others to see
        served = await asyncio.start_server(unavailable, "127.0.0.1", 0)
        async with served:
            assert not await servers.nats_sound(served.sockets[0].getsockname()[1])

    async def unavailable(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n")
        await writer.drain()
        writer.close()

    asyncio.run(main())
    monitored = servers.nats(tmp_path / "monitored", 15_001, 15_002)
    assert 'http: "127.0.0.1:15002"' in (Path(monitored.directory) / "nats.conf").read_text()
