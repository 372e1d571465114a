"""Processes of the stack: started with their output in a log file, reaped by one SIGCHLD handler, ended within a budget."""

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

LOG_BYTES_MAX = 16 << 20  # a log over it is set aside as `.1` at the next start of its process
TAIL_BYTES = 2048


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """How to start one process of the stack."""

    name: str
    argv: list[str]
    env: dict[str, str]
    directory: str | None = None  # None: ours
    pass_fds: tuple[int, ...] = ()
    preexec: Callable[[], None] | None = None
    leftovers: list[Path] = []  # removed ahead of each start and after the end
    ready: Callable[[], Awaitable[bool]] | None = None  # None: ready when started
    sound: Callable[[], Awaitable[bool]] | None = None  # False: it runs, and only a restart makes it work again

    def sweep(self) -> None:
        for path in self.leftovers:
            path.unlink(missing_ok=True)


class Reaper:
    """Waits for every child of this process, also for those it was given by the kernel when their parent died.

    Nothing else in the process may wait for children: no asyncio subprocess, no `subprocess.run`.
    """

    def __init__(self) -> None:
        self._watched: dict[int, asyncio.Future[int]] = {}
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self._reap)

    def watch(self, pid: int) -> asyncio.Future[int]:
        """The exit status of the child `pid` (negative: the signal) once it has ended. Ask before the loop runs again."""
        return self._watched.setdefault(pid, asyncio.get_running_loop().create_future())

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            future = self._watched.pop(pid, None)
            if future is not None and not future.done():
                future.set_result(os.waitstatus_to_exitcode(status))


class Process:
    """One process that runs now. `ended` has its exit status when it has ended."""

    def __init__(self, command: Command, logs: Path, reaper: Reaper) -> None:
        self.name = command.name
        self.log = logs / f"{command.name}.log"
        self.started = time.monotonic()
        command.sweep()
        with contextlib.suppress(FileNotFoundError):
            if self.log.stat().st_size > LOG_BYTES_MAX:
                self.log.rename(self.log.with_suffix(".log.1"))
        with open(self.log, "ab") as output:
            self._popen = subprocess.Popen(
                command.argv,
                cwd=command.directory,
                env=command.env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C in the terminal is for the supervisor, which ends them in order
                pass_fds=command.pass_fds,
                preexec_fn=command.preexec,
            )
        self.pid = self._popen.pid
        self.ended = reaper.watch(self.pid)
        self.ended.add_done_callback(self._note_end)

    def _note_end(self, ended: asyncio.Future[int]) -> None:
        self._popen.returncode = -1 if ended.cancelled() else ended.result()  # the reaper waited in Popen's stead

    @property
    def lived_s(self) -> float:
        return time.monotonic() - self.started

    def signal(self, number: signal.Signals) -> None:
        if not self.ended.done():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


async def end(processes: Mapping[int, asyncio.Future[int]], budget_s: float, force: asyncio.Event) -> list[int]:
    """SIGTERM to each pid that has not ended, SIGKILL to what is left after the budget or when forced; those killed."""
    live = {pid: ended for pid, ended in processes.items() if not ended.done()}
    _signal_all(live, signal.SIGTERM)
    forced = asyncio.create_task(force.wait())
    everyone = asyncio.ensure_future(asyncio.gather(*live.values(), return_exceptions=True))
    either: set[asyncio.Future[Any]] = {everyone, forced}
    await asyncio.wait(either, timeout=budget_s, return_when=asyncio.FIRST_COMPLETED)
    killed = [pid for pid, ended in live.items() if not ended.done()]
    _signal_all(killed, signal.SIGKILL)
    await everyone
    forced.cancel()
    await asyncio.gather(forced, return_exceptions=True)
    return killed


def tail(log: Path) -> str:
    """The end of a log, to show with an error."""
    try:
        with open(log, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            return file.read().decode(errors="replace").strip()
    except OSError:
        return ""


def _signal_all(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
