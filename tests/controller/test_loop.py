"""The control loop as a whole: a real nats-server, real processes that stand in for workers."""

import asyncio
import os
import signal
import time
from typing import Any

import pytest

from shared import wire
from shared.errors import VersionRetired
from shared.jobs import Jobs


def test_the_first_message_starts_a_worker_at_once_and_idleness_ends_it(run_bench: Any) -> None:
    async def work(bench: Any) -> None:
        await bench.start()
        await bench.register("chat", idle_seconds=0.5)
        await bench.available("chat")
        assert not bench.scaler.workers
        began = time.monotonic()
        await bench.request("chat")
        await bench.until(lambda: bench.scaler.workers)
        assert time.monotonic() - began < 1.0  # a tick is 30 s: it was the hint
        await bench.until(bench.workers)
        await bench.clear_queue("chat")
        bench.controller.wake()
        (process,) = bench.scaler.workers.values()

        def tick() -> bool:
            bench.controller.wake()
            return not bench.scaler.workers

        await bench.until(tick)
        assert process.child.returncode == 0
        await bench.request("chat")
        await bench.until(lambda: bench.scaler.workers)

    run_bench(work, tick_s=30.0)


def test_a_job_starts_a_worker_at_once_keeps_it_and_ends_where_its_version_is_removed(run_bench: Any) -> None:
    async def work(bench: Any) -> None:
        await bench.start()
        await bench.register("chat", idle_seconds=0.2)
        await bench.available("chat")
        it = Jobs(bench.bus)
        began = time.monotonic()
        ticket = await it.submit(wire.Request(wire.new_id(), "chat", "v1", wire.Input(prompt="p")), "a")
        await bench.until(lambda: bench.scaler.workers)
        assert time.monotonic() - began < 1.0
        await bench.until(bench.workers)
        for _ in range(10):
            bench.controller.wake()
            await asyncio.sleep(0.05)
        assert bench.workers(), "it is idle with a job"
        lag = bench.controller.observer.lag["chat", "v1"]
        assert (lag.requests, lag.jobs) == (0, 1)
        await bench.set_state("chat", "retired")

        async def ended() -> bool:
            bench.controller.wake()
            return await it.result(ticket) is not None

        await bench.until(ended)
        result = await it.result(ticket)
        assert result is not None
        assert result.error is not None
        assert result.error.code == VersionRetired.code

    run_bench(work, tick_s=30.0, purge_after_s=0.1)


def test_backlog_adds_workers_up_to_the_maximum_and_the_least_loaded_goes_first(run_bench: Any) -> None:
    async def work(bench: Any) -> None:
        await bench.start()
        await bench.register("chat", max_replicas=3)
        await bench.available("chat")
        for _ in range(40):
            await bench.request("chat")
        await bench.until(lambda: len(bench.workers()) == 3)
        assert len(bench.scaler.workers) == 3
        await bench.clear_queue("chat")
        await bench.request("chat")
        await bench.until(lambda: len(bench.scaler.workers) == 1)
        assert bench.workers()

    run_bench(work, scale_down_window_s=0.3)


def test_a_killed_worker_is_replaced_at_once_and_the_version_stays_available(run_bench: Any) -> None:
    async def work(bench: Any) -> None:
        await bench.start()
        await bench.register("chat")
        await bench.available("chat")
        await bench.request("chat")
        for _ in range(4):
            await bench.until(bench.workers)
            (process,) = bench.scaler.workers.values()
            os.kill(process.pid, signal.SIGKILL)
            await bench.until(lambda process=process: bench.scaler.workers.keys() - {process.worker})
        assert await bench.state_is("chat", "available")
        assert "headrace_start_failures_total{" not in exposition(bench)

    run_bench(work)


def test_a_worker_that_says_it_never_can_fails_the_version_with_its_reason(run_bench: Any) -> None:
    async def work(bench: Any) -> None:
        await bench.start("permanent")
        await bench.register("chat")
        await bench.available("chat")
        await bench.request("chat")
        await bench.until(lambda: bench.state_is("chat", "failed"))
        assert (await bench.record("chat")).reason == "the weights are corrupt"
        await bench.until(lambda: purged(bench, "chat"))  # what nobody came for
        await bench.until(lambda: not bench.scaler.workers)
        assert 'start_failures_total{kind="permanent",model="chat",version="v1"} 1.0' in exposition(bench)

    run_bench(work)


async def purged(bench: Any, model: str) -> bool:
    return (await bench.consumer(model)).num_pending == 0


def exposition(bench: Any) -> str:
    from prometheus_client import generate_latest

    return generate_latest(bench.metrics.registry).decode()


def test_crashes_in_a_row_fail_the_version_with_exit_code_and_last_words(run_bench: Any) -> None:
    async def work(bench: Any) -> None:
        await bench.start("crash")
        await bench.register("chat")
        await bench.available("chat")
        await bench.request("chat")
        await bench.until(lambda: bench.state_is("chat", "failed"))
        assert (await bench.record("chat")).reason == "the worker exited with code 7: boom: no such kernel"
        assert len(list((bench.settings.data_path / "logs").glob("worker-*.log"))) == 2

    run_bench(work, start_failures_max=2)


