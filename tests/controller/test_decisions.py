"""The record of scaling decisions in its bucket."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from controller.autoscaler import Decision
from controller.decisions import Decisions, history
from shared.bus import Bus
from shared.records import Signals
from shared.settings import Settings
from shared.streams import DECISIONS_KEPT

BUDGET_S = 20.0

Run = Callable[[Callable[[Bus, Decisions], Awaitable[None]]], None]


@pytest.fixture
def run(nats_server: Any) -> Run:
    def start(work: Callable[[Bus, Decisions], Awaitable[None]]) -> None:
        async def main() -> None:
            bus = await Bus.connect(Settings(nats_url=nats_server.url), "test")
            try:
                await bus.ensure()
                decisions = Decisions(bus)
                await decisions.start()
                await work(bus, decisions)
                await decisions.close()
            finally:
                await bus.close()

        asyncio.run(main())

    return start


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + BUDGET_S
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        await asyncio.sleep(0.005)


def decision(desired: int, version: str = "v", spares: int = 0) -> Decision:
    signals = Signals(pending=5, claimed=2, rate=1.5)
    return Decision(model="m", version=version, desired=desired, spares=spares, reasons=("work",), signals=signals)


def test_the_next_leader_goes_on_from_what_was_decided_last(run: Run) -> None:
    async def work(bus: Bus, decisions: Decisions) -> None:
        decisions.note(decision(2, spares=1))
        await decisions.close()
        following = Decisions(bus)
        await following.recall()
        assert not following.note(decision(2, spares=1))
        assert following.note(decision(0))

    run(work)


def test_only_changes_are_recorded_with_their_reasons_and_signals_the_newest_last(run: Run) -> None:
    async def work(bus: Bus, decisions: Decisions) -> None:
        assert [decisions.note(decision(desired)) for desired in (0, 1, 1, 3)] == [False, True, False, True]
        assert decisions.note(decision(3, spares=1))
        await decisions.close()
        found = await history(bus, "m", "v")
        assert [(each.before, each.desired, each.spares) for each in found] == [(0, 1, 0), (1, 3, 0), (3, 3, 1)]
        assert (found[0].reasons, found[0].signals) == (["work"], Signals(pending=5, claimed=2, rate=1.5))
        assert await history(bus, "m", "other") == []

    run(work)


def test_of_each_version_the_last_ones_are_kept(run: Run) -> None:
    async def work(bus: Bus, decisions: Decisions) -> None:
        decisions.note(decision(7, version="w"))
        for number in range(DECISIONS_KEPT + 5):
            decisions.note(decision(1 + number % 2))
        await decisions.close()
        assert len(await history(bus, "m", "v")) == DECISIONS_KEPT
        assert [each.desired for each in await history(bus, "m", "w")] == [7]

    run(work)


def test_what_is_forgotten_begins_at_nothing_again(run: Run) -> None:
    async def work(bus: Bus, decisions: Decisions) -> None:
        decisions.note(decision(2))
        decisions.forget({("m", "other")})
        assert decisions.note(decision(2))
        await decisions.close()
        assert [each.before for each in await history(bus, "m", "v")] == [0, 0]

    run(work)


def test_while_the_bus_is_away_a_decision_is_logged_and_nobody_waits(
    nats_server: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        bus = await Bus.connect(Settings(nats_url=nats_server.url, publish_timeout_s=1.0), "test")
        try:
            await bus.ensure()
            decisions = Decisions(bus)
            await decisions.start()
            await asyncio.to_thread(nats_server.kill)
            await until(lambda: not bus.connected)
            decisions.note(decision(1))
            await until(lambda: "is not recorded" in caplog.text)
            await asyncio.to_thread(nats_server.start)
            await until(lambda: bus.connected)
            decisions.note(decision(2))
            await decisions.close()
            last = (await history(bus, "m", "v"))[-1]
            assert (last.before, last.desired) == (1, 2)
        finally:
            await bus.close()

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())
    assert '"desired":1' in caplog.text
