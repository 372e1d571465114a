"""Jobs while every process is killed at once: each that was submitted completes once, with its own answer, and its webhook is
told of it."""

import asyncio
import contextlib
import itertools
import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec

from faults import corpus
from faults.answers import Answer
from faults.broker import HOST
from faults.corpus import Question
from faults.fleet import MODEL, Fleet
from faults.receiver import SECRET, Receiver
from shared import subjects, usage

JOBS = "/v1/jobs"
AT_ONCE = 32  # clients that submit, and that wait
QUESTIONS = 100
TOKENS = (20, 80)
RETRY_S = 0.1
WAIT_S = 20
SETTLE_S = 60.0
CODES_RETRIED = (500, 502, 503, 504)


class JobsReport(msgspec.Struct, kw_only=True):
    """What became of all jobs."""

    submitted: int
    kills: int  # processes, over all times
    outcomes: Counter[str]
    moved: int  # jobs that more than one claim served
    repeated: int  # submissions that had to be sent again
    deliveries: int  # to the webhook
    refused: int  # of these, by the receiver
    seconds: float
    problems: list[str]

    def lines(self) -> list[str]:
        outcomes = ", ".join(f"{count} {name}" for name, count in sorted(self.outcomes.items()))
        return [
            f"jobs: {self.submitted} submitted, {self.repeated} of them more than once; {self.kills} processes killed",
            f"  {outcomes}; {self.moved} were served by several claims; {self.seconds:.1f} s",
            f"  webhooks: {self.deliveries} deliveries, {self.refused} of them refused",
            *(f"  PROBLEM: {problem}" for problem in self.problems[:20]),
        ]


