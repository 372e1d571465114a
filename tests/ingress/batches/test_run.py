"""A batch from its record to its files: whatever is wrong with lines, however it ends, and wherever its runner dies."""

import asyncio
import json
import random
from typing import Any

import pytest

from ingress.batches import life, store
from ingress.batches.announcing import announcer
from ingress.batches.progress import Superseded
from ingress.batches.record import BatchRecord
from ingress.batches.validation import PROBLEMS_MAX
from ingress.batches.window import LOOK_EVERY_S
from shared import notices, remains, results, subjects
from shared.bus import PAYLOAD_MARGIN_BYTES, Bus
from shared.claim_check import JOB_INPUTS
from shared.errors import BatchNotFound, HeadraceError
from shared.webhooks import Webhook

from .conftest import ENDED_AT, ENDPOINT, RESPONSES, TENANT, RunWorld, World, line, response_line, until, working

DEATHS = 12


def ids(lines: list[dict[str, Any]]) -> list[str]:
    return [each["custom_id"] for each in lines]


async def done(world: World, made: BatchRecord, lines: int) -> bool:
    """Whether so many lines have answers."""
    batch = await world.read(made)
    return batch.completed + batch.ahead_completed >= lines


async def nothing_is_left(world: World) -> None:
    """No job, no result, no segment."""
    await until(world.no_jobs)
    assert await world.files.call(lambda objects: objects.list("batches/")) == []


def test_lines_have_answers_or_errors_in_order(run_world: RunWorld) -> None:
    async def work(world: World) -> None:
        lines: list[Any] = [line(number) for number in range(40)]
        lines[3]["body"]["temperature"] = 5
        lines[5]["body"]["prompt"] = "break it"
        lines[7]["body"]["prompt"] = ["one", "two"]
        lines[8]["body"]["model"] = "m@v1"
        lines.insert(9, "   ")
        batch = await world.finish(await world.create(lines))
        assert (batch.status, batch.total, batch.completed, batch.failed) == ("completed", 40, 37, 3)
        assert [each.status for each in world.announced] == ["completed"]
        answers, errors = await world.lines_of(batch.output_file_id), await world.lines_of(batch.error_file_id)
        wrong = ["c3", "c5", "c7"]
        assert ids(answers) == [f"c{number}" for number in range(40) if f"c{number}" not in wrong]
        assert ids(errors) == wrong
        first = answers[0]
        assert set(first) == {"id", "custom_id", "response", "error"}
        assert (first["error"], first["response"]["status_code"]) == (None, 200)
        assert first["response"]["body"]["choices"][0]["text"] == "hello 0"
        assert first["response"]["request_id"] == f"req_{batch.id}-1"
        assert first["response"]["body"]["id"] == f"cmpl-{batch.id}-1"
        told = [(each["response"]["status_code"], each["response"]["body"]["error"]["code"]) for each in errors]
        assert told == [(400, "invalid_request"), (500, "engine_failed"), (400, "unsupported_parameter")]
        assert set(world.workers.executed.values()) == {1}
        files = [await world.files.find(TENANT, each) for each in (batch.output_file_id, batch.error_file_id)]
        assert (batch.models, [each.models for each in files]) == (("m",), [("m",), ("m",)])
        await nothing_is_left(world)
        assert (await world.bus.stream_info(subjects.RES_STREAM)).messages == 0, "results are deleted once written"

    run_world(work, batch_segment_lines_max=7)


def test_lines_may_be_responses_which_are_not_kept(run_world: RunWorld) -> None:
    async def work(world: World) -> None:
        lines = [response_line(number, instructions="Be brief.", store=True, stream=True) for number in range(4)]
        lines[1]["body"]["background"] = True
        lines[2]["body"]["previous_response_id"] = "resp_" + "a" * 32
        batch = await world.finish(await world.create(lines, endpoint=RESPONSES))
        assert (batch.status, batch.completed, batch.failed) == ("completed", 2, 2)
        answers, errors = await world.lines_of(batch.output_file_id), await world.lines_of(batch.error_file_id)
        told = [each["response"]["body"] for each in answers]
        assert [each["id"] for each in told] == [f"resp_{batch.id}-1", f"resp_{batch.id}-4"]
        assert [each["output"][0]["content"][0]["text"] for each in told] == ["hello 0", "hello 3"]
        assert {(each["status"], each["completed_at"]) for each in told} == {("completed", int(ENDED_AT))}
        assert {(each["instructions"], each["store"]) for each in told} == {("Be brief.", False)}
        refused = [(each["response"]["status_code"], each["response"]["body"]["error"]) for each in errors]
        assert [(status, error["code"], error["param"]) for status, error in refused] == [
            (400, "unsupported_parameter", "background"),
            (400, "unsupported_parameter", "previous_response_id"),
        ]
        assert await world.bus.kv_keys_below(subjects.RESPONSES_BUCKET, TENANT) == []

    run_world(work)


