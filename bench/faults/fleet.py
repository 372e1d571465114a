"""A whole service as separate processes: broker, controller, workers that the controller starts, and ingresses."""

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec
from msgspec.structs import replace

from faults.broker import Broker, formed
from faults.processes import Child, environment, own, reap_strangers, wait_gone
from faults.proxy import Proxy
from headrace.push import push
from headrace.stack import ports, servers
from shared import lifeline, records, subjects
from shared.bus import Bus
from shared.objects import ObjectStore
from shared.records import EngineSettings, Lease, VersionLimits
from shared.settings import Settings, to_environment
from workers.engine.load import SIMULATED

MODEL, VERSION = "mill", "v1"
CONSUMER = subjects.consumer(subjects.LANE_FAST, subjects.requests_of_lane(MODEL, VERSION, subjects.LANE_FAST))


class Held(msgspec.Struct):
    """What is held anywhere on behalf of requests; all zero when nothing is open."""

    messages: int = 0  # in REQ
    ack_pending: int = 0
    claims: int = 0
    running: int = 0
    waiting: int = 0
    blocks: int = 0
    queued: int = 0  # at ingresses
    streams: int = 0

    @property
    def total(self) -> int:
        return sum(msgspec.structs.astuple(self))


class Fleet:
    """One model version on `workers` workers behind `ingresses` ingresses. Use it as an async context.

    A `source` that is a directory is served from an object store of the fleet's own.
    """

    def __init__(
        self,
        directory: Path,
        source: str = "sim:fixed-20ms",
        workers: int = 4,
        ingresses: int = 2,
        nodes: int = 1,
        engine: EngineSettings | None = None,
        store: Path | None = None,
        shared_port: bool = False,
        proxied: bool = False,
        **overrides: Any,
    ) -> None:
        """`shared_port`: all ingresses listen on one port, and a new one is up before an old one drains.

        `proxied`: each ingress has a way of its own to the (one) server, that can be cut.
        """
        self.source, self.size = source, workers
        self.engine = engine or EngineSettings()
        self.broker = Broker(directory, nodes, store)
        self._lifeline, self._lifeline_write = os.pipe()
        os.set_inheritable(self._lifeline, True)
        self.objects = None if source.startswith(SIMULATED) else Objects(directory)
        self.settings = Settings(
            **({} if self.objects is None else self.objects.settings),
            nats_url=self.broker.client_url,
            nats_replicas=nodes,
            data_dir=str(directory / "data"),
            lifeline_fd=self._lifeline,
            reuse_port=shared_port,
            **overrides,
        )
        self.directory = directory
        self.ingresses: list[Child] = []
        self.urls: list[str] = []
        server = urlsplit(self.broker.client_url)
        ways = ingresses if proxied else 0
        self.proxies = [Proxy((server.hostname or "", server.port or 0)) for _ in range(ways)]
        self.controller = self._child("controller", "controller.main", self.settings)
        self.leases: dict[str, Lease] = {}
        self.bus: Bus
        self._ports = ports.free_ports(1) * ingresses if shared_port else ports.free_ports(ingresses)
        self._generation = 0
        self._keeping: asyncio.Task[None] | None = None
        self.down: set[str] = set()  # children that are not to be started again for now

    async def __aenter__(self) -> "Fleet":
        lifeline.become_subreaper()
        await self.broker.start()
        await formed(self.settings)
        self.bus = await Bus.connect(replace(self.settings, publish_timeout_s=30.0), "faults")
        await self.bus.watch(subjects.WORKERS_BUCKET, self._on_lease)
        if self.objects is not None:
            await self.objects.start()
        self.controller.start()
        for proxy in self.proxies:
            await proxy.start()
        self.urls = [f"http://127.0.0.1:{port}" for port in self._ports]
        self.ingresses = [self._ingress(number) for number in range(len(self.urls))]
        for ingress in self.ingresses:
            ingress.start()
        limits = VersionLimits(min_replicas=self.size, max_replicas=self.size)
        await push(self.bus, ObjectStore(self.settings), self.source, MODEL, VERSION, engine=self.engine, limits=limits)
        self._keeping = asyncio.create_task(self._keep())
        await self.all_active()
        for number in range(len(self.urls)):
            await self.ready(number)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
        pids = [lease.pid for lease in self.leases.values()]
        await self.bus.close()
        os.close(self._lifeline_write)  # everything of ours ends
        for child in [*self.ingresses, self.controller]:
            child.kill()
        for proxy in self.proxies:
            await proxy.close()
        self.broker.kill()
        if self.objects is not None:
            self.objects.kill()
        left = await asyncio.to_thread(wait_gone, pids, 10.0)
        assert not left, f"workers {left} outlived their lifeline"
        os.close(self._lifeline)

    # -- processes -----------------------------------------------------------------------------------------------------

    def _child(self, name: str, module: str, settings: Settings, *arguments: str) -> Child:
        return own(name, module, list(arguments), self.directory, environment(to_environment(settings)), self._lifeline)

    def _ingress(self, number: int) -> Child:
        settings = replace(self.settings, http_port=self._ports[number])
        if self.proxies:
            settings = replace(settings, nats_url=f"nats://127.0.0.1:{self.proxies[number].port}")
        self._generation += 1
        return self._child(f"ingress-{self._generation}", "headrace", settings, "ingress")

    async def replace_ingress(self, number: int) -> int:
        """Start a new ingress beside an old one on a shared port, then let that one drain; its exit status."""
        old, self.ingresses[number] = self.ingresses[number], self._ingress(number)
        self.ingresses[number].start()
        await self.ready(number)
        old.signal(signal.SIGTERM)
        return await asyncio.to_thread(old.wait, self.settings.drain_budget_s + 10)

    async def _keep(self) -> None:
        """Start again what has died, as a supervisor would; wait for orphans of a dead controller."""
        while True:
            children = [*self.ingresses, self.controller, *(node.child for node in self.broker.nodes)]
            for child in children:
                if not child.running and child.name not in self.down:
                    child.start()
            reap_strangers({child.pid for child in children})
            await asyncio.sleep(0.1)

    def active(self) -> list[Lease]:
        """Workers that claim now, by their leases and their processes, in the order of their ids."""
        found = [lease for lease in self.leases.values() if lease.state == "active" and _lives(lease)]
        return sorted(found, key=lambda lease: lease.worker)

    async def all_active(self) -> None:
        """Wait until every worker claims: seconds where a real model has to be loaded."""
        budget_s = 30 if self.objects is None else 120
        await self.until(lambda: len(self.active()) >= self.size, budget_s, "all workers to be active")

    def members(self) -> dict[str, int]:
        """Name and pid of every process that runs."""
        children = [*self.ingresses, self.controller, *(node.child for node in self.broker.nodes)]
        found = {child.name: child.pid for child in children if child.running}
        return found | {f"worker-{lease.worker}": lease.pid for lease in self.active()}

    def _on_lease(self, key: str, value: bytes | None) -> None:
        if value is None:
            self.leases.pop(key, None)
            return
        lease = records.decode_lease(value)
        self.leases[lease.worker] = lease
        for worker, other in list(self.leases.items()):
            if not _lives(other):
                del self.leases[worker]

    async def ready(self, number: int, budget_s: float = 20.0) -> None:
        """Wait until an ingress takes requests, that one and not another one on its port."""
        deadline = time.monotonic() + budget_s
        async with httpx.AsyncClient(timeout=5, limits=httpx.Limits(max_keepalive_connections=0)) as client:
            while True:
                with contextlib.suppress(httpx.HTTPError):
                    answer = await client.get(self.urls[number] + "/readyz")
                    if answer.status_code == 200 and answer.json()["pid"] == self.ingresses[number].pid:
                        return
                assert time.monotonic() < deadline, f"{self.urls[number]} is not ready"
                await asyncio.sleep(0.05)

    async def until(self, condition: Callable[[], object], budget_s: float, what: str) -> None:
        deadline = time.monotonic() + budget_s
        while not condition():
            assert time.monotonic() < deadline, f"not within {budget_s:g} s: {what}"
            await asyncio.sleep(0.02)

    # -- faults --------------------------------------------------------------------------------------------------------

    async def leader(self, stream: str = subjects.REQ_STREAM) -> str:
        """The name of the server that leads a stream."""
        info = await self.bus.api(f"STREAM.INFO.{stream}")
        return str(info["cluster"]["leader"])

    async def replicated(self, stream: str = subjects.REQ_STREAM) -> bool:
        """Whether every replica of a stream is there and has caught up."""
        cluster = (await self.bus.api(f"STREAM.INFO.{stream}"))["cluster"]
        replicas = cluster.get("replicas") or []
        return (
            bool(cluster.get("leader"))
            and len(replicas) == self.broker.replicas - 1
            and all(replica.get("current") and not replica.get("offline") for replica in replicas)
        )

    # -- what is held --------------------------------------------------------------------------------------------------

    async def held(self) -> Held:
        """What broker, workers and ingresses hold now."""
        held = Held()
        held.messages = (await self.bus.stream_info(subjects.REQ_STREAM)).messages
        info = await self.bus.consumer_info(subjects.REQ_STREAM, CONSUMER)
        held.ack_pending = info.num_ack_pending if info else 0
        for lease in self.active():
            held.claims += lease.claims
            held.running += lease.running
            held.waiting += lease.waiting
            held.blocks += lease.blocks_used
        for counters in await self.ingress_counters():
            held.queued += int(counters.get("headrace_queued", 0))
            held.streams += int(counters.get("headrace_streams_open", 0))
        return held

    async def settled(self, budget_s: float) -> Held:
        """What is still held when nothing is any more, or after the budget."""
        deadline = time.monotonic() + budget_s
        while True:
            held = await self.held()
            if held.total == 0 or time.monotonic() > deadline:
                return held
            await asyncio.sleep(0.25)

    async def ingress_counters(self) -> list[dict[str, float]]:
        return [await scrape(url) for url, child in zip(self.urls, self.ingresses, strict=True) if child.running]

    async def worker_counters(self) -> list[dict[str, float]]:
        return [await scrape(f"http://127.0.0.1:{lease.metrics_port}") for lease in self.active()]


