"""Rollouts of whole stacks under load: a good version gets there, bad ones are taken back, and nobody else notices."""

import asyncio
import contextlib
import itertools
import math
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from headrace.stack import ports
from shared.lifeline import die_with_parent
from shared.settings import to_environment

from .conftest import COMPLETIONS, Stack, ended, read_stream, wait_for
from .rollout_load import Load, Seen

BLIND = {"ttft_p99": None, "tpot_p99": None}  # where the test itself makes them wait
RATE = 40.0  # requests a second
BAD_RATE = 15.0
SURE = 4.0  # standard deviations
NOTICED_S = 1.0  # until every ingress has heard of a route, the client's own delays included
BAD = {
    "unloadable-20ms": "ended by themselves|failed",
    "fatal-20ms": "ended by themselves",
    "faulty-20ms": "error_rate",
    "lagging-20ms": "ttft_p99|tpot_p99",  # whoever shares a step with a slow prefill waits, too
    "fixed-40ms": "tpot_p99",
}


def steps(*shares: float, soak_s: float = 2.0, requests: int = 20) -> list[dict[str, Any]]:
    return [
        {"pct": pct, "soak_seconds": soak_s, "requests_min": requests if pct >= 5 else 0} for pct in (*shares, 100.0)
    ]


NONE: dict[str, Any] = {}


class Rolling:
    """One model of a stack, its versions, and its deployments over HTTP."""

    def __init__(self, stack: Stack, model: str) -> None:
        self.stack, self.model = stack, model
        self._extra: list[subprocess.Popen[bytes]] = []

    def push(self, source: str, version: str, limits: dict[str, Any] = NONE, engine: dict[str, Any] = NONE) -> None:
        """Register a simulated version, and wait until it is available."""
        versions = f"/v1/models/{self.model}/versions"
        body = {"version": version, "source": f"sim:{source}", "limits": limits, "engine": engine}
        answer = self.stack.post(versions, body)
        assert answer.status_code == 201, answer.text

        def available() -> bool:
            known = httpx.get(self.stack.url + versions).json()
            return {"version": version, "state": "available"}.items() <= known[-1].items()

        wait_for(available, what=f"{self.model}@{version}")

    def deploy(self, version: str, **more: Any) -> str:
        answer = self.stack.post("/v1/deployments", {"model": self.model, "version": version} | more)
        assert answer.status_code == 202, answer.text
        return str(answer.json()["deployment_id"])

    def command(self, deployment: str, what: str) -> dict[str, Any]:
        answer = self.stack.post(f"/v1/deployments/{deployment}/{what}", {})
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def show(self, deployment: str) -> dict[str, Any]:
        answer = httpx.get(f"{self.stack.url}/v1/deployments/{deployment}", timeout=30)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    async def reaches(self, deployment: str, *states: str, budget_s: float = 60.0, pct: float | None = None) -> Any:
        """The deployment once it is in one of the states, and has given so much of the traffic if that is said."""
        async with asyncio.timeout(budget_s):
            while True:
                with contextlib.suppress(httpx.TransportError):
                    found = await asyncio.to_thread(self.show, deployment)
                    if found["state"] in states and pct in (None, found["traffic_pct"]):
                        return found
                await asyncio.sleep(0.05)

    async def leaves(self, deployment: str, state: str, pct: float) -> None:
        """Wait until it is not in that state, with so much of the traffic, any more."""
        async with asyncio.timeout(60):
            while True:
                found = await self.reaches(deployment, *EVERY)
                if (found["state"], found["traffic_pct"]) != (state, pct):
                    return
                await asyncio.sleep(0.05)

    def ingresses(self, count: int) -> list[str]:
        """The URLs of so many ingresses on the stack's bus, beside its own."""
        urls = []
        for port in ports.free_ports(count):
            settings = self.stack.settings()
            own = {"HEADRACE_HTTP_PORT": str(port), "HEADRACE_DRAIN_LINGER_S": "0"}
            environment = os.environ | to_environment(settings) | own
            environment.pop("HEADRACE_LIFELINE_FD", None)
            self._extra.append(
                subprocess.Popen(
                    [sys.executable, "-m", "headrace", "ingress"],
                    env=environment,
                    stderr=subprocess.DEVNULL,
                    preexec_fn=die_with_parent(),
                )
            )
            urls.append(f"http://127.0.0.1:{port}")
        for url in urls:
            wait_for(lambda url=url: _ready(url), 30, f"an ingress at {url}")
        return urls

    def close(self) -> None:
        for process in self._extra:
            process.terminate()
            process.wait(20)
        changed = {"limits": {"min_replicas": 0}}
        answer = httpx.patch(f"{self.stack.url}/v1/models/{self.model}/versions/v1", json=changed)
        assert answer.status_code == 200, answer.text


