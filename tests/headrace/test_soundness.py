"""A server that runs and does not work any more is started again, once its disk has room."""

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from headrace.stack import servers, state, supervisor
from headrace.stack.plan import Plan
from headrace.stack.process import Command
from headrace.stack.state import StackState
from headrace.stack.supervisor import Supervisor
from shared.settings import Settings

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


def scenario(data: Path) -> None:
    """A server does not work while the disk is full; then there is room. What the supervisor says goes to stdout."""
    room = 0
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        print(line, flush=True)

    async def sound() -> bool:
        return restarts() > 0

    def restarts() -> int:
        found = state.read(data)
        return found.processes["server"].restarts if found and "server" in found.processes else 0

    supervisor.SOUND_EVERY_S = 0.02
    supervisor.shutil.disk_usage = lambda _path: type("Usage", (), {"free": room})  # type: ignore[assignment]
    server = Command(name="server", argv=SLEEP, env={}, sound=sound)
    plan = Plan(
        settings=Settings(drain_budget_s=0.1),
        servers=[server],
        processes=[],
        demo=replace(server, name="demo"),
        state=StackState(pid=0, started=0, http="", nats="", s3_endpoint="", s3_access_key="", s3_secret_key=""),
    )

    async def until(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < deadline, said
            await asyncio.sleep(0.01)

    async def main() -> None:
        nonlocal room
        with state.acquire(data) as lock:
            stack = Supervisor(data, lock, plan, say)
            running = asyncio.create_task(stack.run(False, lambda: None))
            await until(lambda: any("is full" in line for line in said))
            assert restarts() == 0
            room = 1 << 30
            await until(lambda: restarts() == 1)
            stack.stop()
            await running

    asyncio.run(main())


def test_a_server_is_started_again_once_there_is_room(tmp_path: Path) -> None:
    """In a process of its own: a supervisor ends every child of its process, and here those are the servers of other tests."""
    ran = subprocess.run(
        [sys.executable, __file__, str(tmp_path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.count("is full") == 1
    assert ran.stdout.count("there is room") == 1


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


if __name__ == "__main__":
    scenario(Path(sys.argv[1]))
