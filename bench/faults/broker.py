"""NATS for a fleet under fault: one server, or three in a cluster, each on a fixed port and with a store that stays."""

import asyncio
import json
import time
from pathlib import Path

from faults.processes import Child
from headrace.stack import ports, servers

HOST = "127.0.0.1"


class Broker:
    """`nodes` servers with JetStream. `client_url` is where clients connect, `nodes[k].url` one server alone."""

    def __init__(self, directory: Path, nodes: int = 1, store: Path | None = None) -> None:
        """`store` holds the data of a single server instead of a directory here: a small file system, for instance."""
        chosen = ports.free_ports(2 * nodes)
        routes = [f"nats://{HOST}:{port}" for port in chosen[nodes:]]
        self.nodes = [
            Node(directory, f"nats-{number}", chosen[number], chosen[nodes + number], routes, store)
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

    def kill(self) -> None:
        for node in self.nodes:
            node.child.kill()

    def node_named(self, name: str) -> "Node":
        return next(node for node in self.nodes if node.child.name == name)


class Node:
    """One nats-server."""

    def __init__(
        self, directory: Path, name: str, port: int, route_port: int, routes: list[str], store: Path | None
    ) -> None:
        self.url = f"nats://{HOST}:{port}"
        config = directory / f"{name}.conf"
        data = store or directory / name
        lines = [
            f'listen: "{HOST}:{port}"',
            f'server_name: "{name}"',
            f"max_payload: {servers.MAX_PAYLOAD_BYTES}",
            f"jetstream {{ store_dir: {json.dumps(str(data))} }}",
        ]
        if len(routes) > 1:
            # clients know all servers from their own settings; what is advertised would go round a proxy
            others = json.dumps(routes)
            lines.append(
                f'cluster {{ name: faults, listen: "{HOST}:{route_port}", routes: {others}, no_advertise: true }}'
            )
        config.write_text("\n".join(lines) + "\n")
        self.child = Child(name, [servers.binary("nats-server"), "--config", str(config)], directory, tied=True)

    async def ready(self, budget_s: float = 20.0) -> None:
        """Wait until it answers clients."""
        deadline = time.monotonic() + budget_s
        while not await servers.nats_ready(self.url):
            assert self.child.running, f"{self.child.name} ended: {self.child.log}"
            assert time.monotonic() < deadline, f"{self.child.name} does not answer: {self.child.log}"
            await asyncio.sleep(0.02)