def _ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz").status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture(scope="module")
def shared_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    stack = Stack(tmp_path_factory.mktemp("rollouts") / "data", {"HEADRACE_IDLE_SECONDS": "3"})
    stack.up("--no-demo")
    yield stack
    ended(stack)


@pytest.fixture
def rolling(shared_stack: Stack, request: pytest.FixtureRequest) -> Iterator[Rolling]:
    """A model of this test alone, whose version v1 has a worker."""
    rolling = Rolling(shared_stack, f"model {secrets.token_hex(4)}")
    rolling.push("fixed-20ms", "v1", {"min_replicas": 1})
    yield rolling
    rolling.close()


def went_back(seen: list[Seen]) -> list[tuple[Seen, Seen]]:
    """Requests of one session that got the old version after one that had got the new one had ended."""
    of_new = sorted((each for each in seen if each.version == "v2"), key=lambda each: each.at + each.seconds)
    if not of_new:
        return []
    first = of_new[0]
    return [(first, each) for each in seen if each.version == "v1" and each.at > first.at + first.seconds]


def test_a_good_version_gets_all_the_traffic_step_by_step(rolling: Rolling) -> None:
    async def work() -> tuple[Load, Any]:
        urls = [rolling.stack.url, *await asyncio.to_thread(rolling.ingresses, 1)]
        load = Load(urls, rolling.model, RATE)
        async with load.running():
            deployment = rolling.deploy("v2", steps=steps(1, 5, 25, soak_s=4, requests=5), bake_seconds=2)
            return load, await rolling.reaches(deployment, "promoted", "rolled_back")

    rolling.push("fixed-20ms", "v2")
    load, deployment = asyncio.run(work())
    assert deployment["state"] == "promoted", deployment["events"]
    assert load.failed() == []
    events = deployment["events"]
    assert [event["pct"] for event in events] == [0, 0, 1, 5, 25, 100, 100, 100]
    for event, following in itertools.pairwise(events):
        fresh = load.between(event["at"] + NOTICED_S, following["at"] - NOTICED_S)
        fresh = [each for each in fresh if each.session.startswith("fresh")]  # each one draws for itself
        share, count = event["pct"] / 100, len(fresh)
        got = sum(each.version == "v2" for each in fresh)
        assert abs(got - share * count) <= SURE * math.sqrt(share * (1 - share) * count) + 1, (event["pct"], got, count)
        print(f"{event['state']} {event['pct']}%: {got} of {count}")
    assert not [pair for seen in load.by_session().values() for pair in went_back(seen)]


def test_bad_versions_are_taken_back_by_themselves_and_nobody_else_notices(shared_stack: Stack) -> None:
    """Five models, each with another bad version, all at once."""
    models = {source: Rolling(shared_stack, source) for source in BAD}

    async def roll(rolling: Rolling, source: str) -> tuple[Load, Any]:
        # one in twenty takes many requests to be sure of: with 250 of them one run in twelve sees too few fail
        rate, requests = (3 * BAD_RATE, 500) if source == "faulty-20ms" else (BAD_RATE, 250)
        load = Load([shared_stack.url], source, rate)
        async with load.running():
            deployment = rolling.deploy(
                "v2", steps=steps(50, requests=requests), bake_seconds=5, gates={"ttft_p99": {"slack_ms": 5}}
            )
            return load, await rolling.reaches(deployment, "promoted", "rolled_back")

    async def work() -> list[tuple[Load, Any]]:
        return await asyncio.gather(*(roll(rolling, source) for source, rolling in models.items()))

    for source, rolling in models.items():
        rolling.push("fixed-20ms", "v1", {"min_replicas": 1})
        rolling.push(source, "v2")
    for source, (load, deployment) in zip(BAD, asyncio.run(work()), strict=True):
        assert deployment["state"] == "rolled_back", (source, deployment["events"])
        (back,) = [event for event in deployment["events"] if event["state"] == "rolling_back"]
        print(f"{source}: at {back['at'] - deployment['created']:.1f} s, {back['reason']}")
        assert any(reason in back["reason"] for reason in BAD[source].split("|"))
        if source in ("lagging-20ms", "fixed-40ms", "faulty-20ms"):
            breached = {finding["gate"] for finding in back["evidence"] if finding["breached"]}
            assert breached & set(BAD[source].split("|"))
        failed = load.failed()
        assert {(each.version, each.error) for each in failed} <= {("v2", "engine_failed")}
        assert not failed or source == "faulty-20ms"
        pinned = models[source].stack.post(COMPLETIONS, _body(f"{source}@v2", "x"))
        assert (pinned.status_code, pinned.json()["error"]["code"]) == (503, "no_replica_for_pin")
    for rolling in models.values():
        rolling.close()


