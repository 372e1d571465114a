"""Ingress and worker processes around one NATS, and clients that read resumable streams from the outside."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from headrace.stack import ports
from shared import records, subjects
from shared.bus import Bus
from shared.lifeline import die_with_parent
from shared.records import Version
from shared.settings import Settings, to_environment

DEADLINE_S = 20.0


class Stream:
    """What a client has of one stream, over all its connections."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.id = ""  # of the last event, or of the head
        self.events: list[Any] = []
        self.done = False
        self.error: dict[str, Any] | None = None  # of a plain answer, or of the last event

    @property
    def tokens(self) -> list[str]:
        """The texts of choice 0, or of a native stream."""
        found = [event["token"] for event in self.events if "token" in event]
        for event in self.events:
            for choice in event.get("choices", []):
                if choice["index"] == 0:
                    found.append(choice.get("text") or choice.get("delta", {}).get("content") or "")
        return [text for text in found if text]

    def by_choice(self) -> list[list[Any]]:
        """Everything that was told, in an order that does not depend on which choice was faster."""
        found: dict[int, list[Any]] = {}
        for event in self.events:
            choices = event.get("choices") or [{"index": -1, "event": event}]
            for choice in choices:
                found.setdefault(choice["index"], []).append(choice)
        return [found[index] for index in sorted(found)]


class Left(Exception):
    """The reader has seen enough."""


class Process:
    """A process of ours under a test's control."""

    def __init__(self, name: str, argv: list[str], settings: Settings, directory: Path) -> None:
        self.name, self.log = name, directory / f"{name}.log"
        with open(self.log, "wb") as log:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", *argv],
                env=os.environ | to_environment(settings),
                stdout=log,
                stderr=log,
                preexec_fn=die_with_parent(),
            )

    @property
    def lives(self) -> bool:
        return self.popen.poll() is None

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait()

    def terminate(self) -> None:
        self.popen.send_signal(signal.SIGTERM)


class Ingress(Process):
    def __init__(self, name: str, settings: Settings, directory: Path) -> None:
        self.url = f"http://{settings.http_host}:{settings.http_port}"
        super().__init__(name, ["headrace", "ingress"], settings, directory)


