"""Rollouts in the simulator: the production's code decides, bad versions are found, good ones are left alone."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

import controller.rollout
import controller.tallies
import headrace.fleet.rollout
import shared.rollouts
from headrace.cli import app
from headrace.fleet.report import Result, RolloutResult
from headrace.fleet.scenario import RolloutSpec, Scenario
from headrace.fleet.simulation import simulate
from shared.errors import BadRequest
from shared.rollouts import Gates, Step
from shared.router import Router
from shared.tally import Tally

FILE = Path(__file__).parents[3] / "bench" / "fleet" / "rollouts.py"
HEALTHY_RUNS, FAULTY_RUNS = 8, 16  # of each kind; the thousand are in docs/rollouts.md


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fleet_rollouts", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def rolled(bench: ModuleType) -> Callable[..., Result]:
    def roll(kind: str, **changes: Any) -> Result:
        scenario = bench.scenario_of(kind, changes.pop("seed", 1))
        return simulate(with_rollout(scenario, **changes))

    return roll


def with_rollout(scenario: Scenario, **changes: Any) -> Scenario:
    assert scenario.rollout is not None
    return msgspec.structs.replace(scenario, rollout=msgspec.structs.replace(scenario.rollout, **changes))


def rollout_of(result: Result) -> RolloutResult:
    assert result.rollout is not None
    return result.rollout


def shares(result: Result) -> list[float]:
    return [event.pct for event in rollout_of(result).events]


# -- by the dozen ------------------------------------------------------------------------------------------------------

KINDS = {
    "healthy": (),
    "healthy, a burst x2 during the canary": (),
    "healthy, a slow GPU in stable": (),
    "healthy, lognormal lengths": (),
    "healthy, 3 requests a second": (),
    "healthy, 1% errors in both": (),
    "unloadable": ("ended by themselves", "failed"),
    "dies of its first request": ("ended by themselves",),
    "5% errors": ("error_rate",),
    "TTFT x3": ("ttft_p99",),
    "TPOT x2": ("tpot_p99", "ttft_p99"),
}


def test_all_kinds_are_run(bench: ModuleType) -> None:
    assert list(KINDS) == bench.KINDS


@pytest.mark.parametrize("kind", KINDS)
def test_good_versions_are_left_alone_and_bad_ones_are_found(bench: ModuleType, kind: str) -> None:
    reasons = KINDS[kind]
    ((_, runs),) = bench.all_runs([kind], FAULTY_RUNS if reasons else HEALTHY_RUNS, 1, 1)
    print(bench.row(kind, runs))
    assert bench.broken(kind, runs) == ""
    assert {run.state for run in runs} == {"rolled_back" if reasons else "promoted"}
    assert all(any(reason in run.why for reason in reasons) for run in runs if reasons)
    assert all(run.failed == 0 for run in runs)


def test_what_does_not_hold_is_said(bench: ModuleType) -> None:
    (good,) = [bench.Run(seed=1, state="promoted", why="", after_s=0, step=0, requests=0, failed=0, cpu_s=0)]
    back = msgspec.structs.replace(good, state="rolled_back")
    assert bench.broken("healthy", [good] * 99 + [back]) == bench.broken("5% errors", [good] + [back] * 99) == ""
    assert bench.broken("healthy", [good] * 98 + [back] * 2) == "healthy: 2 false alarms of 100"
    assert bench.broken("5% errors", [good] * 2 + [back] * 98) == "5% errors: 98 found of 100"
    assert "did not end" in bench.broken("healthy", [msgspec.structs.replace(good, state="baking")])
    assert "the canary did not answer" in bench.broken("healthy", [msgspec.structs.replace(good, failed=1)])


# -- nothing is written twice ------------------------------------------------------------------------------------------


def test_all_that_decides_is_the_production_s(monkeypatch: pytest.MonkeyPatch, rolled: Callable[..., Result]) -> None:
    simulated, calls = headrace.fleet.rollout, []
    used: list[tuple[Any, str, Any]] = [
        (simulated, "advance", controller.rollout.advance),
        (simulated, "floors", controller.rollout.floors),
        (simulated, "facts_of", controller.rollout.facts_of),
        (controller.rollout, "judge", controller.gates.judge),
        (simulated, "plan_of", shared.rollouts.plan_of),
        (simulated, "route_of", shared.rollouts.route_of),
        (controller.tallies.Tallies, "on_lease", None),
        (controller.tallies.Tallies, "of", None),
        (Tally, "note", None),
        (Router, "put_route", None),
    ]
    for owner, name, wanted in used:
        original = getattr(owner, name)
        assert wanted is None or original is wanted

        def counting(*arguments: Any, _original: Any = original, _name: str = name, **named: Any) -> Any:
            calls.append(_name)
            return _original(*arguments, **named)

        monkeypatch.setattr(owner, name, counting)
    rolled("TPOT x2")
    assert set(calls) == {name for _, name, _ in used}


@pytest.mark.parametrize(
    ("owner", "name", "instead", "what"),
    [
        (controller.rollout, "judge", lambda *arguments: [], lambda found: found.state == "promoted"),
        (Tally, "note", lambda *arguments: None, lambda found: found.state == "stepping"),
        (
            headrace.fleet.rollout,
            "advance",
            lambda deployment, *others: deployment,
            lambda found: found.state == "pending",
        ),
        (headrace.fleet.rollout, "floors", lambda *arguments: (0, 0), lambda found: found.state == "warming"),
        (
            headrace.fleet.rollout,
            "route_of",
            lambda deployment, route: route,
            lambda found: found.versions["v2"].finished == 0,
        ),
    ],
)
def test_what_production_does_is_what_is_simulated(
    monkeypatch: pytest.MonkeyPatch, bench: ModuleType, owner: Any, name: str, instead: Any, what: Callable[..., bool]
) -> None:
    scenario = msgspec.structs.replace(bench.scenario_of("5% errors", 2), seconds=40.0)
    monkeypatch.setattr(owner, name, instead)
    assert what(rollout_of(simulate(scenario)))


# -- what happens ------------------------------------------------------------------------------------------------------


def test_a_rollout_goes_step_by_step_and_nobody_notices(rolled: Callable[..., Result]) -> None:
    result = rolled("healthy")
    found = rollout_of(result)
    assert [event.state for event in found.events] == [
        *["pending", "warming"],
        *["stepping"] * 3,
        *["baking", "promoted"],
    ]
    assert shares(result) == [0, 0, 10, 50, 100, 100, 100]
    assert (result.unfinished, result.refused, found.why, found.caught) == (0, {}, "", None)
    assert (found.versions["v1"].failed, found.versions["v2"].failed) == (0, 0)
    assert found.versions["v1"].finished + found.versions["v2"].finished == result.requests > 1000
    early = [sample for sample in result.timeline if sample.at_s < found.events[1].at]
    assert all(set(sample.versions) == {"v1"} for sample in early)
    begun = found.events[2].at
    assert all(sample.versions["v2"] >= 1 for sample in result.timeline if sample.at_s >= begun)  # capacity first
    baked = [sample for sample in result.timeline if begun <= sample.at_s < found.events[-1].at]
    assert min(sample.versions["v1"] for sample in baked) >= 3  # 16 slots in use, 8 each, at 70%
    assert result.gpu_hours == pytest.approx(sum(each.gpu_hours for each in found.versions.values()), rel=1e-4)


def test_the_same_seed_gives_the_same_bytes(rolled: Callable[..., Result]) -> None:
    assert rolled("5% errors").encoded() == rolled("5% errors").encoded() != rolled("5% errors", seed=2).encoded()


def test_a_version_s_requests_are_answered_by_the_other_when_its_workers_die(rolled: Callable[..., Result]) -> None:
    result = rolled("dies of its first request")
    found = rollout_of(result)
    assert found.state == "rolled_back"
    assert found.rehomed >= 1
    assert (result.unfinished, result.refused) == (0, {})
    assert found.versions["v2"].finished == 0
    assert result.finished == result.requests


def test_only_what_it_answers_itself_fails(rolled: Callable[..., Result]) -> None:
    result = rolled("5% errors", share=0.5)
    found = rollout_of(result)
    assert found.caught is not None
    assert found.caught.step == 0
    assert (found.versions["v1"].failed, result.unfinished) == (0, 0)
    assert 5 < found.versions["v2"].failed == result.refused["engine_failed"]
    assert [each.gate for each in found.events[-2].evidence if each.breached] == ["error_rate"] * 2


def test_a_slow_version_that_no_gate_looks_at_gets_through(rolled: Callable[..., Result]) -> None:
    blind = Gates(tpot_p99=None, ttft_p99=None)
    found = rollout_of(rolled("TPOT x2", gates=blind))
    assert found.state == "promoted"
    assert found.versions["v2"].tpot_ms.p50 > 1.8 * found.versions["v1"].tpot_ms.p50
    late = rollout_of(rolled("TTFT x3", gates=blind))
    assert late.versions["v2"].ttft_ms.p50 == pytest.approx(3 * late.versions["v1"].ttft_ms.p50, rel=0.3)


def test_a_fixed_fleet_keeps_its_size_and_the_new_version_comes_on_top(bench: ModuleType) -> None:
    scenario = bench.scenario_of("healthy", 1).with_fleet(autoscale=False)
    result = simulate(scenario)
    found = rollout_of(result)
    assert found.state == "promoted"
    assert {sample.versions["v1"] for sample in result.timeline} == {4}
    assert found.workers_max > 4


def test_a_plan_that_is_none_is_refused_at_once(bench: ModuleType) -> None:
    with pytest.raises(BadRequest, match="the last one 100"):
        simulate(with_rollout(bench.calm(), steps=(Step(pct=10),)))
    never = simulate(msgspec.structs.replace(bench.calm(RolloutSpec(at_s=99.0)), seconds=2.0))
    assert never.rollout is None


SHOWN = """
traffic = [{ rate = 30, prompt = 200, output = 16 }]
fleet = { workers = 4, autoscale = true, kv_dtype = "8-bit", start_s = 2 }
seconds = 60
warmup_s = 2
[rollout]
at_s = 1
fault = "%s"
stop_s = 1
steps = [{ pct = 50, soak_seconds = 3 }, { pct = 100, soak_seconds = 3 }]
bake_seconds = 2
"""


@pytest.mark.parametrize(("fault", "what"), [("none", "promoted: baked"), ("unloadable", "ended by themselves")])
def test_a_rollout_is_shown(tmp_path: Path, fault: str, what: str) -> None:
    file = tmp_path / "rollout.toml"
    file.write_text(SHOWN % fault)
    ran = CliRunner().invoke(app, ["simulate", str(file)])
    assert "rollout: " in ran.output
    assert what in ran.output
    assert "v2" in ran.output
    assert ("found after" in ran.output) is (fault != "none")
