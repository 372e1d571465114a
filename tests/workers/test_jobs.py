"""Detached work over a real broker and real worker processes."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from shared import encoders, remains, results, subjects, tenants, usage, wire
from shared.errors import (
    BadRequest,
    Cancelled,
    ContextLength,
    GenerationDeadline,
    Poisoned,
    QueueDeadline,
    Unavailable,
    WrongTask,
)
from shared.jobs import Jobs, Ticket
from shared.records import EngineSettings
from shared.results import Result
from shared.tenants import Tenant

from .conftest import Fleet, read, text_of, until

RunFleet = Callable[..., None]


def request(number: int, **sampling: Any) -> wire.Request:
    sampling = {"max_tokens": 40, "temperature": 1.0, "seed": number} | sampling
    return wire.Request(wire.new_id(), "m", "v", wire.Input(prompt=f"hello {number}"), wire.Sampling(**sampling))


def texts(result: Result) -> list[str]:
    return ["".join(part.text) for part in result.parts]


async def nothing_is_left(fleet: Fleet) -> None:
    """Wait until nothing is stored in JOB, nor held."""
    await fleet.idle()
    deadline = time.monotonic() + 15
    while (await fleet.bus.stream_info(subjects.JOB_STREAM)).messages:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


def test_a_job_gives_what_the_same_request_gives_and_leaves_nothing(run_fleet: RunFleet) -> None:
    async def work(fleet: Fleet) -> None:
        await fleet.active(fleet.spawn())
        it = Jobs(fleet.bus)
        asked = [request(1), request(2, n=3, logprobs=2), request(3, temperature=0.0, echo=True, max_tokens=5)]
        tickets = [await it.submit(each, "a") for each in asked]
        for each, ticket in zip(asked, tickets, strict=True):
            result = await it.wait(ticket, 10)
            each.rid = wire.new_id()
            deltas = await read(await fleet.dispatcher.submit(each, "a"))
            assert result.error is None
            assert texts(result) == [text_of(deltas, choice) for choice in range(each.sampling.n)]
            assert [part.finish for part in result.parts] == ["length"] * each.sampling.n
            if each.sampling.logprobs is not None:
                assert [len(part.logprobs or []) for part in result.parts] == [40] * 3
            assert await it.checkpoint(ticket) is None
        await nothing_is_left(fleet)
        sums = (await usage.query(fleet.bus, 0, "a"))[0]
        assert (sums.requests, sums.completed) == (6, 6)

    run_fleet(work)


def test_a_job_of_inputs_to_embed_is_a_result_with_their_vectors(run_fleet: RunFleet) -> None:
    async def work(fleet: Fleet) -> None:
        await fleet.active(fleet.spawn())
        it = Jobs(fleet.bus)
        inputs = [f"text {word}" for word in ("one", "two", "three")]
        asked = wire.Request(
            wire.new_id(), "m", "v", wire.Input(embedding=wire.Embedding(inputs)), wire.Sampling(n=3, max_tokens=0)
        )
        result = await it.wait(await it.submit(asked, "a"), 10)
        asked.rid = wire.new_id()
        deltas = {delta.choice: delta for delta in await read(await fleet.dispatcher.submit(asked, "a"))}
        assert result.error is None
        assert [(part.ids, part.finish, part.vector) for part in result.parts] == [
            ([], "stop", deltas[choice].vector) for choice in range(3)
        ]
        assert [len(part.vector) for part in result.parts] == [4 * encoders.SIMULATED_DIMENSIONS] * 3
        wrong = wire.Request(wire.new_id(), "m", "v", wire.Input(prompt="go on"), wire.Sampling())
        refused = await it.wait(await it.submit(wrong, "a"), 10)
        assert refused.error is not None
        assert refused.error.code == WrongTask.code
        odd = wire.Request(wire.new_id(), "m", "v", asked.input, wire.Sampling(n=2))
        refused = await it.wait(await it.submit(odd, "a"), 10)
        assert refused.error is not None
        assert (refused.error.code, refused.error.param) == (BadRequest.code, "n")
        await nothing_is_left(fleet)
        sums = (await usage.query(fleet.bus, 0, "a"))[0]
        assert (sums.requests, sums.completed, sums.prompt_tokens, sums.output_tokens) == (2, 2, 12, 0)

    run_fleet(work, source=encoders.SIMULATED)


async def began(fleet: Fleet, it: Jobs, ticket: Ticket) -> None:
    """Wait until it has a checkpoint with tokens."""
    deadline = time.monotonic() + 10
    while (found := await it.checkpoint(ticket)) is None or not found.parts[0].ids:
        assert time.monotonic() < deadline, fleet.log("w1")
        await asyncio.sleep(0.02)


async def references(fleet: Fleet, asked: list[wire.Request]) -> list[list[str]]:
    """What the same requests give to whoever waits for them."""

    async def texts_of(each: wire.Request) -> list[str]:
        copy = wire.Request(wire.new_id(), "m", "v", each.input, each.sampling)
        deltas = await read(await fleet.dispatcher.submit(copy, "reference"))
        return [text_of(deltas, choice) for choice in range(each.sampling.n)]

    return list(await asyncio.gather(*(texts_of(each) for each in asked)))


def test_workers_are_killed_while_many_jobs_run_and_each_ends_once_with_its_text(run_fleet: RunFleet) -> None:
    async def work(fleet: Fleet) -> None:
        it = Jobs(fleet.bus)
        asked = [request(number, max_tokens=80, n=1 + number % 2, logprobs=1) for number in range(120)]
        tickets = [await it.submit(each, "ab"[number % 2]) for number, each in enumerate(asked)]
        for _ in range(2):
            await fleet.active(fleet.spawn())
        ended: dict[str, int] = {}
        seen = await fleet.bus.subscribe("res.*.*.result", lambda message: ended.update({message.subject: 1}))
        for killed in ("w1", "w2"):
            before = len(ended)
            await until(lambda: len(ended) >= before + 10)  # noqa: B023 - it is awaited here
            fleet.workers[killed].kill()
            fleet.spawn()
        found = await asyncio.gather(*(it.wait(ticket, 60) for ticket in tickets))
        await seen.unsubscribe()
        assert [each.error for each in found] == [None] * 120
        assert max(each.claims for each in found) >= 2
        assert [texts(each) for each in found] == await references(fleet, asked)
        for each in found:
            for part in each.parts:
                assert len(part.ids) == len(part.text) == len(part.logprobs or []) == 80
                assert [score.id for score in part.logprobs or []] == part.ids
        await nothing_is_left(fleet)
        sums = {each.group: each for each in await usage.query(fleet.bus, 0, by="tenant")}
        assert [(sums[tenant].requests, sums[tenant].completed) for tenant in "ab"] == [(60, 60)] * 2
        assert sums["a"].output_tokens + sums["b"].output_tokens == 180 * 80

    run_fleet(work, source="sim:fixed-10ms", engine=EngineSettings(slots=40), ack_wait_s=1.5, in_progress_every_s=0.4)


def test_who_waits_for_an_answer_has_it_at_once_though_jobs_have_all_slots(run_fleet: RunFleet) -> None:
    async def work(fleet: Fleet) -> None:
        it = Jobs(fleet.bus)
        await fleet.active(fleet.spawn())
        tickets = [await it.submit(request(number, max_tokens=4000), "a") for number in range(12)]
        await asyncio.gather(*(began(fleet, it, ticket) for ticket in tickets[:7]))
        lease = await fleet.lease("w1")
        while lease is None or lease.running < 7:
            await asyncio.sleep(0.05)
            lease = await fleet.lease("w1")
        waits = []
        for number in range(6):
            begun = time.monotonic()
            stream = await fleet.submit(f"ask {number}", max_tokens=3)
            await stream.next(10)
            waits.append(time.monotonic() - begun)
            await read(stream)
        assert sorted(waits)[3] < 0.25, waits  # steps of 50 ms: the one that runs, and its own
        streams = [await fleet.submit(f"many {number}", max_tokens=30) for number in range(8)]
        begun = time.monotonic()
        await asyncio.gather(*(stream.next(10) for stream in streams))
        assert time.monotonic() - begun < 1.0
        assert [len(await read(stream)) > 0 for stream in streams] == [True] * 8
        assert all(await asyncio.gather(*(it.cancel(ticket) for ticket in tickets)))
        await nothing_is_left(fleet)

    run_fleet(work, source="sim:fixed-50ms", engine=EngineSettings(slots=8), checkpoint_every_s=0.2)


def test_tenants_share_by_weight_what_is_left_for_jobs(run_fleet: RunFleet) -> None:
    async def work(fleet: Fleet) -> None:
        it = Jobs(fleet.bus)
        weights = {"one": 1.0, "three": 3.0}
        for name, weight in weights.items():
            record = tenants.encode(Tenant(name=name, weight=weight))
            await fleet.bus.kv_put(subjects.TENANTS_BUCKET, subjects.key(name), record)
        for name in weights:
            await asyncio.gather(*(it.submit(request(number, max_tokens=10), name) for number in range(400)))
        served: Counter[str] = Counter()
        await fleet.bus.subscribe("res.*.*.result", lambda message: served.update([message.subject.split(".")[1]]))
        await fleet.active(fleet.spawn())
        await until(lambda: served.total() >= 60)
        before = served.copy()
        await until(lambda: served.total() >= 400)
        got = served - before
        assert abs(got["three"] / got.total() - 0.75) < 0.05, got

    run_fleet(work, source="sim:fixed-5ms", engine=EngineSettings(slots=16))


def test_a_job_can_be_cancelled_wherever_it_is(run_fleet: RunFleet) -> None:
    async def work(fleet: Fleet) -> None:
        it = Jobs(fleet.bus)
        queued = await it.submit(request(1), "a")
        assert await it.cancel(queued)
        result = await it.wait(queued, 5)
        assert result.error is not None
        assert result.error.code == Cancelled.code
        assert await it.cancel(queued), "again"
        await fleet.active(fleet.spawn())
        running = await it.submit(request(2, max_tokens=4000), "a")
        await began(fleet, it, running)
        assert not (await it.wait(await it.submit(request(3, max_tokens=2), "b"), 5)).error
        about = wire.encode(wire.About(running.id, "b"))
        await fleet.bus.publish(subjects.CANCEL_JOB, about)  # somebody else's is left alone
        assert await it.cancel(running)
        result = await it.wait(running, 5)
        assert result.error is not None
        assert result.error.code == Cancelled.code
        assert result.parts[0].ids
        ended = await it.submit(request(4, max_tokens=2), "a")
        await it.wait(ended, 5)
        assert not await it.cancel(ended)
        dead = await it.submit(request(5, max_tokens=4000), "a")
        await began(fleet, it, dead)
        fleet.workers["w1"].kill()
        fleet.workers["w1"].wait()
        assert await it.cancel(dead)
        await fleet.active(fleet.spawn())
        del fleet.workers["w1"]
        await nothing_is_left(fleet)
        sums = (await usage.query(fleet.bus, 0, "a"))[0]
        assert (sums.requests, sums.completed) == (2, 1)

    run_fleet(work, source="sim:fixed-5ms", checkpoint_every_s=0.2)


def test_a_draining_worker_hands_its_jobs_back_and_they_go_on_where_they_were(run_fleet: RunFleet) -> None:
    async def work(fleet: Fleet) -> None:
        it = Jobs(fleet.bus)
        await fleet.active(fleet.spawn())
        asked = [request(number, max_tokens=300) for number in range(4)]
        tickets = [await it.submit(each, "a") for each in asked]
        await asyncio.gather(*(began(fleet, it, ticket) for ticket in tickets))
        await fleet.active(fleet.spawn())
        fleet.workers["w1"].terminate()
        assert await fleet.exit_status("w1") == 0
        kept = await results.read(fleet.bus, "a", tickets[0].id)
        assert kept.checkpoint is not None
        assert len(kept.checkpoint.parts[0].ids) > 10
        found = await asyncio.gather(*(it.wait(ticket, 20) for ticket in tickets))
        assert [(each.error, each.claims) for each in found] == [(None, 2)] * 4
        assert [texts(each) for each in found] == await references(fleet, asked)

    run_fleet(work, source="sim:fixed-10ms", checkpoint_every_s=0.2)


def test_a_job_that_others_keep_from_the_batch_is_handed_back(run_fleet: RunFleet) -> None:
    async def work(fleet: Fleet) -> None:
        it = Jobs(fleet.bus)
        await fleet.active(fleet.spawn())
        tickets = [await it.submit(request(number, max_tokens=600), "a") for number in range(3)]
        await asyncio.gather(*(began(fleet, it, ticket) for ticket in tickets))
        streams = [await fleet.submit(f"long {number}", max_tokens=4000) for number in range(4)]
        await asyncio.gather(*(stream.next(10) for stream in streams))
        lease = await fleet.lease("w1")
        while lease is None or lease.jobs:  # nobody has room: they wait in the queue
            await asyncio.sleep(0.05)
            lease = await fleet.lease("w1")
        await fleet.active(fleet.spawn())
        found = await asyncio.gather(*(it.wait(ticket, 20) for ticket in tickets))
        assert [(each.error, each.claims) for each in found] == [(None, 2)] * 3
        for stream in streams:
            stream.cancel()
        await nothing_is_left(fleet)

    engine = EngineSettings(slots=4, slots_reserved_fraction=0.0)
    run_fleet(work, source="sim:fixed-5ms", engine=engine, job_patience_s=0.3, checkpoint_every_s=0.2)


def test_a_job_that_kills_workers_is_given_up_and_the_others_are_not(run_fleet: RunFleet) -> None:
    async def work(fleet: Fleet) -> None:
        it = Jobs(fleet.bus)
        deadly = wire.Request(wire.new_id(), "m", "v", wire.Input(prompt="deadly"), wire.Sampling(max_tokens=5))
        tickets = [await it.submit(request(number, max_tokens=200), "a") for number in range(6)]
        poison = await it.submit(deadly, "a")
        fleet.spawn()
        waiting = asyncio.create_task(it.wait(poison, 60))
        while not waiting.done():
            await asyncio.wait([waiting], timeout=0.05)
            if all(process.poll() is not None for process in fleet.workers.values()):
                fleet.spawn()
        result = waiting.result()
        assert result.error is not None
        assert result.error.code == Poisoned.code
        found = await asyncio.gather(*(it.wait(ticket, 30) for ticket in tickets))
        assert [each.error for each in found] == [None] * 6
        dead = await fleet.bus.next_message(subjects.DLQ_STREAM, subjects.dead_letter("m", "v", "a"), 1)
        assert dead is not None
        assert wire.decode_request(dead.data, {}).rid == poison.id

    run_fleet(work, source="sim:mortal-5ms", ack_wait_s=1.0, in_progress_every_s=0.3, deaths_max=3)


def test_a_job_ends_at_its_deadline(run_fleet: RunFleet) -> None:
    async def work(fleet: Fleet) -> None:
        it = Jobs(fleet.bus)
        late = await it.submit(request(1), "a", deadline_s=0.05)
        await fleet.active(fleet.spawn())
        result = await it.wait(late, 10)
        assert result.error is not None
        assert result.error.code == QueueDeadline.code
        slow = await it.submit(request(1, max_tokens=4000), "a", deadline_s=1.0)
        result = await it.wait(slow, 10)
        assert result.error is not None
        assert result.error.code == GenerationDeadline.code
        assert result.parts[0].ids
        refused = await it.submit(request(1, max_tokens=100_000), "a")
        result = await it.wait(refused, 10)
        assert result.error is not None
        assert result.error.code == ContextLength.code
        await nothing_is_left(fleet)

    run_fleet(work, source="sim:fixed-5ms")


def test_a_job_ends_soon_after_its_tenant(run_fleet: RunFleet) -> None:
    async def work(fleet: Fleet) -> None:
        await fleet.active(fleet.spawn())
        it = Jobs(fleet.bus)
        ticket = await it.submit(request(1, max_tokens=4000), "a")  # 80 s
        await began(fleet, it, ticket)

        async def is_had() -> bool:
            try:
                await fleet.bus.request(subjects.FIND_JOB, wire.encode(wire.About(ticket.id, "a")), 1.0)
            except Unavailable:
                return False
            return True

        assert await is_had()
        await remains.remove(fleet.bus, "a")
        async with asyncio.timeout(15):
            while await is_had():
                pass
        await nothing_is_left(fleet)
        kept = await results.read(fleet.bus, "a", ticket.id)
        assert (kept.checkpoint, kept.result) == (None, None)

    run_fleet(work, source="sim:fixed-20ms")
