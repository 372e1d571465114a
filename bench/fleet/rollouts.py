"""Rollouts by the thousand: does a bad version get caught, and is a good one left alone? One seeded simulation each.

    python bench/fleet/rollouts.py --runs 1000 --seed 1

Each is a rollout of tens of seconds over a fleet of a few workers: the production's machine, gates, counts, routes,
autoscaler and scheduler (`headrace simulate` shows a single one). Prints a table; exit status 1 if a bound does not hold: at
most 1% false alarms where nothing is wrong, at least 99% found where something is, and no request failed but those that the
new version answered.
"""

import argparse
import multiprocessing
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext

import msgspec
import numpy as np

from headrace.fleet.report import Result
from headrace.fleet.scenario import Burst, Fault, FleetSpec, Length, RolloutSpec, Scenario, Traffic
from headrace.fleet.simulation import simulate
from shared.records import EngineSettings
from shared.rollouts import Step
from shared.settings import Settings

WARMUP_S = 4.0
LEAD_S = 2.0  # of the measured time, before the rollout
RATE = 40.0  # requests a second
FALSE_MAX, FOUND_MIN = 0.01, 0.99  # shares of the runs
PLAN = RolloutSpec(
    at_s=LEAD_S,
    steps=(
        Step(pct=10, soak_seconds=5, requests_min=40),
        Step(pct=50, soak_seconds=8, requests_min=200),
        Step(pct=100, soak_seconds=5, requests_min=250),
    ),
    bake_seconds=5,
    stop_s=1.0,
)


def calm(rollout: RolloutSpec = PLAN) -> Scenario:
    """A fleet of four of 6 slots, 13 in use on average, and a rollout over half a minute."""
    return Scenario(
        name="rollout",
        traffic=[Traffic(rate=RATE, tenants=5, prompt=200, output=16)],
        warmup_s=WARMUP_S,
        seconds=120.0,
        fleet=FleetSpec(
            workers=4, profile="roofline", gpu="a100-40g", model="13b", autoscale=True, min_workers=1, start_s=2.0
        ),
        engine=EngineSettings(slots=8, prefix_cache="off"),
        settings=Settings(scale_down_window_s=10.0),
        rollout=rollout,
    )


def faulty(fault: str) -> Scenario:
    return calm(msgspec.structs.replace(PLAN, fault=fault))


def in_a_burst() -> Scenario:
    """Twice the traffic for as long as the second step lasts, about."""
    burst = Burst(at_s=LEAD_S + 9, seconds=8, times=2)
    return _with(calm(), traffic=[Traffic(rate=RATE, tenants=5, prompt=200, output=16, bursts=[burst])])


def with_a_slow_gpu() -> Scenario:
    return _with(calm(), faults=[Fault(kind="slow_gpu", at_s=0.0, count=1, times=2.0)])


def of_all_lengths() -> Scenario:
    prompt, output = Length(mean=200, spread=1.0, max=2000), Length(mean=16, spread=1.0, max=300)
    return _with(calm(), traffic=[Traffic(rate=RATE, tenants=5, prompt=prompt, output=output)])


def with_little_traffic() -> Scenario:
    """Three requests a second: a worker, and few samples."""
    steps = tuple(msgspec.structs.replace(step, requests_min=20) for step in PLAN.steps or ())
    few = _with(
        calm(msgspec.structs.replace(PLAN, steps=steps)), traffic=[Traffic(rate=3.0, tenants=5, prompt=200, output=16)]
    )
    return _with(few, seconds=600.0).with_fleet(workers=1)


def with_errors_in_both() -> Scenario:
    return calm().with_fleet(errors=0.01)


def _with(scenario: Scenario, **changes: object) -> Scenario:
    return msgspec.structs.replace(scenario, **changes)


HEALTHY = {
    "healthy": calm,
    "healthy, a burst x2 during the canary": in_a_burst,
    "healthy, a slow GPU in stable": with_a_slow_gpu,
    "healthy, lognormal lengths": of_all_lengths,
    "healthy, 3 requests a second": with_little_traffic,
    "healthy, 1% errors in both": with_errors_in_both,
}
FAULTS = {
    "unloadable": "unloadable",
    "dies of its first request": "fatal",
    "5% errors": "errors",
    "TTFT x3": "ttft",
    "TPOT x2": "tpot",
}
KINDS = [*HEALTHY, *FAULTS]


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """What one rollout came to."""

    seed: int
    state: str
    why: str
    after_s: float
    step: int
    requests: int  # of the canary, until it was rolled back
    failed: (
        int  # by anybody but the canary's own answers: refused, left over, or failed by stable beyond its own errors
    )
    cpu_s: float


