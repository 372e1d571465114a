"""Warm workers, spares and devices: a real nats-server, real processes that stand in for workers."""

import os
import signal
from typing import Any

import pytest

from shared import subjects, wire
from shared.records import Lease
from shared.wire import Assign

from .test_loop import exposition


def leases(bench: Any, model: str, state: str) -> list[Lease]:
    seen = bench.controller.observer.leases.values()
    return [one.lease for one in seen if not one.silent and (one.lease.model, one.lease.state) == (model, state)]


def test_a_warm_worker_is_kept_serves_whatever_comes_first_and_is_replaced(run_bench: Any) -> None:
    async def work(bench: Any) -> None:
        await bench.start()
        await bench.register("chat")
        await bench.register("code")
        await bench.until(lambda: leases(bench, "", "warm"))
        for model in ("code", "chat"):
            (warm,) = leases(bench, "", "warm")
            await bench.request(model)
            await bench.until(lambda model=model: leases(bench, model, "active"))
            (active,) = leases(bench, model, "active")
            assert active.worker == warm.worker
            await bench.until(lambda: leases(bench, "", "warm"))
        assert len(bench.scaler.workers) == 3

    run_bench(work, warm_workers=1)


def test_a_spare_is_loaded_takes_over_at_once_and_is_made_again(run_bench: Any) -> None:
    async def work(bench: Any) -> None:
        await bench.start()
        await bench.register("chat", min_replicas=1, max_replicas=2, warm=1)
        await bench.until(lambda: leases(bench, "chat", "active") and leases(bench, "chat", "loaded"))
        (active,) = leases(bench, "chat", "active")
        (spare,) = leases(bench, "chat", "loaded")
        os.kill(active.pid, signal.SIGKILL)
        await bench.until(lambda: [one.worker for one in leases(bench, "chat", "active")] == [spare.worker])
        await bench.until(lambda: leases(bench, "chat", "loaded"))
        assert len(bench.scaler.workers) == 2

    run_bench(work)


def test_a_version_with_a_loaded_spare_can_be_loaded_so_it_is_not_given_up(run_bench: Any) -> None:
    async def work(bench: Any) -> None:
        await bench.start()
        await bench.register("chat", max_replicas=2, warm=1)
        await bench.until(lambda: leases(bench, "chat", "loaded"))
        (spare,) = leases(bench, "chat", "loaded")
        bench.scaler._command = (*bench.scaler._command[:-1], "permanent")
        await bench.set_limits("chat", max_replicas=2, warm=2)
        await bench.until(lambda: bench.controller._starts["chat", "v1"].failures)

        async def shown() -> bool:
            return (await bench.record("chat")).reason == "the weights are corrupt"

        await bench.until(shown)
        assert await bench.state_is("chat", "available")
        assert [one.worker for one in leases(bench, "chat", "loaded")] == [spare.worker]

    run_bench(work)


def test_a_worker_that_is_too_many_becomes_the_missing_spare(run_bench: Any) -> None:
    async def work(bench: Any) -> None:
        await bench.start()
        await bench.register("chat", max_replicas=2, warm=1, idle_seconds=0.3)
        await bench.until(lambda: leases(bench, "chat", "loaded"))
        (spare,) = leases(bench, "chat", "loaded")
        await bench.request("chat")
        await bench.until(lambda: [one.worker for one in leases(bench, "chat", "active")] == [spare.worker])
        await bench.until(lambda: leases(bench, "chat", "loaded"))
        await bench.clear_queue("chat")
        await bench.until(lambda: len(bench.scaler.workers) == 1 and leases(bench, "chat", "loaded"))

    run_bench(work)


def test_a_device_has_one_worker_and_the_next_waits_for_it(run_bench: Any) -> None:
    async def work(bench: Any) -> None:
        await bench.start()
        await bench.register("chat", min_replicas=1)
        await bench.until(lambda: leases(bench, "chat", "active"))
        await bench.register("code", min_replicas=1)
        await bench.available("code")
        ticks = bench.ticks
        await bench.until(lambda: bench.ticks > ticks + 3)
        (chat,) = bench.scaler.workers.values()
        assert chat.device.startswith("cpu0:")
        await bench.set_limits("chat", min_replicas=0, idle_seconds=0.0)
        await bench.until(lambda: leases(bench, "code", "active"))
        assert chat.child.returncode == 0
        assert [process.device for process in bench.scaler.workers.values()] == [chat.device]

    run_bench(work, devices=1, scale_down_window_s=0.1)


