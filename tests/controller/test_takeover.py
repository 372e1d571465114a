"""Controllers that die at every point of what they do, and that are stopped: the next one goes on, and nothing is twice."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from shared import records, subjects
from shared.bus import Bus
from shared.records import Lease, Version, VersionLimits
from shared.settings import Settings

from .processes import STARTED, Process

UP = ("observed", "to_start", "started", "to_assign", "assigned")
DOWN = ("to_drain", "drained")


class World:
    """Controllers as processes, one model, and what can be seen of their workers."""

    def __init__(self, bus: Bus, settings: Settings, log: Path) -> None:
        self.bus, self.settings, self.log = bus, settings, log
        self.leases: dict[str, Lease] = {}
        self.controllers: list[Process] = []

    def on_lease(self, key: str, value: bytes | None) -> None:
        self.leases.pop(key, None)
        if value is not None:
            self.leases[key] = records.lease_at(key, value)

    def controller(self, fault_point: str = "") -> Process:
        self.controllers.append(Process(self.settings, self.log, fault_point))
        return self.controllers[-1]

    async def want(self, replicas: int) -> None:
        limits = VersionLimits(min_replicas=replicas, idle_seconds=0.0)
        state = "registered" if await self.bus.kv_get(subjects.MODELS_BUCKET, "chat.v1") is None else "available"
        record = Version(model="chat", version="v1", state=state, source="sim:zero", limits=limits)
        await self.bus.kv_put(subjects.MODELS_BUCKET, "chat.v1", records.encode(record))

    def states(self) -> list[tuple[str, str]]:
        return sorted((lease.model, lease.state) for lease in self.leases.values())

    def processes(self) -> list[int]:
        """The pids of the live workers that were started here; a zombie has no arguments."""
        mark = f"HEADRACE_DATA_DIR={self.settings.data_dir}\0".encode()
        found = []
        for entry in Path("/proc").glob("[0-9]*/environ"):
            try:
                if mark in entry.read_bytes() and b"--worker-id" in (entry.parent / "cmdline").read_bytes():
                    found.append(int(entry.parent.name))
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
        return found

    async def settled(self, *states: tuple[str, str]) -> None:
        """Wait until the leases say so and there is no process besides."""
        try:
            await until(lambda: self.states() == sorted(states) and len(self.processes()) == len(states))
        except TimeoutError:
            pytest.fail(f"{self.states()}, {self.processes()}\n{self.log.read_text()}")


async def until(condition: Callable[[], Any], budget_s: float = 20.0) -> None:
    async with asyncio.timeout(budget_s):
        while True:
            if condition():
                return
            await asyncio.sleep(0.02)


@pytest.fixture
def run_world(nats_server: Any, tmp_path: Path, lifeline: Any) -> Callable[..., None]:
    """`run_world(work, **settings)`: run `await work(world)`; all that it started ends."""
    read_end, cut = lifeline

    def run(work: Callable[[World], Awaitable[None]], **given: Any) -> None:
        chosen = {"tick_s": 0.05, "lease_every_s": 0.2, "scale_down_window_s": 0.1, "lease_ttl_s": 2.0} | given
        settings = Settings(data_dir=str(tmp_path), nats_url=nats_server.url, lifeline_fd=read_end, **chosen)

        async def main() -> None:
            bus = await Bus.connect(settings, "test")
            await bus.ensure()
            world = World(bus, settings, tmp_path / "log")
            watch = await bus.watch(subjects.WORKERS_BUCKET, world.on_lease)
            try:
                await work(world)
            finally:
                await watch.close()
                await bus.close()
                cut()
                for controller in world.controllers:
                    controller.process.kill()
                    controller.process.wait()

        asyncio.run(main())

    return run


@pytest.mark.parametrize("fault_point", UP)
def test_a_controller_that_dies_while_it_scales_up_is_followed_by_one_that_gets_there(
    run_world: Any, fault_point: str
) -> None:
    async def work(world: World) -> None:
        first = world.controller(fault_point)
        if "assign" in fault_point:
            await world.settled(("", "warm"))
        await world.want(1)
        assert await asyncio.to_thread(first.process.wait, 20) == -signal.SIGKILL
        second = world.controller()
        await world.settled(("chat", "active"), ("", "warm"))
        second.process.terminate()
        assert await asyncio.to_thread(second.process.wait, 20) == 0

    run_world(work, warm_workers=1, devices=1)


@pytest.mark.parametrize("fault_point", DOWN)
def test_a_controller_that_dies_while_it_scales_down_is_followed_by_one_that_gets_there(
    run_world: Any, fault_point: str
) -> None:
    async def work(world: World) -> None:
        first = world.controller(fault_point)
        await world.want(2)
        await world.settled(("chat", "active"), ("chat", "active"))
        await world.want(0)
        assert await asyncio.to_thread(first.process.wait, 20) == -signal.SIGKILL
        second = world.controller()
        await world.settled()
        second.process.terminate()
        assert await asyncio.to_thread(second.process.wait, 20) == 0

    run_world(work, devices=2)


def test_of_two_controllers_one_acts_and_one_that_is_stopped_for_long_leads_no_more(run_world: Any) -> None:
    async def work(world: World) -> None:
        first = world.controller()
        await until(lambda: "leads controller, term" in world.log.read_text())
        second = world.controller()
        await world.want(1)
        await world.settled(("chat", "active"))
        first.process.send_signal(signal.SIGSTOP)
        await until(lambda: world.log.read_text().count("leads controller, term") == 2)
        (lease,) = world.leases.values()
        os.kill(lease.pid, signal.SIGKILL)
        await until(lambda: lease.worker not in world.leases and world.states() == [("chat", "active")])
        first.process.send_signal(signal.SIGCONT)
        await until(lambda: "leads controller no more" in world.log.read_text())
        await world.want(0)
        await world.settled()
        started = STARTED.findall(world.log.read_text())
        assert len(started) == len(set(started)) == 2
        for controller in (second, first):
            controller.process.terminate()
            assert await asyncio.to_thread(controller.process.wait, 20) == 0

    run_world(work, leader_ttl_s=3.0)
