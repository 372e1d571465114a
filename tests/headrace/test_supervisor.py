"""`headrace up` and `down` with real processes: restarts, ends in order, and nothing left after any end."""

import os
import shutil
import signal
import stat
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from headrace.stack import state
from shared.settings import Settings


def until(condition: Callable[[], Any], budget_s: float = 30.0) -> Any:
    """Wait until `condition` is true; its value."""
    deadline = time.monotonic() + budget_s
    while not (value := condition()):
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.05)
    return value


def processes_of(data: Path) -> list[psutil.Process]:
    """Every live process that names this data directory in its command line, environment or working directory."""
    found = []
    for process in psutil.process_iter():
        try:
            named = str(data) in " ".join([process.cwd(), *process.cmdline(), *process.environ().values()])
            # asked last: it may end while we look, and be a zombie until whoever inherited it reaps it
            if process.pid != os.getpid() and named and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def ask(stack: Any, model: str) -> str:
    answer = stack.headrace("chat", model, "-m", "hello", "--max-tokens", "3", "--temperature", "0")
    assert answer.returncode == 0, answer.stderr
    return str(answer.stdout)


@pytest.mark.e2e
def test_a_stack_from_up_to_down(own_stack: Any) -> None:
    assert own_stack.headrace("status").returncode == 1
    own_stack.up()
    assert stat.S_IMODE((own_stack.data / "stack.json").stat().st_mode) == 0o600
    assert state.holder(own_stack.data) == own_stack.state["pid"]

    second = own_stack.headrace("up", "--detach", "--port", "0", "--no-demo")
    assert second.returncode == 1
    assert "already running" in second.stderr
    assert own_stack.state["ready"]

    own_stack.push("sim:zero", "zero")
    before = ask(own_stack, "zero")
    [worker] = [lease["pid"] for lease in until(lambda: own_stack.status()["workers"])]

    # each server, the ingress and the controller come back on their ports after a SIGKILL; the worker outlives them
    places = {name: own_stack.state[name] for name in ("http", "nats", "s3_endpoint")}
    for name, process in own_stack.state["processes"].items():
        os.kill(process["pid"], signal.SIGKILL)
        again = until(lambda name=name, old=process["pid"]: _other_pid(own_stack, name, old))
        assert again["restarts"] == 1
    assert {name: own_stack.state[name] for name in places} == places
    until(lambda: own_stack.headrace("chat", "zero", "-m", "hello", "--max-tokens", "3").returncode == 0)
    assert ask(own_stack, "zero") == before
    assert [lease["pid"] for lease in until(lambda: own_stack.status()["workers"])] == [worker]

    own_stack.down()
    assert processes_of(own_stack.data) == []
    assert not [path for path in Path("/tmp").glob("seaweedfs-*") if _is_socket_of(own_stack, path)]
    assert own_stack.headrace("status").returncode == 1
    assert "no stack is running" in own_stack.headrace("down").stdout


@pytest.mark.e2e
def test_ctrl_c_in_the_terminal_ends_everything_in_order(own_stack: Any) -> None:
    with subprocess.Popen(
        own_stack.command("up", "--port", "0", "--no-demo"),
        env=own_stack.env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as up:
        assert up.stdout is not None
        printed = list(iter(up.stdout.readline, "Ctrl-C ends it.\n"))
        assert any(line.startswith("Headrace is up at http://127.0.0.1:") for line in printed)
        up.send_signal(signal.SIGINT)
        rest, _ = up.communicate(timeout=30)
    assert up.returncode == 0
    assert [line.strip() for line in rest.splitlines()] == [
        "ending ingress",
        "ending controller",
        "ending nats and objects and redis",
        "ended",
    ]
    assert processes_of(own_stack.data) == []


@pytest.fixture
def beside_servers(own_stack: Any, nats_server: Any, s3_settings: Settings) -> Any:
    """A stack that is told to use servers which are not its own."""
    own_stack.env |= {
        "HEADRACE_NATS_URL": nats_server.url,
        "HEADRACE_S3_ENDPOINT": s3_settings.s3_endpoint,
        "HEADRACE_S3_ACCESS_KEY": s3_settings.s3_access_key,
        "HEADRACE_S3_SECRET_KEY": s3_settings.s3_secret_key,
        "HEADRACE_REDIS_URL": "none",
    }
    return own_stack


@pytest.mark.e2e
def test_named_servers_are_used_and_a_removed_directory_ends_the_stack(beside_servers: Any, nats_server: Any) -> None:
    stack = beside_servers
    stack.up()
    assert sorted(stack.state["processes"]) == ["controller", "ingress"]
    assert stack.status()["nats"] == nats_server.url
    assert processes_of(stack.data)
    shutil.rmtree(stack.data, ignore_errors=True)  # a log may be written while it is removed
    (stack.data / "stack.lock").unlink(missing_ok=True)
    until(lambda: not processes_of(stack.data))
    nats_server.signal(signal.SIGCONT)  # raises if it were gone


@pytest.mark.e2e
def test_a_port_that_is_taken_and_a_process_that_cannot_start_are_told(beside_servers: Any, nats_server: Any) -> None:
    taken = nats_server.url.rpartition(":")[2]
    refused = beside_servers.headrace("up", "--detach", "--port", taken, "--no-demo")
    assert refused.returncode == 1
    assert f"port {taken} is in use" in refused.stderr
    beside_servers.env["HEADRACE_HTTP_HOST"] = "0.0.0.0"  # there are no keys yet, so an ingress refuses it
    broken = beside_servers.headrace("up", "--detach", "--port", "0", "--no-demo")
    assert broken.returncode == 1
    assert "ingress does not start" in broken.stderr
    assert "HEADRACE_INSECURE" in broken.stderr
    assert processes_of(beside_servers.data) == []


@pytest.mark.e2e
def test_a_named_nats_that_cannot_be_used_is_told_in_a_line_and_soon(beside_servers: Any, guarded_nats: Any) -> None:
    address = guarded_nats.url.removeprefix("nats://")
    for variables, shown, reason in (
        ({"HEADRACE_NATS_REPLICAS": "3"}, beside_servers.env["HEADRACE_NATS_URL"], "replicas > 1 not supported"),
        ({"HEADRACE_NATS_URL": f"nats://me:secret@{address}"}, f"nats://...@{address}", "Authorization Violation"),
        ({"HEADRACE_NATS_URL": "nats://127.0.0.1:1"}, "nats://127.0.0.1:1", "Connect call failed"),
    ):
        beside_servers.env |= variables
        for options in ([], ["--detach"]):
            refused = beside_servers.headrace("up", "--port", "0", "--no-demo", *options, timeout_s=60)
            assert (refused.returncode, refused.stdout.strip()) == (1, "")
            assert refused.stderr.count("\n") == 1
            assert shown in refused.stderr
            assert reason in refused.stderr
            assert "secret" not in refused.stderr + (beside_servers.data / "logs" / "check-nats.log").read_text()
    assert processes_of(beside_servers.data) == []


def _other_pid(stack: Any, name: str, old: int) -> dict[str, int] | None:
    found: dict[str, int] = stack.state["processes"][name]
    return found if found["pid"] != old else None


def _is_socket_of(stack: Any, path: Path) -> bool:
    ports = {port + 10_000 for port in stack.state["object_ports"].values()}
    return int(path.stem.rpartition("-")[2]) in ports