def test_a_rollback_by_hand_is_everywhere_within_a_second(rolling: Rolling) -> None:
    """Three ingresses at 25%; the new version has one slot, so that requests queue for it, one of them with a pin."""

    async def work() -> None:
        urls = [rolling.stack.url, *await asyncio.to_thread(rolling.ingresses, 2)]
        load = Load(urls, rolling.model, RATE)
        deployment = rolling.deploy("v2", steps=steps(25, soak_s=600), gates=BLIND)
        await rolling.reaches(deployment, "stepping", pct=25)
        async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=None)) as client:
            running = await _long_stream(client, urls[0], f"{rolling.model}@v2")
            parked = [
                asyncio.create_task(_ask(client, urls[number % 3], rolling.model, number)) for number in range(520)
            ]
            pinned = asyncio.create_task(
                client.post(urls[1] + COMPLETIONS, json=_body(f"{rolling.model}@v2", "pinned"))
            )
            await asyncio.to_thread(wait_for, lambda: _pending(rolling, "v2") > 100, 20, "a queue")
            async with load.running():
                answered = await asyncio.to_thread(rolling.command, deployment, "rollback")
                begun = time.time()
                assert answered["state"] == "rolling_back"
                answers = await asyncio.gather(*parked)
                await asyncio.to_thread(wait_for, lambda: len(load.between(begun + NOTICED_S, math.inf)) > 20)
            assert {each.version for each in load.between(begun + NOTICED_S, math.inf)} == {"v1"}
            assert load.failed() == []
            assert all(answer.status_code == 200 for answer in answers)
            moved = [answer for answer in answers if answer.headers["x-headrace-version"] == "v1"]
            assert len(moved) > 300
            refused = await pinned
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_replica_for_pin")
            rest = await running  # it runs, so it ends where it began
            assert rest.done
            assert rest.headers["x-headrace-version"] == "v2"
        after = await rolling.reaches(deployment, "rolled_back")
        assert after["traffic_pct"] == 0
        await asyncio.to_thread(rolling.stack.idle)

    rolling.push("fixed-20ms", "v2", engine={"slots": 1})
    asyncio.run(work())


def _body(model: str, prompt: str, tokens: int = 2) -> dict[str, Any]:
    return {"model": model, "prompt": prompt, "max_tokens": tokens}


async def _ask(client: httpx.AsyncClient, url: str, model: str, number: int) -> httpx.Response:
    session = {"X-Session-Id": f"parked {number}"}
    return await client.post(url + COMPLETIONS, json=_body(model, f"number {number}"), headers=session)


async def _long_stream(client: httpx.AsyncClient, url: str, model: str) -> "asyncio.Task[Any]":
    """A stream that goes on for ten seconds, once it has begun."""
    begun = asyncio.Event()
    body = _body(model, "long", 500)
    client.base_url = httpx.URL(url)
    task = asyncio.create_task(read_stream(client, COMPLETIONS, body, lambda _: begun.set()))
    await begun.wait()
    return task


def _pending(rolling: Rolling, version: str) -> int:
    lines = httpx.get(f"http://127.0.0.1:{_metrics_port(rolling)}/metrics").text.splitlines()
    mark = f'headrace_lag_messages{{kind="pending",model="{rolling.model}",version="{version}"}}'
    return int(sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(mark)))


def _metrics_port(rolling: Rolling) -> int:
    log = (rolling.stack.data / "logs" / "controller.log").read_text()
    return int(log.rsplit("metrics at http://", 1)[1].split("/")[0].rsplit(":", 1)[1])


