"""A controller without hands: workers that others started are given what is wanted, and drained when it is not."""

import asyncio
import contextlib
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from controller.decisions import history
from controller.loop import Controller
from controller.metrics import Metrics
from controller.scalers.choose import SCALERS, make_scaler
from shared.bus import Bus
from shared.settings import Settings, SettingsError, to_environment

STAND_IN = Path(__file__).parent / "stand_in_worker.py"


async def start_by_hand(settings: Settings, worker: str, behaviour: str = "serve") -> asyncio.subprocess.Process:
    """What systemd does: a warm worker."""
    environment = os.environ | to_environment(settings) | {"HEADRACE_SPAWNED_AT": repr(time.time())}
    return await asyncio.create_subprocess_exec(
        sys.executable, str(STAND_IN), behaviour, "--worker-id", worker, env=environment
    )


def test_a_warm_worker_of_others_is_assigned_and_drained_and_what_is_missing_is_no_error(
    run_bench: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def work(bench: Any) -> None:
        settings = bench.settings
        bus = await Bus.connect(settings, "controller")
        controller = Controller(bus, settings, make_scaler(settings), Metrics(), lambda _version: None)
        bench.controller = controller
        running = asyncio.create_task(controller.run())
        processes = [await start_by_hand(settings, worker) for worker in ("w1", "w2")]
        try:
            await bench.until(lambda: bench.workers("warm") == ["w1", "w2"])
            await bench.register("chat", idle_seconds=0.5)
            await bench.available("chat")
            for _ in range(40):
                await bench.request("chat")
            await bench.until(lambda: bench.workers() == ["w1", "w2"])

            async def more_than_there_are() -> bool:
                decisions = await history(bench.bus, "chat", "v1")
                return bool(decisions) and decisions[-1].desired > 2

            await bench.until(more_than_there_are)
            processes.append(await start_by_hand(settings, "w3"))
            await bench.until(lambda: bench.workers() == ["w1", "w2", "w3"])
            await bench.clear_queue("chat")
            assert [await process.wait() for process in processes] == [0, 0, 0]
            assert await bench.state_is("chat", "available")
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
            controller.stop()
            await running
            await bus.close()
        assert [record.message for record in caplog.records if record.levelno >= logging.ERROR] == []

    run_bench(work, scaler="static", scale_down_window_s=0.3)


@pytest.mark.parametrize("behaviour", ["permanent", "once"])
def test_a_failure_of_a_worker_of_others_is_judged_like_any(run_bench: Any, behaviour: str) -> None:
    async def work(bench: Any) -> None:
        settings = bench.settings
        bus = await Bus.connect(settings, "controller")
        bench.controller = Controller(bus, settings, make_scaler(settings), Metrics(), lambda _version: None)
        running = asyncio.create_task(bench.controller.run())
        processes = []
        try:
            await bench.register("chat", min_replicas=1)
            processes.append(await start_by_hand(settings, "w1", behaviour))
            if behaviour == "permanent":
                await bench.until(lambda: bench.state_is("chat", "failed"))
                assert (await bench.record("chat")).reason == "the weights are corrupt"
                processes.append(await start_by_hand(settings, "w2", behaviour))
                await bench.until(lambda: bench.workers("warm") == ["w2"])  # nothing more is tried with it
                return
            await bench.until(lambda: bench.controller._starts["chat", "v1"].reason)
            processes.append(await start_by_hand(settings, "w2", behaviour))
            await bench.until(bench.workers)
            await bench.until(lambda: not bench.controller._starts["chat", "v1"].reason)
            assert await bench.state_is("chat", "available")
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
            bench.controller.stop()
            await running
            await bus.close()

    run_bench(work, scaler="static")


@pytest.mark.parametrize("name", SCALERS)
def test_the_settings_name_the_scaler(name: str, tmp_path: Path) -> None:
    scaler = make_scaler(Settings(scaler=name, data_dir=str(tmp_path)))
    assert not scaler.workers
    assert scaler.makes_workers is (name != "static")
    assert scaler.reap() == []


def test_an_unknown_scaler_is_refused_with_the_names_that_there_are() -> None:
    with pytest.raises(SettingsError, match="process, kubernetes, static"):
        make_scaler(Settings(scaler="swarm"))


def test_no_worker_can_be_started_without_hands() -> None:
    with pytest.raises(OSError, match="others start the workers"):
        make_scaler(Settings(scaler="static")).start("chat", "v1")
