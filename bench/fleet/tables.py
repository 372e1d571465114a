"""The tables of docs/capacity.md (Markdown), each by one command.

    python bench/fleet/tables.py reference                # the smallest fleets of the reference scenario; minutes of one core
    python bench/fleet/tables.py cap docs/batch-cap.svg   # batches of at most 20, 45, 80; and a plot over the fleet's size
    python bench/fleet/tables.py gpus                     # GPUs and dtypes, by the roofline
    python bench/fleet/tables.py trouble                  # burst, loss, flood, day, trouble
    python bench/fleet/tables.py trouble10                # the same at ten times the size, for a shorter time

cap and gpus: a quarter of the traffic; GPUs are given for all of it. The plot needs matplotlib: pip install 'headrace[plots]'.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import NamedTuple

import msgspec

from headrace.fleet.report import Result
from headrace.fleet.scenario import Scenario, read
from headrace.fleet.search import estimate, smallest
from headrace.fleet.simulation import simulate

HERE = Path(__file__).parent
SHARE = 4  # of the traffic: one in so many requests
SECONDS = 30.0
BEYOND = 1  # fleets larger than the smallest one that holds
FLEETS_MAX = 14


class Case(NamedTuple):
    name: str
    profile: str
    slots: int
    paced: bool
    colour: str


CASES = (
    Case("20, A100 40 GB", "a100-40g-13b", 20, True, "#8d99ae"),
    Case("45, A100 40 GB", "a100-40g-13b", 45, True, "#2a9d8f"),
    Case("80, paced, A100 80 GB", "a100-80g-13b", 80, True, "#264653"),
    Case("80, no pacer, A100 80 GB", "a100-80g-13b", 80, False, "#e76f51"),
)


class Run(NamedTuple):
    scenario: str
    workers: int | None = None  # None: as it says
    times: float = 1.0
    seconds: float | None = None  # None: as it says


RUNS = {
    "reference": (
        Run("reference", 98),
        Run("reference", 99),
        Run("reference-fp16", 162),
        Run("reference-fp16", 163),
        Run("reference-fp16", 168),
    ),
    "trouble": (
        Run("burst"),
        Run("loss"),
        Run("flood"),
        Run("trouble"),
        Run("day"),
        Run("slow-day"),
        Run("rollout", times=0.25),
    ),
    "trouble10": (
        Run("burst", times=10, seconds=45),
        Run("loss", times=10, seconds=25),
        Run("flood", times=10, seconds=60),
        Run("trouble", times=10, seconds=70),
        Run("day", times=10, seconds=200),
    ),
}


class Gpu(NamedTuple):
    gpu: str
    weights: str
    kv_dtype: str
    slots: int  # what the closed form says fits the pacer's target


GPUS = (
    Gpu("a100-40g", "fp16", "8-bit", 32),
    Gpu("a100-80g", "fp16", "fp16", 36),
    Gpu("a100-80g", "8-bit", "8-bit", 96),
    Gpu("h100-80g", "fp16", "fp16", 90),
    Gpu("h100-80g", "8-bit", "8-bit", 192),
    Gpu("h200", "8-bit", "8-bit", 256),
    Gpu("l40s", "8-bit", "8-bit", 24),
)


def scenario_of(case: Case) -> Scenario:
    reference = read(HERE / "reference.toml").times_larger(1 / SHARE)
    target = reference.engine.tpot_ms_target if case.paced else None
    scenario = reference.with_fleet(profile=case.profile).with_engine(slots=case.slots, tpot_ms_target=target)
    return msgspec.structs.replace(scenario, seconds=SECONDS)


def fleets(case: Case) -> list[Result]:
    """From one that is too small on, until some have held one after the other: of those the first is the answer."""
    scenario, results = scenario_of(case), []
    guess = estimate(scenario)
    assert guess is not None
    for workers in range(guess.saturated - 1, guess.saturated - 1 + FLEETS_MAX):
        results.append(simulate(scenario.with_fleet(workers=workers)))
        if len(results) > BEYOND and all(each.holds for each in results[-1 - BEYOND :]):
            break
    return results


def row(case: Case, results: list[Result]) -> str:
    found = results[-1 - BEYOND]
    if not all(each.holds for each in results[-1 - BEYOND :]):
        return f"| {case.name} | more than {results[-1].workers * SHARE} | | | | |"
    hour = found.workers * SHARE * scenario_of(case).profile().usd_per_hour
    return (
        f"| {case.name} | {found.workers * SHARE} | {found.batch:.0f} | {found.ttft_ms.p99:.0f} | {found.tpot_ms.p99:.1f}"
        f" | {hour:.0f} |"
    )


def draw(found: dict[Case, list[Result]], file: Path) -> None:
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "batch cap"
    page = Figure(figsize=(9, 3.6), layout="constrained")
    axes = page.subplots(1, 2)
    sla = scenario_of(CASES[0]).sla
    for case, results in found.items():
        gpus = [each.workers * SHARE for each in results]
        axes[0].plot(gpus, [each.ttft_ms.p99 for each in results], color=case.colour, marker=".", label=case.name)
        axes[1].plot(gpus, [each.tpot_ms.p99 for each in results], color=case.colour, marker=".", label=case.name)
    axes[0].set_yscale("log")
    for axis, what, target in ((axes[0], "time to first token", sla.ttft_ms), (axes[1], "time per token", sla.tpot_ms)):
        axis.axhline(target, color="black", linestyle="--", linewidth=0.8)
        axis.set_xlabel("GPUs for 1,000 requests/s")
        axis.set_ylabel(f"{what}, p99, ms")
    axes[1].set_ylim(bottom=15)
    axes[1].legend(title="batch, at most", fontsize="small")
    page.savefig(file, metadata={"Date": None})


def runs(name: str) -> None:
    """Each with the command that repeats it."""
    print("| `headrace simulate` | holds | requests | p99 TTFT / TPOT, ms | within the SLA | GPU-hours | CPU s |")
    print("|---|---|---|---|---|---|---|")
    for run in RUNS[name]:
        scenario, options = read(HERE / f"{run.scenario}.toml"), f"bench/fleet/{run.scenario}.toml"
        if run.times != 1:
            scenario, options = scenario.times_larger(run.times), f"{options} --times {run.times:g}"
        if run.workers is not None:
            scenario, options = scenario.with_fleet(workers=run.workers), f"{options} --workers {run.workers}"
        if run.seconds is not None:
            scenario = msgspec.structs.replace(scenario, seconds=run.seconds)
            options = f"{options} --seconds {run.seconds:g}"
        begin = time.process_time()
        found = simulate(scenario)
        print(
            f"| `{options}` | {'yes' if found.holds else 'no'} | {found.requests} | {found.ttft_ms.p99:.0f} / "
            f"{found.tpot_ms.p99:.1f} | {found.attainment:.2%} | {found.gpu_hours:.2f} | {time.process_time() - begin:.0f} |",
            flush=True,
        )


def cap(file: Path) -> None:
    found = {}
    print("| batch, at most | GPUs | batch | p99 TTFT, ms | p99 TPOT, ms | USD an hour |\n|---|---|---|---|---|---|")
    for case in CASES:
        found[case] = fleets(case)
        print(row(case, found[case]), flush=True)
        for each in found[case]:
            print(f"{each.workers * SHARE}: {each.ttft_ms.p99:.0f} / {each.tpot_ms.p99:.1f}", end="; ", file=sys.stderr)
        print(file=sys.stderr, flush=True)
    draw(found, file)


def gpus() -> None:
    print(
        "| GPU | weights, KV | slots | closed form | GPUs | p99 TTFT / TPOT, ms | USD an hour | USD per million tokens |"
    )
    print("|---|---|---|---|---|---|---|---|")
    reference = read(HERE / "roofline.toml").times_larger(1 / SHARE)
    for each in GPUS:
        scenario = reference.with_fleet(gpu=each.gpu, weights=each.weights, kv_dtype=each.kv_dtype)
        scenario = msgspec.structs.replace(scenario.with_engine(slots=each.slots), seconds=SECONDS)
        found = smallest(scenario)
        assert found.workers is not None, found.reason
        assert found.estimate is not None
        count, result = found.workers * SHARE, found.result
        print(
            f"| {each.gpu} | {each.weights}, {each.kv_dtype} | {each.slots} | {found.estimate.saturated * SHARE} | {count}"
            f" | {result.ttft_ms.p99:.0f} / {result.tpot_ms.p99:.1f} | {count * scenario.profile().usd_per_hour:.0f}"
            f" | {result.usd_per_million_tokens:.2f} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["cap", "gpus", *RUNS])
    parser.add_argument("plot", type=Path, nargs="?", default=Path("batch-cap.svg"), help="of the cap")
    arguments = parser.parse_args()
    if arguments.what == "cap":
        cap(arguments.plot)
    elif arguments.what == "gpus":
        gpus()
    else:
        runs(arguments.what)


if __name__ == "__main__":
    main()
