"""Requests of a version that was rolled back whose requester is gone, in a real queue."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from controller.orphans import rehome_orphans
from shared import subjects, wire
from shared.bus import Bus
from shared.dispatch import Dispatcher
from shared.records import Route, Weight
from shared.settings import Settings
from shared.streams import StoredMessage

OLD, NEW = "v2", "v1"


def with_bus(url: str, work: Callable[[Bus, str], Awaitable[Any]], model: str) -> None:
    async def run() -> None:
        bus = await Bus.connect(Settings(nats_url=url), "test")
        try:
            await bus.ensure()
            await work(bus, model)
        finally:
            await bus.close()

    asyncio.run(run())


async def publish(bus: Bus, model: str, reply: str, movable: bool = True, version: str = OLD) -> str:
    """A request of somebody; its rid."""
    rid = wire.new_id()
    request = wire.Request(rid, model, version, wire.Input(prompt="p"), movable=movable)
    headers = {
        wire.HEADER_MSG_ID: rid,
        wire.HEADER_TTL: "900",
        wire.HEADER_REPLY: reply,
        wire.HEADER_GENERATION_MS: "5000",
    }
    await bus.publish_durable(subjects.request(model, OLD, subjects.LANE_FAST, "acme"), wire.encode(request), headers)
    return rid


async def queued(bus: Bus, model: str, version: str) -> dict[str, StoredMessage]:
    """The messages that wait for a version, by rid."""
    found: dict[str, StoredMessage] = {}
    sequence = 1
    while message := await bus.next_message(
        subjects.REQ_STREAM, subjects.requests_of_version(model, version), sequence
    ):
        found[wire.decode_request(message.data, {}).rid] = message
        sequence = message.seq + 1
    return found


async def until(bus: Bus, model: str, version: str, rids: set[str]) -> None:
    """Wait until just these requests wait for a version."""
    async with asyncio.timeout(10):
        while set(await queued(bus, model, version)) != rids:  # noqa: ASYNC110 - the queue has no event
            await asyncio.sleep(0.01)


def gone() -> str:
    """The address of a process that has ended."""
    return subjects.frame_address(subjects.INGRESS_OWNER, wire.new_id())


def test_what_is_nobodys_moves_with_all_that_was_said_of_it(nats_url: str) -> None:
    async def work(bus: Bus, model: str) -> None:
        reply = gone()
        rids = {await publish(bus, model, reply) for _ in range(2)}
        rids.add(await publish(bus, model, reply, movable=False, version=""))  # the server's mapping chose
        assert await rehome_orphans(bus, model, OLD, NEW) == 3
        assert await queued(bus, model, OLD) == {}
        moved = await queued(bus, model, NEW)
        assert set(moved) == rids
        for rid, message in moved.items():
            assert wire.decode_request(message.data, {}).version == NEW
            assert message.subject == subjects.request(model, NEW, subjects.LANE_FAST, "acme")
            told = {name: message.headers[name] for name in (wire.HEADER_REPLY, wire.HEADER_GENERATION_MS)}
            assert told == {wire.HEADER_REPLY: reply, wire.HEADER_GENERATION_MS: "5000"}
            assert message.headers[wire.HEADER_RESUME] == "1"  # nobody may start it unasked
            assert message.headers[wire.HEADER_MSG_ID] == wire.copy_id(rid, NEW, 0)
        assert await rehome_orphans(bus, model, OLD, NEW) == 0

    with_bus(nats_url, work, "orphans-move")


def test_what_was_named_and_what_is_listened_for_stays(nats_url: str) -> None:
    async def work(bus: Bus, model: str) -> None:
        listened = gone()
        await bus.subscribe(listened, lambda message: None)
        stays = {await publish(bus, model, gone(), movable=False), await publish(bus, model, listened)}
        goes = await publish(bus, model, gone())
        assert await rehome_orphans(bus, model, OLD, NEW) == 1
        assert set(await queued(bus, model, OLD)) == stays
        assert set(await queued(bus, model, NEW)) == {goes}

    with_bus(nats_url, work, "orphans-stay")


def test_what_somebody_else_reads_by_now_stays(nats_url: str) -> None:
    async def work(bus: Bus, model: str) -> None:
        dispatcher = Dispatcher(bus, Settings(nats_url=nats_url))
        await dispatcher.start()
        rid = await publish(bus, model, gone())
        [message] = (await queued(bus, model, OLD)).values()
        request = wire.decode_request(message.data, {})
        stream = await dispatcher.attach(request, "acme", message.seq, message.data, 60.0, keyed=True)
        assert await rehome_orphans(bus, model, OLD, NEW) == 0
        assert set(await queued(bus, model, OLD)) == {rid}
        stream.cancel()
        await dispatcher.close()
        assert await rehome_orphans(bus, model, OLD, NEW) == 1

    with_bus(nats_url, work, "orphans-read")


def test_a_requester_that_moves_its_own_and_the_leader_store_one_copy(nats_url: str) -> None:
    async def work(bus: Bus, model: str) -> None:
        dispatcher = Dispatcher(bus, Settings(nats_url=nats_url))
        await dispatcher.start()
        request = wire.Request(wire.new_id(), model, OLD, wire.Input(prompt="p"), movable=True)
        stream = await dispatcher.submit(request, "acme")
        [message] = (await queued(bus, model, OLD)).values()
        dispatcher.route_changed(Route(model, {}, [Weight(NEW, 10_000)], {OLD: "it was slow"}))
        assert stream.version == NEW
        await until(bus, model, NEW, {request.rid})
        headers = message.headers | {wire.HEADER_MSG_ID: "as if it had not been deleted", wire.HEADER_REPLY: gone()}
        late = wire.decode_request(message.data, {})
        await bus.publish_durable(message.subject, wire.encode(late), headers)
        # the leader sees it, finds that it is read, and leaves it; once nobody reads it, its copy is there already
        assert await rehome_orphans(bus, model, OLD, NEW) == 0
        stream.cancel()
        await until(bus, model, NEW, set())
        await dispatcher.close()
        assert await rehome_orphans(bus, model, OLD, NEW) == 1
        assert await queued(bus, model, OLD) == {}
        assert await queued(bus, model, NEW) == {}

    with_bus(nats_url, work, "orphans-both")
