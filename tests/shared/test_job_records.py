"""What is known of jobs, on a real nats-server: records, and the state that is read off what is stored."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from shared import job_records, job_status, jobs, results, subjects, wire
from shared.bus import Bus
from shared.errors import Cancelled, EngineFailed, GenerationDeadline, QueueDeadline
from shared.job_records import JobRecord
from shared.results import Checkpoint, Part, Result
from shared.settings import Settings


def with_bus(nats_url: str, work: Callable[[Bus], Awaitable[None]]) -> None:
    async def run() -> None:
        bus = await Bus.connect(Settings(nats_url=nats_url), "test")
        try:
            await bus.ensure()
            await work(bus)
        finally:
            await bus.close()

    asyncio.run(run())


def record(tenant: str = "a", **changed: Any) -> JobRecord:
    now = time.time()
    rid = job_records.new_job_id(now)
    request = wire.Request(rid, "m", "v", wire.Input(prompt="secret"), wire.Sampling(seed=4))
    given: dict[str, Any] = {"created_at": now, "deadline": now + 60, "keep_s": 60} | changed
    return JobRecord(id=rid, tenant=tenant, endpoint="/v1/completions", request=job_records.stripped(request), **given)


def result(error: str = "", keep: str = "x") -> Result:
    told = wire.WireError(error, "told") if error else None
    return Result(
        version="v", claim="c", parts=[Part([1, 2], ["a", keep], None, "stop")], ended_at=time.time(), error=told
    )


def test_ids_sort_by_age_and_are_rids() -> None:
    made = [job_records.new_job_id(now) for now in (1_700_000_000.0, 1_700_000_000.001, 1_900_000_000.5)]
    assert made == sorted(made)
    assert {len(each) for each in made} == {32}
    assert job_records.new_job_id(5.0) != job_records.new_job_id(5.0)


def test_a_record_is_created_once_noted_listed_and_removed(nats_server: Any) -> None:
    async def work(bus: Bus) -> None:
        older, newer, foreign = record(), record(created_at=1.0), record("other")
        for each in (older, newer, foreign):
            assert await job_records.create(bus, each)
        assert not await job_records.create(bus, older)
        assert await job_records.ids(bus, "a") == sorted([older.id, newer.id], reverse=True)
        assert await job_records.read(bus, "other", older.id) is None
        noted = await job_records.note(bus, "a", older.id, 7, "v2")
        assert noted is not None
        assert (noted.sequence, noted.request.version, noted.ticket.sequence) == (7, "v2", 7)
        assert await job_records.note(bus, "a", older.id, 5, "v1") == noted, "an older message is none of it any more"
        assert await job_records.read(bus, "a", older.id) == noted
        assert await job_records.note(bus, "a", job_records.new_job_id(1.0), 7, "v") is None
        await job_records.remove(bus, "a", older.id)
        assert await job_records.ids(bus, "a") == [newer.id]
        assert await job_records.create(bus, older), "the id is free again"

    with_bus(nats_server.url, work)


def test_a_record_holds_no_input_and_nothing_big(nats_server: Any) -> None:
    sampling = wire.Sampling(grammar=wire.Grammar("regex", "a*"), logit_bias={1: 2.0}, seed=9, n=2)
    kept = job_records.stripped(wire.Request("r", "m", "v", wire.Input(prompt="secret"), sampling, framing=b"f"))
    assert kept == wire.Request("r", "m", "v", wire.Input(), wire.Sampling(seed=9, n=2), framing=b"f")


def test_the_state_of_a_job_is_read_off_what_is_stored(nats_server: Any) -> None:
    async def work(bus: Bus) -> None:
        it = jobs.Jobs(bus)

        async def status(of: JobRecord) -> str | None:
            state = await job_status.look(bus, of.tenant, of.id)
            return None if state is None else state.status

        async def submitted(**changed: Any) -> JobRecord:
            made = record(**changed)
            assert await job_records.create(bus, made)
            assert await status(made) == "queued", "nobody has published it, as far as is known"
            request = wire.Request(made.id, "m", "v", wire.Input(prompt="p"))
            ticket = await it.submit(request, "a", 60, made.keep_s)
            noted = await job_records.note(bus, "a", made.id, ticket.sequence, "v")
            assert noted is not None
            return noted

        assert await job_status.look(bus, "a", job_records.new_job_id(1.0)) is None
        one = await submitted()
        assert await status(one) == "queued"
        saved = await results.save(bus, "a", one.id, checkpoint(held=True), 0)
        state = await job_status.look(bus, "a", one.id)
        assert state is not None
        assert (state.status, state.tokens, state.claims) == ("running", 2, 3)
        assert saved is not None
        await results.save(bus, "a", one.id, checkpoint(held=False), saved)
        assert await status(one) == "queued", "it was handed back"
        codes = {"": "completed", EngineFailed.code: "failed", Cancelled.code: "cancelled"}
        codes |= {QueueDeadline.code: "expired", GenerationDeadline.code: "expired"}
        for code, wanted in codes.items():
            each = await submitted()
            await results.store(bus, "a", each.id, result(code), each.keep_s)
            assert await status(each) == wanted
        state = await job_status.look(bus, "a", each.id)
        assert state is not None
        await job_status.forget(bus, state)
        assert await status(each) is None
        assert await bus.get_message(subjects.JOB_STREAM, each.sequence) is None

    with_bus(nats_server.url, work)


def test_a_job_that_nobody_published_as_far_as_is_known_can_be_cancelled_and_deleted(nats_server: Any) -> None:
    async def work(bus: Bus) -> None:
        made = record()
        assert await job_records.create(bus, made)
        assert await jobs.Jobs(bus).cancel(made.ticket)
        state = await job_status.look(bus, "a", made.id)
        assert state is not None
        assert state.status == "cancelled"
        await job_status.forget(bus, state)
        assert await job_status.look(bus, "a", made.id) is None

    with_bus(nats_server.url, work)


def checkpoint(held: bool) -> Checkpoint:
    return Checkpoint(version="v", claim="c", held=held, parts=[Part([1, 2], ["a", "b"])], claims=3)


def test_a_job_that_ended_is_over_when_its_result_has_gone_and_one_that_moved_is_not(nats_server: Any) -> None:
    async def work(bus: Bus) -> None:
        it = jobs.Jobs(bus)
        made = record(keep_s=1)
        assert await job_records.create(bus, made)
        request = wire.Request(made.id, "m", "v", wire.Input(prompt="p"))
        ticket = await it.submit(request, "a", 60, 1)
        await job_records.note(bus, "a", made.id, ticket.sequence, "v")
        moved = await it.submit(wire.Request(made.id, "m", "w", wire.Input(prompt="p")), "b", 60, 1)
        assert moved.sequence == ticket.sequence, "the same message id: one message"
        ack = await bus.publish_durable(subjects.job("m", "w", "a"), b"copy", {wire.HEADER_MSG_ID: "copy"})
        await job_records.note(bus, "a", made.id, ack, "w")
        await bus.delete_message(subjects.JOB_STREAM, ticket.sequence)
        state = await job_status.look(bus, "a", made.id)
        assert state is not None
        assert (state.status, state.record.request.version) == ("queued", "w")
        await results.store(bus, "a", made.id, result(), 1)
        await bus.delete_message(subjects.JOB_STREAM, ack)
        deadline = time.monotonic() + 20
        while (state := await job_status.look(bus, "a", made.id)) is not None:
            assert state.status == "completed"
            assert time.monotonic() < deadline
            await asyncio.sleep(0.1)
        assert await job_records.read(bus, "a", made.id) is None, "the record went with it"
        assert await bus.last_message(subjects.RES_STREAM, subjects.result("a", made.id)) is None
        lost = record()
        assert await job_records.create(bus, lost)
        ticket = await it.submit(wire.Request(lost.id, "m", "v", wire.Input(prompt="p")), "a", 60, 60)
        await job_records.note(bus, "a", lost.id, ticket.sequence, "v")
        await bus.delete_message(subjects.JOB_STREAM, ticket.sequence)
        assert await job_status.look(bus, "a", lost.id) is None, "a message goes only once there is a result"

    with_bus(nats_server.url, work)
