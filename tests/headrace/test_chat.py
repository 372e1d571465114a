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
        chat._answer(client, "m", [], {}, [])
    assert capsys.readouterr().out == printed


def test_a_refusal_that_is_not_ours_is_told_as_it_came() -> None:
    for given, words in (
        (httpx.Response(502, text="<h1>Bad gateway</h1>"), "answered 502: <h1>Bad gateway"),
        (httpx.Response(500, json=["no"]), "answered 500"),
        (httpx.Response(404, json={"detail": "Not Found"}), "Not Found"),
        (httpx.Response(400, json={"error": "no such thing"}), "no such thing"),
    ):
        with (
            httpx.Client(base_url="http://i", transport=httpx.MockTransport(lambda _, given=given: given)) as client,
            pytest.raises(HeadraceError, match=words),
        ):
            chat._answer(client, "m", [], {}, [])


def test_a_conversation_remembers_what_was_said_of_each_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole, stopped by Ctrl-C, broken off by an error, refused: the model is shown what there was of it."""
    sent: list[Any] = []
    lines = iter(["one", "two", "three", "four", "five"])

    def typed(prompt: str) -> str:
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    def stream(*parts: str | type[BaseException]) -> Iterator[bytes]:
        for part in parts:
            if not isinstance(part, str):
                raise part
            yield b'data: {"choices":[{"delta":{"content":"%b"}}]}\n\n' % part.encode()
        yield b"data: [DONE]\n\n"

    def answer(request: httpx.Request) -> httpx.Response:
        sent.append([message["content"] for message in json.loads(request.content)["messages"]])
        parts = {
            "one": stream("a", "b"),
            "two": stream("c", KeyboardInterrupt),
            "three": stream(KeyboardInterrupt),
            "four": None,
        }.get(sent[-1][-1], stream("e"))
        return httpx.Response(503, json={"error": {}}) if parts is None else httpx.Response(200, content=parts)

    monkeypatch.setattr("builtins.input", typed)
    with httpx.Client(base_url="http://ingress", transport=httpx.MockTransport(answer)) as client:
        chat._converse(client, "m", [{"role": "system", "content": "Be brief."}], {})
    assert sent[0] == ["Be brief.", "one"]
    assert sent[-1] == ["Be brief.", "one", "ab", "two", "c", "five"]


@pytest.mark.e2e
def test_piped_in_and_told_before(stack: Any) -> None:
    stack.push("sim:zero", "piped")
    command = stack.command("chat", "piped", "--system", "You are brief.", "--max-tokens", "5")
    asked = {"env": stack.env, "capture_output": True, "text": True, "check": False, "timeout": 60}
    ran = subprocess.run(command, input="hello", **asked)
    assert (ran.returncode, bool(ran.stdout.strip()), ran.stderr) == (0, True, "")
    empty = subprocess.run(command, input=" \n", **asked)
    assert (empty.returncode, empty.stdout) == (2, "")
    assert "nothing in it to answer" in empty.stderr
    unknown = subprocess.run(stack.command("chat", "nobody"), input="hello", **asked)
    assert (unknown.returncode, unknown.stderr) == (1, "headrace: the model `nobody` does not exist\n")


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
