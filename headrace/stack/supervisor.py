"""`headrace up`: starts the stack's processes in order, restarts what dies, and ends all of it in order.

The supervisor holds the only write end of the lifeline, so that even its SIGKILL ends every process of the stack. It is
the subreaper of them: a worker whose controller died becomes its child, goes on, and is ended and reaped here.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import psutil
from msgspec.structs import replace

from headrace.stack import plan as planning
from headrace.stack import reports, state
from headrace.stack.plan import Plan
from headrace.stack.process import Command, Process, Reaper, end, tail
from headrace.stack.reports import Failed, Progress
from headrace.stack.state import ProcessState, StackError
from shared.lifeline import become_subreaper

BACKOFF_S = 0.1
BACKOFF_MAX_S = 5.0
STEADY_S = 10.0  # a process that lived this long starts over at the shortest back-off
EARLY_ENDS_MAX = 3  # that often a process may end before the stack is ready
READY_BUDGET_S = 90.0
SERVER_STOP_S = 3.0  # the stores survive a SIGKILL, and SeaweedFS would wait up to 30 s for idle connections
CONTROLLER_STOP_S = 5.0
MARGIN_S = 2.0  # on top of a drain's own budget
POLL_S = 0.05
DIRECTORY_CHECK_S = 1.0
SOUND_EVERY_S = 2.0
ROOM_BYTES_MIN = 16 << 20


class Supervisor:
    """One stack, from its start to its end. `report` gets one line for each thing that a person wants to know."""

    def __init__(self, data: Path, lock: BinaryIO, plan: Plan, report: Callable[[str], None]) -> None:
        self._should_exit = asyncio.Event()
        self._force_exit = asyncio.Event()
        self._data = data
        self._lock = lock
        self._logs = data / "logs"
        self._logs.mkdir(parents=True, exist_ok=True)
        self._plan = plan
        self._report = report
        self._reaper = Reaper()
        self._processes: dict[str, Process] = {}
        self._ends: Counter[str] = Counter()
        self._keepers: list[asyncio.Task[None]] = []
        self._state = replace(plan.state, started=time.time())

    def stop(self) -> None:
        """End the stack; a second call ends it at once."""
        (self._force_exit if self._should_exit.is_set() else self._should_exit).set()

    async def run(self, demo: bool, on_ready: Callable[[], None]) -> None:
        """Bring the stack up, keep it up until `stop`, end it. Raises StackError when it does not come up."""
        startup = asyncio.create_task(self._start(demo))
        exiting = asyncio.create_task(self._should_exit.wait())
        watching = asyncio.gather(self._watch_directory(), self._watch_soundness())
        try:
            await asyncio.wait({startup, exiting}, return_when=asyncio.FIRST_COMPLETED)
            if startup.done():
                startup.result()
                self._state.ready = True
                self._write_state()
                on_ready()
                await exiting
        finally:
            for task in (startup, exiting, watching):
                task.cancel()
            await asyncio.gather(startup, exiting, watching, return_exceptions=True)
            await self._end()

    # -- up ------------------------------------------------------------------------------------------------------------

    async def _start(self, demo: bool) -> None:
        if self._plan.check is not None:
            await self._run_once(self._plan.check, "NATS cannot be tried")
        for commands in (self._plan.servers, self._plan.processes):
            if commands:
                self._report("starting " + " and ".join(command.name for command in commands))
            for command in commands:
                keeper = asyncio.create_task(self._keep(command))
                keeper.add_done_callback(self._keeper_done)
                self._keepers.append(keeper)
            await asyncio.gather(*(self._until_ready(command) for command in commands))
        if demo:
            await self._run_once(self._plan.demo, "the demo model cannot be registered; --no-demo does without")

    async def _keep(self, command: Command) -> None:
        """Run a process again and again, sooner if it lived long."""
        backoff_s = BACKOFF_S
        while True:
            lived_s = 0.0
            try:
                process = Process(command, self._logs, self._reaper)
            except OSError as error:  # no more processes or files to be had: that may pass
                how = str(error)
            else:
                self._processes[command.name] = process
                self._write_state()
                await asyncio.wait({process.ended})
                lived_s, how = process.lived_s, _how(process.ended.result())
            self._ends[command.name] += 1
            backoff_s = BACKOFF_S if lived_s > STEADY_S else min(backoff_s * 2, BACKOFF_MAX_S)
            self._report(f"{command.name} ended ({how}): starting it again; log {self._logs / command.name}.log")
            await asyncio.sleep(backoff_s)

    async def _watch_directory(self) -> None:
        """End when the data directory is removed: nothing could reach this stack any more, not even `headrace down`."""
        while True:
            await asyncio.sleep(DIRECTORY_CHECK_S)
            if not state.still_held(self._lock, self._data):
                self._report(f"{self._data} is gone: ending")
                self.stop()
                return

    async def _watch_soundness(self) -> None:
        """Restart what runs and does not work any more, once there is room on its disk again."""
        told = False
        while True:
            await asyncio.sleep(SOUND_EVERY_S)
            for command in self._plan.servers:
                process = self._processes.get(command.name)
                if command.sound is None or process is None or process.ended.done() or await command.sound():
                    continue
                if shutil.disk_usage(self._data).free < ROOM_BYTES_MIN:
                    if not told:
                        self._report(f"{command.name} cannot write: the disk of {self._data} is full")
                    told = True
                    continue
                told = False
                self._report(f"{command.name} could not write, and there is room: starting it again")
                process.signal(signal.SIGTERM)
                await asyncio.wait({process.ended}, timeout=SERVER_STOP_S)
                process.signal(signal.SIGKILL)

    def _keeper_done(self, keeper: asyncio.Task[None]) -> None:
        if not keeper.cancelled():  # it never ends but by an error, which `_end` raises
            self._should_exit.set()

    async def _until_ready(self, command: Command) -> None:
        deadline = time.monotonic() + READY_BUDGET_S
        log = self._logs / f"{command.name}.log"
        while command.name not in self._processes or (command.ready is not None and not await command.ready()):
            if self._ends[command.name] >= EARLY_ENDS_MAX:
                raise StackError(f"{command.name} does not start; the end of {log}:\n{tail(log)}")
            if time.monotonic() > deadline:
                raise StackError(
                    f"{command.name} is not ready after {READY_BUDGET_S:.0f} s; the end of {log}:\n{tail(log)}"
                )
            await asyncio.sleep(POLL_S)

    async def _run_once(self, once: Command, failing: str) -> None:
        """Run a process to its end and pass its progress on. Raises StackError with the reason it tells, else `failing`."""
        read_end, write_end = os.pipe()
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read_end, "rb", buffering=0)
        )
        command = replace(once, argv=[*once.argv, "--report-fd", str(write_end)], pass_fds=(*once.pass_fds, write_end))
        try:
            process = Process(command, self._logs, self._reaper)
        finally:
            os.close(write_end)
        self._processes[command.name] = process
        reason = ""
        try:
            async for line in reader:
                match reports.decode(line):
                    case Progress(text):
                        self._report(text)
                    case Failed(reason):
                        pass
            code = await asyncio.shield(process.ended)
        finally:
            transport.close()
        if code != 0:
            raise StackError(reason or f"{failing}; the end of {process.log}:\n{tail(process.log)}")
        del self._processes[command.name]

    # -- down ----------------------------------------------------------------------------------------------------------

    async def _end(self) -> None:
        """Ingress first (it drains), then the controller, then the workers, then the servers."""
        for keeper in self._keepers:
            keeper.cancel()
        failures = await asyncio.gather(*self._keepers, return_exceptions=True)
        drain_s = self._plan.settings.drain_budget_s + MARGIN_S
        await self._end_processes([planning.CHECK, planning.DEMO], 0.0)
        await self._end_processes(["ingress"], drain_s)
        await self._end_processes(["controller"], CONTROLLER_STOP_S)
        while orphans := self._orphans():
            self._report(f"ending {len(orphans)} worker process{'es' if len(orphans) > 1 else ''}")
            await end(orphans, drain_s, self._force_exit)
        await self._end_processes([command.name for command in self._plan.servers], SERVER_STOP_S)
        for command in self._plan.servers:
            command.sweep()
        self._state = replace(self._state, ready=False)
        self._write_state()
        for failure in failures:
            if isinstance(failure, Exception):
                raise failure

    async def _end_processes(self, names: list[str], budget_s: float) -> None:
        live = [self._processes.pop(name) for name in names if name in self._processes]
        if running := [process for process in live if not process.ended.done()]:
            self._report("ending " + " and ".join(process.name for process in running))
        killed = await end({process.pid: process.ended for process in live}, budget_s, self._force_exit)
        for process in live:
            if process.pid in killed and process.name in ("ingress", "controller"):
                self._report(f"{process.name} did not end within {budget_s:.0f} s and was killed")

    def _orphans(self) -> dict[int, asyncio.Future[int]]:
        """What the kernel gave to us when its parent ended: workers. No await between the look and the watch."""
        known = {process.pid for process in self._processes.values()}
        return {
            child.pid: self._reaper.watch(child.pid) for child in psutil.Process().children() if child.pid not in known
        }

    def _write_state(self) -> None:
        self._state.processes = {
            name: ProcessState(process.pid, self._ends[name]) for name, process in self._processes.items()
        }
        try:
            state.write(self._data, self._state)
        except OSError as error:  # a full disk is no reason to end what runs
            self._report(f"the state file cannot be written: {error}")


def run(
    data: Path, http_port: int | None, demo: bool, report: Callable[[str], None], on_ready: Callable[[Plan], None]
) -> None:
    """Run a stack on `data` until SIGINT, SIGTERM or SIGHUP. Raises StackError, also when one runs there already.

    Call it from the main thread: the servers of the stack end with the thread that started them.
    """
    with state.acquire(data) as lock:
        read_end, write_end = os.pipe()
        try:
            become_subreaper()
            plan = planning.make(data, http_port, read_end)
            asyncio.run(_run(data, lock, plan, demo, report, lambda: on_ready(plan)))
        finally:
            os.close(write_end)
            os.close(read_end)


async def _run(
    data: Path, lock: BinaryIO, plan: Plan, demo: bool, report: Callable[[str], None], on_ready: Callable[[], None]
) -> None:
    supervisor = Supervisor(data, lock, plan, report)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, supervisor.stop)
    await supervisor.run(demo, on_ready)


def _how(status: int) -> str:
    if status >= 0:
        return f"status {status}"
    with contextlib.suppress(ValueError):
        return signal.Signals(-status).name
    return f"signal {-status}"
