"""Jobs whose version is out of service, in a real queue."""

import asyncio
from collections.abc import Awaitable, Callable

from controller.strays import end_jobs, rehome_jobs
from shared import results, subjects, wire
from shared.bus import Bus, Message
from shared.errors import NoReplicaForPin, VersionRetired
from shared.jobs import Jobs, Ticket
from shared.records import Route, Weight
from shared.results import Checkpoint, Part
from shared.settings import Settings

OLD, NEW = "v2", "v1"


def with_bus(url: str, work: Callable[[Bus, str], Awaitable[None]], model: str) -> None:
    async def run() -> None:
        bus = await Bus.connect(Settings(nats_url=url), "test")
        try:
            await bus.ensure()
            await work(bus, model)
        finally:
            await bus.close()

    asyncio.run(run())


async def submit(bus: Bus, model: str, movable: bool, tenant: str = "acme") -> Ticket:
    request = wire.Request(wire.new_id(), model, OLD, wire.Input(prompt="p"), movable=movable)
    return await Jobs(bus).submit(request, tenant)


def route_of(model: str) -> Route:
    return Route(model=model, aliases={}, weights=[Weight(NEW, 10_000)], withdrawn={OLD: "its errors"})


async def queued(bus: Bus, model: str, version: str) -> int:
    return sum((await bus.subject_counts(subjects.JOB_STREAM, subjects.jobs_of_version(model, version))).values())


def test_jobs_of_a_version_that_was_rolled_back_move_and_those_that_named_it_end(nats_url: str) -> None:
    async def work(bus: Bus, model: str) -> None:
        await submit(bus, model, movable=True)
        pinned, held = await submit(bus, model, movable=False), await submit(bus, model, movable=True)

        def find(message: Message) -> None:
            if wire.decode_about(message.data).rid == held.id:
                asyncio.ensure_future(bus.publish(message.reply, b"here"))  # noqa: RUF006 - the bus keeps it

        await bus.subscribe(subjects.FIND_JOB, find)
        assert await rehome_jobs(bus, route_of(model), OLD) == 2
        assert (await queued(bus, model, OLD), await queued(bus, model, NEW)) == (1, 1)
        result = await Jobs(bus).wait(pinned, 5)
        assert result.error is not None
        assert result.error.code == NoReplicaForPin.code
        assert "its errors" in result.error.message
        moved = await bus.next_message(subjects.JOB_STREAM, subjects.jobs_of_version(model, NEW), 1)
        assert moved is not None
        assert wire.decode_request(moved.data, moved.headers).version == NEW
        assert moved.headers[wire.HEADER_DEADLINE]
        assert await rehome_jobs(bus, route_of(model), OLD) == 0

    with_bus(nats_url, work, "strays1")


def test_jobs_of_a_version_that_is_gone_end_with_what_they_had_come_to(nats_url: str) -> None:
    async def work(bus: Bus, model: str) -> None:
        tickets = [await submit(bus, model, movable=True, tenant=f"t{number % 3}") for number in range(9)]
        begun = Checkpoint(version=OLD, claim="c", held=True, parts=[Part([1], ["one"])], claims=2)
        assert await results.save(bus, tickets[0].tenant, tickets[0].id, begun, 0) is not None
        await bus.publish_durable(f"j.{model}.{OLD}.acme", b"no job", {wire.HEADER_MSG_ID: wire.new_id()})
        assert await end_jobs(bus, model, OLD, VersionRetired("gone")) == 9
        assert await queued(bus, model, OLD) == 0
        found = [await Jobs(bus).wait(ticket, 5) for ticket in tickets]
        assert {each.error.code for each in found if each.error is not None} == {VersionRetired.code}
        assert (found[0].parts, found[0].claims) == ([Part([1], ["one"])], 2)

    with_bus(nats_url, work, "strays2")
