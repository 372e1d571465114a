"""Whole stacks of real processes, as a user starts them, and clients that read them from the outside."""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from ..conftest import LocalStack

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def wait_for(condition: Callable[[], Any], budget_s: float = 30.0, what: str = "the condition") -> Any:
    """Poll until `condition()` is true; what it returned."""
    deadline = time.monotonic() + budget_s
    while not (result := condition()):
        assert time.monotonic() < deadline, f"{what} did not come true within {budget_s:g} s"
        time.sleep(0.05)
    return result


async def until(condition: Callable[[], object], budget_s: float = 60.0) -> None:
    """The same on an event loop."""
    async with asyncio.timeout(budget_s):
        while not condition():  # noqa: ASYNC110 - what others do is looked at
            await asyncio.sleep(0.02)


class Answer:
    """One stream as its client saw it."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.events: list[dict[str, Any]] = []
        self.done = False  # [DONE] came, or the native last event
        self.seconds = 0.0
        self.first_s: float | None = None  # to the first event with text

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def texts(self) -> list[str]:
        """The text of each event of choice 0."""
        parts = []
        for event in self.events:
            if "token" in event:
                parts.append(event["token"])
            for choice in event.get("choices", []):
                if choice["index"] == 0:
                    parts.append(choice.get("text") or choice.get("delta", {}).get("content") or "")
        return parts

    @property
    def scored(self) -> list[dict[str, Any]]:
        """The logprobs of each token of choice 0 of a chat stream."""
        return [
            token
            for event in self.events
            for choice in event.get("choices", [])
            if choice["index"] == 0 and choice.get("logprobs")
            for token in choice["logprobs"]["content"]
        ]

    @property
    def error(self) -> dict[str, Any] | None:
        return next((event["error"] for event in self.events if "error" in event), None)

    @property
    def usage(self) -> dict[str, Any] | None:
        return next((event["usage"] for event in self.events if event.get("usage")), None)

    @property
    def finish(self) -> str | None:
        reasons = [event.get("finish_reason") for event in self.events]
        reasons += [choice["finish_reason"] for event in self.events for choice in event.get("choices", [])]
        return next((reason for reason in reasons if reason), None)


class Stack(LocalStack):
    """A running stack, with clients that read it from the outside."""

    @property
    def url(self) -> str:
        return self.http

    def workers(self, model: str, state: str = "active") -> list[dict[str, Any]]:
        return [each for each in self.status()["workers"] if each["model"] == model and each["state"] == state]

    def worker(self, model: str, **said: Any) -> dict[str, Any]:
        """The lease of the model's only active worker, once it says `said`: what it holds is some 0.3 s old at most."""

        def found() -> dict[str, Any] | None:
            leases = self.workers(model)
            return leases[0] if len(leases) == 1 and said.items() <= leases[0].items() else None

        lease: dict[str, Any] = wait_for(found, what=f"one worker of {model} that says {said}")
        return lease

    def idle(self, budget_s: float = 20.0) -> None:
        """Wait until status shows nothing queued, claimed, running or holding a block."""

        def nothing() -> bool:
            status = self.status()
            held = [each for each in status["workers"] if each["running"] or each["claims"] or each["blocks_used"]]
            return not held and status["queue"] == {"pending": 0, "claimed": 0, "jobs": 0}

        wait_for(nothing, budget_s, "an idle stack")

    def processes(self) -> list[int]:
        """Every live process that was started for this data directory."""
        mark = str(self.data).encode()
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            try:
                said = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
                said += os.readlink(entry / "cwd").encode()
                if mark in said and b") Z " not in (entry / "stat").read_bytes():
                    found.append(int(entry.name))
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
        return found

    def kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)

    # -- clients -------------------------------------------------------------------------------------------------------

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        return httpx.post(self.url + path, json=body, headers=headers, timeout=120)

    def stream(self, path: str, body: dict[str, Any], on_event: Callable[[Answer], None] | None = None) -> Answer:
        """One stream, to its end."""
        return asyncio.run(self.streams([(path, body)], on_event))[0]

    async def streams(
        self, requests: list[tuple[str, dict[str, Any]]], on_event: Callable[[Answer], None] | None = None
    ) -> list[Answer]:
        """All the streams at once; their answers in order."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(base_url=self.url, timeout=300, limits=limits) as client:
            return await asyncio.gather(*(read_stream(client, path, body, on_event) for path, body in requests))


async def read_stream(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], on_event: Callable[[Answer], None] | None = None
) -> Answer:
    answer = Answer()
    start = time.monotonic()
    async with client.stream("POST", path, json=body | {"stream": True}) as response:
        answer.status, answer.headers = response.status_code, dict(response.headers)
        async for line in response.aiter_lines():
            if not line.startswith("data: "):
                continue
            assert not answer.done, "an event after the end"
            if line == "data: [DONE]":
                answer.done = True
                continue
            answer.events.append(msgspec.json.decode(line[6:]))
            if answer.first_s is None and answer.texts and answer.texts[-1]:
                answer.first_s = time.monotonic() - start
            if "finish_reason" in answer.events[-1]:
                answer.done = True
            if on_event is not None:
                on_event(answer)
    answer.seconds = time.monotonic() - start
    return answer


def greedy(model: str, prompt: str, max_tokens: int, **more: Any) -> dict[str, Any]:
    """A chat request at temperature 0, with the two best candidates of each token."""
    messages = [{"role": "user", "content": prompt}]
    body = {"model": model, "messages": messages, "max_tokens": max_tokens, "temperature": 0}
    return body | {"logprobs": True, "top_logprobs": 2} | more


def assert_same_but_for_ties(name: str, got: Answer, wanted: Answer, margin_max: float) -> None:
    """Token-exact, or the first difference is where the two best tokens were within `margin_max` of each other."""
    pairs = zip(got.scored, wanted.scored, strict=False)
    for index, (one, other) in enumerate(pairs):
        if one["bytes"] == other["bytes"]:
            continue
        top = other["top_logprobs"]
        margin = top[0]["logprob"] - top[1]["logprob"]
        print(
            f"{name}: first differs at index {index}: {one['token']!r} for {other['token']!r}, top-2 margin {margin:.3f}"
        )
        assert margin <= margin_max, f"{name}: differs at index {index} with a margin of {margin:.3f}"
        return
    assert got.text == wanted.text


def ended(stack: Stack) -> None:
    """End a stack: nothing of it is left."""
    stack.down()
    wait_for(lambda: not stack.processes(), 20, "the end of every process")


@pytest.fixture
def fresh_stack(tmp_path: Path) -> Iterator[Stack]:
    """A stack of this test alone, without the demo model."""
    stack = Stack(tmp_path / "data")
    stack.up("--no-demo")
    yield stack
    ended(stack)


@pytest.fixture
def stopped_stack(tmp_path: Path) -> Iterator[Stack]:
    """A stack that its test starts and ends by itself; ended all the same when the test fails."""
    stack = Stack(tmp_path / "data")
    yield stack
    stack.headrace("down")
