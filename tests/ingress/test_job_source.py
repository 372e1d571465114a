"""Jobs' answers, from what a worker stores of them on a real bus."""

import asyncio
import json
import struct
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from ingress.family import Admitted, Framing, encode_framing
from ingress.job_source import admitted_of, answer_of, open_source, wait_ended
from ingress.routes.chat import Chat
from ingress.routes.completions import Completions
from ingress.routes.embeddings import Embeddings
from ingress.routes.messages import Messages
from shared import job_records, job_status, results, subjects, wire
from shared.bus import Bus
from shared.dispatch import Delta
from shared.errors import Diverged, EngineFailed, JobNotFound
from shared.job_records import JobRecord
from shared.results import Checkpoint, Part, Result
from shared.settings import Settings
from shared.terms import Known

TEXTS = ["Hel", "lo", "", " there"]


def with_bus(nats_url: str, work: Callable[[Bus], Awaitable[None]]) -> None:
    async def run() -> None:
        bus = await Bus.connect(Settings(nats_url=nats_url), "test")
        try:
            await bus.ensure()
            async with asyncio.timeout(20):
                await work(bus)
        finally:
            await bus.close()

    asyncio.run(run())


async def made(bus: Bus, n: int = 1) -> JobRecord:
    now = time.time()
    rid = job_records.new_job_id(now)
    framing = encode_framing(Framing("/v1/chat/completions", "m@stable", 77, True, False))
    request = wire.Request(rid, "m", "v", wire.Input(), wire.Sampling(n=n), framing=framing)
    record = JobRecord(
        id=rid, tenant="a", endpoint="/v1/x", request=request, created_at=now, deadline=now + 60, keep_s=60
    )
    assert await job_records.create(bus, record)
    return record


def part(count: int, finish: str | None = None) -> Part:
    return Part(list(range(10, 10 + count)), TEXTS[:count], None, finish)


def checkpoint(*parts: Part) -> Checkpoint:
    return Checkpoint(version="v", claim="c", held=True, parts=list(parts), claims=1)


def ended(*parts: Part, error: wire.WireError | None = None) -> Result:
    usage = wire.Usage(5, sum(len(each.ids) for each in parts), 2)
    return Result(version="w", claim="c", parts=list(parts), ended_at=time.time(), usage=usage, error=error, claims=2)


async def rest(source: Any) -> list[Delta]:
    deltas: list[Delta] = []
    try:
        while True:
            deltas += await source.next()
    except StopAsyncIteration:
        return deltas


def test_a_source_tells_tokens_as_they_are_stored_and_the_end(nats_server: Any) -> None:
    async def work(bus: Bus) -> None:
        record = await made(bus, n=2)
        async with open_source(bus, record) as source:
            assert await source.next(0.05) == []
            saved = await results.save(bus, "a", record.id, checkpoint(part(1), part(2)), 0)
            begun = time.monotonic()
            first = await source.next(5)
            assert time.monotonic() - begun < 1.5, "it hears of what is stored, and does not only look now and then"
            assert [(delta.choice, delta.ids, delta.text, delta.finish) for delta in first] == [
                (0, [10], "Hel", None),
                (1, [10], "Hel", None),
                (1, [11], "lo", None),
            ]
            assert not source.ended
            assert saved is not None
            await results.save(bus, "a", record.id, checkpoint(part(1), part(3, "length")), saved)
            assert [(delta.choice, delta.ids, delta.finish) for delta in await source.next(5)] == [(1, [12], "length")]
            await results.store(bus, "a", record.id, ended(part(4, "stop"), part(3, "length")))
            assert [(delta.ids, delta.finish) for delta in await rest(source)] == [
                ([11], None),
                ([12], None),
                ([13], "stop"),
            ]
            assert (source.ended, source.usage, source.claims, source.version) == (True, wire.Usage(5, 7, 2), 2, "w")
        async with open_source(bus, record) as late:
            assert "".join(delta.text for delta in await rest(late) if delta.choice == 0) == "Hello there"

    with_bus(nats_server.url, work)


def test_a_source_ends_with_the_error_of_its_job_and_when_the_job_is_deleted(nats_server: Any) -> None:
    async def work(bus: Bus) -> None:
        record = await made(bus)
        error = wire.WireError(EngineFailed.code, "it broke")
        await results.store(bus, "a", record.id, ended(part(2), error=error))
        async with open_source(bus, record) as source:
            assert len(await source.next()) == 2
            with pytest.raises(EngineFailed, match="it broke"):
                await source.next()
        state = await job_status.look(bus, "a", record.id)
        assert state is not None
        await job_status.forget(bus, state)
        async with open_source(bus, record) as source:
            with pytest.raises(JobNotFound):
                await source.next()

    with_bus(nats_server.url, work)


