"""A bus, a dispatcher and real worker processes of a simulated model: the path below HTTP."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from shared import encoders, records, subjects, wire
from shared.bus import Bus
from shared.dispatch import Delta, Dispatcher, Stream
from shared.lifeline import die_with_parent
from shared.settings import Settings, to_environment


async def until(condition: Callable[[], object], budget_s: float = 15.0) -> None:
    deadline = time.monotonic() + budget_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        await asyncio.sleep(0.005)


class Fleet:
    """The version `m@v` of a simulated model with its workers, and a dispatcher that asks for it."""

    def __init__(self, settings: Settings, directory: Path, bus: Bus) -> None:
        self.settings, self.bus = settings, bus
        self.dispatcher = Dispatcher(bus, settings)
        self.workers: dict[str, subprocess.Popen[bytes]] = {}
        self._directory = directory

    def spawn(self, warm: bool = False, device: str = "") -> str:
        """Start a worker, with the model or without one; its id."""
        worker = f"w{len(self.workers) + 1}"
        command = [sys.executable, "-m", "workers.main", "--worker-id", worker]
        command += [] if warm else ["--model", "m", "--version", "v"]
        with open(self._directory / f"{worker}.log", "wb") as log:
            self.workers[worker] = subprocess.Popen(
                command,
                env=os.environ | to_environment(self.settings) | {"HEADRACE_DEVICE": device},
                stdout=log,
                stderr=log,
                preexec_fn=die_with_parent(),
            )
        return worker

    def log(self, worker: str) -> str:
        return (self._directory / f"{worker}.log").read_text()

    async def lease(self, worker: str) -> records.Lease | None:
        found = await self.bus.kv_get(subjects.WORKERS_BUCKET, worker)
        return None if found is None else records.decode_lease(found[0])

    async def active(self, worker: str) -> None:
        """Wait until the worker claims."""
        await self.becomes(worker, "active")

    async def becomes(self, worker: str, state: str) -> records.Lease:
        """Wait until the worker's lease says so."""
        deadline = time.monotonic() + 30
        while (lease := await self.lease(worker)) is None or lease.state != state:
            assert time.monotonic() < deadline, self.log(worker)
            await asyncio.sleep(0.02)
        return lease

    async def assign(self, worker: str, claim: bool, term: int = 1, version: str = "v") -> None:
        assign = wire.encode(wire.Assign("m", version, claim, term))
        await self.bus.publish(subjects.worker_assign(worker), assign)

    async def exit_status(self, worker: str) -> int:
        return await asyncio.to_thread(self.workers[worker].wait, 20)

    async def idle(self) -> None:
        """Wait until nothing is queued and every lease shows nothing held."""
        deadline = time.monotonic() + 15
        while True:
            held = 0
            for worker, process in self.workers.items():
                lease = await self.lease(worker) if process.poll() is None else None
                held += 0 if lease is None else lease.claims + lease.running + lease.waiting + lease.blocks_used
            messages = (await self.bus.stream_info(subjects.REQ_STREAM)).messages
            if held + messages == 0:
                return
            assert time.monotonic() < deadline, f"{messages} messages are queued, leases show {held} things held"
            await asyncio.sleep(0.05)

    async def submit(self, prompt: str = "hello there", **sampling: Any) -> Stream:
        sampling = {"max_tokens": 40, "temperature": 0.0} | sampling
        request = wire.Request(wire.new_id(), "m", "v", wire.Input(prompt=prompt), wire.Sampling(**sampling))
        return await self.dispatcher.submit(request, subjects.LOCAL_TENANT)


async def read(stream: Stream) -> list[Delta]:
    """All of a stream."""
    deltas: list[Delta] = []
    try:
        while True:
            deltas += await stream.next(30)
    except StopAsyncIteration:
        return deltas


def text_of(deltas: list[Delta], choice: int = 0) -> str:
    return "".join(delta.text for delta in deltas if delta.choice == choice)


@pytest.fixture
def run_fleet(nats_server: Any, tmp_path: Path) -> Callable[..., None]:
    """`run_fleet(work, source="sim:zero", engine=..., **settings)`: run `work(fleet)`; nothing of it outlives that."""

    def run(
        work: Callable[[Fleet], Awaitable[None]],
        source: str = "sim:zero",
        engine: records.EngineSettings | None = None,
        **overrides: Any,
    ) -> None:
        settings = Settings(**{"nats_url": nats_server.url, "data_dir": str(tmp_path), **overrides})

        async def main() -> None:
            bus = await Bus.connect(settings, "test")
            await bus.ensure()
            version = records.Version(
                model="m",
                version="v",
                state="available",
                source=source,
                engine=engine or records.EngineSettings(),
                encoder=encoders.simulated(source),
            )
            await bus.kv_put(subjects.MODELS_BUCKET, subjects.key("m", "v"), records.encode(version))
            await bus.ensure_consumer("m", "v", subjects.LANE_FAST)
            fleet = Fleet(settings, tmp_path, bus)
            await fleet.dispatcher.start()
            try:
                await work(fleet)
            finally:
                await fleet.dispatcher.close()
                for process in fleet.workers.values():
                    process.kill()
                    process.wait()
                await bus.close()

        asyncio.run(main())

    return run
