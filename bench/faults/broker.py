"""NATS for a fleet under fault: one server, or three in a cluster, each on a fixed port and with a store that stays."""

import asyncio
import contextlib
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

from faults.processes import Child
from headrace.stack import ports, servers
from shared.bus import Bus
from shared.errors import Unavailable
from shared.settings import Settings

HOST = "127.0.0.1"


async def formed(settings: Settings) -> None:
    """Wait until the servers have found each other and hold our streams."""
    bus = await Bus.connect(settings, "formed")
    try:
        async with asyncio.timeout(40):
            while True:
                with contextlib.suppress(Unavailable):
                    await bus.ensure()
                    return
                await asyncio.sleep(0.2)
    finally:
        await bus.close()


class Broker:
    """`nodes` servers with JetStream. `client_url` is where clients connect, `nodes[k].url` one server alone."""

    def __init__(self, directory: Path, nodes: int = 1, store: Path | None = None, options: Sequence[str] = ()) -> None:
        """`store` holds the data of a single server instead of a directory here: a small file system, for instance.

        `options` are lines of configuration.
        """
        chosen = ports.free_ports(2 * nodes)
        routes = [f"nats://{HOST}:{port}" for port in chosen[nodes:]]
        self.nodes = [
            Node(directory, f"nats-{number}", chosen[number], chosen[nodes + number], routes, store, options)
            for number in range(nodes)
        ]
        self.replicas = nodes

    @property
    def client_url(self) -> str:
        return ",".join(node.url for node in self.nodes)

    async def start(self) -> None:
        for node in self.nodes:
            node.child.start()
        for node in self.nodes:
            await node.ready()

    def start_and_wait(self) -> None:
        """`start` for callers without a loop."""
        asyncio.run(self.start())

    def kill(self) -> None:
        for node in self.nodes:
            node.child.kill()

    def node_named(self, name: str) -> "Node":
        return next(node for node in self.nodes if node.child.name == name)


class Node:
    """One nats-server."""

    def __init__(
        self,
        directory: Path,
        name: str,
        port: int,
        route_port: int,
        routes: list[str],
        store: Path | None,
        options: Sequence[str],
    ) -> None:
        self.url = f"nats://{HOST}:{port}"
        config = directory / f"{name}.conf"
        data = store or directory / name
        lines = [
            f'listen: "{HOST}:{port}"',
            f'server_name: "{name}"',
            f"max_payload: {servers.MAX_PAYLOAD_BYTES}",
            f"jetstream {{ store_dir: {json.dumps(str(data))} }}",
            *options,
        ]
        if len(routes) > 1:
            # clients know all servers from their own settings; what is advertised would go round a proxy
            others = json.dumps(routes)
            lines.append(
                f'cluster {{ name: faults, listen: "{HOST}:{route_port}", routes: {others}, no_advertise: true }}'
            )
        config.write_text("\n".join(lines) + "\n")
        argv = [servers.binary("nats-server"), "--config", str(config)]
        self.child = Child(name, argv, directory, os.environ | servers.NATS_ENV, tied=True)

    async def ready(self, budget_s: float = 20.0) -> None:
        """Wait until it answers clients."""
        deadline = time.monotonic() + budget_s
        while not await servers.nats_ready(self.url):
            assert self.child.running, f"{self.child.name} ended: {self.child.log}"
            assert time.monotonic() < deadline, f"{self.child.name} does not answer: {self.child.log}"
            await asyncio.sleep(0.02)
