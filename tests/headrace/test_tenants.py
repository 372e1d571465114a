"""`headrace tenants`, `headrace audit` and `--key`, as somebody at a terminal uses them."""

import getpass
import json
import re
import secrets
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

import msgspec
import pytest
import typer
from typer.testing import CliRunner

from headrace.audit import in_words
from headrace.cli import app
from headrace.deployments import gates_of
from headrace.tenants import seconds_of
from shared import tenancy, tenants
from shared.errors import HeadraceError
from shared.rollouts import DEFAULT_STEPS, NewDeployment

KEY = re.compile(r"^hr_[A-Za-z0-9_-]{43}$", re.MULTILINE)


@pytest.fixture
def name() -> str:
    return f"team-{secrets.token_hex(4)}"


class Ran(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def run(stack: Any, *arguments: str) -> Ran:
    """A command in this process: its start costs more than what it does."""
    ran = CliRunner().invoke(app, ["--data", str(stack.data), *arguments])
    known = isinstance(ran.exception, HeadraceError)
    assert known or ran.exception is None or isinstance(ran.exception, SystemExit), ran.exception
    return Ran(ran.exit_code, ran.stdout, str(ran.exception) if known else ran.stderr)


def said(stack: Any, *arguments: str) -> Any:
    """What a command prints as JSON."""
    ran = run(stack, *arguments, "--json")
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def test_durations_are_read() -> None:
    assert [seconds_of(text, "--x") for text in ("90d", "12h", "1.5m", "45s", "45")] == [7_776_000, 43_200, 90, 45, 45]
    for wrong in ("", "d", "-1h", "1w", "1h30m"):
        with pytest.raises(typer.BadParameter):
            seconds_of(wrong, "--x")


@pytest.mark.e2e
def test_the_life_of_a_tenant_at_a_terminal(stack: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenancy, "SETTLED_S", 0.0)
    added = run(stack, "tenants", "add", name, "--weight", "2", "--requests-per-minute", "60", "--note", "first")
    assert added.returncode == 0, added.stderr
    [key] = KEY.findall(added.stdout)
    assert "told this once" in added.stdout
    again = run(stack, "tenants", "add", name)
    assert (again.returncode, again.stdout) == (1, "")
    assert "there is a tenant" in again.stderr

    shown = said(stack, "tenants", "show", name)
    assert (shown["weight"], shown["limits"]["requests_per_minute"]) == (2.0, 60)
    [first] = shown["keys"]
    assert (first["note"], first["role"], first["state"]) == ("first", "infer", "active")
    changed = said(stack, "tenants", "set", name, "--queue-max", "5", "--unset", "requests-per-minute")
    assert (changed["limits"]["requests_per_minute"], changed["limits"]["queue_max"]) == (None, 5)
    issued = said(stack, "tenants", "issue", name, "--role", "deploy", "--model", "m", "--expires", "1d")
    assert tenants.is_key(issued["key"])
    assert issued["expires"] - issued["created"] in (86_400, 86_401)
    rotated = said(stack, "tenants", "rotate", name, issued["id"], "--grace", "0s")
    assert (rotated["role"], rotated["models"]) == ("deploy", ["m"])
    assert run(stack, "tenants", "revoke", name, rotated["id"]).returncode == 0
    states = {each["id"]: each["state"] for each in said(stack, "tenants", "show", name)["keys"]}
    assert states == {first["id"]: "active", issued["id"]: "expired", rotated["id"]: "revoked"}
    assert name in {each["name"] for each in said(stack, "tenants", "list")}
    table = run(stack, "tenants", "list").stdout
    assert re.search(rf"{name} +2 +0 +queue_max=5 +1/3", table), table

    mistaken = run(stack, "tenants", "revoke", name, key)
    assert (mistaken.returncode, mistaken.stdout) == (1, "")
    removed = run(stack, "tenants", "rm", name)
    assert removed.stdout == f"removed {name}\n"
    assert run(stack, "tenants", "show", name).returncode == 1

    told = [entry for entry in said(stack, "audit", "--since", "1h") if entry["target"] == name]
    assert [(entry["action"], entry["result"]) for entry in told] == [
        ("tenant.add", "ok"),
        ("key.issue", "ok"),
        ("tenant.add", "tenant_exists"),
        ("tenant.change", "ok"),
        ("key.issue", "ok"),
        ("key.rotate", "ok"),
        ("key.revoke", "ok"),
        ("key.revoke", "api_key_not_found"),
        ("tenant.remove", "ok"),
    ]
    assert all(entry["by"].startswith(f"cli:{getpass.getuser()}@") for entry in told)
    written = json.dumps(told) + mistaken.stderr + run(stack, "audit").stdout
    written += "".join(log.read_text() for log in sorted((stack.data / "logs").glob("*.log")))
    for secret in (key, issued["key"], rotated["key"]):
        assert secret[3:] not in written


@pytest.mark.e2e
def test_what_is_wrong_is_usage(stack: Any, name: str) -> None:
    for arguments in (
        ("add", name, "--weight", "0"),
        ("add", name, "--role", "root"),
        ("add", name, "--expires", "soon"),
        ("set", name),
        ("set", name, "--unset", "colour"),
        ("set", name, "--weight", "-1"),
        ("rotate", name, "k1", "--grace", "x"),
        ("rotate", name, "k1", "--grace", "999999d"),
    ):
        ran = run(stack, "tenants", *arguments)
        assert ran.returncode == 2, (arguments, ran.stderr)
    for reserved in ("ingress", "local"):
        assert run(stack, "tenants", "add", reserved).returncode == 1
    assert name not in {each["name"] for each in said(stack, "tenants", "list")}


def test_the_table_of_the_audit_log_says_what_was_changed_and_nothing_that_is_as_usual() -> None:
    asked = NewDeployment(model="m", version="v2", steps=DEFAULT_STEPS["canary"])
    assert in_words(json.loads(msgspec.json.encode(asked))) == "model=m version=v2 strategy=canary steps=1,5,25,100"
    gates = gates_of(
        ["error_rate.max=0.02", "ttft_p99.ratio_max=off", "tpot_p99=off", "crashes_max=0", "samples_min=30"]
    )
    asked = NewDeployment(model="m", version="v2", gates=gates, bake_seconds=0.0)
    changed = "gates.error_rate.max=0.02 gates.ttft_p99.ratio_max=off gates.tpot_p99=off gates.crashes_max=0"
    assert sorted(in_words(json.loads(msgspec.json.encode(asked))).split()) == sorted(
        f"model=m version=v2 strategy=canary bake_seconds=0.0 {changed}".split()
    )
    limits = {"limits": {"max_replicas": 2, "idle_seconds": None, "schedule": [{"from": 1}, {"from": 2}]}, "engine": {}}
    assert in_words(limits) == "limits.max_replicas=2 limits.idle_seconds=default limits.schedule=(2)"
    assert in_words({"models": ["a", "b"], "expires_seconds": None, "note": ""}) == "models=a,b"


@pytest.mark.e2e
def test_models_and_aliases_are_audited(stack: Any, name: str) -> None:
    stack.push("sim:zero", name)
    assert run(stack, "models", "alias", name, "beta", "v1").returncode == 0
    assert run(stack, "models", "alias", name, "beta", "v9").returncode == 1
    assert run(stack, "models", "alias", name, "beta", "--delete").returncode == 0
    assert run(stack, "models", "set", f"{name}@v1", "--max-replicas", "1").returncode == 0
    stack.push("sim:zero", name, version="v2")
    deployed = said(stack, "deploy", f"{name}@v2", "--strategy", "canary")
    [line] = [each for each in run(stack, "audit").stdout.splitlines() if f"model={name} " in each]
    assert line.split()[7:] == [f"model={name}", "version=v2", "strategy=canary"]
    [entry] = [each for each in said(stack, "audit") if each["target"] == deployed["deployment_id"]]
    assert "samples_min" in entry["detail"]["gates"]
    assert run(stack, "rollback", name).returncode == 0
    told = [
        (entry["action"], entry["target"], entry["result"])
        for entry in said(stack, "audit", "--since", "1h")
        if name in entry["target"] or entry["target"] == deployed["deployment_id"]
    ]
    assert told == [
        ("version.register", f"{name}@v1", "ok"),
        ("alias.set", f"{name}@beta", "ok"),
        ("alias.set", f"{name}@beta", "version_not_found"),
        ("alias.remove", f"{name}@beta", "ok"),
        ("version.change", f"{name}@v1", "ok"),
        ("version.register", f"{name}@v2", "ok"),
        ("deployment.create", deployed["deployment_id"], "ok"),
        ("deployment.rollback", deployed["deployment_id"], "ok"),
    ]


class _Ingress(BaseHTTPRequestHandler):
    """Says what key it was sent, and what the sender's command line is, as everybody on the host can read it."""

    protocol_version = "HTTP/1.0"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        command = "no such client"
        for process in Path("/proc").glob("[0-9]*"):
            try:
                line = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if f"127.0.0.1:{self.server.server_address[1]}" in line:
                command = line
        event = {"choices": [{"delta": {"content": f"{self.headers['authorization']}|{command}"}}]}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n".encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def ingress_url() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), _Ingress)
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("way", ["option", "equals", "variable", "none"])
def test_a_key_is_sent_and_is_on_no_command_line(own_stack: Any, ingress_url: str, way: str) -> None:
    key = tenants.new_key()
    options = {"option": ["--key", key], "equals": [f"--key={key}"]}.get(way, [])
    own_stack.env.pop("HEADRACE_API_KEY", None)
    if way == "variable":
        own_stack.env["HEADRACE_API_KEY"] = key
    command = [sys.executable, "-m", "headrace", "--url", ingress_url, *options, "chat", "m", "-m", "Hi"]
    ran = subprocess.run(command, env=own_stack.env, capture_output=True, text=True, check=False, timeout=60)
    sent, _, line = ran.stdout.strip().partition("|")
    assert ran.returncode == 0, ran.stderr
    assert sent == ("None" if way == "none" else f"Bearer {key}")
    assert "chat m -m Hi" in line
    assert key not in line
