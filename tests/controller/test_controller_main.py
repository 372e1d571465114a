"""The controller as the process that the stack starts: its metrics, its signals, its lifeline, its workers' lives."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shared import records, subjects
from shared.bus import Bus
from shared.records import Version, VersionLimits
from shared.settings import Settings, to_environment

ROOT = Path(__file__).parents[2]
STARTED = re.compile(r"started (w[0-9a-f]+)")
METRICS = re.compile(r"metrics at (http://\S+)")


class Process:
    """`python -m controller.main` with workers that are stand-ins."""

    def __init__(self, settings: Settings, log: Path) -> None:
        self._log = log
        script = (
            "import sys; from controller.scalers import process; from controller import main; "
            "from shared.settings import load; "
            f"process.WORKER_COMMAND = (sys.executable, {str(Path(__file__).parent / 'stand_in_worker.py')!r}, 'serve'); "
            "process.ProcessScaler.__init__.__defaults__ = (process.WORKER_COMMAND,); main.main(load())"
        )
        fds = () if settings.lifeline_fd is None else (settings.lifeline_fd,)
        environment = os.environ | to_environment(settings) | {"PYTHONPATH": str(ROOT)}
        with open(log, "ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-c", script], env=environment, stderr=output, stdout=output, pass_fds=fds
            )

    def find(self, pattern: re.Pattern[str]) -> str:
        """The first group of the first match in the log, once it is there."""
        until(lambda: pattern.search(self._log.read_text()) or self.process.poll() is not None)
        match = pattern.search(self._log.read_text())
        assert match, self._log.read_text()
        return match[1]


def until(condition: Callable[[], Any], budget_s: float = 15.0) -> None:
    deadline = time.monotonic() + budget_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.01)


def register(settings: Settings) -> None:
    async def run() -> None:
        bus = await Bus.connect(settings, "test")
        await bus.ensure()
        limits = VersionLimits(min_replicas=1)
        record = Version(model="chat", version="v1", state="registered", source="sim:zero", limits=limits)
        await bus.kv_put(subjects.MODELS_BUCKET, subjects.key("chat", "v1"), records.encode(record))
        await bus.close()

    asyncio.run(run())


def alive(worker: str) -> list[int]:
    """The pids of live processes that have `worker` among their arguments."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if worker.encode() in entry.read_bytes().split(b"\0"):
                found.append(int(entry.parent.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


@pytest.fixture
def lifeline() -> Iterator[tuple[int, Callable[[], None]]]:
    """The read end of a pipe, and a function that ends the write end."""
    read_end, write_end = os.pipe()
    ends = [write_end]
    yield read_end, lambda: [os.close(ends.pop()) for _ in list(ends)] and None
    for end in (read_end, *ends):
        os.close(end)


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