def test_a_response_is_told_that_came_before_its_line_would_be_refused(run_world: RunWorld) -> None:
    """What is told of a request is made of its line, also where that is not asked any more."""

    async def work(world: World) -> None:
        lines = [response_line(number, instructions="Be brief.") for number in range(4)]
        made = await world.create(lines, endpoint=RESPONSES)
        run = await world.run(made)
        await run._validate()
        await run._progress.update(lambda record: life.intending(record, 4))
        running = asyncio.create_task(run.run())

        async def asked() -> bool:
            return (await world.bus.stream_info(subjects.JOB_STREAM)).messages == 4

        await until(asked)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        world.context.router.drop_version("m", "v1")
        async with working(world):
            batch = await world.finish(made)
        assert (batch.status, batch.completed) == ("completed", 4)
        answers = await world.lines_of(batch.output_file_id)
        assert {each["response"]["body"]["instructions"] for each in answers} == {"Be brief."}

    run_world(work, idle=True)


def test_what_is_kept_of_responses_counts_among_what_is_ahead(run_world: RunWorld) -> None:
    """What has been answered, and waits for a line before it, still has its tools and instructions in memory."""

    async def work(world: World) -> None:
        world.workers.held = lambda rid: rid.endswith("-1")
        lines = [response_line(number, instructions="x" * 10_000) for number in range(80)]
        made = await world.create(lines, endpoint=RESPONSES)
        running = asyncio.create_task((await world.run(made)).run())
        await until(lambda: done(world, made, 31))
        await asyncio.sleep(3 * LOOK_EVERY_S)  # it looks again, and finds no room
        assert len(world.workers.executed) < 80 - 1
        world.workers.held = lambda rid: False
        await running
        assert (await world.read(made)).completed == 80

    run_world(work, batch_ahead_bytes_max=200_000)


def test_a_file_that_is_no_batch_says_where_and_nothing_of_it_runs(run_world: RunWorld) -> None:
    async def work(world: World) -> None:
        bad = [
            line(0),
            "{not JSON",
            line(0),
            line(3) | {"url": "/v1/chat/completions"},
            line(4) | {"method": "GET"},
            {"custom_id": "x", "method": "POST", "url": ENDPOINT},
            line(6, model="unknown"),
            line(7, model="m@v9"),
            line(8) | {"custom_id": ""},
            line(9),
        ]
        batch = await world.finish(await world.create(bad))
        assert (batch.status, batch.total, batch.output_file_id, batch.error_file_id) == ("failed", 0, "", "")
        assert [(each.line, each.code, each.param) for each in batch.errors] == [
            (2, "invalid_json_line", None),
            (3, "duplicate_custom_id", "custom_id"),
            (4, "mismatched_url", "url"),
            (5, "invalid_method", "method"),
            (6, "invalid_line", None),
            (7, "model_not_found", "body.model"),
            (8, "version_not_found", "body.model"),
            (9, "invalid_line", "custom_id"),
        ]
        assert "line 1" in batch.errors[1].message
        too_many = await world.finish(await world.create([line(number) for number in range(13)]))
        assert [(each.line, each.code) for each in too_many.errors] == [(13, "too_many_lines")]
        empty = await world.finish(await world.create(["", " "]))
        assert [each.code for each in empty.errors] == ["empty_file"]
        only = await world.finish(await world.create([line(0)], models=("other",)))
        assert [each.code for each in only.errors] == ["model_not_allowed"]
        assert world.workers.executed == {}

    run_world(work, batch_lines_max=12)


def test_what_is_wrong_fits_into_the_record_however_long_the_lines_are(run_world: RunWorld) -> None:
    async def work(world: World) -> None:
        lines: list[Any] = [line(number, model=f"{number}" + "\x00" * 100_000) for number in range(PROBLEMS_MAX)]
        batch = await world.finish(await world.create(lines))
        assert (batch.status, len(batch.errors)) == ("failed", PROBLEMS_MAX)
        assert {each.code for each in batch.errors} == {"model_not_found"}

    run_world(work)


def test_a_webhook_is_told_of_the_end(run_world: RunWorld) -> None:
    async def work(world: World) -> None:
        webhook = Webhook(url="https://example.com/hook", secret="whsec_" + "A" * 32, events=("batch.completed",))
        tell = announcer(world.bus)
        made = await world.finish(await world.create([line(0)], webhook=webhook))
        for _ in range(2):
            await tell(made)  # again: it is one event
        told = await notices.delivery(world.bus, TENANT, "batch.completed", made.id)
        assert told is not None
        found = await notices.find(world.bus, TENANT, told.id)
        assert found is not None
        data = json.loads(found.body)["data"]
        assert data == {
            "id": made.id,
            "status": "completed",
            "request_counts": {"total": 1, "completed": 1, "failed": 0},
            "ended_at": made.completed_at,
        }
        failed = await world.finish(await world.create([line(0, prompt="break")], webhook=webhook))
        await tell(failed)
        assert await notices.delivery(world.bus, TENANT, "batch.failed", failed.id) is None, "it did not want to know"

    run_world(work)


