"""A whole stack on a nats-server with the accounts of `headrace nats-config`."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ..conftest import LocalStack

BODY = {"model": "guarded", "prompt": "hello there", "max_tokens": 20, "temperature": 0}


@pytest.fixture
def guarded_stack(own_guarded_nats: Any, tmp_path: Path) -> Iterator[LocalStack]:
    own = own_guarded_nats.settings()
    env = {"HEADRACE_NATS_URL": own.nats_url, "HEADRACE_NATS_NKEY": own.nats_nkey}
    stack = LocalStack(tmp_path / "data", env)
    stack.up()
    yield stack
    stack.down()


def test_ingress_controller_and_worker_serve_on_it(guarded_stack: LocalStack, own_guarded_nats: Any) -> None:
    import httpx

    stack = guarded_stack
    stack.push("sim:zero", "guarded")
    answer = httpx.post(f"{stack.http}/v1/completions", json=BODY, timeout=60)
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 20
    assert [each["state"] for each in stack.status()["workers"]] == ["active"]
    seed = own_guarded_nats.key().read_bytes().strip()
    files = [path for path in stack.data.rglob("*") if path.is_file()]
    assert files
    assert [path for path in files if seed in path.read_bytes()] == []
    mark = str(stack.data).encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                said = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
            except OSError:
                continue
            assert mark not in said or seed not in said
