"""The client over NATS, with the services of an ingress and no worker: what waits for a version out of service."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from headrace import Client, HeadraceError
from ingress import answers
from ingress.answers import Receive, Scope, Send
from ingress.context import Context
from ingress.detached import Detached
from ingress.identity import Identities
from ingress.keys import Keys
from ingress.registrar import Registrar
from ingress.service import Services
from shared import subjects, wire
from shared.bus import Bus
from shared.dispatch import Dispatcher
from shared.encoders import Encoder
from shared.records import Route, Version, Weight
from shared.router import Router
from shared.settings import Settings

BUDGET_S = 20.0
ENCODER = Encoder(dimensions=4, length=100, positions=100, pooling="cls_token", normalized=True)


class Ingress:
    """The router and the services of one; `cancelled` are the positions that it was to cancel."""

    def __init__(self, bus: Bus, settings: Settings) -> None:
        self.bus, self.settings = bus, settings
        self.router = Router()
        self.cancelled: list[str] = []
        context = Context(
            settings,
            self.router,
            Dispatcher(bus, settings),
            Keys(bus, settings),
            Registrar(bus, settings),
            lambda: True,
            Identities(False),
            Detached(bus),
        )
        self.services = Services(bus, self._application, context)

    def serve(self, model: str, weights: dict[str, int], withdrawn: dict[str, str] | None = None) -> None:
        """Split the traffic of a model."""
        for version in (*weights, *(withdrawn or {})):
            encoder = ENCODER if model == "vectors" else None
            self.router.put_version(
                Version(model=model, version=version, state="available", source="sim:zero", encoder=encoder)
            )
        shares = [Weight(version, points) for version, points in weights.items()]
        self.router.put_route(Route(model, {"stable": "v1"}, shares, withdrawn or {}))

    async def queued(self, model: str, version: str) -> list[str]:
        """The rids of what waits."""
        filter_, sequence, found = f"q.{model}.{version}.>", 1, []
        while (message := await self.bus.next_message(subjects.REQ_STREAM, filter_, sequence)) is not None:
            found.append(message.headers[wire.HEADER_MSG_ID])
            sequence = message.seq + 1
        return found

    async def until_queued(self, model: str, version: str, count: int) -> list[str]:
        deadline = time.monotonic() + BUDGET_S
        while len(found := await self.queued(model, version)) != count:
            assert time.monotonic() < deadline, found
            await asyncio.sleep(0.02)
        return found

    async def _application(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["method"] == "DELETE", scope
        self.cancelled.append(dict(scope["headers"])[b"last-event-id"].decode())
        data = b'{"id": "", "status": "cancelled"}'
        await send(answers.start(200, answers.json_headers(data, [])))
        await send(answers.body(data))


@pytest.fixture
def meet(nats_server: Any) -> Callable[[Callable[[Ingress, Client], Awaitable[None]]], None]:
    def run(work: Callable[[Ingress, Client], Awaitable[None]]) -> None:
        async def main() -> None:
            settings = Settings(nats_url=nats_server.url)
            bus = await Bus.connect(settings, "ingress")
            try:
                await bus.ensure()
                ingress = Ingress(bus, settings)
                await ingress.services.start()
                async with Client(nats_server.url) as client:
                    await work(ingress, client)
                await ingress.services.close()
            finally:
                await bus.close()

        asyncio.run(main())

    return run


def test_what_waits_for_a_version_that_is_rolled_back_goes_to_another_one(meet: Any) -> None:
    async def work(ingress: Ingress, client: Client) -> None:
        ingress.serve("m", {"v2": 10_000, "v1": 0})
        ingress.serve("vectors", {"v2": 10_000, "v1": 0})
        generation = client.stream("m", "hello", max_tokens=3)
        asking = [
            asyncio.create_task(each)
            for each in (
                generation.complete(),
                client.generate("m@v2", "hello", max_tokens=3),
                client.embed("vectors", "hello"),
            )
        ]
        before = await ingress.until_queued("m", "v2", 2)
        assert generation.id in before
        await ingress.until_queued("vectors", "v2", 1)
        ingress.serve("m", {"v1": 10_000}, {"v2": "it was too slow"})
        ingress.serve("vectors", {"v1": 10_000}, {"v2": "it was too slow"})
        [moved] = await ingress.until_queued("m", "v1", 1)
        await ingress.until_queued("vectors", "v1", 1)
        assert generation.id == moved
        assert moved not in before
        with pytest.raises(HeadraceError, match="it was too slow") as refused:  # it named the version
            await asyncio.wait_for(asking[1], BUDGET_S)
        assert refused.value.code == "no_replica_for_pin"
        assert {each.partition(".")[0] for each in ingress.cancelled} == set(before), (
            "an ingress deletes what they left"
        )
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)

    meet(work)


def test_what_waits_for_a_version_that_takes_requests_goes_on_waiting(meet: Any) -> None:
    async def work(ingress: Ingress, client: Client) -> None:
        ingress.serve("m", {"v1": 10_000})
        asking = asyncio.create_task(client.generate("m", "hello", max_tokens=3))
        [rid] = await ingress.until_queued("m", "v1", 1)
        for state in ("available", "registered"):  # the latter is a reason to wait
            ingress.router.put_version(Version(model="m", version="v1", state=state, source="sim:zero"))
            done, _ = await asyncio.wait({asking}, timeout=2.5)
            assert not done
        assert await ingress.queued("m", "v1") == [rid]
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)

    meet(work)
