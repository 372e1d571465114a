"""Every code of shared/errors.py, provoked on real processes: its status, its headers and its one shape; or where else that is.

The rules are docs/errors.md's. A code that is added has to be provoked here, or has to name the test that does.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from headrace.stack import ports, servers
from shared import records, subjects, tenancy
from shared.audit import Actor
from shared.errors import HeadraceError
from shared.records import EngineSettings, Route, Version, VersionLimits, Weight
from shared.tenancy import NewKey, NewTenant
from shared.tenants import Limits

from ..ingress.test_error_docs import tree
from ..reliability.conftest import SETTINGS, Ingress, Process, Site

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
ERRORS = {error.code: error for error in tree(HeadraceError)}
ERRORS |= {"internal_error": HeadraceError}
TEST = Actor("local", "test")
COMPLETIONS, DEPLOYMENTS, VERSIONS = "/v1/completions", "/v1/deployments", "/v1/models/m/versions"

ELSEWHERE = {  # code: where it is provoked, in processes as real as it takes
    "version_in_use": "tests/headrace/test_push.py::test_a_version_in_use_is_not_removed_and_the_answer_says_by_what",
    "idempotency_result_gone": "tests/reliability/test_idempotency.py::"
    "test_an_answer_too_large_to_keep_is_the_workers_for_a_while_and_never_run_again",
    "file_in_use": "tests/ingress/files/test_routes.py::test_batches_are_made_listed_and_cancelled",
    "too_many_files": "tests/ingress/files/test_routes.py::test_files_are_uploaded_listed_read_and_deleted",
    "too_many_batches": "tests/ingress/files/test_routes.py::test_batches_are_made_listed_and_cancelled",
    "batch_state": "tests/e2e/test_batches.py::test_what_is_cancelled_or_expires_keeps_what_is_done",
    "cancelled": "tests/reliability/test_cancel.py::test_a_cancelled_key_stays_cancelled",
    "request_poisoned": "tests/reliability/test_dlq.py::"
    "test_a_poisoned_request_is_listed_shown_without_its_prompt_and_run_again",
    "diverged": "tests/shared/test_requester.py::test_every_choice_must_meet_its_digest",
    "stream_gone": "tests/shared/test_requester.py::test_gone_without_a_body_ends_after_the_grace_and_two_ack_waits",
    "scaler_unavailable": "tests/controller/test_kubernetes_scaler.py::"
    "test_an_api_that_cannot_be_reached_or_does_not_know_us_is_said_at_the_start",
    "draining": "tests/reliability/test_handover.py::test_a_stream_that_outlasts_the_drain_is_resumed_and_a_key_is_kept",
}


class Place(Site):
    """A keyed ingress with short times, one with room for few connections, two workers; no controller, no Redis."""

    tight: Ingress
    faulty: Process
    keys: dict[str, str]

    async def start(self) -> None:
        await super().start()
        for version in VERSIONS_OF_M:
            await self.bus.kv_put(subjects.MODELS_BUCKET, subjects.key("m", version.version), records.encode(version))
        route = Route("m", {"stable": "v"}, [Weight("v", 10_000)], {"back": "deployment d-1 was rolled back: errors"})
        await self.bus.kv_put(subjects.ROUTES_BUCKET, "m", records.encode(route))
        await self.bus.kv_put(subjects.DEPLOYMENTS_BUCKET, "d-77", b"{")
        for version_name in ("empty", "faulty"):
            await self.bus.ensure_consumer("m", version_name, subjects.LANE_FAST)
        self.keys = {name: await self._key(name, role, models, limits) for name, role, models, limits in KEYS}
        self.first, self.one = await asyncio.gather(self.ingress(), self.worker())
        tight = self.ingress(http_connections_max=2, require_keys=False)
        self.tight, self.faulty = await asyncio.gather(tight, self.worker("faulty"))

    async def _key(self, name: str, role: Any, models: tuple[str, ...], limits: Limits) -> str:
        await tenancy.add(self.bus, TEST, NewTenant(name=name, limits=limits))
        return (await tenancy.issue(self.bus, TEST, name, NewKey(role=role, models=models))).secret

    async def ask(self, method: str, path: str, key: str = "any", **given: Any) -> httpx.Response:
        """One request with a tenant's key."""
        given["headers"] = {"authorization": f"Bearer {self.keys[key]}"} | given.get("headers", {})
        return await self.http.request(method, self.first.url + path, **given)

    async def complete(self, key: str = "any", headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
        body = {"model": "m", "prompt": "hi", "max_tokens": 2} | body
        return await self.ask("POST", COMPLETIONS, key, json=body, headers=headers or {})


def version(name: str, **fields: Any) -> Version:
    return Version(**({"model": "m", "version": name, "state": "available", "source": "sim:zero"} | fields))


VERSIONS_OF_M = [
    version("v", source="sim:fixed-20ms", engine=EngineSettings(max_model_len=4000), max_model_len=4000),
    version("faulty", source="sim:faulty-1ms"),
    version("empty"),  # no worker
    version("new", state="registered"),
    version("bad", state="failed", reason="its files are damaged"),
    version("old", state="retired"),
    version("none", limits=VersionLimits(max_replicas=0)),
    version("back"),
]
NO_LIMITS, EACH = Limits(), Limits(requests_per_minute=6000)
KEYS: list[tuple[str, str, tuple[str, ...], Limits]] = [
    ("any", "admin", (), NO_LIMITS),
    ("infers", "infer", (), NO_LIMITS),
    ("other", "infer", ("else",), NO_LIMITS),
    ("seldom", "infer", (), Limits(requests_per_minute=1)),
    ("short", "infer", (), Limits(requests_per_minute=6000, tokens_per_minute=1)),
    ("single", "infer", (), Limits(requests_per_minute=6000, concurrency=1)),
    ("queued", "infer", (), Limits(requests_per_minute=6000, queue_max=1)),
]


@pytest.fixture(scope="module")
def server(start_server: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    directory = tmp_path_factory.mktemp("doctrine") / "nats"
    server = start_server(servers.nats(directory, ports.free_ports(1)[0]), servers.nats_ready, [])
    yield server
    server.kill()


@pytest.fixture(scope="module")
def place(server: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    settings = SETTINGS | {
        "require_keys": True,
        "redis_url": "",
        "s3_endpoint": "http://127.0.0.1:9",
        "queue_deadline_s": 1.0,
        "generation_deadline_s": 1.0,
        "head_hold_s": 0.3,
        "request_read_s": 1.0,
        "request_bytes_max": 100_000,
        "limit_burst_s": 1.0,
        "publish_timeout_s": 1.0,
    }
    place = Place(server.url, tmp_path_factory.mktemp("doctrine"), "m", "sim:zero", settings)
    place.run(place.start())
    yield place
    place.run(place.stop())
    place.runner.close()


# -- what provokes each code -------------------------------------------------------------------------------------------


async def second(call: Callable[[], Awaitable[httpx.Response]]) -> httpx.Response:
    """The answer to the same request again."""
    first = await call()
    assert first.status_code < 300, first.text
    return await call()


async def one_too_many(place: Place, key: str, model: str) -> httpx.Response:
    """Of two at once, the one that is refused."""
    both = [place.complete(key, model=model, max_tokens=3000) for _ in range(2)]
    [refused] = [answer for answer in await asyncio.gather(*both) if answer.status_code == 429]
    return refused


async def raw(port: int, data: bytes) -> httpx.Response:
    """What a connection that sent `data`, and no more, is answered."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    status, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    body = await reader.readexactly(int(headers["content-length"]))
    writer.close()
    return httpx.Response(int(status.split()[1]), headers=headers, content=body)


async def faulty(place: Place) -> httpx.Response:
    """One request in 20 fails, by its seed."""
    for seed in range(500):
        answer = await place.complete(model="m@faulty", seed=seed)
        if answer.status_code != 200:
            return answer
    raise AssertionError("none failed")


async def revoked(place: Place) -> httpx.Response:
    made = (await place.ask("POST", "/v1/tenants/other/keys", json={})).json()
    path = f"/v1/tenants/other/keys/{made['id']}"
    assert (await place.ask("DELETE", path)).status_code == 200
    return await place.ask("POST", path + "/rotate", json={})


async def crowded(place: Place) -> httpx.Response:
    """More connections than may be."""
    port = int(place.tight.url.rpartition(":")[2])
    idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
    try:
        return await raw(port, b"")
    finally:
        for _, writer in idle:
            writer.close()


def deploy(place: Place, what: str = "faulty") -> Awaitable[httpx.Response]:
    return place.ask("POST", DEPLOYMENTS, json={"model": "m", "version": what})


async def not_paused(place: Place) -> httpx.Response:
    listed = (await place.ask("GET", DEPLOYMENTS)).json()
    id_ = listed[0]["deployment_id"] if listed else (await deploy(place)).json()["deployment_id"]
    return await place.ask("POST", f"{DEPLOYMENTS}/{id_}/resume")


async def other_engine(place: Place) -> httpx.Response:
    return await place.ask("POST", VERSIONS, json={"version": "empty", "source": "sim:other"})


async def deployed_twice(place: Place) -> httpx.Response:
    await deploy(place)
    return await deploy(place)


async def key_again(place: Place) -> httpx.Response:
    key = {"idempotency-key": "doctrine"}
    assert (await place.complete(headers=key)).status_code == 200
    return await place.complete(headers=key, prompt="other")


def slow_body(place: Place) -> Awaitable[httpx.Response]:
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {place.keys['any']}\r\n"
    return raw(int(place.first.url.rpartition(":")[2]), f"{head}content-length: 5\r\n\r\n{{".encode())


CASES: dict[str, Callable[[Place], Awaitable[httpx.Response]]] = {
    "invalid_request": lambda place: place.complete(temperature=-1),
    "context_length_exceeded": lambda place: place.complete(prompt="hi " * 5000),  # the worker counts the tokens
    "unsupported_parameter": lambda place: place.complete(suffix="x"),
    "version_conflict": lambda place: place.complete(model="m@v", headers={"x-version-pin": "old"}),
    "invalid_api_key": lambda place: place.complete(headers={"authorization": "Bearer hr_unknown"}),
    "role_missing": lambda place: place.ask("GET", "/v1/tenants", "infers"),
    "model_not_allowed": lambda place: place.complete("other"),
    "not_found": lambda place: place.ask("GET", "/v1/nothing"),
    "model_not_found": lambda place: place.complete(model="unknown"),
    "version_not_found": lambda place: place.complete(model="m@unknown"),
    "version_retired": lambda place: place.complete(model="m@old"),
    "wrong_task": lambda place: place.ask("POST", "/v1/embeddings", json={"model": "m", "input": "x"}),
    "previous_response_not_found": lambda place: place.ask(
        "POST", "/v1/responses", json={"model": "m", "input": "x", "previous_response_id": f"resp_{'0' * 32}"}
    ),
    "response_not_found": lambda place: place.ask("GET", f"/v1/responses/resp_{'0' * 32}"),
    "job_not_found": lambda place: place.ask("GET", f"/v1/jobs/{'0' * 32}"),
    "file_not_found": lambda place: place.ask("GET", "/v1/files/file-nothing"),
    "batch_not_found": lambda place: place.ask("GET", "/v1/batches/batch_nothing"),
    "stream_not_found": lambda place: place.ask("GET", f"/v1/streams/{'0' * 32}"),
    "deployment_not_found": lambda place: place.ask("GET", f"{DEPLOYMENTS}/d-999"),
    "tenant_not_found": lambda place: place.ask("GET", "/v1/tenants/nobody"),
    "api_key_not_found": lambda place: place.ask("DELETE", "/v1/tenants/any/keys/k0"),
    "method_not_allowed": lambda place: place.ask("PUT", COMPLETIONS),
    "request_timeout": slow_body,
    "version_exists": other_engine,
    "deployment_active": deployed_twice,
    "deployment_state": not_paused,
    "tenant_exists": lambda place: place.ask("POST", "/v1/tenants", json={"name": "any"}),
    "api_key_over": revoked,
    "request_too_large": lambda place: place.complete(prompt="x" * 100_001),
    "idempotency_key_reused": key_again,
    "headers_too_large": lambda place: place.ask("GET", "/v1/models", headers={"x": "y" * 70_000}),
    "queue_full": lambda place: one_too_many(place, "queued", "m@empty"),
    "rate_limited_requests": lambda place: second(lambda: place.complete("seldom")),
    "rate_limited_tokens": lambda place: second(lambda: place.complete("short", max_tokens=1)),
    "concurrency_limited": lambda place: one_too_many(place, "single", "m@v"),
    "internal_error": lambda place: place.ask("GET", f"{DEPLOYMENTS}/d-77"),  # its record cannot be read
    "engine_failed": faulty,
    "version_failed": lambda place: place.complete(model="m@bad"),
    "no_capacity": lambda place: place.complete(model="m@none"),
    "no_replica_for_pin": lambda place: place.complete(model="m@back"),
    "objects_unavailable": lambda place: place.ask("POST", VERSIONS, json={"version": "s", "source": "s3"}),
    "too_many_connections": crowded,
    "queue_deadline": lambda place: place.complete(model="m@empty"),
    "generation_deadline": lambda place: place.complete(max_tokens=3000),
    "bus_unavailable": lambda place: place.complete(model="m@new"),  # and without a broker: below
}
LIMITED = {"queue_full", "rate_limited_requests", "rate_limited_tokens", "concurrency_limited"}


# -- what they all have to keep ----------------------------------------------------------------------------------------


def check(code: str, answer: httpx.Response) -> None:
    """Status, shape and headers of an error."""
    kind, headers = ERRORS[code], answer.headers
    body = answer.json()
    assert (answer.status_code, set(body)) == (kind.status, {"error"}), answer.text
    assert set(body["error"]) == {"message", "type", "param", "code"}, answer.text
    assert (body["error"]["code"], body["error"]["type"]) == (code, kind.type), answer.text
    assert body["error"]["message"]
    assert headers["content-type"] == "application/json"
    assert int(headers["content-length"]) == len(answer.content)
    if kind.status in (429, 503):
        assert 0 < int(headers["retry-after-ms"]) <= int(headers["retry-after"]) * 1000, headers
    else:
        assert not {"retry-after", "retry-after-ms"} & set(headers), headers
    lasting = not kind.retryable and (kind.status == 409 or kind.status >= 500)
    assert headers.get("x-should-retry") == ("false" if lasting else None), headers
    assert ("www-authenticate" in headers) == (kind.status == 401)
    if code in LIMITED:
        for name in ("limit", "remaining", "reset"):
            assert f"x-ratelimit-{name}-requests" in headers, headers


@pytest.mark.parametrize("code", CASES)
def test_the_answer_to(place: Place, code: str) -> None:
    check(code, place.run(CASES[code](place)))


def test_both_sizes_are_named_where_a_body_is_too_large(place: Place) -> None:
    message = place.run(place.complete(prompt="x" * 100_001)).json()["error"]["message"]
    assert len(re.findall(r"\d+ bytes", message)) == 2


@pytest.mark.parametrize(
    ("code", "body"),
    [("queue_deadline", {"model": "m@empty"}), ("generation_deadline", {"model": "m@v", "max_tokens": 3000})],
)
@pytest.mark.parametrize("route", ["chat", "text", "infer"])
def test_after_the_stream_began_one_error_is_its_last_event(
    place: Place, route: str, code: str, body: dict[str, Any]
) -> None:
    async def lines() -> list[str]:
        path, asked = place.body(route, "hi", 2, **body)
        asked = {name: value for name, value in asked.items() if route != "infer" or name != "model"}
        path = path.replace("/m/", f"/{body['model']}/")
        answer = await place.ask("POST", path, json=asked)
        assert (answer.status_code, answer.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        return [line for line in answer.text.split("\n\n") if line.startswith("data: ")]

    events = place.run(lines())
    assert "data: [DONE]" not in events
    errors_told = [event for event in events if event.startswith('data: {"error":')]
    assert errors_told == events[-1:]
    told = msgspec.json.decode(events[-1][6:])
    assert set(told) == {"error"}
    assert set(told["error"]) == {"message", "type", "param", "code"}
    assert (told["error"]["code"], told["error"]["type"]) == (code, "server_error")
    assert not any("finish_reason" in event and '"finish_reason":null' not in event for event in events)


def test_every_code_is_provoked_here_or_where_it_says() -> None:
    assert CASES.keys() & ELSEWHERE.keys() == set()
    assert CASES.keys() | ELSEWHERE.keys() == ERRORS.keys()
    for code, where in ELSEWHERE.items():
        file, _, name = where.partition("::")
        text = (ROOT / file).read_text()
        assert f"def {name}(" in text, where
        assert code in text or re.search(rf"\b{ERRORS[code].__name__}\b", text), where


def test_without_a_broker_every_route_that_needs_it_says_so(place: Place, server: Any) -> None:
    """The last one here: the broker is killed."""
    place.run(place.idle())
    server.kill()

    async def ask() -> None:
        asked = [place.complete(), place.ask("GET", "/v1/tenants"), place.ask("GET", "/v1/usage")]
        for answer in await asyncio.gather(*asked, place.ask("POST", "/v1/tenants", json={"name": "later"})):
            check("bus_unavailable", answer)
        ready = await place.ask("GET", "/readyz")
        assert (ready.status_code, ready.json()["status"]) == (503, "bus_unavailable")
        assert (await place.ask("GET", "/v1/models")).status_code == 200  # it is known

    try:
        place.run(ask())
    finally:
        server.start()
    place.run(place.until(lambda: answered(place), place.first))


async def answered(place: Place) -> bool:
    return (await place.complete()).status_code == 200
