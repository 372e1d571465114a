"""Replays of `bench/fleet/scaling.py` at a small scale: the autoscaler beside plain scalers, with bounds on what it costs."""

import importlib.util
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

from headrace.fleet.report import Result
from headrace.fleet.scenario import Burst, Scenario

FILE = Path(__file__).parents[3] / "bench" / "fleet" / "scaling.py"


@pytest.fixture(scope="module")
def scaling() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fleet_scaling", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def replay(scaling: ModuleType, name: str, seconds: float, scale: float = 0.5) -> Scenario:
    found: Scenario = msgspec.structs.replace(scaling.replays(scale)[name], seconds=seconds)
    return found


def most(result: Result) -> int:
    return max(sum(sample.workers.values()) for sample in result.timeline)


def test_under_steady_load_nobody_is_late_and_the_fleet_is_no_larger_than_it_has_to_be(scaling: ModuleType) -> None:
    scenario = replay(scaling, "steady", 90.0)
    result = scaling.run(scenario, None)
    assert (result.late, result.unfinished) == (0, 0)
    assert result.starts <= 2
    assert result.gpu_hours * 3600 <= 90 * 3  # 44 slots are in use of 45 to a worker: two, at 70% of them
    plain = scaling.run(scenario, scaling.scalers()["pending / 10, 300 s"])
    assert plain.late == 0


def test_a_spike_is_met_with_a_bounded_number_of_starts_and_is_over_in_bounded_time(scaling: ModuleType) -> None:
    scenario = replay(scaling, "spike", 135.0, scale=0.2)
    (traffic,) = scenario.traffic
    burst = Burst(at_s=60.0, seconds=75.0, times=10.0)
    scenario = msgspec.structs.replace(scenario, traffic=[msgspec.structs.replace(traffic, bursts=[burst])])
    result = scaling.run(scenario, None)
    assert result.unfinished == 0
    start_s, drain_s = 24.1, 0.5 * 24.1
    recovered = [each for each in result.windows if each["at_s"] > 60 + start_s + 2 * drain_s + 10]
    assert max(each["ttft_p99_ms"] for each in recovered) < 500
    steady = 2 * 10 * 4.4 / (0.7 * 45)
    assert steady <= most(result) <= 2 + 6 * steady
    plain = scaling.run(scenario, scaling.scalers()["all / 31, 60 s"])
    assert result.late <= 1.2 * plain.late
    assert result.gpu_hours < plain.gpu_hours


def test_nothing_is_taken_away_while_the_queue_is_not_known(scaling: ModuleType) -> None:
    scenario = replay(scaling, "dead metrics", 170.0, scale=0.3)
    result = scaling.run(scenario, None)
    assert (result.late, result.unfinished) == (0, 0)
    counts = [sum(sample.workers.values()) for sample in result.timeline if 60.5 < sample.at_s < 150]
    assert len(set(counts)) == 1


def test_what_a_dead_worker_holds_is_replaced_before_it_comes_back(scaling: ModuleType) -> None:
    scenario = replay(scaling, "dead worker", 130.0, scale=0.5)
    result = scaling.run(scenario, None)
    assert result.unfinished == 0
    assert result.redelivered > 0
    assert result.late <= 0.02 * result.requests
    assert most(result) <= 4
