"""What `headrace status` says of workers that are starting."""

import asyncio
import secrets

import pytest
from msgspec.structs import replace

from headrace import status
from headrace.status import ModelStatus, QueueStatus, ScalingStatus, Status, WorkerStatus
from shared import records, subjects
from shared.bus import Bus
from shared.records import Lease, Signals
from shared.settings import Settings


def test_a_workers_fetch_is_shown_until_all_is_here(nats_url: str) -> None:
    settings = Settings(nats_url=nats_url)
    lease = Lease(
        worker=f"w{secrets.token_hex(4)}",
        model="chat",
        version="v1",
        state="starting",
        pid=1,
        host="here",
        started=0.0,
        fetched_bytes=439_999,
        fetch_bytes=1_000_000,
    )

    async def shown(lease: Lease) -> WorkerStatus:
        bus = await Bus.connect(settings, "test")
        try:
            await bus.ensure()
            await bus.kv_put(subjects.WORKERS_BUCKET, subjects.key(lease.worker), records.encode(lease))
        finally:
            await bus.close()
        found = await status.collect(settings, None)
        return next(worker for worker in found.workers if worker.id == lease.worker)

    starting = asyncio.run(shown(lease))
    assert (starting.fetched_bytes, starting.fetch_bytes) == (439_999, 1_000_000)
    assert status.fetch_progress(starting) == "43%"
    assert status.fetch_progress(asyncio.run(shown(replace(lease, fetched_bytes=1_000_000)))) == ""  # it loads now
    assert status.fetch_progress(asyncio.run(shown(replace(lease, state="failed")))) == ""


@pytest.mark.parametrize("state", ["warm", "starting", "active"])
def test_a_worker_that_fetches_nothing_shows_nothing(state: str) -> None:
    lease = Lease(worker="w", model="", version="", state=state, pid=1, host="h", started=0.0)
    names = WorkerStatus.__struct_fields__
    worker = WorkerStatus(**{name: getattr(lease, name, "") for name in names})
    assert status.fetch_progress(worker) == ""


def test_without_workers_it_says_what_would_bring_one() -> None:
    def model(state: str) -> ModelStatus:
        return ModelStatus("m", "v", state, "sim:zero", 100.0, [], "")

    def of(models: list[ModelStatus], desired: int, spares: int = 0) -> Status:
        scaling = [ScalingStatus("m", "v", 0.0, desired, spares, [], Signals())]
        return Status(None, "", QueueStatus(1, 0), models, [], scaling, {})

    def said(models: list[ModelStatus], desired: int, spares: int = 0) -> str:
        return status.without_workers(of(models, desired, spares))

    assert said([], 0) == said([model("retired")], 0) == "no model: `headrace models push` registers one"
    assert said([model("available")], 0) == "no worker: the next request starts one"
    assert (
        said([model("available")], 1)
        == said([model("available")], 0, 1)
        == "no worker yet: one is wanted, and not there"
    )
    assert status.in_service(of([model("retired")], 0)) == []
    assert len(status.in_service(of([model("failed")], 0))) == 1


def test_a_row_is_a_line_where_no_terminal_is(capsys: pytest.CaptureFixture[str]) -> None:
    reason = "a reason that is long enough to fill the rest of the row, and more than a terminal's width"
    failed = ModelStatus("a/model-with-a-long-name", "v1", "failed", "sim:fixed-50ms", 100.0, ["stable"], reason)
    status.console().print(status.models_table([failed]))
    assert reason in capsys.readouterr().out
