"""The hands of the controller on this host: workers as processes, each in a session of its own and with its own log.

Workers outlive the controller. The next one finds them by their leases and signals a pid only while that process still
carries the worker's id in its command line, since pids are used again.
"""

import contextlib
import glob
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from controller.scalers.base import Managed
from controller.starts import Exit
from shared.records import Lease
from shared.settings import Settings, to_environment

log = logging.getLogger(__name__)

WORKER_COMMAND = (sys.executable, "-m", "workers.main")
SPAWNED_AT = "HEADRACE_SPAWNED_AT"  # unix seconds, so that the worker can tell how long its process took to begin
DEVICE = "HEADRACE_DEVICE"  # which device is the worker's
VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
LOG_TAIL_BYTES = 4096
LOG_LINE_MAX = 300


class WorkerProcess(Managed, kw_only=True):
    """A live worker on this host."""

    pid: int
    child: subprocess.Popen[bytes] | None = None  # None: of an earlier controller


def host_devices(environ: Mapping[str, str] = os.environ, limit: int = 0, cores: Sequence[int] = ()) -> tuple[str, ...]:
    """What workers on this host may use, each for one with a model; none where there is no such bound.

    Accelerators as CUDA_VISIBLE_DEVICES names them, the first `limit` of them (0: all). On a CPU host `limit` groups of
    its `cores`, as `cpu<number>:<core>,<core>...`.
    """
    visible = environ.get(VISIBLE_DEVICES)
    if visible is not None:
        found = [name.strip() for name in visible.split(",") if name.strip() not in ("", "-1")]
    else:
        found = [str(index) for index in range(len(glob.glob("/dev/nvidia[0-9]*")))]
    if found or not limit:
        return tuple(found[: limit or None])
    groups = []
    for number in range(limit):
        begin = number * len(cores) // limit
        group = cores[begin : max(begin + 1, (number + 1) * len(cores) // limit)]
        groups.append(f"cpu{number}:{','.join(map(str, group))}")
    return tuple(groups)


class ProcessScaler:
    """Starts, drains, kills and reaps the workers of this host. `command` is the worker's, without its arguments."""

    def __init__(self, settings: Settings, command: Sequence[str] = WORKER_COMMAND) -> None:
        self._settings = settings
        self._command = tuple(command)
        self.host = socket.gethostname()
        self._logs = settings.data_path / "logs"
        self._devices = host_devices(limit=settings.devices, cores=sorted(os.sched_getaffinity(0)))
        self._workers: dict[str, WorkerProcess] = {}

    @property
    def makes_workers(self) -> bool:
        return True

    @property
    def workers(self) -> Mapping[str, WorkerProcess]:
        return self._workers

    @property
    def replicas_max(self) -> int:
        """One on each device; one where there is no such bound, on a CPU host: they would share its cores."""
        return max(1, len(self._devices))

    @property
    def devices(self) -> tuple[str, ...] | None:
        return self._devices or None

    async def open(self) -> None:
        """Nothing goes on in the background."""

    async def close(self) -> None:
        """Nothing goes on in the background."""

    def start(self, model: str, version: str, device: str = "") -> str:
        """Start a worker; its id. Raises OSError when the process cannot be made."""
        worker = f"w{secrets.token_hex(5)}"
        environment = os.environ | to_environment(self._settings) | {SPAWNED_AT: repr(time.time()), DEVICE: device}
        if device and not device.startswith("cpu"):
            environment[VISIBLE_DEVICES] = device
        arguments = [f"--model={model}", f"--version={version}"] if model else []
        lifeline = self._settings.lifeline_fd
        self._logs.mkdir(parents=True, exist_ok=True)
        self._drop_old_logs()
        with open(self._log_file(worker), "ab") as output:
            child = subprocess.Popen(
                [*self._command, *arguments, "--worker-id", worker],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=() if lifeline is None else (lifeline,),
            )
        self._workers[worker] = WorkerProcess(
            worker=worker,
            model=model,
            version=version,
            pid=child.pid,
            started=time.monotonic(),
            device=device,
            child=child,
        )
        return worker

    def adopt(self, leases: Iterable[Lease]) -> None:
        """Take over the live workers of this host that another controller started."""
        for lease in leases:
            if lease.worker in self._workers or not self.owns(lease) or not _carries(lease.pid, lease.worker):
                continue
            log.info("adopted %s (pid %d) of %s@%s", lease.worker, lease.pid, lease.model, lease.version)
            self._workers[lease.worker] = WorkerProcess(
                worker=lease.worker,
                model=lease.model,
                version=lease.version,
                pid=lease.pid,
                started=time.monotonic() - max(0.0, time.time() - lease.started),
                device=lease.device,
                own=False,
            )

    def owns(self, lease: Lease) -> bool:
        return lease.host == self.host

    def drain(self, worker: str) -> None:
        """Tell a worker to finish what it has and end. Once is enough: the worker keeps its own budget."""
        process = self._workers[worker]
        if process.drained_at is None:
            process.drained_at = time.monotonic()
            _signal(process, signal.SIGTERM)

    def kill(self, worker: str, reason: str) -> None:
        """SIGKILL."""
        process = self._workers[worker]
        process.killed_because = process.killed_because or reason
        _signal(process, signal.SIGKILL)

    def reap(self) -> list[Exit]:
        """The workers that have ended since the last call."""
        ended = []
        for process in list(self._workers.values()):
            if process.child.poll() is None if process.child else _carries(process.pid, process.worker):
                continue
            del self._workers[process.worker]
            ended.append(
                Exit(
                    worker=process.worker,
                    model=process.model,
                    version=process.version,
                    code=process.child.returncode if process.child else None,
                    asked=process.drained_at is not None,
                    killed_because=process.killed_because,
                    last_line=last_line(self._log_file(process.worker)),
                )
            )
        return ended

    def _log_file(self, worker: str) -> Path:
        return self._logs / f"worker-{worker}.log"

    def _drop_old_logs(self) -> None:
        live = {self._log_file(worker) for worker in self.workers}
        files = sorted(self._logs.glob("worker-*.log"), key=lambda file: file.stat().st_mtime)
        for file in files[: max(0, len(files) + 1 - self._settings.worker_logs_max)]:
            if file not in live:
                file.unlink(missing_ok=True)


def last_line(file: Path) -> str:
    """The last line of a log that is not empty, shortened; "" when there is none."""
    try:
        with open(file, "rb") as stream:
            stream.seek(0, os.SEEK_END)
            stream.seek(max(0, stream.tell() - LOG_TAIL_BYTES))
            lines = stream.read().decode(errors="replace").split("\n")
    except FileNotFoundError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")[:LOG_LINE_MAX]


def _signal(process: WorkerProcess, number: signal.Signals) -> None:
    if process.child is not None:
        process.child.send_signal(number)
    elif _carries(process.pid, process.worker):
        with contextlib.suppress(ProcessLookupError):  # it ended since
            os.kill(process.pid, number)


def _carries(pid: int, worker: str) -> bool:
    """Whether the live process `pid` was started as `worker`; a zombie has no arguments.

    A lease can claim anything, so that a process that merely has the word among its arguments must not do.
    """
    try:
        return b"\0--worker-id\0%b\0" % worker.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False
