"""A request that a worker cannot begin in time goes to one that can."""

import asyncio
import time
from collections.abc import Callable

import pytest

from shared.records import EngineSettings
from shared.streams import ConsumerInfo
from shared.wire import Attach, Input, No, Request, Sampling
from workers.claims import Abort, ClaimLimits, ClaimTable, Delivery, Nak, Send
from workers.handback import EVERY_S, HandBack

from .conftest import Fleet, read

RunFleet = Callable[..., None]
ADDRESS = "tok.ingress.me"


def looked(late: list[str], waiting: int | None, own: int) -> list[str]:
    """What is handed back when the broker knows `waiting` open pulls, `own` of them our own."""
    handed: list[str] = []

    async def info() -> ConsumerInfo | None:
        return None if waiting is None else ConsumerInfo(num_waiting=waiting)

    asyncio.run(HandBack(info, lambda: own, handed.append).look(late))
    return handed


@pytest.mark.parametrize(
    ("waiting", "own", "handed"),
    [(0, 0, []), (2, 2, []), (1, 2, []), (None, 0, []), (1, 0, ["a"]), (3, 1, ["a", "b"]), (9, 1, ["a", "b", "c"])],
)
def test_as_many_are_handed_back_as_others_have_pulls_open(waiting: int | None, own: int, handed: list[str]) -> None:
    assert looked(["a", "b", "c"], waiting, own) == handed


def test_the_broker_is_asked_once_a_second_and_only_if_somebody_is_late() -> None:
    async def info() -> ConsumerInfo | None:
        return None

    it = HandBack(info, lambda: 0, lambda run: None)
    assert not it.is_due([], 100.0)
    assert it.is_due(["a"], 100.0)
    assert not it.is_due(["a"], 100.0 + EVERY_S / 2)
    assert it.is_due(["a"], 100.0 + EVERY_S)


def delivery(rid: str, seq: int, deliveries: int = 1) -> Delivery:
    request = Request(rid, "m", "v", Input(prompt="x"), Sampling())
    return Delivery(request=request, tenant="t", seq=seq, handle=f"ack.{seq}", reply=ADDRESS, deliveries=deliveries)


def test_a_claim_is_handed_back_whole_and_only_once() -> None:
    table = ClaimTable("w", ClaimLimits())
    table.message(delivery("r", 1), 0.0)
    table.attach(Attach("r", "s", ADDRESS, [[]]), False, 0.1)
    (run,) = table._runs
    actions = table.hand_back(run)
    assert [type(action) for action in actions] == [Send, Nak, Abort]
    assert isinstance(actions[0], Send)
    assert isinstance(actions[0].item, No)
    assert (len(table), table.holding, table.handles()) == (0, 0, [])
    assert table.hand_back(run) == []

    table.message(delivery("r", 1, deliveries=2), 1.0)
    table.attach(Attach("r", "s2", ADDRESS, [[]]), False, 1.1)
    (run,) = table._runs
    assert table.hand_back(run) == [], "met again, it stays"
    assert len(table) == 1


def test_a_request_that_lacks_memory_here_is_begun_where_there_is_some(run_fleet: RunFleet) -> None:
    """The first worker's memory is full for seconds; the second one comes, and takes what waits."""

    async def work(fleet: Fleet) -> None:
        first = fleet.spawn()
        await fleet.active(first)
        long = await fleet.submit("word " * 400, max_tokens=200)
        begun = await long.next(10)
        waiting = await fleet.submit("other " * 400, max_tokens=5)
        deadline = time.monotonic() + 10
        while (lease := await fleet.lease(first)) is None or lease.waiting == 0:
            assert time.monotonic() < deadline, "the second request is not there"
            await asyncio.sleep(0.05)
        await fleet.active(fleet.spawn())
        assert sum(len(delta.ids) for delta in await read(waiting)) == 5
        assert waiting.claims == 2
        lease = await fleet.lease(first)
        assert lease is not None
        assert lease.running == 1, "the first worker has its memory still full"
        assert sum(len(delta.ids) for delta in begun + await read(long)) == 200
        assert long.claims == 1
        await fleet.idle()

    engine = EngineSettings(kv_blocks=40, ttft_ms_target=300.0, slots_reserved_fraction=0.0)
    run_fleet(work, source="sim:fixed-40ms", engine=engine, pull_expires_s=1.0, lease_every_s=0.2)


def test_alone_a_worker_keeps_what_is_late(run_fleet: RunFleet) -> None:
    async def work(fleet: Fleet) -> None:
        await fleet.active(fleet.spawn())
        streams = [await fleet.submit(f"{word} " * 400, max_tokens=40) for word in ("one", "two")]
        for stream in streams:
            assert sum(len(delta.ids) for delta in await read(stream)) == 40
            assert stream.claims == 1
        await fleet.idle()

    engine = EngineSettings(kv_blocks=40, ttft_ms_target=100.0)
    run_fleet(work, source="sim:fixed-40ms", engine=engine)
