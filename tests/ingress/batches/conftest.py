"""Batches on a real bus and a real object store, without HTTP, and with workers that answer at once."""

import asyncio
import contextlib
import io
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
import pytest

from ingress.batches import store
from ingress.batches.asking import Asker
from ingress.batches.progress import Progress
from ingress.batches.record import BatchRecord
from ingress.batches.run import BatchRun
from ingress.context import Context
from ingress.detached import Detached
from ingress.families import BATCHED
from ingress.files.store import FileRecord, new_id
from ingress.identity import Identities
from ingress.keys import Keys
from ingress.registrar import Registrar
from shared import results, subjects, wire
from shared.bus import Bus
from shared.dispatch import Dispatcher
from shared.results import Part, Result
from shared.router import Router
from shared.settings import Settings
from shared.wire import Usage, WireError
from shared.wire import new_id as random_id

ENDPOINT = "/v1/completions"
TENANT = "t"


RESPONSES = "/v1/responses"
ENDED_AT = 1_750_000_000.0  # unix seconds, of every result


def line(number: int, **body: Any) -> dict[str, Any]:
    asked = {"model": "m", "prompt": f"hello {number}", "max_tokens": 3} | body
    return {"custom_id": f"c{number}", "method": "POST", "url": ENDPOINT, "body": asked}


def response_line(number: int, **body: Any) -> dict[str, Any]:
    asked = {"model": "m", "input": f"hello {number}", "max_output_tokens": 3} | body
    return {"custom_id": f"c{number}", "method": "POST", "url": RESPONSES, "body": asked}


class Workers:
    """Takes jobs and gives each its prompt as the answer. `lag`: so many steps lie between a result and its ack."""

    def __init__(self, bus: Bus, lag: int = 0) -> None:
        self._bus, self._lag = bus, lag
        self.executed: Counter[str] = Counter()  # by rid
        self.held: Callable[[str], bool] = lambda rid: False  # what is not answered
        self._unacked: list[int] = []

    async def run(self) -> None:
        while True:
            sequence, stored = 1, 0
            jobs = subjects.jobs_of_tenant(TENANT)
            while (message := await self._bus.next_message(subjects.JOB_STREAM, jobs, sequence)) is not None:
                sequence, stored = message.seq + 1, stored + 1
                request = wire.decode_request(message.data, message.headers, "v1")
                if self.held(request.rid):
                    continue
                if message.seq not in self._unacked:
                    await self._execute(request)
                    self._unacked.append(message.seq)
            while len(self._unacked) > self._lag:
                await self._bus.delete_message(subjects.JOB_STREAM, self._unacked.pop(0))
            self._lag = 0 if stored <= self._lag else self._lag  # nothing else comes: the last ones, too
            await asyncio.sleep(0.005)

    async def _execute(self, request: wire.Request) -> None:
        """As a worker that was given a message again would: it has no result yet, or is acked."""
        if await results.read_result(self._bus, TENANT, request.rid) is not None:
            return
        self.executed[request.rid] += 1
        text = request.input.prompt or (request.input.messages or [wire.ChatMessage("user", "")])[-1].content or ""
        error = WireError("engine_failed", "it broke") if "break" in text else None
        parts = [Part([1], [text], None, "stop")] if error is None else []
        usage = Usage(2, 1) if error is None else None
        result = Result(
            version=request.version, claim="c", parts=parts, ended_at=ENDED_AT, usage=usage, error=error, claims=1
        )
        await results.store(self._bus, TENANT, request.rid, result)


class World:
    """What a batch needs, and how it is run here."""

    def __init__(self, context: Context, bus: Bus) -> None:
        self.context, self.bus, self.files = context, bus, context.files
        self.workers = Workers(bus)
        self.announced: list[BatchRecord] = []
        self.leads = True

    async def upload(self, lines: list[Any]) -> FileRecord:
        """A file of these lines; those that are no strings become JSON."""
        data = "\n".join(each if isinstance(each, str) else json.dumps(each) for each in lines).encode()
        file_id = new_id("file-")
        size = await self.files.write(TENANT, file_id, io.BytesIO(data))
        record = FileRecord(
            id=file_id, tenant=TENANT, filename="in.jsonl", purpose="batch", bytes=size, created_at=int(time.time())
        )
        await self.files.note(record)
        return record

    async def create(self, lines: list[Any], window_s: float = 3600, **more: Any) -> BatchRecord:
        now = int(time.time())
        record = BatchRecord(
            id=new_id("batch_"),
            tenant=TENANT,
            endpoint=more.pop("endpoint", ENDPOINT),
            input_file_id=(await self.upload(lines)).id,
            completion_window="24h",
            created_at=now,
            expires_at=int(now + window_s),
            **more,
        )
        await store.create(self.bus, record)
        return record

    async def run(self, record: BatchRecord) -> BatchRun:
        """A run of the batch, as a process that has just got the lead makes it."""
        found, revision = await store.find(self.bus, TENANT, record.id)
        progress = Progress(self.bus, self.bus.settings, found, revision, lambda: self.leads)
        asker = Asker(self.context, BATCHED)
        return BatchRun(self.bus, self.files, self.context.detached.jobs, asker, progress, self._announce)

    async def finish(self, record: BatchRecord) -> BatchRecord:
        """Run it to its end."""
        await (await self.run(record)).run()
        return await self.read(record)

    async def no_jobs(self) -> bool:
        return not (await self.bus.stream_info(subjects.JOB_STREAM)).messages

    async def read(self, record: BatchRecord) -> BatchRecord:
        return (await store.find(self.bus, TENANT, record.id))[0]

    async def lines_of(self, file_id: str) -> list[dict[str, Any]]:
        if not file_id:
            return []
        file = await self.files.find(TENANT, file_id)
        data = b"".join([piece async for piece in self.files.stream(file, await self.files.read(file, 0))])
        assert data.endswith(b"\n")
        return [json.loads(each) for each in data.splitlines()]

    async def _announce(self, record: BatchRecord) -> None:
        self.announced.append(record)


async def until(condition: Callable[[], Awaitable[bool]], budget_s: float = 30.0) -> None:
    """Poll until the condition holds."""
    deadline = time.monotonic() + budget_s
    while not await condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def working(world: World) -> AsyncIterator[None]:
    task = asyncio.create_task(world.workers.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


RunWorld = Callable[..., None]


@pytest.fixture
def run_world(make: Any, nats_server: Any, s3_settings: Settings) -> RunWorld:
    """Run `work(world)`; settings may be given, and the workers work unless `idle`."""

    def run(work: Callable[[World], Awaitable[None]], idle: bool = False, **changed: Any) -> None:
        async def main() -> None:
            servers = {"nats_url": nats_server.url, "redis_url": "", "s3_bucket": f"batches-{random_id()[:12]}"}
            settings = msgspec.structs.replace(s3_settings, **(servers | changed))
            bus = await Bus.connect(settings, "test")
            try:
                await bus.ensure()
                router = Router()
                router.put_version(make.version())
                router.put_route(make.route(("v1", 10_000), stable="v1"))
                context = Context(
                    settings,
                    router,
                    Dispatcher(bus, settings),
                    Keys(bus, settings),
                    Registrar(bus, settings),
                    lambda: True,
                    Identities(False),
                    Detached(bus),
                )
                world = World(context, bus)
                async with contextlib.nullcontext() if idle else working(world):
                    await work(world)
                context.files.close()
            finally:
                await bus.close()

        asyncio.run(main())

    return run
