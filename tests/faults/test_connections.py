"""The broker and the ways to it: restarts, elections, partitions, connections that the server or the client ends."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import nats.errors
import pytest
from faults.broker import Broker, formed
from faults.proxy import Proxy
from msgspec.structs import replace

from shared.bus import Bus
from shared.dispatch import Dispatcher
from shared.errors import QueueFull
from shared.records import EngineSettings
from shared.settings import Settings
from shared.stream import Stream

from ..workers.conftest import Fleet, read, until
from .conftest import CONSUMER, FAST, answers, workers_of

RunFleet = Callable[..., None]


@contextlib.asynccontextmanager
async def proxied(fleet: Fleet) -> AsyncIterator[tuple[Proxy, str]]:
    """A way to the broker that can be cut, and its URL."""
    target = urlsplit(fleet.settings.nats_url)
    proxy = Proxy((target.hostname or "", target.port or 0))
    await proxy.start()
    try:
        yield proxy, f"nats://127.0.0.1:{proxy.port}"
    finally:
        await proxy.close()


def test_h15_an_oversized_publish_that_closes_the_client_is_a_pause(run_fleet: RunFleet) -> None:
    async def work(fleet: Fleet) -> None:
        await workers_of(fleet, 1)
        wanted = await answers([await fleet.submit(f"p {number}", max_tokens=80) for number in range(10)])
        streams = [await fleet.submit(f"p {number}", max_tokens=80) for number in range(10)]
        heads = [await stream.next(10) for stream in streams]
        client, address = fleet.bus._client, fleet.dispatcher.address
        client._max_payload = 1 << 30  # the check on our side is not what is tested
        with contextlib.suppress(nats.errors.Error):
            await client.publish("elsewhere", bytes(9 << 20))
        await until(lambda: fleet.bus._client is not client)
        assert await answers(streams, heads) == wanted
        assert fleet.dispatcher.address == address
        assert len(await read(await fleet.submit())) == 40
        await fleet.idle()

    run_fleet(work, source="sim:fixed-10ms")


def test_h11_a_restart_of_the_server_under_a_thousand_streams_is_no_storm(
    run_fleet: RunFleet, nats_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    naks: list[str] = []
    publish = Bus.publish

    async def counted(bus: Bus, subject: str, data: bytes = b"", *rest: Any, **more: Any) -> bool:
        naks.extend([subject] if data == b"-NAK" else [])
        return await publish(bus, subject, data, *rest, **more)

    async def work(fleet: Fleet) -> None:
        await workers_of(fleet, 2)
        streams = [await fleet.submit(f"p {number}", max_tokens=8) for number in range(1000)]
        await until(lambda: all(stream.requester.claims for stream in streams), 30)
        await asyncio.to_thread(nats_server.kill)
        await until(lambda: not fleet.bus.connected)
        await asyncio.to_thread(nats_server.start)
        assert all(len(each) == 8 for each in await answers(streams))
        assert not naks
        # a killed server forgets its last deliveries, so that some messages come out a second time
        assert sum(stream.claims > 1 for stream in streams) < 300
        await fleet.idle()

    monkeypatch.setattr(Bus, "publish", counted)
    run_fleet(work, source="sim:fixed-700ms", engine=EngineSettings(slots=600))


def test_a_requester_behind_a_partition_goes_on_when_it_ends(run_fleet: RunFleet) -> None:
    async def work(fleet: Fleet) -> None:
        await workers_of(fleet, 1)
        async with proxied(fleet) as (proxy, url):
            settings = replace(fleet.settings, nats_url=url)
            bus = await Bus.connect(settings, "partitioned")
            fleet.dispatcher = Dispatcher(bus, settings)
            await fleet.dispatcher.start()
            try:
                streams = [await fleet.submit(f"p {number}", max_tokens=180) for number in range(5)]
                heads = [await stream.next(10) for stream in streams]
                proxy.stall()
                await asyncio.sleep(1.2)  # longer than whoever hears nothing waits before it asks
                proxy.restore()
                found = await answers(streams, heads)
                await proxy.sever()
                later = asyncio.create_task(fleet.submit("p 0", max_tokens=180))
                await until(lambda: not bus.connected)
                await proxy.start()
                assert await answers([await later]) == found[:1]
            finally:
                await fleet.dispatcher.close()
                await bus.close()
        assert all(len(each) == 180 for each in found)
        await fleet.idle()

    run_fleet(work, source="sim:fixed-10ms", publish_timeout_s=10.0)


def test_a_worker_behind_a_partition_is_replaced_and_fenced(run_fleet: RunFleet) -> None:
    async def work(fleet: Fleet) -> None:
        async with proxied(fleet) as (proxy, url):
            ours = fleet.settings
            fleet.settings = replace(ours, nats_url=url)
            await workers_of(fleet, 1)
            fleet.settings = ours
            wanted = await answers([await fleet.submit(f"p {number}", max_tokens=120) for number in range(4)])
            streams = [await fleet.submit(f"p {number}", max_tokens=120) for number in range(4)]
            heads = [await stream.next(10) for stream in streams]
            proxy.stall()
            await fleet.active(fleet.spawn())
            await until(lambda: all(stream.requester.worker == "w2" for stream in streams))
            proxy.restore()
            assert await answers(streams, heads) == wanted
            await fleet.idle()

    run_fleet(work, source="sim:fixed-10ms", **FAST)


def test_a_server_that_drops_a_slow_consumer_costs_nobody_a_token(run_fleet: RunFleet, tmp_path: Path) -> None:
    broker = Broker(tmp_path, options=['write_deadline: "300ms"'])

    async def work(fleet: Fleet) -> None:
        await workers_of(fleet, 1)
        async with proxied(fleet) as (proxy, url):
            settings = replace(fleet.settings, nats_url=url)
            bus = await Bus.connect(settings, "slow")
            fleet.dispatcher = Dispatcher(bus, settings)
            await fleet.dispatcher.start()
            try:
                streams = [await fleet.submit(f"p {number}", max_tokens=600, logprobs=5) for number in range(40)]
                heads = [await stream.next(10) for stream in streams]
                proxy.stall()
                await until(lambda: "Slow Consumer" in broker.nodes[0].child.log.read_text(), 20)
                proxy.restore()
                found = await answers(streams, heads)
            finally:
                await fleet.dispatcher.close()
                await bus.close()
        assert all(len(each) == 600 for each in found)
        assert bus.reconnects >= 1
        await fleet.idle()

    broker.start_and_wait()
    try:
        run_fleet(work, source="sim:fixed-10ms", nats_url=broker.client_url)
    finally:
        broker.kill()


def test_the_loss_of_a_clusters_leader_is_a_pause(run_fleet: RunFleet, tmp_path: Path) -> None:
    broker = Broker(tmp_path, nodes=3)

    async def leader(fleet: Fleet) -> str:
        return str((await fleet.bus.api("STREAM.INFO.REQ"))["cluster"]["leader"])

    async def work(fleet: Fleet) -> None:
        await workers_of(fleet, 2)
        wanted = await answers([await fleet.submit(f"p {number}", max_tokens=100) for number in range(4)])
        streams = [await fleet.submit(f"p {number}", max_tokens=100) for number in range(4)]
        heads = [await stream.next(10) for stream in streams]
        old = broker.node_named(await leader(fleet)).child
        await asyncio.to_thread(old.kill)
        parked = [asyncio.create_task(fleet.submit(f"p {number}", max_tokens=100)) for number in range(4)]
        assert await answers(streams, heads) == wanted
        assert await answers(await asyncio.gather(*parked)) == wanted
        old.start()
        await fleet.idle()

    broker.start_and_wait()
    try:
        asyncio.run(formed(Settings(nats_url=broker.client_url, nats_replicas=3)))
        run_fleet(work, source="sim:fixed-10ms", nats_url=broker.client_url, nats_replicas=3)
    finally:
        broker.kill()


def test_a_full_stream_is_a_coded_refusal_and_empties(run_fleet: RunFleet) -> None:
    async def work(fleet: Fleet) -> None:
        asked = [fleet.submit("word " * 1000, max_tokens=1) for _ in range(60)]
        found = await asyncio.gather(*asked, return_exceptions=True)
        streams = [each for each in found if isinstance(each, Stream)]
        refusals = [each for each in found if isinstance(each, QueueFull)]
        assert (len(streams) + len(refusals), bool(streams), bool(refusals)) == (60, True, True)
        await workers_of(fleet, 1)
        assert all(len(each) == 1 for each in await answers(streams))
        await fleet.idle()  # an answer is there before its message is acked
        assert len(await read(await fleet.submit("word " * 1000, max_tokens=1))) == 1
        await fleet.idle()
        assert (await fleet.bus.consumer_info("REQ", CONSUMER)) is not None

    run_fleet(work, req_bytes_max=200_000)
