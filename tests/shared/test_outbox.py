"""What is sent to workers, on a real server."""

import asyncio
from typing import Any

from shared import wire
from shared.bus import Bus
from shared.outbox import Outbox
from shared.settings import Settings


def test_each_of_two_on_one_connection_hears_who_is_gone(nats_url: str) -> None:
    async def work() -> None:
        bus = await Bus.connect(Settings(nats_url=nats_url), "test")
        gone: list[asyncio.Queue[str]] = [asyncio.Queue(), asyncio.Queue()]
        both: list[Any] = [Outbox(bus, "ingress", each.put_nowait) for each in gone]
        for outbox in both:
            await outbox.start()
        for number, outbox in enumerate(both):
            outbox.put(f"nobody{number}", wire.Release(wire.new_id(), wire.new_id(), bus.inbox, True))
        async with asyncio.timeout(5):
            assert [await each.get() for each in gone] == ["nobody0", "nobody1"]
        for outbox in both:
            await outbox.close()
        await bus.close()

    asyncio.run(work())