class Objects:
    """An object store that lives as long as its fleet."""

    def __init__(self, directory: Path) -> None:
        chosen = servers.ObjectPorts(*ports.free_ports(5))
        access_key, secret_key = secrets.token_hex(10), secrets.token_hex(20)
        server = servers.objects(directory / "objects", chosen, access_key, secret_key)
        self.settings = {"s3_endpoint": server.url, "s3_access_key": access_key, "s3_secret_key": secret_key}
        env = servers.environment(server, os.environ)
        self._child = Child("objects", server.argv, directory, env, tied=True, directory=Path(server.directory))
        self._url, self._sockets = server.url, servers.object_sockets(chosen)

    async def start(self) -> None:
        self._child.start()
        deadline = time.monotonic() + 30
        while not await servers.s3_ready(self._url):
            assert time.monotonic() < deadline, f"the object store does not answer: {self._child.log}"
            await asyncio.sleep(0.05)

    def kill(self) -> None:
        self._child.kill()
        for socket_path in self._sockets:
            socket_path.unlink(missing_ok=True)


async def scrape(url: str) -> dict[str, float]:
    """The samples of a /metrics page, by name and labels as they stand there; {} when nobody answers."""
    try:
        async with httpx.AsyncClient(timeout=5) as client:
            text = (await client.get(url + "/metrics")).text
    except httpx.HTTPError:
        return {}
    samples = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            samples[name] = float(value)
    return samples


def _lives(lease: Lease) -> bool:
    if lease.host != socket.gethostname():
        return False
    try:
        return lease.worker.encode() in Path(f"/proc/{lease.pid}/cmdline").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError):
        return False