def scenario_of(kind: str, seed: int) -> Scenario:
    scenario = HEALTHY[kind]() if kind in HEALTHY else faulty(FAULTS[kind])
    return _with(scenario, seed=seed)


def run(job: tuple[str, int]) -> Run:
    kind, seed = job
    begin = time.process_time()
    result = simulate(scenario_of(kind, seed))
    found = result.rollout
    assert found is not None
    caught = found.caught
    return Run(
        seed=seed,
        state=found.state,
        why=found.why,
        after_s=caught.after_s if caught else 0.0,
        step=caught.step if caught else 0,
        requests=caught.requests if caught else 0,
        failed=_failed(result),
        cpu_s=time.process_time() - begin,
    )


def _failed(result: Result) -> int:
    answered = result.refused.get("engine_failed", 0)  # by whichever version, as it does of its own
    return result.unfinished + sum(result.refused.values()) - answered


def all_runs(kinds: Sequence[str], runs: int, seed: int, processes: int) -> Iterator[tuple[str, list[Run]]]:
    """The runs of each kind, whose seeds begin with `seed`."""
    with multiprocessing.Pool(processes) if processes > 1 else nullcontext() as pool:
        for kind in kinds:
            jobs = [(kind, each) for each in range(seed, seed + runs)]
            yield kind, pool.map(run, jobs, chunksize=4) if pool else list(map(run, jobs))


HEAD = (
    "| kind | runs | rolled back | at step (none, 1, 2, ..) | canary requests, p50 / p99 | seconds, p50 / p99 "
    "| failed beyond | CPU s a run |\n|---|---|---|---|---|---|---|---|"
)


def row(kind: str, runs: Sequence[Run]) -> str:
    back = [each for each in runs if each.state == "rolled_back"]
    steps = [sum(each.step == step for each in back) for step in range(-1, len(PLAN.steps or ()))]
    requests, seconds = (
        f"{np.percentile(values, 50):.3g} / {np.percentile(values, 99):.3g}" if values else ""
        for values in ([each.requests for each in back], [each.after_s for each in back])
    )
    return (
        f"| {kind} | {len(runs)} | {len(back)} | {', '.join(map(str, steps)) if back else ''} | {requests} | {seconds} "
        f"| {sum(each.failed for each in runs)} | {sum(each.cpu_s for each in runs) / len(runs):.2f} |"
    )


def broken(kind: str, runs: Sequence[Run]) -> str:
    """The bound that does not hold, or ""."""
    back = sum(each.state == "rolled_back" for each in runs)
    undecided = sum(each.state not in ("rolled_back", "promoted") for each in runs)
    if undecided:
        return f"{kind}: {undecided} rollouts did not end"
    if failed := sum(each.failed for each in runs):
        return f"{kind}: {failed} requests failed that the canary did not answer"
    if kind in HEALTHY and back > FALSE_MAX * len(runs):
        return f"{kind}: {back} false alarms of {len(runs)}"
    if kind in FAULTS and back < FOUND_MIN * len(runs):
        return f"{kind}: {back} found of {len(runs)}"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000, help="of each kind")
    parser.add_argument("--seed", type=int, default=1, help="of the first one")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--kind", choices=KINDS, action="append")
    parser.add_argument("--why", action="store_true", help="of each rollback that was not due")
    arguments = parser.parse_args()
    print(HEAD)
    problems = []
    for kind, runs in all_runs(arguments.kind or KINDS, arguments.runs, arguments.seed, arguments.processes):
        print(row(kind, runs), flush=True)
        if problem := broken(kind, runs):
            problems.append(problem)
        if arguments.why:
            for each in runs:
                if (each.state == "rolled_back") == (kind in HEALTHY):
                    print(f"    seed {each.seed}: {each.state} {each.why}", file=sys.stderr)
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
