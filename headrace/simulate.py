"""`headrace simulate` and `headrace plan`: the fleet simulator on the command line."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from headrace.fleet import plots, search
from headrace.fleet.report import Result, RolloutResult, Spread
from headrace.fleet.scenario import Scenario, read
from headrace.fleet.simulation import OnProgress, simulate


def show_simulation(
    file: Path,
    seed: int | None,
    workers: int | None,
    seconds: float | None,
    times: float,
    as_json: bool,
    plot: Path | None,
) -> None:
    """Run a scenario and print what came of it. Exit status 1 if the SLA is not held."""
    scenario = changed(read(file), seed, workers, seconds, times)
    with _progress(scenario.name) as on_progress:
        result = simulate(scenario, on_progress)
    if plot is not None:
        plots.draw(result, scenario.sla, plot)
    if as_json:
        sys.stdout.buffer.write(result.encoded() + b"\n")
    else:
        _show(result, scenario)
    if not result.holds:
        raise typer.Exit(1)


def show_plan(file: Path, seed: int | None, seconds: float | None, as_json: bool) -> None:
    """Search for the smallest fleet. Exit status 1 if there is none."""
    scenario = changed(read(file), seed, None, seconds, 1.0)
    console = Console(stderr=True)

    def on_run(result: Result) -> None:
        ttft, tpot = result.ttft_ms.p99, result.tpot_ms.p99
        holds = "holds" if result.holds else "does not hold"
        console.print(
            f"{result.workers} workers, {result.seconds:g} s: TTFT p99 {ttft:.0f} ms, TPOT {tpot:.1f} ms: {holds}"
        )

    found = search.smallest(scenario, on_run)
    if as_json:
        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
    else:
        _show_found(found, scenario)
    if found.workers is None:
        raise typer.Exit(1)


def changed(scenario: Scenario, seed: int | None, workers: int | None, seconds: float | None, times: float) -> Scenario:
    """A scenario with what the command line says; `workers` is of the scenario that is `times` as large."""
    if times != 1:
        scenario = scenario.times_larger(times)
    if workers is not None:
        scenario = scenario.with_fleet(workers=workers)
    if seed is not None:
        scenario = msgspec.structs.replace(scenario, seed=seed)
    if seconds is not None:
        scenario = msgspec.structs.replace(scenario, seconds=seconds)
    return scenario


@contextmanager
def _progress(name: str) -> Iterator[OnProgress]:
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(name, total=1.0)
        yield lambda share: progress.update(task, completed=share)


def _show(result: Result, scenario: Scenario) -> None:
    console = Console()
    console.print(
        f"[bold]{result.scenario}[/bold]: {result.profile}, {result.workers} workers of {result.slots} slots,"
        f" {result.seconds:g} s, seed {result.seed}",
        highlight=False,
        soft_wrap=True,
    )
    table = Table("", "mean", "p50", "p90", "p99", "max", "SLA (p99)")
    rows: list[tuple[str, Spread, str]] = [
        ("time to first token, ms", result.ttft_ms, f"{scenario.sla.ttft_ms:g}"),
        ("time per output token, ms", result.tpot_ms, f"{scenario.sla.tpot_ms:g}"),
        ("gap between two tokens, ms", result.gap_ms, ""),
        ("wait for the batch, ms", result.queue_ms, ""),
    ]
    for name, spread, target in rows:
        values = (spread.mean, spread.p50, spread.p90, spread.p99, spread.max)
        table.add_row(name, *(f"{value:.1f}" for value in values), target)
    console.print(table)
    refused = ", ".join(f"{count} {reason}" for reason, count in result.refused.items()) or "none"
    for line in (
        f"the SLA {'holds' if result.holds else 'does not hold'}: {result.attainment:.2%} of the requests met it,"
        f" {result.goodput:.1f} a second",
        f"requests: {result.requests}, finished {result.finished}, cancelled {result.cancelled},"
        f" unfinished {result.unfinished}, refused: {refused}, delivered more than once: {result.redelivered}",
        f"batch: {result.batch:.1f} sequences on average; preemptions: {result.preemptions};"
        f" prompt tokens found in the cache: {result.cached_share:.0%}",
        f"fleet: {result.gpu_hours:.2f} GPU-hours, {result.usd:.2f} USD,"
        f" {result.usd_per_million_tokens:.3f} USD per million tokens out; {result.starts} starts, {result.drains} drains",
        f"tenants: {len(result.tenants)}, Jain's index of their service by weight {result.jain:.3f}",
    ):
        console.print(line, highlight=False, soft_wrap=True)
    if result.rollout is not None:
        _show_rollout(result.rollout, console)


def _show_rollout(found: RolloutResult, console: Console) -> None:
    console.print(f"[bold]rollout[/bold]: {found.state}; {found.workers_max} workers at most", highlight=False)
    for event in found.events:
        console.print(
            f"  {event.at:8.2f} s  {event.pct:5g}%  {event.state}: {event.reason}", highlight=False, soft_wrap=True
        )
    if found.caught is not None:
        console.print(
            f"  found after {found.caught.after_s:.2f} s and {found.caught.requests} requests of the new version;"
            f" {found.rehomed} that waited for it went to the old one",
            highlight=False,
            soft_wrap=True,
        )
    table = Table(
        "version", "finished", "failed", "outside the SLA", "TTFT p50, p99, ms", "TPOT p50, p99, ms", "GPU-hours"
    )
    for name, each in found.versions.items():
        ttft, tpot = (f"{spread.p50:.1f}, {spread.p99:.1f}" for spread in (each.ttft_ms, each.tpot_ms))
        table.add_row(name, str(each.finished), str(each.failed), str(each.late), ttft, tpot, f"{each.gpu_hours:.2f}")
    console.print(table)


def _show_found(found: search.Found, scenario: Scenario) -> None:
    console = Console()
    guess = found.estimate
    if guess is not None:
        console.print(
            f"closed form: {guess.requests_per_s:g} requests/s a worker at a batch of {guess.batch} ({guess.bound}):"
            f" {guess.saturated} workers saturated, {guess.queueing} with room for waiting, {guess.utilised} at"
            f" {scenario.settings.target_utilisation:.0%}",
            highlight=False,
            soft_wrap=True,
        )
    if found.workers is None:
        console.print(f"[bold]no fleet holds it[/bold]: {found.reason}", highlight=False, soft_wrap=True)
        return
    hour = found.workers * scenario.profile().usd_per_hour
    console.print(
        f"simulated: [bold]{found.workers} workers[/bold], {hour:.0f} USD an hour; {found.reason}", highlight=False
    )
    _show(found.result, scenario)