def test_a_passing_failure_is_shown_and_tried_again_until_it_works(run_bench: Any) -> None:
    async def work(bench: Any) -> None:
        await bench.start("once")
        await bench.register("chat")
        await bench.available("chat")
        await bench.request("chat")

        async def shown() -> bool:
            return (await bench.record("chat")).reason == "the object store is away"

        await bench.until(shown)
        await bench.until(bench.workers)

        async def cleared() -> bool:
            record = await bench.record("chat")
            return (record.state, record.reason) == ("available", "")

        await bench.until(cleared)

    run_bench(work, start_failures_max=1, start_backoff_s=1.0)


def test_a_worker_that_does_not_become_active_in_time_is_killed_and_counted(run_bench: Any) -> None:
    async def work(bench: Any) -> None:
        await bench.start("slow")
        await bench.register("chat")
        await bench.available("chat")
        await bench.request("chat")
        await bench.until(lambda: bench.state_is("chat", "failed"))
        assert (await bench.record("chat")).reason == "the worker was not active within 0.3 s"

    run_bench(work, start_seconds_max=0.3, start_failures_max=1)


def test_a_worker_that_does_not_drain_is_killed_after_its_budget(
    run_bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("controller.fleet.KILL_MARGIN_S", 0.2)

    async def work(bench: Any) -> None:
        await bench.start("stubborn")
        await bench.register("chat", idle_seconds=0.2)
        await bench.available("chat")
        await bench.request("chat")
        await bench.until(bench.workers)
        (process,) = bench.scaler.workers.values()
        await bench.clear_queue("chat")
        await bench.until(lambda: not bench.scaler.workers)
        assert process.child.returncode == -signal.SIGKILL
        assert await bench.state_is("chat", "available")

    run_bench(work, drain_budget_s=0.3)


def test_workers_outlive_the_controller_and_the_next_one_adopts_and_drains_them(run_bench: Any) -> None:
    async def work(bench: Any) -> None:
        await bench.start()
        await bench.register("chat", idle_seconds=0.5)
        await bench.available("chat")
        await bench.request("chat")
        await bench.until(bench.workers)
        (process,) = bench.scaler.workers.values()
        await bench.stop()
        assert process.child.poll() is None
        await bench.start()
        await bench.until(lambda: process.worker in bench.scaler.workers)
        assert bench.scaler.workers[process.worker].child is None
        await bench.until(bench.workers)
        assert len(bench.scaler.workers) == 1
        await bench.clear_queue("chat")
        await bench.until(lambda: process.child.poll() is not None)
        assert process.child.returncode == 0
        await bench.until(lambda: not bench.scaler.workers)

    run_bench(work)


def test_a_nats_restart_holds_every_decision(run_bench: Any, nats_server: Any) -> None:
    async def work(bench: Any) -> None:
        await bench.start()
        await bench.register("chat", idle_seconds=1.0)
        await bench.available("chat")
        await bench.request("chat")
        await bench.until(bench.workers)
        before = set(bench.scaler.workers)
        await asyncio.to_thread(nats_server.kill)
        await asyncio.sleep(2.0)  # longer than the lease's TTL and the idle time: what is not heard is not gone
        assert set(bench.scaler.workers) == before
        await asyncio.to_thread(nats_server.start)
        await bench.until(lambda: bench.bus.connected and bench.controller.observer.lag)
        await bench.request("chat")
        await bench.until(bench.workers)
        assert set(bench.scaler.workers) == before
        await bench.clear_queue("chat")
        await bench.until(lambda: not bench.scaler.workers)

    run_bench(work, lease_ttl_s=1.5)


def test_a_stopped_worker_is_replaced_and_killed_when_it_stays_silent(run_bench: Any) -> None:
    async def work(bench: Any) -> None:
        await bench.start()
        await bench.register("chat")
        await bench.available("chat")
        await bench.request("chat")
        await bench.until(bench.workers)
        (process,) = bench.scaler.workers.values()
        os.kill(process.pid, signal.SIGSTOP)
        await bench.until(lambda: len(bench.scaler.workers) == 2)
        await bench.until(lambda: process.child.poll() is not None)
        assert process.child.returncode == -signal.SIGKILL
        await bench.until(lambda: process.worker not in bench.scaler.workers and bench.workers())
        assert len(bench.scaler.workers) == 1

    run_bench(work, lease_ttl_s=1.0)


def test_a_retired_version_loses_its_workers_and_its_consumer(run_bench: Any) -> None:
    async def work(bench: Any) -> None:
        await bench.start()
        await bench.register("chat")
        await bench.register("gone", min_replicas=1)
        await bench.until(bench.workers)
        await bench.request("gone")
        await bench.set_state("gone", "retired")
        await bench.until(lambda: not bench.scaler.workers)

        async def cleaned() -> bool:
            return await bench.consumer("gone") is None

        await bench.until(cleaned)
        assert ("gone", "v1") not in bench.controller.observer.lag  # what is not looked at any more is not known
        assert 'lag_messages{kind="pending",model="gone"' not in exposition(bench)
        assert await bench.clear_queue("gone") == 0
        assert await bench.consumer("chat") is not None

    run_bench(work)
