"""Usage events: each id counts once, whatever came of the one who wrote it."""

import asyncio
import time
from typing import Any

import msgspec
import pytest

from shared import subjects, usage
from shared.bus import Bus
from shared.errors import BadRequest
from shared.settings import Settings
from shared.usage import Sums, UsageEvent, UsageSum
from shared.wire import HEADER_MSG_ID, new_id


def event(id_: str, at: float, model: str = "m", outcome: str = "completed") -> UsageEvent:
    return UsageEvent(id_, at, model, "v1", outcome, 10, 4, 5, 0.5, 0.25)


def test_an_id_counts_once_for_its_tenant() -> None:
    sums = Sums("total")
    sums.add("a", [event("1", 0), event("1", 1), event("2", 2, outcome="cancelled")])
    sums.add("a", [event("2", 3, outcome="cancelled")])
    sums.add("b", [event("1", 4)])
    assert sums.sums() == [
        UsageSum(
            group="total",
            requests=3,
            completed=2,
            prompt_tokens=30,
            cached_tokens=12,
            output_tokens=15,
            queue_seconds=1.5,
            gpu_seconds=0.75,
        )
    ]
    sums.add("a", [UsageEvent("2", 9, "m", "v2", "completed", 10, 4, 7, 0.5, 0.25)])  # it ended elsewhere after all
    sums.add("a", [event("2", 9, outcome="cancelled"), event("1", 9, outcome="cancelled")])
    assert (sums.sums()[0].requests, sums.sums()[0].completed, sums.sums()[0].output_tokens) == (3, 3, 17)
    with pytest.raises(BadRequest, match="by: one of total, tenant, model, day"):
        Sums("hour")  # type: ignore[arg-type]


def test_events_are_stored_in_few_bytes_and_read_as_they_were() -> None:
    events = [UsageEvent(new_id(), 1_800_000_000, "m", "v1", "completed", 500, 0, 200, 1.25, 0.5) for _ in range(8)]
    events += [event("a" * 16, 1), event("\u00e4-of-a-publisher", 2, "other", "cancelled")]
    assert usage.decode(usage.encode(events)) == events
    assert len(usage.encode(events[:8])) / 8 < 48
    for damaged in (
        b"",
        b"\xff",
        usage.encode(events)[:-1],
        msgspec.msgpack.encode([[], [[b"x", 0, 1, 1, 1, 1, 1, 1]]]),
    ):
        with pytest.raises(ValueError, match=r".+"):
            usage.decode(damaged)


def test_what_is_stored_is_found_by_tenant_time_and_group(nats_server: Any) -> None:
    async def main() -> None:
        bus = await Bus.connect(Settings(nats_url=nats_server.url), "test")
        await bus.ensure()
        now = time.time()
        assert await usage.query(bus, now - 60) == []

        async def store(tenant: str, *events: UsageEvent) -> None:
            await bus.publish_durable(subjects.usage(tenant), usage.encode(list(events)), {HEADER_MSG_ID: new_id()})

        await store("a.b", event("1", now), event("2", now, "other"))
        await store("a.b", event("1", now))  # a second worker that did not know of the first one
        await store("c", *(event(str(number), now) for number in range(1000)))
        await bus.publish_durable(subjects.usage("c"), b"\xff", {HEADER_MSG_ID: "damaged"})
        await store("c", event("old", now - 3600))  # tried again for an hour

        async def found(**asked: Any) -> dict[str, int]:
            return {each.group: each.requests for each in await usage.query(bus, now - 60, **asked)}

        assert await found(by="tenant") == {"a.b": 2, "c": 1000}
        assert await found(by="model") == {"m": 1001, "other": 1}
        assert await found(by="day", tenant="a.b") == {usage.day_of(now): 2}
        assert await found(tenant="nobody") == {}
        assert (await usage.query(bus, -1e30))[0].requests == 1003  # of all times
        await bus.close()

    asyncio.run(main())