def test_if_every_line_fails_the_batch_does(run_world: RunWorld) -> None:
    async def work(world: World) -> None:
        batch = await world.finish(await world.create([line(number, prompt="break") for number in range(3)]))
        assert (batch.status, batch.failed, batch.output_file_id) == ("failed", 3, "")
        assert [each.code for each in batch.errors] == ["all_requests_failed"]
        assert ids(await world.lines_of(batch.error_file_id)) == ["c0", "c1", "c2"]

    run_world(work)


@pytest.mark.parametrize("end", ["cancelled", "expired"])
def test_what_is_done_is_kept_and_the_rest_is_told_why_it_is_not(run_world: RunWorld, end: str) -> None:
    async def work(world: World) -> None:
        lines = 60
        made = await world.create([line(number) for number in range(lines)])
        world.workers.held = lambda rid: int(rid.rpartition("-")[2]) > 20
        run = await world.run(made)
        running = asyncio.create_task(run.run())
        await until(lambda: done(world, made, 20))
        if end == "cancelled":
            await store.change(world.bus, TENANT, made.id, lambda record: life.cancelled(record, 1))
            run.tell_changed()
        else:
            await run._progress.update(life.expired)  # as its clock does
        await running
        batch = await world.read(made)
        assert (batch.status, batch.total, batch.completed, batch.failed) == (end, lines, 20, 40)
        assert ids(await world.lines_of(batch.output_file_id)) == [f"c{number}" for number in range(20)]
        errors = await world.lines_of(batch.error_file_id)
        assert ids(errors) == [f"c{number}" for number in range(20, lines)]
        assert {each["error"]["code"] for each in errors} == {f"batch_{end}"}
        assert {each["response"] for each in errors} == {None}
        world.workers.held = lambda rid: False
        await nothing_is_left(world)
        assert sum(world.workers.executed.values()) == 20, "what was given up is not executed later"

    run_world(work, batch_waiting_max=12)


def test_a_cancelled_line_that_is_too_large_for_the_bus_leaves_no_input(run_world: RunWorld) -> None:
    async def work(world: World) -> None:
        world.bus._client._max_payload = PAYLOAD_MARGIN_BYTES + 2000
        made = await world.create([line(number, prompt="x" * (1 + 3000 * (number % 2))) for number in range(6)])

        async def inputs() -> list[str]:
            return [each.key for each in await world.files.call(lambda objects: objects.list(JOB_INPUTS))]

        async def stored() -> bool:
            return len(await inputs()) == 3

        run = await world.run(made)
        running = asyncio.create_task(run.run())
        await until(stored)
        await store.change(world.bus, TENANT, made.id, lambda record: life.cancelled(record, 1))
        run.tell_changed()
        await running
        assert (await world.read(made)).failed == 6
        assert await inputs() == []
        assert await world.no_jobs()

    run_world(work, idle=True)


