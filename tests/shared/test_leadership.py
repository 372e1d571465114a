"""One process leads: it renews, gives up in order, is replaced when it dies or is stopped, and never goes on after that."""

import asyncio
import os
import subprocess
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from shared import leadership as module
from shared import records, subjects
from shared.bus import Bus
from shared.leadership import CONTROLLER, Leadership
from shared.records import Leader
from shared.settings import Settings

TTL_S = 1.2


@pytest.fixture
def run_leaders(nats_server: Any) -> Callable[[Callable[[Bus, list[Leadership]], Awaitable[None]]], None]:
    """Run `work(bus, leaders)`, with two candidates that have not started."""

    def run(work: Callable[[Bus, list[Leadership]], Awaitable[None]]) -> None:
        async def main() -> None:
            bus = await Bus.connect(Settings(nats_url=nats_server.url, leader_ttl_s=TTL_S), "test")
            await bus.ensure()
            leaders = [Leadership(bus, CONTROLLER, TTL_S) for _ in range(2)]
            try:
                await work(bus, leaders)
            finally:
                for leader in leaders:
                    await leader.close()
                await bus.close()

        asyncio.run(main())

    return run


async def until(condition: Callable[[], bool | Awaitable[bool]], budget_s: float = 10.0) -> None:
    deadline = time.monotonic() + budget_s
    while True:
        result = condition()
        if await result if isinstance(result, Awaitable) else result:
            return
        assert time.monotonic() < deadline, "the condition did not come true"
        await asyncio.sleep(0.01)


def test_the_first_leads_and_renews_and_the_second_follows_it_in_order(run_leaders: Any) -> None:
    async def work(bus: Bus, leaders: list[Leadership]) -> None:
        first, second = leaders
        await first.start()
        await second.start()
        before = await bus.kv_get(subjects.LEADER_BUCKET, CONTROLLER)
        assert before is not None

        async def renewed() -> bool:
            now = await bus.kv_get(subjects.LEADER_BUCKET, CONTROLLER)
            assert now is not None
            assert first.leads
            assert not second.leads
            return now[1] > before[1] + 5  # longer than the TTL

        await until(renewed)
        await first.close()
        assert not first.leads
        await until(lambda: second.leads)
        assert second.term > first.term

    run_leaders(work)


def test_one_that_cannot_renew_stops_before_another_can_lead(run_leaders: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(bus: Bus, leaders: list[Leadership]) -> None:
        first, second = leaders
        await first.start()
        await second.start()
        assert first._task is not None
        first._task.cancel()  # as a process that is stopped: it neither renews nor gives up
        while not second.leads:
            seen = first.leads
            await asyncio.sleep(0.005)
        assert not seen
        assert not first.leads
        await first._campaign()  # it wakes up, and finds that it has been replaced
        assert not first.leads
        assert second.leads

    run_leaders(work)


def test_a_dead_process_of_this_host_is_replaced_at_once_and_a_live_one_is_not(run_leaders: Any) -> None:
    async def work(bus: Bus, leaders: list[Leadership]) -> None:
        process = await asyncio.to_thread(subprocess.Popen, ["sleep", "600"])
        try:
            other = Leader(host=os.uname().nodename, pid=process.pid, process=module._process_of(process.pid))
            assert other.process
            await bus.kv_put(subjects.LEADER_BUCKET, CONTROLLER, records.encode(other))
            await leaders[0].start()
            assert not leaders[0].leads
            await leaders[0].close()
            process.kill()
            await asyncio.to_thread(os.waitid, os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # a zombie: it is dead
            await bus.kv_put(subjects.LEADER_BUCKET, CONTROLLER, records.encode(other))
            await leaders[1].start()
            assert leaders[1].leads  # at its first try, not after the TTL
        finally:
            process.kill()
            await asyncio.to_thread(process.wait)

    run_leaders(work)


def test_terms_rise_when_the_broker_has_forgotten_all_leaders(run_leaders: Any) -> None:
    async def work(bus: Bus, leaders: list[Leadership]) -> None:
        first, second = leaders
        for number in range(5):
            await bus.kv_put(subjects.LEADER_BUCKET, f"earlier-{number}", b"")
        await first.start()
        await bus.api(f"STREAM.DELETE.KV_{subjects.LEADER_BUCKET}")  # it was in the memory of one that was restarted
        await bus.ensure()
        await second.start()
        assert second.leads
        assert second.term > first.term  # else workers that the first one told something would not heed it

    run_leaders(work)


def test_a_process_is_known_by_its_pid_and_its_start() -> None:
    assert module._process_of(os.getpid()) == module._process_of(os.getpid()) != module._process_of(1)
    assert module._process_of(2**22 + 1) == ""
