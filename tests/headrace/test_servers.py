"""`headrace server`: the Procfile's lines for runners other than the supervisor."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import typer

from headrace import cli
from headrace.stack import ports, servers
from shared.lifeline import die_with_parent
from shared.objects import ObjectStore
from shared.settings import Settings, to_environment

ROOT = Path(__file__).parents[2]


def test_the_procfile_holds_the_lines_of_the_stack() -> None:
    lines = (ROOT / "Procfile").read_text().splitlines()
    assert [line.partition(": ")[0] for line in lines] == ["nats", "objects", "redis", "ingress", "controller"]
    commands = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]
    for line in lines:
        program, command, *_ = line.partition(": ")[2].split()
        assert program == "headrace"
        assert command in commands


def test_servers_start_where_the_settings_say(tmp_path: Path) -> None:
    nats_port, s3_port, redis_port = ports.free_ports(3)
    settings = Settings(
        data_dir=str(tmp_path),
        nats_url=f"nats://127.0.0.1:{nats_port}",
        s3_endpoint=f"http://127.0.0.1:{s3_port}",
        redis_url=f"redis://127.0.0.1:{redis_port}",
    )
    with serving("redis", settings, servers.redis_ready, settings.redis_url):
        assert (tmp_path / "redis").is_dir()
    with serving("nats", settings, servers.nats_ready, settings.nats_url):
        assert (tmp_path / "nats" / "jetstream").is_dir()
    with serving("objects", settings, servers.s3_ready, settings.s3_endpoint):
        store = ObjectStore(settings)  # without keys, as a Procfile runner has none
        store.ensure_bucket()
        store.put("key", b"value")
        assert store.get("key") == b"value"


@contextmanager
def serving(name: str, settings: Settings, ready: Callable[[str], Awaitable[bool]], url: str) -> Iterator[None]:
    async def until_ready() -> None:
        deadline = time.monotonic() + 20
        while not await ready(url):
            assert process.poll() is None
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)

    with open(settings.data_path / f"{name}.log", "wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "headrace", "server", name],
            env=os.environ | to_environment(settings),
            stdout=log,
            stderr=subprocess.STDOUT,
            preexec_fn=die_with_parent(),
        )
    try:
        asyncio.run(until_ready())
        yield
    finally:
        arguments = Path(f"/proc/{process.pid}/cmdline").read_text().split("\0")
        process.kill()
        process.wait()
        for argument in arguments:
            if ".port=" in argument:
                port = int(argument.partition("=")[2]) + ports.GRPC_OFFSET
                for path in Path("/tmp").glob(f"seaweedfs-*-grpc-{port}.sock"):
                    path.unlink()