class Countdown:
    """Counts what is asked of the bus, by the runner and by workers; `reached` is set at the end of a count."""

    def __init__(self, bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached = asyncio.Event()
        self._left, self._ask = 0, bus._ask
        monkeypatch.setattr(bus, "_ask", self._counted)

    def start(self, count: int) -> None:
        self._left = count
        self.reached.clear()

    async def _counted(self, *given: Any) -> Any:
        self._left -= 1
        if self._left == 0:
            self.reached.set()
        return await self._ask(*given)


@pytest.mark.parametrize("seed", range(2))
def test_the_runner_may_die_anywhere(run_world: RunWorld, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Runners are cut off, one after the other, in whatever they do; workers hold their acks back meanwhile."""

    async def work(world: World) -> None:
        draw = random.Random(seed)
        world.workers = type(world.workers)(world.bus, lag=9)
        made = await world.create([line(number, prompt="break" if number % 17 == 5 else "p") for number in range(150)])
        countdown = Countdown(world.bus, monkeypatch)
        async with working(world):
            for _ in range(DEATHS):
                running = asyncio.create_task((await world.run(made)).run())
                countdown.start(draw.randint(1, 80))
                await asyncio.wait_for(countdown.reached.wait(), 30)
                running.cancel()
                assert isinstance((await asyncio.gather(running, return_exceptions=True))[0], asyncio.CancelledError)
            batch = await world.finish(made)
            failed = [f"c{number}" for number in range(150) if number % 17 == 5]
            assert (batch.status, batch.completed, batch.failed) == ("completed", 150 - len(failed), len(failed))
            assert ids(await world.lines_of(batch.error_file_id)) == failed
            answers = await world.lines_of(batch.output_file_id)
            assert ids(answers) == [f"c{number}" for number in range(150) if f"c{number}" not in failed]
            assert len(world.workers.executed) == 150
            assert set(world.workers.executed.values()) == {1}
            await until(world.no_jobs)

    run_world(work, idle=True, batch_segment_lines_max=20, batch_waiting_max=25)


def test_a_runner_that_lost_the_lead_or_the_record_writes_nothing_more(run_world: RunWorld) -> None:
    async def work(world: World) -> None:
        made = await world.create([line(number) for number in range(10)])
        late = await world.run(made)
        batch = await world.finish(made)
        with pytest.raises(Superseded):
            await late.run()
        assert await world.read(made) == batch
        other = await world.create([line(0)])
        world.leads = False
        with pytest.raises(Superseded):
            await world.finish(other)
        assert (await world.read(other)).status == "validating"

    run_world(work)


@pytest.mark.parametrize("when", ["lines", "files"])
def test_a_batch_ends_with_its_tenant_and_leaves_nothing(run_world: RunWorld, when: str) -> None:
    async def work(world: World) -> None:
        made = await world.create([line(number) for number in range(40)])
        write = world.files.write

        async def write_long(*given: Any) -> int:
            size = await write(*given)
            await remains.remove(world.bus, TENANT)
            return size

        if when == "lines":
            world.workers.held = lambda rid: int(rid.rpartition("-")[2]) > 20
        else:
            world.files.write = write_long  # type: ignore[method-assign]
        run = await world.run(made)
        running = asyncio.create_task(run.run())
        if when == "lines":
            await until(lambda: done(world, made, 20))
            await remains.remove(world.bus, TENANT)
            run.tell_changed()  # as the mark in the bucket does
        async with asyncio.timeout(10):
            await asyncio.wait({running})
        with pytest.raises((BatchNotFound, ExceptionGroup)):
            await running
        await remains.remove(world.bus, TENANT)  # what it was at then
        assert await world.no_jobs()
        assert await world.files.ids(TENANT) == []
        assert await world.files.call(lambda objects: objects.list("")) == []
        assert (await world.bus.stream_info(subjects.RES_STREAM)).messages == 0
        with pytest.raises(BatchNotFound):
            await world.read(made)

    run_world(work, batch_waiting_max=12)


def test_the_window_bounds_what_waits_and_what_is_ahead(run_world: RunWorld) -> None:
    async def work(world: World) -> None:
        world.workers.held = lambda rid: True
        made = await world.create([line(number) for number in range(200)])
        running = asyncio.create_task((await world.run(made)).run())

        async def jobs() -> int:
            return (await world.bus.stream_info(subjects.JOB_STREAM)).messages

        async def full() -> bool:
            return await jobs() >= 40

        await until(full)
        await asyncio.sleep(3 * LOOK_EVERY_S)  # it looks again, and finds no room
        assert await jobs() == 40
        world.workers.held = lambda rid: rid.endswith("-1")
        await until(lambda: done(world, made, 79))
        assert len(world.workers.executed) <= 80 + 32, "a first line that is late holds the others back"
        world.workers.held = lambda rid: False
        await running
        assert (await world.read(made)).completed == 200

    run_world(work, batch_waiting_max=40, batch_ahead_max=80)


def test_a_batch_whose_input_is_gone_keeps_what_is_done(run_world: RunWorld) -> None:
    async def work(world: World) -> None:
        made = await world.create([line(number) for number in range(30)])
        file = await world.files.find(TENANT, made.input_file_id)
        await world.files.delete(file)
        batch = await world.finish(made)
        assert (batch.status, [each.code for each in batch.errors]) == ("failed", ["file_not_found"])
        again = await world.create([line(number) for number in range(30)])
        await store.change(world.bus, TENANT, again.id, lambda record: life.validated(record, 30, ("m",), 1))
        await world.files.delete(await world.files.find(TENANT, again.input_file_id))
        batch = await world.finish(again)
        assert (batch.status, batch.total, batch.cursor) == ("failed", 30, 0)

    run_world(work)


def test_a_result_that_is_there_already_is_taken_and_not_asked_for_again(run_world: RunWorld) -> None:
    async def work(world: World) -> None:
        made = await world.create([line(number) for number in range(4)])
        run = await world.run(made)
        await run._validate()
        await run._progress.update(lambda record: life.intending(record, 4))
        first = await world.run(made)
        async with working(world):
            await first.run()
        assert set(world.workers.executed.values()) == {1}
        with pytest.raises(HeadraceError):
            await store.find(world.bus, "other", made.id)
        assert await results.read_result(world.bus, TENANT, f"{made.id}-1") is None

    run_world(work, idle=True)
