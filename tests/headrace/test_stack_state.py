"""The lock and the state file of a data directory, and the plan of a stack."""

import os
import stat
from pathlib import Path

import pytest

from headrace.stack import plan, ports, state
from headrace.stack.state import StackError, StackState
from shared.settings import load


def make_state(**changes: object) -> StackState:
    values = {
        "pid": os.getpid(),
        "started": 1.0,
        "http": "http://127.0.0.1:1",
        "nats": "nats://127.0.0.1:2",
        "s3_endpoint": "http://127.0.0.1:3",
        "s3_access_key": "key",
        "s3_secret_key": "secret",
    }
    return StackState(**(values | changes))  # type: ignore[arg-type]


def test_one_stack_to_a_directory_and_the_lock_is_the_truth(tmp_path: Path) -> None:
    data = tmp_path / "data"
    assert state.holder(data) is None
    with state.acquire(data):
        assert state.holder(data) == os.getpid()
        with pytest.raises(StackError, match=f"already running on {data} .pid {os.getpid()}."):
            state.acquire(data)
        assert state.running(data) is None  # nothing written yet
        state.write(data, make_state())
        assert state.running(data) == make_state()
    assert state.holder(data) is None
    assert state.running(data) is None  # stale, whatever the file says
    assert state.read(data) == make_state()
    (data / "stack.json").write_text('{"pid": 1')
    assert state.read(data) is None


def test_the_state_file_is_for_its_owner_only_even_when_it_was_not(tmp_path: Path) -> None:
    (tmp_path / "stack.json").write_text("{}")
    (tmp_path / "stack.json").chmod(0o644)
    state.write(tmp_path, make_state())
    assert stat.S_IMODE((tmp_path / "stack.json").stat().st_mode) == 0o600


def test_a_command_reaches_the_running_stack_unless_told_otherwise(tmp_path: Path) -> None:
    def reach(environ: dict[str, str]) -> tuple[str, str, str]:
        found = state.client_settings(environ, data_dir=str(tmp_path))
        return found.nats_url, found.s3_endpoint, found.s3_secret_key

    with state.acquire(tmp_path):
        state.write(tmp_path, make_state())
        assert reach({}) == ("nats://127.0.0.1:2", "http://127.0.0.1:3", "secret")
        assert reach({"HEADRACE_NATS_URL": "nats://n:1"}) == ("nats://n:1", "http://127.0.0.1:3", "secret")
        assert reach({"HEADRACE_S3_ENDPOINT": "http://s:1"}) == ("nats://127.0.0.1:2", "http://s:1", "")
    assert reach({}) == ("nats://127.0.0.1:4222", "http://127.0.0.1:8333", "")


def test_a_plan_gives_every_process_the_same_settings(tmp_path: Path) -> None:
    (tmp_path / "headrace.toml").write_text("http_port = 1\ntick_s = 0.5\n")
    port = ports.free_ports(1)[0]
    environ = {"HEADRACE_LOG_LEVEL": "debug", "HEADRACE_DATA": "elsewhere", "PATH": os.environ["PATH"]}
    planned = plan.make(tmp_path, port, 7, environ)
    assert [command.name for command in (*planned.servers, *planned.processes)] == [
        "nats",
        "objects",
        "redis",
        "ingress",
        "controller",
    ]
    for command in planned.processes:
        seen = load(command.env)
        assert seen == planned.settings
        assert (seen.http_port, seen.tick_s, seen.log_level, seen.idle_seconds) == (port, 0.5, "debug", 60.0)
        assert (seen.data_dir, seen.lifeline_fd, command.pass_fds) == (str(tmp_path), 7, (7,))
        assert "HEADRACE_DATA" not in command.env
    assert planned.settings.s3_secret_key not in " ".join(planned.servers[1].argv)

    state.write(tmp_path, planned.state)
    again = plan.make(tmp_path, port, 7, environ | {"HEADRACE_IDLE_SECONDS": "300"})
    assert again.settings.nats_url == planned.settings.nats_url  # ports that are free are used again
    assert again.state.object_ports == planned.state.object_ports
    assert again.settings.redis_url == planned.settings.redis_url
    assert again.settings.s3_secret_key != planned.settings.s3_secret_key
    assert again.settings.idle_seconds == 300.0


def test_servers_that_are_named_by_hand_are_not_started(tmp_path: Path) -> None:
    environ = {"HEADRACE_NATS_URL": "nats://n:1", "HEADRACE_S3_ENDPOINT": "http://s:1", "HEADRACE_HTTP_PORT": "0"}
    environ["HEADRACE_REDIS_URL"] = "none"
    planned = plan.make(tmp_path, None, 7, environ)
    assert planned.servers == []
    assert (planned.settings.nats_url, planned.settings.s3_endpoint) == ("nats://n:1", "http://s:1")
