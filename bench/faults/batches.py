"""A batch through the command line, on a local stack whose every process is killed on the way; what came of each line."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil

from faults.processes import REPOSITORY, environment, resident_bytes
from headrace.stack import state
from shared import subjects, usage
from shared.bus import Bus
from shared.errors import HeadraceError

SERVERS = ("objects", "ingress", "controller", "nats", "redis")  # in the order in which they are killed
POLL_S = 0.05
SETTLE_S = 30.0  # after the end, for what workers still write down
ENDPOINT = "/v1/completions"


class Outcome(msgspec.Struct, kw_only=True):
    """What was seen of a run."""

    lines: int
    seconds: float = 0.0
    status: str = ""
    counts: dict[str, int] = {}
    answers: int = 0
    errors: int = 0
    killed: list[str] = []
    resident_before: int = 0  # of the ingress, in bytes
    resident_peak: int = 0
    billed: int = 0  # requests that are accounted for
    live_ms: list[float] = []  # how long the ingress took to say that its event loop turns
    problems: list[str] = []


class Stack:
    """A local stack of its own, as `headrace up` starts it."""

    def __init__(self, directory: Path, settings: dict[str, str] | None = None) -> None:
        self.data = directory / "data"
        self.env = environment({"HEADRACE_DATA": str(self.data), "HEADRACE_DRAIN_BUDGET_S": "5"} | (settings or {}))
        self.bus: Bus

    async def __aenter__(self) -> "Stack":
        await self.headrace("up", "--detach", "--no-demo", "--port", "0")
        settings = state.client_settings({}, data_dir=str(self.data))
        self.bus = await Bus.connect(msgspec.structs.replace(settings, publish_timeout_s=30.0), "bench")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.bus.close()
        await self.headrace("down")

    @property
    def state(self) -> state.StackState:
        found = state.read(self.data)
        assert found is not None, "the stack runs"
        return found

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "headrace", *arguments]

    async def headrace(self, *arguments: str) -> str:
        """Run a command to its good end; what it printed."""
        process = await asyncio.create_subprocess_exec(
            *self.command(*arguments),
            env=self.env,
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        said, _ = await process.communicate()
        assert process.returncode == 0, said.decode()
        return said.decode()

    def workers(self) -> list[int]:
        """The pids of the workers that live. The bus is not asked: it may have been killed a moment ago."""
        found = []
        for process in psutil.Process(self.state.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if "--worker-id" in process.cmdline():
                    found.append(process.pid)
        return found


class Run:
    """One batch of `lines` lines, of which each tenth chooses at random; each hundredth cannot be answered."""

    def __init__(
        self, stack: Stack, directory: Path, model: str, lines: int, tokens: int, padding_bytes: int = 0
    ) -> None:
        """`padding_bytes`: so much longer is each line than it need be, by what changes nothing about its answer."""
        self._stack, self._directory, self._model, self._tokens = stack, directory, model, tokens
        self._padding = "x" * padding_bytes
        self.outcome = Outcome(lines=lines)
        self._progress = (0, 0)  # done, total
        self._faulty = {f"line-{number}" for number in range(7, lines, 100)}

    async def play(self, everything: bool, say: Callable[[str], None]) -> Outcome:
        """Run it, killing each process once, and in the end (`everything`) all at once; check what came of it."""
        outcome, begin = self.outcome, time.monotonic()
        input_file = self._directory / "batch.jsonl"
        self._write(input_file)
        output, errors = self._directory / "answers.jsonl", self._directory / "errors.jsonl"
        command = self._stack.command("batch", "run", str(input_file), "--json", "--out", str(output))
        outcome.resident_before = outcome.resident_peak = self._resident()
        process = await asyncio.create_subprocess_exec(
            *(*command, "--errors", str(errors)),
            env=self._stack.env,
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        async with self._watched():
            for number, victims in enumerate(victim_sets := self._victims(everything)):
                await self._reached((number + 1) / (len(victim_sets) + 1), process)
                if process.returncode is not None:
                    outcome.problems.append(f"it ended before {', '.join(victims)} could be killed")
                    break
                self._kill(victims)
                say(f"{self._progress[0]} of {self._progress[1]} lines: killed {outcome.killed[-1]}")
            said, _ = await process.communicate()
        outcome.seconds = time.monotonic() - begin
        self._check(json.loads(said), output, errors)
        await self._check_left()
        return outcome

    def _write(self, path: Path) -> None:
        with open(path, "w") as file:
            for number in range(self.outcome.lines):
                body: dict[str, Any] = {
                    "model": self._model,
                    "prompt": f"Count from {number}:",
                    "max_tokens": self._tokens,
                }
                body["temperature"] = 1.0 if number % 10 == 0 else 0.0
                if f"line-{number}" in self._faulty:
                    body["temperature"] = 5.0
                if self._padding:
                    body["metadata"] = {"padding": self._padding}
                asked = {"custom_id": f"line-{number}", "method": "POST", "url": ENDPOINT, "body": body}
                file.write(json.dumps(asked) + "\n")

    # -- kills ---------------------------------------------------------------------------------------------------------

    def _victims(self, everything: bool) -> list[list[str]]:
        each = [["worker"], *([name] for name in SERVERS)]
        return [*each, ["worker", *SERVERS]] if everything else each

    def _kill(self, names: list[str]) -> None:
        pids: list[int] = []
        for name in names:
            pids += self._stack.workers() if name == "worker" else [self._stack.state.processes[name].pid]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.outcome.killed.append(", ".join(names))

    async def _reached(self, share: float, process: asyncio.subprocess.Process) -> None:
        while process.returncode is None:
            done, total = self._progress
            if total and done >= share * total:
                return
            await asyncio.sleep(POLL_S)

    @contextlib.asynccontextmanager
    async def _watched(self) -> AsyncIterator[None]:
        watching = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    async def _watch(self) -> None:
        async with httpx.AsyncClient(base_url=self._stack.state.http, timeout=5) as client:
            while True:
                with contextlib.suppress(httpx.HTTPError, ValueError, LookupError):
                    [batch] = (await client.get("/v1/batches", params={"limit": 1})).json()["data"]
                    counts = batch["request_counts"]
                    self._progress = counts["completed"] + counts["failed"], counts["total"]
                with contextlib.suppress(httpx.HTTPError):
                    asked = time.monotonic()
                    await client.get("/livez")
                    self.outcome.live_ms.append((time.monotonic() - asked) * 1e3)
                self.outcome.resident_peak = max(self.outcome.resident_peak, self._resident())
                await asyncio.sleep(POLL_S)

    def _resident(self) -> int:
        return resident_bytes(self._stack.state.processes["ingress"].pid)

    # -- checks --------------------------------------------------------------------------------------------------------

    def _check(self, batch: dict[str, object], output: Path, errors: Path) -> None:
        outcome = self.outcome
        outcome.status, outcome.counts = str(batch["status"]), dict(batch["request_counts"])  # type: ignore[call-overload]
        answers, refusals = _lines(output), _lines(errors)
        outcome.answers, outcome.errors = len(answers), len(refusals)
        wanted = {f"line-{number}" for number in range(outcome.lines)}
        seen = Counter(line["custom_id"] for line in [*answers, *refusals])
        self._expect("lines without a result", len(wanted - seen.keys()), 0)
        self._expect("lines with several results", sum(count > 1 for count in seen.values()), 0)
        self._expect("lines that nobody asked", len(seen.keys() - wanted), 0)
        self._expect("lines with an error", {line["custom_id"] for line in refusals}, self._faulty)
        self._expect("statuses of errors", {line["response"]["status_code"] for line in refusals}, {400})
        self._expect("status", outcome.status, "completed")
        good = outcome.lines - len(self._faulty)
        self._expect("counts", outcome.counts, {"total": outcome.lines, "completed": good, "failed": len(self._faulty)})
        in_order = [int(line["custom_id"].partition("-")[2]) for line in answers]
        self._expect("the order of the output", in_order == sorted(in_order), True)
        bodies = [line["response"]["body"] for line in answers]
        self._expect(
            "tokens of answers that were cut",
            {body["usage"]["completion_tokens"] for body in bodies if body["choices"][0]["finish_reason"] == "length"}
            - {self._tokens},
            set(),
        )
        self._tokens_told = sum(body["usage"]["completion_tokens"] for body in bodies)

    async def _check_left(self) -> None:
        """What was accounted for, once, and that nothing is left in the queue."""
        bus, deadline = self._stack.bus, time.monotonic() + SETTLE_S
        good = self.outcome.lines - len(self._faulty)
        while True:
            with contextlib.suppress(HeadraceError):
                [sums] = await usage.query(bus, 0, by="total")
                jobs = (await bus.stream_info(subjects.JOB_STREAM)).messages
                if (sums.requests, jobs) == (good, 0) or time.monotonic() > deadline:
                    break
            await asyncio.sleep(POLL_S)
        self.outcome.billed = sums.requests
        self._expect("jobs that are left", jobs, 0)
        self._expect("requests that were accounted for", (sums.requests, sums.completed), (good, good))
        self._expect("tokens that were accounted for", sums.output_tokens, self._tokens_told)

    def _expect(self, what: str, found: object, wanted: object) -> None:
        if found != wanted:
            self.outcome.problems.append(f"{what}: {found!r:.300}, and not {wanted!r:.300}")


def _lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
