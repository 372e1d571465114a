"""A page of plots of one simulation (PNG). It needs matplotlib, which is an extra: pip install headrace[plots]."""

from pathlib import Path

from headrace.fleet.report import Result
from headrace.fleet.scenario import Sla
from shared.errors import Unsupported

STATES = {"active": "#2a9d8f", "starting": "#e9c46a", "draining": "#8d99ae"}


def draw(result: Result, sla: Sla, file: Path) -> None:
    """Raises Unsupported where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise Unsupported("plots need matplotlib: pip install 'headrace[plots]'") from error
    page = Figure(figsize=(10, 11), layout="constrained")
    axes = page.subplots(4, 1, sharex=True)
    page.suptitle(f"{result.scenario}: {result.profile}, {result.workers} workers, seed {result.seed}")
    at = [window["at_s"] for window in result.windows]
    for axis, name, target, what in (
        (axes[0], "ttft_p99_ms", sla.ttft_ms, "time to first token, p99 (ms)"),
        (axes[1], "tpot_p99_ms", sla.tpot_ms, "time per output token, p99 (ms)"),
    ):
        axis.plot(at, [window[name] for window in result.windows], color="#264653")
        axis.axhline(target, color="#e76f51", linestyle="--", label=f"SLA {target:g} ms")
        axis.set_ylabel(what)
        axis.set_ylim(bottom=0)
        axis.legend(loc="upper right")
    times = [sample.at_s for sample in result.timeline]
    axes[2].stackplot(
        times,
        [[sample.workers.get(state, 0) for sample in result.timeline] for state in STATES],
        labels=list(STATES),
        colors=list(STATES.values()),
    )
    for name in sorted({name for sample in result.timeline for name in sample.versions}):
        axes[2].plot(times, [sample.versions.get(name, 0) for sample in result.timeline], label=name)
    axes[2].set_ylabel("workers")
    axes[2].legend(loc="lower right")
    axes[3].plot(times, [sample.claimed for sample in result.timeline], label="claimed", color="#264653")
    axes[3].plot(times, [sample.queued for sample in result.timeline], label="queued", color="#e76f51")
    axes[3].set_ylabel("requests")
    axes[3].set_xlabel("seconds after the warm-up")
    axes[3].legend(loc="upper right")
    page.savefig(file, dpi=110)
