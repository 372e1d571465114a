"""What a submitter tells workers, on a real server."""

import asyncio
from typing import Any

from shared import subjects, wire
from shared.bus import Bus
from shared.jobs import Jobs
from shared.settings import Settings


def test_the_last_of_several_jobs_is_hinted_at_too(nats_server: Any) -> None:
    async def work() -> None:
        bus = await Bus.connect(Settings(nats_url=nats_server.url), "test")
        await bus.ensure()
        hints: asyncio.Queue[Any] = asyncio.Queue()
        await bus.subscribe(subjects.wake("m", "v"), hints.put_nowait)
        jobs = Jobs(bus)
        async with asyncio.timeout(5):
            for number in range(3):
                request = wire.Request(wire.new_id(), "m", "v", wire.Input(prompt=str(number)), wire.Sampling())
                await jobs.submit(request, "a")
            for _ in range(2):  # of the first, and of those that came within a moment of it
                await hints.get()
        await bus.close()

    asyncio.run(work())
