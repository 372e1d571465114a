"""A controller in this process, with a real nats-server and stand-ins for workers as real processes."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from controller.loop import Controller
from controller.metrics import Metrics
from controller.scalers.process import ProcessScaler
from shared import records, subjects
from shared.bus import Bus
from shared.records import Version, VersionLimits
from shared.settings import Settings

STAND_IN = Path(__file__).parent / "stand_in_worker.py"
ROOT = Path(__file__).parents[2]


class Bench:
    """What a test works with: a bus of its own, the controller under test, and shorthands for both."""

    def __init__(self, bus: Bus, settings: Settings) -> None:
        self.bus = bus
        self.settings = settings
        self.behaviour = "serve"
        self.verified: list[Version] = []
        self.verify: Callable[[Version], None] = self.verified.append
        self.ticks = 0  # of the controller, from end to end
        self._controller_bus: Bus | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self, behaviour: str = "serve") -> None:
        """Start a controller whose workers behave like that."""
        self.scaler = ProcessScaler(self.settings, (sys.executable, str(STAND_IN), behaviour))
        self.metrics = Metrics()
        self._controller_bus = await Bus.connect(self.settings, "controller")
        self.controller = Controller(self._controller_bus, self.settings, self.scaler, self.metrics, self.verify)
        tick = self.controller._tick

        async def counted() -> None:
            await tick()
            self.ticks += 1

        self.controller._tick = counted  # type: ignore[method-assign]
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self.controller.wake)
        self._task = asyncio.create_task(self.controller.run())

    async def stop(self) -> None:
        """Stop the controller in good order, as SIGTERM does."""
        if self._task is not None and self._controller_bus is not None:
            self.controller.stop()
            task, self._task = self._task, None
            try:
                await task
            finally:
                await self._controller_bus.close()

    async def register(self, model: str, version: str = "v1", source: str = "sim:zero", **limits: Any) -> None:
        record = Version(
            model=model, version=version, state="registered", source=source, limits=VersionLimits(**limits)
        )
        await self.bus.kv_put(subjects.MODELS_BUCKET, subjects.key(model, version), records.encode(record))

    async def set_state(self, model: str, state: str, version: str = "v1") -> None:
        record = replace(await self.record(model, version), state=state)
        await self.bus.kv_put(subjects.MODELS_BUCKET, subjects.key(model, version), records.encode(record))

    async def set_limits(self, model: str, version: str = "v1", **limits: Any) -> None:
        record = replace(await self.record(model, version), limits=VersionLimits(**limits))
        await self.bus.kv_put(subjects.MODELS_BUCKET, subjects.key(model, version), records.encode(record))

    async def record(self, model: str, version: str = "v1") -> Version:
        found = await self.bus.kv_get(subjects.MODELS_BUCKET, subjects.key(model, version))
        assert found is not None
        return records.decode_version(found[0])

    async def request(self, model: str, version: str = "v1", wake: bool = True) -> None:
        subject = subjects.request(model, version, subjects.LANE_FAST, "local")
        await self.bus.publish_durable(subject, b"{}", {"Nats-Msg-Id": os.urandom(8).hex()})
        if wake:
            await self.bus.publish(subjects.wake(model, version))

    async def clear_queue(self, model: str, version: str = "v1") -> int:
        return await self.bus.purge(subjects.REQ_STREAM, subjects.requests_of_version(model, version))

    async def consumer(self, model: str, version: str = "v1") -> Any:
        filter_subject = subjects.requests_of_lane(model, version, subjects.LANE_FAST)
        name = subjects.consumer(subjects.LANE_FAST, filter_subject)
        return await self.bus.consumer_info(subjects.REQ_STREAM, name)

    async def available(self, model: str, version: str = "v1") -> None:
        await self.until(lambda: self.state_is(model, "available", version))

    async def state_is(self, model: str, state: str, version: str = "v1") -> bool:
        return (await self.record(model, version)).state == state

    def workers(self, state: str = "active") -> list[str]:
        """The workers whose last lease, as the controller knows it, has that state."""
        seen = self.controller.observer.leases.values()
        return sorted(one.lease.worker for one in seen if not one.silent and one.lease.state == state)

    async def until(self, condition: Callable[[], Any], budget_s: float = 15.0) -> None:
        """Wait until `condition()`, which may be async, is true."""
        deadline = time.monotonic() + budget_s
        while True:
            result = condition()
            if await result if isinstance(result, Awaitable) else result:
                return
            assert time.monotonic() < deadline, "the condition did not come true"
            assert self._task is None or not self._task.done(), self._task
            await asyncio.sleep(0.01)

    async def end_workers(self) -> None:
        """SIGKILL to every worker that is left, and reap it."""
        for worker in list(self.scaler.workers):
            self.scaler.kill(worker, "the test is over")
        await self.until(lambda: self.scaler.reap() is None or not self.scaler.workers)


RunBench = Callable[..., None]


@pytest.fixture
def run_bench(nats_server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunBench:
    """`run_bench(work, **settings)`: run `await work(bench)` and then end everything that it started."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def run(work: Callable[[Bench], Awaitable[None]], **given: Any) -> None:
        chosen = {"tick_s": 0.05, "lease_every_s": 0.2, "start_backoff_s": 0.1, "purge_after_s": 0.3} | given
        settings = Settings(data_dir=str(tmp_path / "data"), nats_url=nats_server.url, **chosen)
        settings.data_path.mkdir(exist_ok=True)

        async def main() -> None:
            bus = await Bus.connect(settings, "test")
            bench = Bench(bus, settings)
            try:
                await bus.ensure()
                await work(bench)
            finally:
                with contextlib.suppress(AttributeError):  # it never started one
                    await bench.stop()
                    await bench.end_workers()
                await bus.close()

        asyncio.run(main())

    return run


@pytest.fixture
def lifeline() -> Iterator[tuple[int, Callable[[], None]]]:
    """The read end of a pipe, and a function that ends the write end."""
    read_end, write_end = os.pipe()
    ends = [write_end]
    yield read_end, lambda: [os.close(ends.pop()) for _ in list(ends)] and None
    for end in (read_end, *ends):
        os.close(end)
