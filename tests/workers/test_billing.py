"""What requests came to is stored before their messages are acknowledged, and the sums are right whoever is killed."""

import asyncio
import signal
import time
from collections.abc import Callable
from typing import Any

from shared import subjects, usage
from shared.bus import Bus
from shared.errors import HeadraceError
from shared.settings import Settings
from shared.usage import UsageEvent, UsageSum
from workers.billing import HOLD_S, Biller

from .conftest import Fleet, read, until

RunFleet = Callable[..., None]
TOKENS = 60


async def total(bus: Bus) -> UsageSum:
    found = await usage.query(bus, time.time() - 600)
    return found[0] if found else UsageSum(group="total")


def test_what_is_acknowledged_is_stored_and_a_broker_that_hangs_holds_nothing_up_for_long(nats_server: Any) -> None:
    async def main() -> None:
        bus = await Bus.connect(Settings(nats_url=nats_server.url), "test")
        await bus.ensure()
        acked: list[str] = []
        biller = Biller(bus, acked.append)
        biller.start()

        def add(number: int) -> None:
            event = UsageEvent(f"r{number}", time.time(), "m", "v", "completed", 1, 0, 2, 0.0, 0.0)
            biller.add(f"tenant-{number % 3}", event, [f"ack.{number}"])

        for number in range(100):
            add(number)
        assert acked == []
        await until(lambda: len(acked) == 100)
        assert (await total(bus)).requests == 100
        assert (await bus.stream_info(subjects.USAGE_STREAM)).messages == 3  # together
        nats_server.signal(signal.SIGSTOP)
        start = time.monotonic()
        add(100)
        await until(lambda: len(acked) == 101)
        assert time.monotonic() - start < HOLD_S + 1
        nats_server.signal(signal.SIGCONT)
        add(101)
        await biller.stop()
        assert len(acked) == 102
        assert (await total(bus)).requests == 102  # the kept one is there too, once
        await bus.close()

    asyncio.run(main())


def test_the_sums_are_what_the_clients_have_whichever_workers_are_killed(run_fleet: RunFleet) -> None:
    """Four kills while 60 requests run and end: no token is lost to the accounts, none is counted twice."""

    async def work(fleet: Fleet) -> None:
        alive = [fleet.spawn(), fleet.spawn()]
        for worker in alive:
            await fleet.active(worker)
        streams = [await fleet.submit(f"number {number}", max_tokens=1 + number) for number in range(TOKENS)]
        readers = [asyncio.create_task(read(stream)) for stream in streams]
        for _ in range(4):
            done = sum(reader.done() for reader in readers)
            await until(lambda done=done: sum(reader.done() for reader in readers) > done, 60)
            killed = alive.pop(0)  # some of its requests have ended a moment ago, and are not acknowledged yet
            fleet.workers[killed].kill()
            alive.append(fleet.spawn())
        await asyncio.gather(*readers)
        await fleet.idle()
        told = [stream.usage for stream in streams]
        found = await total(fleet.bus)
        assert found.requests == found.completed == len(streams)
        assert found.output_tokens == sum(each.completion_tokens for each in told if each) == sum(range(1, TOKENS + 1))
        assert found.prompt_tokens == sum(each.prompt_tokens for each in told if each)
        assert found.gpu_seconds > 0.0

    run_fleet(work, source="sim:fixed-20ms", ack_wait_s=2.0, in_progress_every_s=0.5)


def test_cancelled_and_refused_requests_are_accounted_for_with_what_they_took(run_fleet: RunFleet) -> None:
    async def work(fleet: Fleet) -> None:
        await fleet.active(fleet.spawn())
        stream = await fleet.submit("a few words more", max_tokens=400)
        seen = len(await stream.next(30))
        stream.cancel()
        refused = await fleet.submit(" ".join(["word"] * 20_000))
        try:
            await read(refused)
        except HeadraceError as error:
            code = error.code
        await fleet.idle()
        found = await total(fleet.bus)
        assert (found.requests, found.completed) == (2, 0)
        assert code == "context_length_exceeded"
        assert found.prompt_tokens == 4
        assert seen <= found.output_tokens < 100
        assert 0.0 < found.gpu_seconds < 10.0

    run_fleet(work, source="sim:fixed-20ms", ack_wait_s=2.0, in_progress_every_s=0.5)