def test_a_version_that_cannot_start_now_leaves_the_device_to_others(run_bench: Any) -> None:
    async def work(bench: Any) -> None:
        await bench.start("away")
        await bench.register("away", priority=1)
        await bench.register("chat")
        await bench.available("away")
        await bench.available("chat")
        await bench.request("away")
        await bench.until(lambda: bench.controller._starts["away", "v1"].failures)
        await bench.request("chat")
        await bench.until(lambda: leases(bench, "chat", "active"))

    run_bench(work, devices=1, start_backoff_s=3.0)


def test_a_warm_worker_that_cannot_start_is_tried_again_later_and_fails_no_version(run_bench: Any) -> None:
    async def work(bench: Any) -> None:
        await bench.start("crash-warm")
        await bench.register("chat")
        await bench.until(lambda: bench.controller._starts["", ""].failures >= 2)
        await bench.available("chat")
        assert not [process for process in bench.scaler.workers.values() if process.model]

    run_bench(work, warm_workers=1)


def test_the_warm_worker_that_becomes_a_spare_is_tried_again_later_too(run_bench: Any) -> None:
    async def work(bench: Any) -> None:
        await bench.start()
        bench.scaler._command = ("false",)
        await bench.register("chat", warm=1)
        await bench.until(lambda: bench.controller._starts["", ""].failures)
        ticks = bench.ticks
        await bench.until(lambda: bench.ticks > ticks + 10)
        assert bench.controller._starts["", ""].failures == 1
        assert not bench.scaler.workers

    run_bench(work, start_backoff_s=10.0)


def test_a_warm_worker_that_was_stopped_before_it_was_assigned_a_version_is_replaced(run_bench: Any) -> None:
    async def work(bench: Any) -> None:
        await bench.start()
        await bench.register("chat")
        await bench.available("chat")
        await bench.until(lambda: leases(bench, "", "warm"))
        (warm,) = leases(bench, "", "warm")
        os.kill(warm.pid, signal.SIGSTOP)
        await bench.request("chat")
        await bench.until(lambda: leases(bench, "chat", "active"))
        await bench.until(lambda: warm.worker not in bench.scaler.workers)
        assert "headrace_start_failures_total{" not in exposition(bench)

    run_bench(work, warm_workers=1, lease_ttl_s=0.8)


def test_a_warm_worker_that_did_not_hear_what_it_is_for_is_told_by_who_leads_next(
    run_bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(bench: Any) -> None:
        await bench.start()
        await bench.register("chat")
        await bench.available("chat")
        await bench.until(lambda: leases(bench, "", "warm"))
        with monkeypatch.context() as patch:
            patch.setattr(bench.controller._hands, "_bus", Deaf(bench.controller._hands._bus))
            await bench.request("chat")
            await bench.until(lambda: bench.controller._hands.told)
            bench.controller._hands.told.clear()  # as one that leads no more, for a moment: the broker was restarted
        (process,) = (process for process in bench.scaler.workers.values() if process.model)
        await bench.until(lambda: [one.worker for one in leases(bench, "chat", "active")] == [process.worker])

    run_bench(work, warm_workers=1)


def test_a_warm_worker_that_another_controller_has_taken_is_left_to_it(
    run_bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(bench: Any) -> None:
        await bench.start()
        await bench.register("chat")
        await bench.register("code", min_replicas=1, max_replicas=2)
        await bench.available("chat")
        await bench.until(lambda: leases(bench, "code", "active") and leases(bench, "", "warm"))
        (warm,) = leases(bench, "", "warm")
        with monkeypatch.context() as patch:
            patch.setattr(bench.controller._hands, "_bus", Deaf(bench.controller._hands._bus))
            await bench.request("chat")
            await bench.until(lambda: bench.controller._hands.told)
            await bench.bus.publish(subjects.worker_assign(warm.worker), wire.encode(Assign("code", "v1", True, 1)))
            await bench.until(lambda: not bench.controller._hands.told)
        assert bench.scaler.workers[warm.worker].model == "code"
        await bench.until(lambda: leases(bench, "chat", "active"))
        assert warm.worker in [one.worker for one in leases(bench, "code", "active")]

    run_bench(work, warm_workers=1)


class Deaf:
    """A bus on which core messages get lost."""

    def __init__(self, bus: Any) -> None:
        self._bus = bus

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bus, name)

    async def publish(self, *_: Any) -> bool:
        return True
