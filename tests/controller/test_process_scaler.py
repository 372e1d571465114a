"""Processes: started with what they need, adopted only when they are who they say, drained, killed, reaped."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from controller.scalers import process as module
from controller.scalers.process import ProcessScaler, host_devices, last_line
from shared.records import Lease
from shared.settings import Settings

SHOW = "import os, sys; print(sys.argv[1:], os.environ.get('HEADRACE_LIFELINE_FD'), os.getsid(0) == os.getpid())"
WAIT = "import signal; print('ready', flush=True); signal.pause()"


class Workers:
    """Scalers of one test, whose processes are killed at its end."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._scalers: list[ProcessScaler] = []

    def scaler(self, code: str, **settings: Any) -> ProcessScaler:
        chosen = Settings(data_dir=str(self.directory), **settings)
        self._scalers.append(ProcessScaler(chosen, (sys.executable, "-c", code)))
        return self._scalers[-1]

    def log(self, worker: str) -> str:
        return (self.directory / "logs" / f"worker-{worker}.log").read_text()

    def end(self) -> None:
        for scaler in self._scalers:
            for worker in list(scaler.workers):
                scaler.kill(worker, "the test is over")
            until(lambda scaler=scaler: scaler.reap() is None or not scaler.workers)


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    made = Workers(tmp_path)
    yield made
    made.end()


def until(condition: Callable[[], Any], budget_s: float = 10.0) -> Any:
    deadline = time.monotonic() + budget_s
    while not (result := condition()):
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.005)
    return result


def lease_of(worker: str, pid: int, host: str | None = None) -> Lease:
    host = host or socket.gethostname()
    return Lease(worker=worker, model="m", version="v", state="active", pid=pid, host=host, started=time.time() - 5)


def test_a_worker_gets_its_arguments_the_settings_the_lifeline_a_session_and_a_log(workers: Workers) -> None:
    read_end, write_end = os.pipe()
    try:
        scaler = workers.scaler(SHOW + "; os.fstat(int(os.environ['HEADRACE_LIFELINE_FD']))", lifeline_fd=read_end)
        worker = scaler.start("-org/m", "-v1")
        (ended,) = until(scaler.reap)
    finally:
        os.close(read_end)
        os.close(write_end)
    assert (ended.worker, ended.model, ended.version, ended.code) == (worker, "-org/m", "-v1", 0)
    arguments = ["--model=-org/m", "--version=-v1", "--worker-id", worker]  # a name may look like an option
    assert workers.log(worker).strip() == f"{arguments} {read_end} True"
    assert ended.last_line == workers.log(worker).strip()
    assert not scaler.workers


def test_a_worker_is_told_when_its_process_was_started(workers: Workers) -> None:
    before = time.time()
    scaler = workers.scaler("import os; print(os.environ['HEADRACE_SPAWNED_AT'])")
    worker = scaler.start("m", "v")
    until(scaler.reap)
    assert before <= float(workers.log(worker)) <= time.time()


def test_draining_is_one_sigterm_and_the_exit_says_that_it_was_asked(workers: Workers) -> None:
    scaler = workers.scaler(WAIT)
    worker = scaler.start("m", "v")
    until(lambda: "ready" in workers.log(worker))
    scaler.drain(worker)
    drained_at = scaler.workers[worker].drained_at
    (ended,) = until(scaler.reap)
    assert (ended.code, ended.asked, drained_at is not None) == (-signal.SIGTERM, True, True)


def test_killing_gives_the_first_reason(workers: Workers) -> None:
    scaler = workers.scaler(WAIT)
    worker = scaler.start("m", "v")
    scaler.kill(worker, "too slow")
    scaler.kill(worker, "again")
    (ended,) = until(scaler.reap)
    assert (ended.code, ended.killed_because) == (-signal.SIGKILL, "too slow")


