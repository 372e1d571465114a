"""Limits from three ingress processes: held together with Redis, each its part without; nothing else notices its death."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from headrace.stack import ports, servers

from .conftest import wait_for as wait_until
from .test_tenants import Ingress, listens, wait_for

pytestmark = pytest.mark.e2e

MODEL, SLOW = "limited", "limited-slow"
BURST_S, LEASE_S = 2.0, 2.0
EACH_EVERY_S = 0.02
RATE = 6  # a second, of all: slow enough for a busy machine to ask for more at every ingress


@pytest.fixture(scope="module")
def redis(start_server: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    directory = tmp_path_factory.mktemp("limits") / "redis"
    server = start_server(servers.redis(directory, ports.free_ports(1)[0]), servers.redis_ready, [])
    yield server
    server.kill()


@pytest.fixture(scope="module")
def ingresses(stack: Any, redis: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Ingress]]:
    """Three that require keys and count in `redis`."""
    logs = tmp_path_factory.mktemp("ingresses")
    stack.push("sim:zero", MODEL, "--min-replicas", "1")
    stack.push("sim:fixed-20ms", SLOW)
    settings = replace(
        stack.settings(),
        require_keys=True,
        redis_url=redis.url,
        limit_burst_s=BURST_S,
        limit_lease_s=LEASE_S,
        limit_wait_s=0.5,  # a machine that does all this at once is slow to answer
        attach_timeout_s=0.3,
    )
    started = [Ingress(settings, logs / f"{number}.log") for number in range(3)]
    for each in started:
        wait_until(lambda url=each.url: listens(url), 120, "an ingress that is ready")
    yield started
    for each in started:
        each.process.kill()
        each.process.wait(20)


@pytest.fixture
def key_of(stack: Any, ingresses: list[Ingress]) -> Callable[..., dict[str, str]]:
    """Makes a tenant; the headers that carry its key."""

    def make(tenant: str, *limits: str) -> dict[str, str]:
        ran = stack.headrace("tenants", "add", tenant, "--json", *limits)
        assert ran.returncode == 0, ran.stderr
        key = json.loads(ran.stdout)["key"]
        with httpx.Client() as client:
            for each in ingresses:
                wait_for(lambda ingress=each: ingress.status(key, client) == 200, "the key is known")
        return {"authorization": f"Bearer {key}"}

    return make


def ask(url: str, headers: dict[str, str], client: httpx.Client, **more: Any) -> httpx.Response:
    body = {"model": MODEL, "prompt": "x", "max_tokens": 1} | more
    return client.post(f"{url}/v1/completions", json=body, headers=headers, timeout=30)


class Asking:
    """Asks an ingress all the time, as one tenant, until told to stop."""

    def __init__(self, url: str, headers: dict[str, str], every_s: float = EACH_EVERY_S) -> None:
        self.seen: list[tuple[float, int, str]] = []  # when it was asked, status, code
        self.slowest_s = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(url, headers, every_s))
        self._thread.start()

    def _run(self, url: str, headers: dict[str, str], every_s: float) -> None:
        with httpx.Client() as client:
            while not self._stop.wait(every_s):
                start = time.monotonic()
                answer = ask(url, headers, client)
                code = answer.json()["error"]["code"] if answer.status_code != 200 else ""
                self.seen.append((start, answer.status_code, code))
                self.slowest_s = max(self.slowest_s, time.monotonic() - start)

    def granted(self, since: float, until: float = float("inf")) -> int:
        return sum(status == 200 and since <= at < until for at, status, _ in self.seen)

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


def test_a_limit_holds_over_three_ingresses_and_nothing_else_notices_that_redis_dies(
    ingresses: list[Ingress],
    key_of: Callable[..., dict[str, str]],
    redis: Any,
    capsys: pytest.CaptureFixture[str],
) -> None:
    limited, free = key_of("rate-limited", "--requests-per-minute", str(60 * RATE)), key_of("unlimited")
    with httpx.Client() as client:
        for each in ingresses:
            assert ask(each.url, free, client).status_code == 200  # the worker is up
            assert ask(each.url, limited, client).status_code == 200  # it is connected
    start = time.monotonic() + 1
    wait_for(lambda: time.monotonic() > start, "a full bucket")
    asking = [Asking(each.url, limited) for each in ingresses]
    beside = Asking(ingresses[0].url, free, 0.05)
    try:
        until = time.monotonic() + 5
        wait_for(lambda: time.monotonic() > until, "five seconds")
        killed = time.monotonic()
        redis.kill()
        until = time.monotonic() + 5
        wait_for(lambda: time.monotonic() > until, "five seconds")
    finally:
        end = time.monotonic()
        for each in [*asking, beside]:
            each.stop()
        redis.start()
    start = min(each.seen[0][0] for each in asking)  # until then the bucket was full
    asked = sum(at < killed for each in asking for at, _, _ in each.seen)
    granted = sum(each.granted(start, killed) for each in asking)
    ideal = (killed - start + BURST_S) * RATE
    alone = sum(each.granted(killed, end) for each in asking)
    alone_ideal = (end - killed) * RATE * 3 / 4  # the stack's own ingress has its part, too, and is not asked
    with capsys.disabled():
        print(
            f"\nwith Redis {granted} of {ideal:.1f}, {asked} were asked; after its death {alone} of {alone_ideal:.1f}"
        )
    assert asked > 1.5 * ideal, "too busy a machine to ask for more than the limit"
    assert ideal * 0.95 - 1 <= granted <= ideal * 1.01 + 1
    assert alone_ideal * 0.95 - 3 <= alone <= alone_ideal + BURST_S * RATE
    refusals = {(status, code) for each in asking for _, status, code in each.seen}
    assert refusals == {(200, ""), (429, "rate_limited_requests")}
    assert {status for _, status, _ in beside.seen} == {200}
    assert len(beside.seen) > 20
    assert (
        max(each.slowest_s for each in [*asking, beside]) < 2.0
    )  # seconds; of a machine with two cores that does all this


def test_what_clients_are_told(ingresses: list[Ingress], key_of: Callable[..., dict[str, str]]) -> None:
    key = key_of("told", "--requests-per-minute", "60", "--tokens-per-minute", "6000", "--queue-max", "1")
    with httpx.Client() as client:
        first = ask(ingresses[0].url, key, client, max_tokens=20)
        assert first.status_code == 200
        assert first.headers["x-ratelimit-limit-requests"] == "60"
        assert first.headers["x-ratelimit-remaining-requests"] == "1"  # two at once
        assert first.headers["x-ratelimit-limit-tokens"] == "6000"
        assert first.headers["x-ratelimit-remaining-tokens"] == "180"
        assert first.headers["x-ratelimit-reset-tokens"] == "200ms"
        second = ask(ingresses[1].url, key, client)
        assert (second.status_code, second.headers["x-ratelimit-remaining-requests"]) == (200, "0")
        third = ask(ingresses[2].url, key, client)
        assert (third.status_code, third.json()["error"]["code"]) == (429, "rate_limited_requests")
        assert third.json()["error"]["type"] == "rate_limit_error"
        assert third.headers["retry-after"] == "1"
        assert 0 < int(third.headers["retry-after-ms"]) <= 1000
        assert third.headers["x-ratelimit-remaining-requests"] == "0"
        assert "x-should-retry" not in third.headers
        bad = ask(ingresses[2].url, key, client, max_tokens=-1)
        assert (bad.status_code, "x-ratelimit-limit-requests" in bad.headers) == (400, False)  # it takes nothing


def test_an_ingress_that_is_killed_holds_nothing_for_long(
    ingresses: list[Ingress], key_of: Callable[..., dict[str, str]]
) -> None:
    key = key_of("few-at-once", "--concurrency", "2")
    long = {"model": SLOW, "prompt": "x", "max_tokens": 2000, "stream": True}
    with httpx.Client(timeout=30) as client, httpx.Client(timeout=30) as other:
        for number in (0, 1):
            request = client.build_request("POST", f"{ingresses[number].url}/v1/completions", json=long, headers=key)
            streamed = client.send(request, stream=True)
            assert streamed.status_code == 200
        refused = ask(ingresses[2].url, key, other)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "concurrency_limited")
        assert "retry-after-ms" in refused.headers
        ingresses[0].process.kill()
        killed = time.monotonic()
        wait_for(lambda: ask(ingresses[2].url, key, other).status_code == 200, "the killed one's place is free")
        assert time.monotonic() - killed < LEASE_S + 1.0
        assert ask(ingresses[2].url, key, other).status_code == 200  # one after the other: the place is free at once
        streamed.close()  # a client that leaves frees its place
        wait_for(lambda: _two_at_once(ingresses[2].url, key, long), "both places are free")


def _two_at_once(url: str, key: dict[str, str], long: dict[str, Any]) -> bool:
    with httpx.Client(timeout=30) as client:
        first = client.stream("POST", f"{url}/v1/completions", json=long, headers=key)
        second = client.stream("POST", f"{url}/v1/completions", json=long, headers=key)
        with first as one, second as two:
            return one.status_code == two.status_code == 200