def test_what_is_stored_must_go_on_from_what_was_told(nats_server: Any) -> None:
    async def work(bus: Bus) -> None:
        record = await made(bus)
        saved = await results.save(bus, "a", record.id, checkpoint(part(3)), 0)
        assert saved is not None
        async with open_source(bus, record) as source:
            assert len(await source.next()) == 3
            saved = await results.save(bus, "a", record.id, checkpoint(part(1)), saved)  # a claim that began anew
            assert saved is not None
            assert await source.next(0.2) == []
            await results.save(bus, "a", record.id, checkpoint(Part([10, 99], ["Hel", "p"])), saved)
            with pytest.raises(Diverged):
                await source.next()
        seen = Known(next=[1], digest=[wire.digest([10])])
        async with open_source(bus, record, seen) as source:
            assert len(await source.next()) == 2
        other = Known(next=[2], digest=[wire.digest([10, 11])])
        async with open_source(bus, record, other) as source:
            with pytest.raises(Diverged):
                await source.next()

    with_bus(nats_server.url, work)


def test_the_end_of_a_job_is_waited_for(nats_server: Any) -> None:
    async def work(bus: Bus) -> None:
        record = await made(bus)
        state = await wait_ended(bus, record, 0.05)
        assert state is not None
        assert state.status == "queued"
        waiting = asyncio.create_task(wait_ended(bus, record, 15))
        await results.store(bus, "a", record.id, ended(part(4, "stop")))
        begun = time.monotonic()
        state = await waiting
        assert state is not None
        assert (state.status, time.monotonic() - begun < 1.5) == ("completed", True)

    with_bus(nats_server.url, work)


def test_who_waits_for_the_end_reads_nothing_of_what_the_job_has_come_to_so_far(
    nats_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(bus: Bus) -> None:
        record = await made(bus)
        saved = await results.save(bus, "a", record.id, checkpoint(part(1)), 0)
        read: list[str] = []
        looked = asyncio.Event()
        last_message = bus.last_message

        async def reading(stream: str, subject: str) -> Any:
            read.append(subject)
            looked.set()
            return await last_message(stream, subject)

        monkeypatch.setattr(bus, "last_message", reading)
        waiting = asyncio.create_task(wait_ended(bus, record, 15))
        await looked.wait()
        assert saved is not None
        await results.save(bus, "a", record.id, checkpoint(part(2)), saved)
        assert await wait_ended(bus, record, 0.1) is not None
        assert read.count(subjects.checkpoint("a", record.id)) == 1, "to tell what it is, once the time is over"
        await results.store(bus, "a", record.id, ended(part(4, "stop")))
        assert (await waiting) is not None
        assert read.count(subjects.checkpoint("a", record.id)) == 2

    with_bus(nats_server.url, work)


def test_who_waits_for_a_job_that_is_deleted_learns_of_it(nats_server: Any) -> None:
    async def work(bus: Bus) -> None:
        record = await made(bus)
        waiting = asyncio.create_task(wait_ended(bus, record, 15))
        await job_records.remove(bus, "a", record.id)
        begun = time.monotonic()
        assert await waiting is None
        assert time.monotonic() - begun < 5

    with_bus(nats_server.url, work)


def test_a_stored_result_is_answered_as_its_route_would(nats_server: Any) -> None:
    framing = Framing("/v1/chat/completions", "m@stable", 77, False, False)
    admitted = Admitted(wire.Request("r" * 32, "m", "v", wire.Input(), wire.Sampling(n=2)), framing)
    found = answer_of(Chat(), admitted, ended(part(4, "stop"), part(2, "length")))
    answer = json.loads(found.body)
    assert found.status == 200
    assert (answer["id"], answer["created"], answer["model"]) == (f"chatcmpl-{'r' * 32}", 77, "m@stable")
    assert [each["message"]["content"] for each in answer["choices"]] == ["Hello there", "Hello"]
    assert [each["finish_reason"] for each in answer["choices"]] == ["stop", "length"]
    assert answer["usage"]["total_tokens"] == 11
    failed = ended(part(1), error=wire.WireError("context_length_exceeded", "too long", "prompt"))
    for family in (Chat(), Completions(), Messages()):
        found = answer_of(family, admitted, failed)
        assert found.status == 400
        assert json.loads(found.body)["error"]["code"] == "context_length_exceeded"

    vectors = [struct.pack("<2f", 1.0, 0.5), struct.pack("<2f", 2.0, 0.25)]
    embedded = ended(*(Part(finish="stop", vector=each) for each in vectors))
    answer = json.loads(answer_of(Embeddings(), admitted, embedded).body)
    assert [each["embedding"] for each in answer["data"]] == [[1.0, 0.5], [2.0, 0.25]]

    async def work(bus: Bus) -> None:
        record = await made(bus)
        restored = admitted_of(record, "w")
        assert (restored.request.version, restored.reference, restored.created) == ("w", "m@stable", 77)

    with_bus(nats_server.url, work)