VICTIMS = ("controller", "ingress", "nats")
EVERY = ("pending", "warming", "stepping", "baking", "promoted", "rolling_back", "rolled_back")
STATES = (("warming", 0), ("stepping", 10), ("stepping", 50), ("stepping", 100), ("baking", 100))


def test_what_is_killed_in_each_state_of_a_rollout_changes_nothing_of_where_it_ends(rolling: Rolling) -> None:
    """Each of the victims in each of the states; clients ask another ingress, whose requests must not fail."""

    async def work() -> None:
        other = await asyncio.to_thread(rolling.ingresses, 1)
        load = Load(other, rolling.model, 20)
        async with load.running():
            slow = steps(10, 50, soak_s=5, requests=5)
            deployment = rolling.deploy("v2", steps=slow, bake_seconds=8, gates=BLIND)
            for number, (state, pct) in enumerate(STATES):
                await rolling.reaches(deployment, *(each for each, _ in STATES[number:]), "promoted")
                for victim in VICTIMS:
                    found = await rolling.reaches(deployment, *EVERY)
                    if (found["state"], found["traffic_pct"]) == (state, pct):
                        print(f"{victim} in {state} {pct}%")
                        await asyncio.to_thread(kill, rolling, victim)
                await rolling.leaves(deployment, state, pct)
            promoted = await rolling.reaches(deployment, "promoted", "rolled_back")
        assert promoted["state"] == "promoted", promoted["events"]
        shares = [event["pct"] for event in promoted["events"]]
        assert shares == [0, 0, 10, 50, 100, 100, 100]
        assert load.failed() == []
        again = rolling.deploy("v1", steps=steps(50, soak_s=600), gates=BLIND)
        await rolling.reaches(again, "stepping", pct=50)
        rolling.command(again, "rollback")
        for victim in VICTIMS:
            await asyncio.to_thread(kill, rolling, victim)
        after = await rolling.reaches(again, "rolled_back")
        assert [event["state"] for event in after["events"]].count("rolling_back") == 1

    rolling.push("fixed-20ms", "v2")
    asyncio.run(work())
    last = httpx.get(f"{rolling.stack.url}/v1/models/{rolling.model}/versions").json()
    assert {each["version"]: each["traffic_pct"] for each in last} == {"v1": 0, "v2": 100}


def kill(rolling: Rolling, name: str) -> None:
    """SIGKILL, and wait until its successor runs."""
    before = rolling.stack.state["processes"][name]["pid"]
    rolling.stack.kill(before)
    wait_for(lambda: rolling.stack.state["processes"][name]["pid"] not in (0, before), 20, f"another {name}")


def test_versions_live_side_by_side_and_one_that_is_gone_says_why(rolling: Rolling) -> None:
    stack, model = rolling.stack, rolling.model
    for version in ("v2", "v3"):
        rolling.push("fixed-20ms", version, {"idle_seconds": 0})
    for alias, version in (("next", "v2"), ("nightly", "v3"), ("blue", "v3")):
        assert stack.headrace("models", "alias", model, alias, version).returncode == 0
    names = {"": "v1", "@stable": "v1", "@next": "v2", "@nightly": "v3", "@blue": "v3", "@v2": "v2"}

    async def ask() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=stack.url, timeout=60) as client:
            plain = [client.post(COMPLETIONS, json=_body(model + name, "x")) for name in names]
            pins = [
                client.post(COMPLETIONS, json=_body(model, "x"), headers={"X-Version-Pin": version})
                for version in ("v1", "v2", "v3")
            ]
            return await asyncio.gather(*plain, *pins)

    answers = asyncio.run(ask())
    assert [answer.status_code for answer in answers] == [200] * 9
    assert [answer.headers["x-headrace-version"] for answer in answers] == [*names.values(), "v1", "v2", "v3"]
    for alias in ("nightly", "blue"):
        assert stack.headrace("models", "alias", model, alias, "--delete").returncode == 0

    def removed() -> bool:
        ran = stack.headrace("models", "rm", f"{model}@v3")
        assert ran.returncode == 0 or "workers" in ran.stderr, ran.stderr
        return ran.returncode == 0

    wait_for(removed, 60, "the end of the workers of v3")
    answer = stack.post(COMPLETIONS, _body(f"{model}@v3", "x"))
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "version_retired")
    assert "taken out of service" in answer.json()["error"]["message"]