def test_another_controllers_worker_is_adopted_drained_and_noticed_when_it_ends(workers: Workers) -> None:
    first, second = workers.scaler(WAIT), workers.scaler(WAIT)
    worker = first.start("m", "v")
    until(lambda: "ready" in workers.log(worker))
    pid = first.workers[worker].pid
    second.adopt([lease_of(worker, pid)])
    adopted = second.workers[worker]
    assert (adopted.pid, adopted.child) == (pid, None)
    assert adopted.started == pytest.approx(time.monotonic() - 5, abs=1)
    assert second.reap() == []
    second.drain(worker)
    (ended,) = until(second.reap)  # though it is a zombie until its parent reaps it
    assert (ended.code, ended.asked) == (None, True)
    second.adopt([lease_of(worker, pid)])
    assert not second.workers


def test_a_process_that_is_not_the_worker_is_neither_adopted_nor_signalled(workers: Workers) -> None:
    scaler = workers.scaler(WAIT)
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        scaler.adopt(
            [lease_of("wother", other.pid), lease_of("wfar", os.getpid(), host="far"), lease_of("wgone", 2**22)]
        )
        assert not scaler.workers
        scaler.workers["w1"] = module.WorkerProcess(worker="w1", model="m", version="v", pid=other.pid, started=0.0)
        scaler.kill("w1", "its pid was used again")
        assert [ended.worker for ended in scaler.reap()] == ["w1"]
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_a_worker_gets_the_device_that_it_is_started_for(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    scaler = workers.scaler("import os; print(os.environ['CUDA_VISIBLE_DEVICES'], os.environ['HEADRACE_DEVICE'])")
    assert (scaler.replicas_max, scaler.devices) == (2, ("2", "5"))
    worker = scaler.start("m", "v", "5")
    assert scaler.workers[worker].device == "5"
    until(lambda: workers.log(worker) == "5 5\n")


def test_a_warm_worker_is_started_without_a_model(workers: Workers) -> None:
    scaler = workers.scaler("import sys; print(sys.argv[1:])")
    worker = scaler.start("", "")
    until(lambda: workers.log(worker) == f"['--worker-id', '{worker}']\n")


def test_devices_are_those_that_are_visible() -> None:
    assert host_devices({"CUDA_VISIBLE_DEVICES": "0, 3"}) == ("0", "3")
    assert host_devices({"CUDA_VISIBLE_DEVICES": "0, 3"}, limit=1) == ("0",)
    assert host_devices({"CUDA_VISIBLE_DEVICES": ""}) == host_devices({"CUDA_VISIBLE_DEVICES": "-1"}) == ()


def test_a_cpu_host_has_as_many_groups_of_cores_as_it_is_told() -> None:
    cpu = {"CUDA_VISIBLE_DEVICES": ""}
    assert host_devices(cpu, limit=1, cores=(0, 1)) == ("cpu0:0,1",)
    assert host_devices(cpu, limit=2, cores=(0, 1, 4, 6, 7)) == ("cpu0:0,1", "cpu1:4,6,7")
    assert host_devices(cpu, limit=3, cores=(0, 1)) == ("cpu0:0", "cpu1:0", "cpu2:1")


def test_old_logs_are_dropped_but_not_those_of_live_workers(workers: Workers) -> None:
    scaler = workers.scaler(WAIT, worker_logs_max=3)
    live = scaler.start("m", "v")
    ended = []
    for age in range(4):
        file = workers.directory / "logs" / f"worker-wold{age}.log"
        file.write_text("done")
        os.utime(file, (1e9 - age, 1e9 - age))
        ended.append(file)
    os.utime(workers.directory / "logs" / f"worker-{live}.log", (1, 1))
    scaler.start("m", "v")
    assert [file.exists() for file in ended] == [True, True, False, False]
    assert len(list((workers.directory / "logs").iterdir())) == 4


def test_the_last_line_is_the_last_that_is_not_empty(tmp_path: Path) -> None:
    file = tmp_path / "log"
    assert last_line(file) == ""
    file.write_bytes(b"")
    assert last_line(file) == ""
    file.write_bytes(b"x" * 10_000 + b"\nlast words \xff\n\n")
    assert last_line(file) == "last words �"
    file.write_bytes(b"y" * 10_000)
    assert last_line(file) == "y" * 300
