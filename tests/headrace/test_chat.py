"""`headrace chat` at a terminal: a pseudo-terminal types, and reads what a person would see."""

import contextlib
import json
import os
import pty
import select
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from headrace import chat
from shared.errors import HeadraceError


class Terminal:
    """A process that thinks a person sits before it."""

    def __init__(self, command: list[str], env: dict[str, str]) -> None:
        self._ours, theirs = pty.openpty()
        self.process = subprocess.Popen(command, env=env, stdin=theirs, stdout=theirs, stderr=theirs, process_group=0)
        os.close(theirs)
        self._seen = ""

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def wait_for(self, text: str, budget_s: float = 20.0) -> str:
        """Read until `text` appears; everything up to its end, which is then forgotten."""
        deadline = time.monotonic() + budget_s
        while text not in self._seen:
            assert time.monotonic() < deadline, f"{text!r} did not appear in {self._seen!r}"
            if select.select([self._ours], [], [], 0.1)[0]:
                with contextlib.suppress(OSError):  # Linux says EIO at the end of a terminal
                    self._seen += os.read(self._ours, 4096).decode()
        head, _, self._seen = self._seen.partition(text)
        return head

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


@pytest.mark.parametrize(("begun", "printed"), [("", ""), ("half an", "half an\n")])
def test_an_error_is_on_a_line_of_its_own(begun: str, printed: str, capsys: pytest.CaptureFixture[str]) -> None:
    events: list[dict[str, Any]] = [{"choices": [{"delta": {"content": begun}}]}] if begun else []
    events.append({"error": {"code": "version_failed", "message": "m@v1 cannot be served"}})
    stream = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
    with (
        httpx.Client(
            base_url="http://ingress", transport=httpx.MockTransport(lambda _: httpx.Response(200, text=stream))
        ) as client,
        pytest.raises(HeadraceError, match="cannot be served"),
    ):
        chat._answer(client, "m", [], {})
    assert capsys.readouterr().out == printed


@pytest.fixture
def terminal(stack: Any) -> Iterator[Terminal]:
    stack.push("sim:fixed-20ms", "talker")
    opened = Terminal(stack.command("chat", "talker", "--max-tokens", "400"), stack.env)
    yield opened
    opened.close()


@pytest.mark.e2e
def test_a_conversation_that_is_stopped_goes_on_and_ends(stack: Any, terminal: Terminal) -> None:
    terminal.wait_for("Ctrl-D ends")
    terminal.wait_for("> ")
    terminal.type("hello\n")
    terminal.wait_for("hello")
    terminal.wait_for(" ")  # the first word of eight seconds of them
    terminal.process.send_signal(2)
    terminal.wait_for("[stopped]")
    terminal.wait_for("> ")
    deadline = time.monotonic() + 10
    while any(worker["claims"] or worker["running"] for worker in stack.status()["workers"]):
        assert time.monotonic() < deadline, "the stopped answer went on"
    terminal.type("\x04")
    assert terminal.process.wait(10) == 0
