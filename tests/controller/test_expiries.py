"""Jobs whose deadlines pass in a real queue, with nobody to see it."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from controller.expiries import Expiries, expire
from shared import job_records, job_status, results, subjects, wire
from shared.bus import Bus, Message
from shared.job_records import JobRecord
from shared.jobs import GONE_S, Jobs
from shared.results import Checkpoint, Part, Result
from shared.settings import Settings


def with_bus(url: str, work: Callable[[Bus], Awaitable[None]]) -> None:
    async def run() -> None:
        bus = await Bus.connect(Settings(nats_url=url), "test")
        try:
            await bus.ensure()
            await work(bus)
        finally:
            await bus.close()

    asyncio.run(run())


async def submit(bus: Bus, deadline_s: float, tenant: str = "a") -> JobRecord:
    now = time.time()
    request = wire.Request(job_records.new_job_id(now), "m", "v", wire.Input(prompt="p"))
    record = JobRecord(
        id=request.rid,
        tenant=tenant,
        endpoint="/v1/completions",
        request=job_records.stripped(request),
        created_at=now,
        deadline=now + deadline_s,
        keep_s=600,
    )
    assert await job_records.create(bus, record)
    ticket = await Jobs(bus).submit(request, tenant, deadline_s, record.keep_s)
    noted = await job_records.note(bus, tenant, record.id, ticket.sequence, "v")
    assert noted is not None
    return noted


async def status(bus: Bus, record: JobRecord) -> Any:
    state = await job_status.look(bus, record.tenant, record.id)
    assert state is not None
    return state.status


def test_the_leader_ends_what_is_due_once_and_leaves_the_rest_alone(nats_server: Any) -> None:
    async def work(bus: Bus) -> None:
        before, later = await submit(bus, 5), await submit(bus, 500)
        expiries = Expiries(bus)
        await expiries.start()
        after, done = await submit(bus, 5, "b"), await submit(bus, 5)
        result = Result(version="v", claim="c", parts=[], ended_at=time.time())
        await results.store(bus, "a", done.id, result, done.keep_s)
        expiries.step(time.time())
        assert [await status(bus, each) for each in (before, after, later)] == ["queued"] * 3
        deadline = time.monotonic() + 20
        while [await status(bus, each) for each in (before, after)] != ["expired"] * 2:
            assert time.monotonic() < deadline
            expiries.step(time.time() + 6 + GONE_S)
            await asyncio.sleep(0.05)
        assert await status(bus, later) == "queued"
        assert await status(bus, done) == "completed"
        left = await bus.subject_counts(subjects.JOB_STREAM, subjects.jobs_of_version("m", "v"))
        assert sum(left.values()) == 2, "the one that is not due, and the one whose worker has not acked"
        await expiries.close()

    with_bus(nats_server.url, work)


def test_a_job_that_a_worker_has_is_the_worker_s_to_end(nats_server: Any) -> None:
    async def work(bus: Bus) -> None:
        held, dropped = await submit(bus, 5), await submit(bus, 5)
        for each in (held, dropped):
            begun = Checkpoint(version="v", claim="c", held=True, parts=[Part([1], ["one"])], claims=2)
            await results.save(bus, "a", each.id, begun, 0)

        def find(message: Message) -> None:
            if wire.decode_about(message.data).rid == held.id:
                asyncio.ensure_future(bus.publish(message.reply, b"here"))  # noqa: RUF006 - the bus keeps it

        await bus.subscribe(subjects.FIND_JOB, find)
        assert not await expire(bus, "a", held.id)
        assert await expire(bus, "a", dropped.id)
        assert await status(bus, held) == "running"
        state = await job_status.look(bus, "a", dropped.id)
        assert state is not None
        assert state.result is not None
        assert state.result.error is not None
        assert (state.status, state.result.error.code, state.tokens) == ("expired", "generation_deadline", 1)
        assert await expire(bus, "a", dropped.id), "again"

    with_bus(nats_server.url, work)