class Site:
    """One NATS, one version of a simulated model, and as many processes as a test starts. `run` runs a test's coroutine."""

    first: "Ingress"
    second: "Ingress"
    one: "Process"  # a worker

    def __init__(self, nats_url: str, directory: Path, model: str, source: str, settings: dict[str, Any]) -> None:
        self.settings = Settings(nats_url=nats_url, data_dir=str(directory), **settings)
        self.model, self.source = model, source
        self.runner = asyncio.Runner()
        self.run = self.runner.run
        self._directory = directory
        self._number = 0
        self._processes: list[Process] = []

    async def start(self) -> None:
        self.bus = await Bus.connect(self.settings, "test")
        await self.bus.ensure()
        version = Version(model=self.model, version="v", state="available", source=self.source)
        route = records.Route(self.model, {}, [records.Weight("v", 10_000)])
        await self.bus.kv_put(subjects.MODELS_BUCKET, subjects.key(self.model, "v"), records.encode(version))
        await self.bus.kv_put(subjects.ROUTES_BUCKET, subjects.key(self.model), records.encode(route))
        await self.bus.ensure_consumer(self.model, "v", subjects.LANE_FAST)
        self.http = httpx.AsyncClient(timeout=DEADLINE_S, limits=httpx.Limits(max_connections=None))

    async def both_ingresses(self) -> None:
        """Start `first` and `second`, or what was killed of them."""

        async def living(name: str) -> Ingress:
            before: Ingress | None = getattr(self, name, None)
            return before if before is not None and before.lives else await self.ingress()

        self.first, self.second = await asyncio.gather(living("first"), living("second"))

    async def one_worker(self) -> None:
        """Start the worker `one`."""
        self.one = await self.worker()

    async def stop(self) -> None:
        await self.http.aclose()
        for process in self._processes:
            process.kill()
        await self.bus.close()

    async def ingress(self, port: int = 0, **changed: Any) -> Ingress:
        """Start an ingress; it is ready when this returns."""
        port = port or ports.free_ports(1)[0]
        self._number += 1
        settings = msgspec.structs.replace(self.settings, http_port=port, **changed)
        ingress = Ingress(f"ingress{self._number}", settings, self._directory)
        self._processes.append(ingress)

        async def ready() -> bool:
            try:  # on a connection of its own: another ingress may share the port
                answer = await self.http.get(ingress.url + "/readyz", headers={"connection": "close"})
            except httpx.TransportError:
                return False
            return answer.status_code == 200 and answer.json()["pid"] == ingress.popen.pid

        await self.until(ready, ingress)
        return ingress

    async def worker(self, version: str = "v") -> Process:
        """Start a worker; it claims when this returns."""
        self._number += 1
        name = f"{self.model}-worker{self._number}"
        argv = ["workers.main", "--model", self.model, "--version", version, "--worker-id", name]
        worker = Process(name, argv, self.settings, self._directory)
        self._processes.append(worker)

        async def active() -> bool:
            found = await self.bus.kv_get(subjects.WORKERS_BUCKET, name)
            return found is not None and records.decode_lease(found[0]).state == "active"

        await self.until(active, worker)
        return worker

    async def until(self, condition: Callable[[], Any], process: Process | None = None) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not await condition():
            assert time.monotonic() < deadline, process.log.read_text() if process else "not in time"
            await asyncio.sleep(0.02)

    async def idle(self) -> None:
        """Wait until no request is stored and no worker holds anything."""

        async def nothing() -> bool:
            held = 0
            for process in self._processes:
                found = await self.bus.kv_get(subjects.WORKERS_BUCKET, process.name)
                if found is not None and process.lives:
                    lease = records.decode_lease(found[0])
                    held += lease.claims + lease.running + lease.waiting + lease.blocks_used
            return not held and (await self.bus.next_message(subjects.REQ_STREAM, self.queue, 1)) is None

        await self.until(nothing)

    @property
    def queue(self) -> str:
        return subjects.requests_of_version(self.model, "v")

    # -- clients -------------------------------------------------------------------------------------------------------

    def body(self, route: str, prompt: str, tokens: int, **more: Any) -> tuple[str, dict[str, Any]]:
        """Path and body of a streamed request: chat, text or native."""
        common = {"max_tokens": tokens, "temperature": 0, "stream": True} | more
        if route == "chat":
            messages = [{"role": "user", "content": prompt}]
            return "/v1/chat/completions", {"model": self.model, "messages": messages} | common
        if route == "text":
            return "/v1/completions", {"model": self.model, "prompt": prompt} | common
        return f"/v1/models/{self.model}/infer", {"input": prompt} | common

    async def begin(
        self, ingress: Ingress, request: tuple[str, dict[str, Any]], events_max: int | None = None, **headers: str
    ) -> Stream:
        """A new stream, read to its end or until `events_max` events have come."""
        stream = Stream()
        await self.read(stream, "POST", ingress.url + request[0], events_max, json=request[1], headers=headers)
        return stream

    async def resume(self, ingress: Ingress, stream: Stream, events_max: int | None = None) -> None:
        """Go on with a stream where its client left it."""
        url = f"{ingress.url}/v1/streams/{stream.id.split('.')[0]}"
        await self.read(stream, "GET", url, events_max, headers={"Last-Event-ID": stream.id})

    async def read(self, stream: Stream, method: str, url: str, events_max: int | None = None, **request: Any) -> None:
        request["headers"] = {name.replace("_", "-"): value for name, value in request.get("headers", {}).items()}
        try:
            async with self.http.stream(method, url, **request) as response:
                stream.status, stream.headers = response.status_code, dict(response.headers)
                stream.id = response.headers.get("x-headrace-last-event-id", stream.id)
                if not response.headers.get("content-type", "").startswith("text/event-stream"):
                    data = await response.aread()
                    stream.error = json.loads(data).get("error") if data else None
                    return
                lines: list[str] = []
                async for line in response.aiter_lines():
                    if line:
                        lines.append(line)
                        continue
                    take(stream, lines)
                    lines = []
                    if events_max is not None and len(stream.events) >= events_max:
                        raise Left
        except (Left, httpx.RemoteProtocolError, httpx.ReadError):
            return


def take(stream: Stream, lines: list[str]) -> None:
    """One event: the lines up to the empty one. What has no such end has not been told."""
    fields = dict(line.split(": ", 1) for line in lines if not line.startswith(":"))
    if "data" not in fields:
        return
    assert not stream.done, "an event after the end"
    stream.id = fields.get("id", stream.id)
    if fields["data"] == "[DONE]":
        stream.done = True
        return
    event = json.loads(fields["data"])
    if "error" in event:
        stream.error = event["error"]
        return
    stream.events.append(event)
    stream.done = "finish_reason" in event


SETTINGS: dict[str, Any] = {
    "drain_budget_s": 5.0,
    "drain_linger_s": 0.3,
    "ack_wait_s": 1.0,
    "in_progress_every_s": 0.3,
    "orphan_grace_s": 2.0,
    "history_kept_s": 2.0,
    "idempotency_result_bytes_max": 2000,
    "attach_timeout_s": 0.4,
    "lease_every_s": 0.2,
}


@pytest.fixture(scope="session")
def site(nats_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Two ingresses and a worker that the tests here share; who kills one starts another. Leave it idle."""
    site = Site(nats_url, tmp_path_factory.mktemp("site"), "reliability", "sim:fixed-10ms", SETTINGS)
    site.run(site.start())
    site.run(site.both_ingresses())
    site.run(site.one_worker())
    yield site
    site.run(site.stop())
    site.runner.close()
