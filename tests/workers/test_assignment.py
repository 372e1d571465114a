"""Real workers that are told what they are for: warm, loaded, claiming; by which leader; on which device."""

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from shared.records import Version
from shared.settings import Settings
from workers import weights
from workers.main import Worker, main

from .conftest import Fleet, read, text_of, until

RunFleet = Callable[..., None]


def test_a_warm_worker_loads_what_it_is_assigned_and_claims_when_the_present_leader_says_so(
    run_fleet: RunFleet,
) -> None:
    async def work(fleet: Fleet) -> None:
        worker, other = fleet.spawn(warm=True), fleet.spawn(warm=True)
        lease = await fleet.becomes(worker, "warm")
        assert (lease.model, lease.metrics_port) == ("", 0)
        await fleet.assign(worker, claim=False, term=7)
        lease = await fleet.becomes(worker, "loaded")
        assert lease.model == "m"
        assert lease.slots > 0
        assert {"process", "imports", "load"} <= lease.cold_start.keys()
        stream = await fleet.submit()
        await fleet.assign(worker, claim=True, term=6)  # of a leader that was replaced
        await fleet.assign(worker, claim=True, term=8, version="other")
        await until(lambda: fleet.log(worker).count("not heeded") == 2)
        assert (await fleet.becomes(worker, "loaded")).claims == 0
        await fleet.assign(worker, claim=True, term=8)
        assert len(text_of(await read(stream)).split()) > 10
        assert (await fleet.becomes(worker, "active")).version == "v"

        await fleet.becomes(other, "warm")
        fleet.workers[other].send_signal(signal.SIGTERM)
        assert await fleet.exit_status(other) == 0
        assert await fleet.lease(other) is None

    run_fleet(work)


def test_a_worker_that_rests_finishes_what_it_has_and_takes_nothing_new(run_fleet: RunFleet) -> None:
    async def work(fleet: Fleet) -> None:
        first = fleet.spawn()
        await fleet.active(first)
        running = await fleet.submit(max_tokens=60)
        begun = await running.next(10)
        await fleet.assign(first, claim=False)
        await fleet.becomes(first, "loaded")
        second = fleet.spawn()
        await fleet.active(second)
        for _ in range(3):
            await read(await fleet.submit(max_tokens=2))
        assert len(begun + await read(running)) > 30
        fleet.workers[second].send_signal(signal.SIGTERM)
        assert await fleet.exit_status(second) == 0
        waiting = await fleet.submit(max_tokens=2)
        await fleet.assign(first, claim=True)
        await read(waiting)

    run_fleet(work, source="sim:fixed-20ms")


def test_a_second_worker_of_a_device_loads_when_the_first_is_gone(run_fleet: RunFleet) -> None:
    async def work(fleet: Fleet) -> None:
        first = fleet.spawn(device="cpu0:0")
        lease = await fleet.becomes(first, "active")
        assert lease.device == "cpu0:0"
        second = fleet.spawn(device="cpu0:0")
        await fleet.becomes(second, "starting")
        third = fleet.spawn()
        await fleet.active(third)  # no device, no wait
        lease = await fleet.becomes(second, "starting")
        assert "load" not in lease.cold_start
        fleet.workers[first].kill()
        lease = await fleet.becomes(second, "active")
        assert lease.cold_start["device"] > 0

    run_fleet(work)


@pytest.mark.parametrize("worker_id", ["node7.example.org-1", "node 7", ""])
def test_an_id_that_no_lease_could_have_is_refused(worker_id: str) -> None:
    with pytest.raises(SystemExit, match=f"{worker_id!r} is no worker id"):
        main(Settings(), worker_id, None)


def test_a_worker_tells_how_far_its_fetch_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    worker = Worker(Settings(data_dir=str(tmp_path)), "w1", born=0.0)
    told: list[tuple[int, int]] = []

    def fetch(_version: Version, _objects: object, _settings: Settings, on_progress: weights.OnProgress) -> Path:
        for here in (0, 43, 100):
            on_progress(here, 100)
            lease = worker.lease()
            told.append((lease.fetched_bytes, lease.fetch_bytes))
        return tmp_path

    monkeypatch.setattr(weights, "fetch", fetch)
    version = Version(model="m", version="v", state="available", source="s3")
    assert worker._fetch(version) == tmp_path
    assert told == [(0, 100), (43, 100), (100, 100)]
