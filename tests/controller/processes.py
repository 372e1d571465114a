"""Controllers as processes of their own, with workers that are stand-ins."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from controller.faults import POINT
from shared.settings import Settings, to_environment

ROOT = Path(__file__).parents[2]
STARTED = re.compile(r"started (w[0-9a-f]+)")
METRICS = re.compile(r"metrics at (http://\S+)")


class Process:
    """`python -m controller.main` with workers that are stand-ins; what a dead one was told of comes again within a second."""

    def __init__(self, settings: Settings, log: Path, fault_point: str = "") -> None:
        self._log = log
        script = (
            "import sys; from controller.scalers import process; from controller import main; "
            "from shared import streams; from shared.settings import load; "
            "streams.RESULT_ACK_WAIT_S = 1.0; "
            f"process.WORKER_COMMAND = (sys.executable, {str(Path(__file__).parent / 'stand_in_worker.py')!r}, 'serve'); "
            "process.ProcessScaler.__init__.__defaults__ = (process.WORKER_COMMAND,); main.main(load())"
        )
        fds = () if settings.lifeline_fd is None else (settings.lifeline_fd,)
        environment = os.environ | to_environment(settings) | {"PYTHONPATH": str(ROOT), POINT: fault_point}
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