async def play(count: int, seed: int, times: int = 1, workers: int = 2, **settings: Any) -> JobsReport:
    """Submit `count` jobs and kill every process `times` times meanwhile: the first time while they are being submitted."""
    dice = random.Random(seed)
    questions = await corpus.make(seed, QUESTIONS)
    asked = [(dice.choice(questions), dice.randint(*TOKENS)) for _ in range(count)]
    kill_at = sorted(dice.randrange(count // 3, count) for _ in range(times))
    with tempfile.TemporaryDirectory(prefix="headrace-jobs-") as directory:
        settings = {"webhook_private_hosts": HOST, "webhook_backoff_s": 0.5} | settings
        async with (
            Receiver(seed) as receiver,
            Fleet(Path(directory), "sim:fixed-5ms", workers=workers, ingresses=2, **settings) as fleet,
        ):
            return await Run(fleet, receiver, asked, f"{seed}").run(kill_at)


class Run:
    """Jobs of one fleet."""

    def __init__(self, fleet: Fleet, receiver: Receiver, asked: list[tuple[Question, int]], name: str) -> None:
        self._fleet, self._receiver, self._asked, self._name = fleet, receiver, asked, name
        self._ids: dict[int, str] = {}
        self._outcomes: Counter[str] = Counter()
        self._problems: list[str] = []
        self._moved = self._repeated = self._kills = 0
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._http = httpx.AsyncClient(timeout=WAIT_S + 20, limits=limits)

    async def run(self, kill_at: list[int]) -> JobsReport:
        begin = time.monotonic()
        async with self._http:
            numbers = iter(range(len(self._asked)))
            killing = asyncio.create_task(self._kill(kill_at))
            async with asyncio.TaskGroup() as group:
                for _ in range(AT_ONCE):
                    group.create_task(self._submit(numbers))
            await killing
            numbers = iter(range(len(self._asked)))
            async with asyncio.TaskGroup() as group:
                for _ in range(AT_ONCE):
                    group.create_task(self._wait(numbers))
            await self._check()
            await self._check_webhooks()
        return JobsReport(
            submitted=len(self._ids),
            kills=self._kills,
            outcomes=self._outcomes,
            moved=self._moved,
            repeated=self._repeated,
            deliveries=self._receiver.deliveries,
            refused=self._receiver.refused,
            seconds=time.monotonic() - begin,
            problems=self._problems,
        )

    async def _kill(self, kill_at: list[int]) -> None:
        """SIGKILL to everything, each time that so many were submitted; the fleet starts all of it again."""
        fleet = self._fleet
        for wanted in kill_at:
            await fleet.until(lambda: len(self._ids) >= wanted, 600, "jobs to be submitted")  # noqa: B023 - awaited here
            members = fleet.members()
            for pid in members.values():
                _kill(pid)
            self._kills += len(members)

    async def _submit(self, numbers: Iterator[int]) -> None:
        for number in numbers:
            question, tokens = self._asked[number]
            body = question.body(MODEL, tokens, stream=False)
            webhook = {"url": self._receiver.url, "secret": SECRET}
            order = {"endpoint": question.route.format(model=MODEL), "body": body, "webhook": webhook}
            headers = {"idempotency-key": f"{self._name}-{number}"}
            answer, tries = await self._call("POST", JOBS, number, json=order, headers=headers)
            self._repeated += tries > 1
            if answer.status_code != 202:
                self._problems.append(f"job {number} was refused: {answer.text[:200]}")
                continue
            self._ids[number] = answer.json()["id"]

    async def _wait(self, numbers: Iterator[int]) -> None:
        for number in numbers:
            if number not in self._ids:
                continue
            while True:
                path = f"{JOBS}/{self._ids[number]}"
                answer, _ = await self._call("GET", path, number, params={"wait": str(WAIT_S)})
                if answer.status_code != 200 or answer.json()["status"] not in ("queued", "running"):
                    break
            self._judge(number, answer)

    def _judge(self, number: int, answer: httpx.Response) -> None:
        if answer.status_code != 200:
            self._problems.append(f"job {number}: {answer.text[:200]}")
            return
        job = answer.json()
        self._outcomes[job["status"]] += 1
        self._moved += job["progress"]["claims"] > 1
        if job["status"] != "completed":
            self._problems.append(f"job {number} is {job['status']}: {job['error']}")
            return
        question, tokens = self._asked[number]
        got = Answer(question)
        got.whole(msgspec.json.encode(job["result"]))
        if (fault := got.fault(tokens)) is not None:
            self._problems.append(f"job {number}: {fault}")

    async def _check(self) -> None:
        """What is counted elsewhere: no job twice, nothing left."""
        bus, count = self._fleet.bus, len(self._asked)
        if len(set(self._ids.values())) != count:
            self._problems.append(f"{len(set(self._ids.values()))} jobs of {count} submissions")
        if left := await self._left():
            self._problems.append(f"{left} messages are left in {subjects.JOB_STREAM}")
        listed: set[str] = set()
        after: dict[str, str] = {}
        while True:
            answer, _ = await self._call("GET", JOBS, 0, params={"limit": "100", **after})
            page = answer.json()
            listed |= {job["id"] for job in page["data"]}
            if not page["has_more"]:
                break
            after = {"after": page["last_id"]}
        if listed != set(self._ids.values()):
            self._problems.append(f"{len(listed)} jobs are listed")
        [used] = await usage.query(bus, 0)
        if (used.requests, used.completed) != (count, count):
            self._problems.append(f"usage has {used.requests} requests, {used.completed} of them completed")

    async def _check_webhooks(self) -> None:
        """Each job's end was told at least once, under one id."""
        receiver, jobs = self._receiver, set(self._ids.values())
        await receiver.until_told(len(jobs), SETTLE_S)
        if receiver.told.keys() != jobs:
            self._problems.append(f"webhooks were told of {len(receiver.told)} jobs")
        if several := [job for job, ids in receiver.told.items() if len(set(ids)) > 1]:
            self._problems.append(f"the ends of {len(several)} jobs were told under several ids")
        if others := [job for job, types in receiver.types.items() if types != {"job.completed"}]:
            self._problems.append(f"of {len(others)} jobs something else was told than that they are completed")
        if receiver.unsigned:
            self._problems.append(f"{receiver.unsigned} deliveries were not signed as they should be")

    async def _left(self) -> int:
        """Messages that are stored when none is any more, or after a while."""
        deadline = time.monotonic() + SETTLE_S
        while True:
            left = (await self._fleet.bus.stream_info(subjects.JOB_STREAM)).messages
            if not left or time.monotonic() > deadline:
                return left
            await asyncio.sleep(0.25)

    async def _call(self, method: str, path: str, number: int, **more: Any) -> tuple[httpx.Response, int]:
        """A request at one ingress or the other, until one of them answers; and how often it was sent."""
        for tries in itertools.count(1):
            url = self._fleet.urls[(number + tries) % len(self._fleet.urls)]
            try:
                answer = await self._http.request(method, url + path, **more)
                if answer.status_code not in CODES_RETRIED:
                    return answer, tries
            except httpx.HTTPError:
                pass
            await asyncio.sleep(RETRY_S)
        raise AssertionError("it is tried for ever")


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
