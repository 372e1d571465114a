"""The holes that the model found in the first version of the protocol, each with real processes: none may open again."""

import asyncio
from collections.abc import Callable

import pytest

from shared import subjects
from shared.errors import HeadraceError, Poisoned
from shared.records import EngineSettings
from shared.stream import Stream
from workers.engine.sim import DEADLY_WORD

from ..workers.conftest import Fleet, read, until
from .conftest import (
    CONSUMER,
    FAST,
    Elsewhere,
    answers,
    elsewhere,
    holder_of,
    read_along,
    renewed,
    stop,
    wake,
    workers_of,
)

RunFleet = Callable[..., None]


def test_h1_a_kill_with_all_slots_busy_mixes_nothing(run_fleet: RunFleet) -> None:
    async def work(fleet: Fleet) -> None:
        names = await workers_of(fleet, 2)
        wanted = await answers([await fleet.submit(f"p {number}", max_tokens=50) for number in range(8)])
        streams = [await fleet.submit(f"p {number}", max_tokens=50) for number in range(8)]
        await until(lambda: sum(stream.requester.worker is not None for stream in streams) == 4)
        victim = await holder_of(fleet, next(stream for stream in streams if stream.requester.worker))
        moved = [stream for stream in streams if stream.requester.worker == victim]
        fleet.workers[victim].kill()
        assert await answers(streams) == wanted
        assert len(moved) == 2
        assert [stream.claims for stream in moved] == [2, 2]
        assert victim in names
        await fleet.idle()

    run_fleet(work, source="sim:fixed-10ms", engine=EngineSettings(slots=2), **FAST)


def test_h3_a_zombie_that_wakes_under_its_successor_mixes_nothing(run_fleet: RunFleet) -> None:
    async def work(fleet: Fleet) -> None:
        await workers_of(fleet, 1)
        wanted = await answers([await fleet.submit(f"p {number}", max_tokens=100) for number in range(4)])
        streams = [await fleet.submit(f"p {number}", max_tokens=100) for number in range(4)]
        heads = [await stream.next(10) for stream in streams]
        stop(fleet, "w1")
        await fleet.active(fleet.spawn())
        await until(lambda: all(stream.requester.worker == "w2" for stream in streams))
        wake(fleet, "w1")
        assert await answers(streams, heads) == wanted
        await fleet.idle()

    run_fleet(work, source="sim:fixed-10ms", **FAST)


def test_h3_a_second_reader_is_given_one_generation_whoever_answers(run_fleet: RunFleet) -> None:
    async def work(fleet: Fleet) -> None:
        await workers_of(fleet, 1)
        wanted = await answers([await fleet.submit(f"p {number}", max_tokens=100) for number in range(4)])
        async with elsewhere(fleet) as other:
            streams = [await fleet.submit(f"p {number}", max_tokens=100) for number in range(4)]
            heads = [await stream.next(10) for stream in streams]
            stop(fleet, "w1")
            await fleet.active(fleet.spawn())
            await until(lambda: all(stream.requester.worker == "w2" for stream in streams))
            wake(fleet, "w1")  # zombie and successor both hear the broadcasts of the second readers
            seconds = [await read_along(other, stream, head) for stream, head in zip(streams, heads, strict=True)]
            assert await answers(streams, heads) == wanted
            assert await answers(seconds) == wanted
        await fleet.idle()

    run_fleet(work, source="sim:fixed-10ms", **FAST)


async def left_to_its_second_reader(fleet: Fleet) -> tuple[Stream, list[list[int]]]:
    """A stream of w1 whose publisher is gone, and the answer that is wanted of it."""
    await workers_of(fleet, 1)
    wanted = await answers([await fleet.submit(max_tokens=100)])
    async with elsewhere(fleet) as publisher:
        fleet.dispatcher, reader = publisher.dispatcher, fleet.dispatcher
        stream = await fleet.submit(max_tokens=100)
        head = await stream.next(10)
        fleet.dispatcher = reader
        second = await read_along(Elsewhere(fleet.bus, reader), stream, head)
        await until(lambda: second.requester.worker == "w1")
        await publisher.vanish()
    return second, wanted


def test_h5_a_message_that_dies_under_a_second_reader_is_published_again(run_fleet: RunFleet) -> None:
    async def work(fleet: Fleet) -> None:
        second, wanted = await left_to_its_second_reader(fleet)
        stop(fleet, "w1")  # it is not to end its answer while the next one starts
        await fleet.active(fleet.spawn())
        # the next worker speaks to the publisher only, finds nobody there, and gives the message up before its reader looks
        fleet.workers["w1"].kill()
        assert await answers([second]) == wanted
        assert second.claims >= 2
        await fleet.idle()

    run_fleet(work, source="sim:fixed-10ms", orphan_grace_s=0.2, **FAST)


def test_h6_a_zombie_generates_nothing_once_it_is_fenced(run_fleet: RunFleet) -> None:
    async def work(fleet: Fleet) -> None:
        await workers_of(fleet, 1)
        streams = [await fleet.submit(f"p {number}", max_tokens=1000) for number in range(4)]
        for stream in streams:
            await stream.next(10)
        stop(fleet, "w1")
        await fleet.active(fleet.spawn())
        await until(lambda: all(stream.requester.worker == "w2" for stream in streams))
        wake(fleet, "w1")
        await renewed(fleet, "w1", 2)  # fenced by the first frames that it sends
        zombie, successor = await renewed(fleet, "w1", 1), await renewed(fleet, "w2", 1)
        assert not any(stream.ended for stream in streams)
        assert (zombie.running, zombie.waiting, zombie.claims, zombie.blocks_used) == (0, 0, 0, 0)
        assert successor.running == 4
        for stream in streams:
            stream.cancel()
        await fleet.idle()

    run_fleet(work, source="sim:fixed-10ms", **FAST)


