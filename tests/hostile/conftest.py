"""An ingress, a worker and a controller with a NATS of their own: whatever is sent to them, they go on."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from headrace.stack import ports, servers
from shared import records, registry, subjects
from shared.records import Version

from ..reliability.conftest import SETTINGS, Process, Site

MODEL = "m"
GRACE_S = 10.0


class Target(Site):
    """All three, and how to see that they are well."""

    controller: Process
    log_marks: dict[str, int]

    async def start(self) -> None:
        await super().start()
        self.first = await self.ingress()
        self.one = await self.worker()
        self.controller = Process("controller", ["controller.main"], self.settings, self._directory)
        self._processes.append(self.controller)
        await self.registered("ready")

    async def registered(self, version: str) -> None:
        """Register a version and wait until the controller made it available: its loop turns."""
        record = Version(model="watched", version=version, state="registered", source="sim:zero")
        await registry.register(self.bus, record)
        await registry.wait_available(self.bus, "watched", version, 20)

    @property
    def port(self) -> int:
        return int(self.first.url.rpartition(":")[2])

    async def parked(self) -> None:
        """The version `v` of the model `parked`, which no worker serves."""
        record = Version(model="parked", version="v", state="registered", source="sim:zero")
        await registry.register(self.bus, record)
        await registry.wait_available(self.bus, "parked", "v", 20)

    async def answers(self) -> None:
        """A good request of each kind is answered, by the processes that were there from the beginning."""
        for process in (self.first, self.one, self.controller):
            assert process.lives, process.log.read_text()[-5000:]
        for route in ("chat", "text", "infer"):
            stream = await self.begin(self.first, self.body(route, "are you well?", 3))
            assert (stream.status, stream.done, stream.error) == (200, True, None), self.one.log.read_text()[-3000:]
            path, body = self.body(route, "are you well?", 3, stream=False)
            answer = await self.http.post(self.first.url + path, json=body)
            assert answer.status_code == 200, answer.text

    async def settled(self) -> None:
        """Wait until nothing is stored, nothing is claimed, and the worker holds nothing."""
        deadline = time.monotonic() + GRACE_S

        async def nothing() -> bool:
            assert time.monotonic() < deadline, await self.left()
            return not any((await self.left()).values())

        await self.until(nothing, self.one)

    async def left(self) -> dict[str, int]:
        """What is not at rest yet."""
        found = await self.bus.kv_get(subjects.WORKERS_BUCKET, self.one.name)
        assert found is not None, self.one.log.read_text()[-3000:]
        lease = records.decode_lease(found[0])
        consumer = subjects.consumer(subjects.LANE_FAST, subjects.requests_of_lane(self.model, "v", subjects.LANE_FAST))
        fast = await self.bus.consumer_info(subjects.REQ_STREAM, consumer)
        assert fast is not None
        return {
            "stored": (await self.bus.stream_info(subjects.REQ_STREAM)).messages,
            "claimed": fast.num_ack_pending,
            "held": lease.claims + lease.running + lease.waiting + lease.blocks_used,
        }

    def tracebacks(self) -> str:
        """The first defect that a log tells of."""
        for process in (self.first, self.one, self.controller):
            text = process.log.read_text(errors="replace")
            at = max(text.find("Traceback"), text.find("was not handled"), text.find("never retrieved"))
            if at >= 0:
                return f"{process.name}: {text[max(0, at - 300) : at + 3000]}"
        return ""


@pytest.fixture(scope="session")
def target(start_server: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """They are shared by the tests here, each of which leaves them idle."""
    directory = tmp_path_factory.mktemp("hostile")
    server = start_server(servers.nats(directory / "nats", ports.free_ports(1)[0]), servers.nats_ready, [])
    settings = SETTINGS | {"scaler": "static", "deliveries_max": 20, "queue_deadline_s": 20.0, "redis_url": ""}
    target = Target(server.url, directory, MODEL, "sim:zero", settings)
    target.run(target.start())
    yield target
    target.run(target.stop())
    target.runner.close()
    server.kill()
