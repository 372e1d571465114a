"""Tenants that publish over NATS for themselves, through the accounts of `headrace nats-config`, and real workers."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from msgspec.structs import replace

from shared import subjects, wire
from shared.bus import Bus, Message
from shared.dispatch import Dispatcher, Stream
from shared.settings import Settings

from .conftest import Fleet, read, text_of, until

RunFleet = Callable[..., None]


class Direct:
    """A requester process of a tenant."""

    def __init__(self, tenant: str, bus: Bus, settings: Settings) -> None:
        self.tenant, self.bus = tenant, bus
        self.dispatcher = Dispatcher(bus, settings, tenant)
        self.heard: list[Message] = []

    def request(self, tokens: int = 40) -> wire.Request:
        sampling = wire.Sampling(max_tokens=tokens, temperature=0.0)
        return wire.Request(wire.new_id(), "m", "v", wire.Input(prompt="hello there"), sampling)

    async def submit(self, tokens: int = 40) -> Stream:
        return await self.dispatcher.submit(self.request(tokens), self.tenant)

    async def listen(self, address: str) -> None:
        await self.bus.subscribe(address, self.heard.append)


@asynccontextmanager
async def direct(server: Any, tenant: str, fleet: Fleet) -> AsyncIterator[Direct]:
    settings = replace(fleet.settings, nats_nkey=str(server.key(tenant)))
    bus = await Bus.connect(settings, tenant)
    found = Direct(tenant, bus, settings)
    await found.dispatcher.start()
    try:
        yield found
    finally:
        await found.dispatcher.close()
        await bus.close()


@pytest.fixture
def guarded(run_fleet: RunFleet, own_guarded_nats: Any) -> Callable[..., None]:
    """`run_fleet` on a server with accounts."""

    def run(work: Callable[[Fleet], Any], **more: Any) -> None:
        own = own_guarded_nats.settings()
        run_fleet(work, nats_url=own.nats_url, nats_nkey=own.nats_nkey, **more)

    return run


def test_a_tenants_own_requester_streams_and_outlives_a_worker(
    guarded: Callable[..., None], own_guarded_nats: Any
) -> None:
    async def work(fleet: Fleet) -> None:
        first = fleet.spawn()
        await fleet.active(first)
        async with direct(own_guarded_nats, "acme", fleet) as acme:
            ours, theirs = await acme.submit(), await fleet.submit()
            assert text_of(await read(ours)) == text_of(await read(theirs)) != ""
            assert ours.lane == subjects.LANE_FAIR
            long = await acme.submit(120)
            head = await long.next(10)
            fleet.workers[first].kill()
            fleet.spawn()
            deltas = head + await read(long)
            assert sum(len(delta.ids) for delta in deltas) == 120
            assert long.claims == 2
            await fleet.idle()

    guarded(work, source="sim:fixed-20ms", ack_wait_s=1.0, in_progress_every_s=0.3)


def test_a_message_that_is_gone_is_published_again(guarded: Callable[..., None], own_guarded_nats: Any) -> None:
    """The requester may not look into the stream: it concludes it from nobody serving what a worker had."""

    async def work(fleet: Fleet) -> None:
        first = fleet.spawn()
        await fleet.active(first)
        async with direct(own_guarded_nats, "acme", fleet) as acme:
            stream = await acme.submit(120)
            head = await stream.next(10)
            fleet.workers[first].kill()
            await fleet.bus.delete_message(subjects.REQ_STREAM, stream.sequence)
            fleet.spawn()
            assert sum(len(delta.ids) for delta in head + await read(stream)) == 120
            await fleet.idle()

    timers = {"ack_wait_s": 0.5, "in_progress_every_s": 0.2, "pull_expires_s": 1.0, "pull_heartbeat_s": 0.3}
    guarded(work, source="sim:fixed-20ms", seek_every_max_s=0.5, seek_every_s=0.2, **timers)


def test_it_finds_and_cancels_its_own_requests_only(guarded: Callable[..., None], own_guarded_nats: Any) -> None:
    async def work(fleet: Fleet) -> None:
        await fleet.active(fleet.spawn())
        async with direct(own_guarded_nats, "acme", fleet) as acme, direct(own_guarded_nats, "other", fleet) as other:
            stream = await acme.submit(4000)
            await stream.next(10)
            rid = stream.rid
            for tenant in ("acme", "other"):
                assert await other.dispatcher.locate(rid, tenant, stream.sequence) is None
                assert await other.dispatcher.revoke(rid, tenant, stream.sequence) == b""
            found = await acme.dispatcher.locate(rid, "acme", stream.sequence)
            assert found is not None
            assert found.request.rid == rid
            assert await acme.dispatcher.revoke(rid, "acme", stream.sequence) == wire.CANCELLED
            await fleet.idle()

    guarded(work, source="sim:fixed-20ms", attach_timeout_s=0.3)


def test_nobody_speaks_for_another_tenant(guarded: Callable[..., None], own_guarded_nats: Any) -> None:
    async def work(fleet: Fleet) -> None:
        worker = fleet.spawn()
        await fleet.active(worker)
        async with direct(own_guarded_nats, "acme", fleet) as acme, direct(own_guarded_nats, "other", fleet) as other:
            stream = await acme.submit(100)
            head = await stream.next(10)
            rid, sid = stream.rid, stream.requester.sid
            address = subjects.frame_address("other", "x")
            await other.listen(address)
            for reply in (address, acme.dispatcher.address, fleet.dispatcher.address):
                for item in (wire.Attach(rid, sid, reply, [[]]), wire.Release(rid, sid, reply, True)):
                    data = wire.encode(wire.ToWorker([item]))
                    await other.bus.publish(subjects.worker_control(worker, "other"), data)
                    await other.bus.publish(subjects.attach_broadcast("m", "v", "other"), data)
            await until(lambda: other.heard)
            said = [item for message in other.heard for item in wire.decode_from_worker(message.data).items]
            assert said == [wire.No(rid, sid)]  # to its own attach, at its own address

            # a request whose frames would go to somebody else, and one with somebody else's rid
            for number, (reply, name) in enumerate([(acme.dispatcher.address, wire.new_id()), (address, rid)]):
                request = other.request()
                request.rid = name
                headers = {wire.HEADER_WIRE: "1", wire.HEADER_REPLY: reply, wire.HEADER_MSG_ID: f"forged-{number}"}
                subject = subjects.request("m", "v", subjects.LANE_FAIR, "other")
                await other.bus.publish_durable(subject, wire.encode(request), headers)
            deltas = head + await read(stream)
            assert sum(len(delta.ids) for delta in deltas) == 100
            assert stream.claims == 1
            await fleet.idle()
            assert (await fleet.bus.stream_info(subjects.DLQ_STREAM)).messages == 2
            assert len(other.heard) == 1

    guarded(work, source="sim:fixed-20ms")


def test_a_cancelled_request_that_waits_leaves_nothing(guarded: Callable[..., None], own_guarded_nats: Any) -> None:
    async def work(fleet: Fleet) -> None:
        async with direct(own_guarded_nats, "acme", fleet) as acme:
            stream = await acme.submit(4000)
            stream.cancel()
            fleet.spawn()
            await fleet.idle()
            assert acme.dispatcher.totals["withdrawn"] == 0
            assert len(await asyncio.wait_for(read(await acme.submit(5)), 20)) > 0

    guarded(work)
