"""Processes under a test's control: started, signalled, started again, and gone when whoever started them is."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from shared import lifeline

REPOSITORY = Path(__file__).parents[2]
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Child:
    """One process, by its command. `start` again after `kill` is the same command; the log goes on."""

    def __init__(
        self,
        name: str,
        argv: list[str],
        logs: Path,
        env: Mapping[str, str] = os.environ,
        pass_fds: tuple[int, ...] = (),
        tied: bool = False,
        directory: Path = REPOSITORY,
    ) -> None:
        """`tied`: it knows no lifeline, so the kernel ends it with this process. `directory`: where it runs."""
        self.name, self.argv = name, argv
        self.log = logs / f"{name}.log"
        self._env = dict(env)
        self._pass_fds = pass_fds
        self._tied = tied
        self._directory = directory
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self.process is not None, f"{self.name} was not started"
        return self.process.pid

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        assert not self.running, f"{self.name} runs already"
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                self.argv,
                cwd=self._directory,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=self._pass_fds,
                preexec_fn=lifeline.die_with_parent() if self._tied else None,
            )

    def signal(self, number: signal.Signals) -> None:
        if self.running:
            os.kill(self.pid, number)

    def wait(self, budget_s: float = 20.0) -> int:
        """Wait for the end; the exit status."""
        assert self.process is not None
        return self.process.wait(budget_s)

    def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(20)


def own(name: str, module: str, arguments: list[str], logs: Path, env: Mapping[str, str], lifeline_fd: int) -> Child:
    """A process of ours, which ends with the lifeline."""
    return Child(name, [sys.executable, "-m", module, *arguments], logs, env, (lifeline_fd,))


def environment(settings: Mapping[str, str]) -> dict[str, str]:
    """The environment of our processes: this checkout's code, these settings and no others."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    return kept | {"PYTHONPATH": str(REPOSITORY)} | dict(settings)


def resident_bytes(pid: int) -> int:
    """The resident memory of a process, 0 when it is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES
    except (FileNotFoundError, ProcessLookupError, IndexError):
        return 0


def processor_seconds(pid: int) -> float:
    """The CPU time that a process has used, 0 when it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def reap_strangers(known: set[int]) -> None:
    """Wait for children that this process was given when their own parent died; those in `known` have an owner here."""
    while True:
        try:
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if found is None or found.si_pid in known:
            return
        with contextlib.suppress(ChildProcessError):
            os.waitpid(found.si_pid, os.WNOHANG)


def wait_gone(pids: list[int], budget_s: float) -> list[int]:
    """Wait until the processes are gone, those too that became our children; which are not."""
    deadline = time.monotonic() + budget_s
    while left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        reap_strangers(set())
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    return left
