"""The controller as the process that the stack starts: its metrics, its signals, its lifeline, its workers' lives."""

import asyncio
import signal
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from shared import records, subjects
from shared.bus import Bus
from shared.records import Version, VersionLimits
from shared.settings import Settings

from .processes import METRICS, STARTED, Process, alive, until


def register(settings: Settings) -> None:
    async def run() -> None:
        bus = await Bus.connect(settings, "test")
        await bus.ensure()
        limits = VersionLimits(min_replicas=1)
        record = Version(model="chat", version="v1", state="registered", source="sim:zero", limits=limits)
        await bus.kv_put(subjects.MODELS_BUCKET, subjects.key("chat", "v1"), records.encode(record))
        await bus.close()

    asyncio.run(run())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_it_serves_metrics_ends_on_a_signal_and_leaves_its_workers_to_the_lifeline(
    nats_server: Any, tmp_path: Path, lifeline: Any, number: signal.Signals
) -> None:
    read_end, cut = lifeline
    settings = Settings(data_dir=str(tmp_path), nats_url=nats_server.url, lifeline_fd=read_end, tick_s=0.05)
    register(settings)
    controller = Process(settings, tmp_path / "log")
    url = controller.find(METRICS)
    worker = controller.find(STARTED)

    def active() -> bool:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return 'headrace_replicas{model="chat",state="active",version="v1"} 1.0' in answer.read().decode()

    until(active)
    controller.process.send_signal(number)
    assert controller.process.wait(10) == (-number if number == signal.SIGKILL else 0)
    assert "Traceback" not in (tmp_path / "log").read_text()
    assert alive(worker)
    cut()
    until(lambda: not alive(worker))


def test_it_ends_with_its_lifeline(nats_server: Any, tmp_path: Path, lifeline: Any) -> None:
    read_end, cut = lifeline
    settings = Settings(data_dir=str(tmp_path), nats_url=nats_server.url, lifeline_fd=read_end)
    controller = Process(settings, tmp_path / "log")
    controller.find(METRICS)
    cut()
    assert controller.process.wait(10) == 0