def test_h8_a_rolling_restart_during_one_long_prefill_is_no_poison(run_fleet: RunFleet) -> None:
    async def work(fleet: Fleet) -> None:
        names = await workers_of(fleet, 5)
        prompt = " ".join(f"word{number}" for number in range(2000))  # ten steps of prefill
        stream = await fleet.submit(prompt, max_tokens=5)
        visited = []
        while len(visited) < 4:
            worker = await holder_of(fleet, stream)
            visited.append(worker)
            fleet.workers[worker].terminate()
            await until(lambda left=worker: stream.requester.worker not in (None, left))
        assert len(await read(stream)) == 5
        assert stream.claims == 5
        assert set(visited) < set(names)
        assert (await fleet.bus.stream_info(subjects.DLQ_STREAM)).messages == 0
        await fleet.idle()

    run_fleet(work, source="sim:fixed-200ms", engine=EngineSettings(prefill_chunk=200), drain_budget_s=0.1)


def test_h9_a_second_reader_of_a_hung_worker_finds_its_successor(run_fleet: RunFleet) -> None:
    async def work(fleet: Fleet) -> None:
        second, wanted = await left_to_its_second_reader(fleet)
        stop(fleet, "w1")
        await fleet.active(fleet.spawn())  # it speaks to the publisher only, as far as it knows
        assert await answers([second]) == wanted
        assert second.claims == 2
        wake(fleet, "w1")
        await fleet.idle()

    run_fleet(work, source="sim:fixed-10ms", generation_deadline_s=60.0, **FAST)


@pytest.mark.parametrize("leaver", [0, 1])
def test_h10_one_readers_leaving_is_not_the_end_of_the_others_stream(run_fleet: RunFleet, leaver: int) -> None:
    async def work(fleet: Fleet) -> None:
        await workers_of(fleet, 1)
        wanted = await answers([await fleet.submit(max_tokens=100)])
        async with elsewhere(fleet) as other:
            stream = await fleet.submit(max_tokens=100)
            head = await stream.next(10)
            second = await read_along(other, stream, head)
            await until(lambda: second.requester.worker == "w1")
            readers, heads = [stream, second], [head, []]
            readers.pop(leaver).cancel()
            heads.pop(leaver)
            assert await answers(readers, heads) == wanted
            assert readers[0].claims == 1
        await fleet.idle()

    run_fleet(work, source="sim:fixed-10ms")


@pytest.mark.parametrize("step_ms", [20, 0])
def test_h12c_a_request_that_kills_its_workers_ends_alone(run_fleet: RunFleet, step_ms: int) -> None:
    async def work(fleet: Fleet) -> None:
        await workers_of(fleet, 2)
        harmless = [await fleet.submit(f"p {number}", max_tokens=150) for number in range(6)]
        stream = await fleet.submit(f"{DEADLY_WORD} words", max_tokens=10)
        ending = asyncio.create_task(read(stream))

        async def restart() -> None:  # as the controller would
            while not ending.done():
                alive = sum(process.poll() is None for process in fleet.workers.values())
                if alive < 2:
                    fleet.spawn()
                await asyncio.sleep(0.05)

        await asyncio.gather(restart(), asyncio.wait([ending], timeout=40))
        with pytest.raises(Poisoned):
            ending.result()
        dead = sum(process.poll() is not None for process in fleet.workers.values())
        assert dead in (4, 5)  # one more, if the first died before it had granted the attach
        # those that were in the same batches are innocent
        assert all(len(each) == 150 for each in await answers(harmless))
        assert (await fleet.bus.stream_info(subjects.DLQ_STREAM)).messages == 1
        await fleet.idle()

    run_fleet(work, source=f"sim:mortal-{step_ms}ms", **FAST)


def test_h7_a_request_that_nobody_confirms_is_let_go(run_fleet: RunFleet) -> None:
    async def work(fleet: Fleet) -> None:
        await workers_of(fleet, 1)
        stream = await fleet.submit(max_tokens=8000)
        await stream.next(10)
        stop(fleet, "w1")
        stream.cancel()
        with pytest.raises(HeadraceError, match="cancelled"):
            await read(stream)
        wake(fleet, "w1")
        await fleet.idle()
        info = await fleet.bus.consumer_info(subjects.REQ_STREAM, CONSUMER)
        assert info is not None
        assert info.num_ack_pending == 0

    run_fleet(work, source="sim:fixed-10ms", **FAST)


def test_h16_a_message_outlives_its_clocks_and_carries_what_is_left_of_them(run_fleet: RunFleet) -> None:
    async def work(fleet: Fleet) -> None:
        stream = await fleet.submit(max_tokens=5)
        message = await fleet.bus.get_message(subjects.REQ_STREAM, stream.sequence)
        assert message is not None
        times = {name: int(message.headers[name]) for name in ("Nats-TTL", "Hr-Queue-Ms", "Hr-Generation-Ms")}
        assert times["Nats-TTL"] >= 7 + 11 + fleet.settings.orphan_grace_s + 60
        assert 6000 < times["Hr-Queue-Ms"] <= 7000
        assert times["Hr-Generation-Ms"] == 11_000
        stream.cancel()
        await fleet.idle()

    run_fleet(work, queue_deadline_s=7.0, generation_deadline_s=11.0)
