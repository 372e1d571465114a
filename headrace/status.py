"""`headrace status`: what runs, what waits, what is registered. Read from NATS, so it needs no ingress."""

import asyncio
import sys

import msgspec
from rich.console import Console
from rich.table import Table

from headrace.globals import Globals
from headrace.stack import state
from headrace.stack.state import ProcessState
from headrace.tuning import utc
from shared import deployment_views, deployments, records, registry, subjects
from shared.bus import Bus
from shared.records import Route, Signals, Version
from shared.rollouts import Deployment, Progress
from shared.settings import Settings

REASON_CHARACTERS_MAX = 100
COLUMNS = 300  # where there is no terminal


class QueueStatus(msgspec.Struct):
    pending: int  # stored, and no worker has it
    claimed: int  # delivered to a worker, not acked yet
    jobs: int = 0  # of detached work, whether a worker has them or not


class ModelStatus(msgspec.Struct):
    model: str
    version: str
    state: str
    source: str
    traffic_pct: float
    aliases: list[str]
    reason: str
    withdrawn: str = ""  # why nothing new goes to it: it was rolled back


class WorkerStatus(msgspec.Struct):
    id: str
    pid: int
    model: str
    version: str
    state: str
    running: int  # sequences in the batch
    claims: int  # messages held
    blocks_used: int
    blocks_total: int
    slots: int
    metrics_port: int
    fetched_bytes: int  # of its files, while they are fetched
    fetch_bytes: int  # of all of them
    reason: str


class ScalingStatus(msgspec.Struct):
    """The last decision on a version's workers."""

    model: str
    version: str
    at: float  # unix seconds
    desired: int
    spares: int
    reasons: list[str]
    signals: Signals


class RolloutStatus(msgspec.Struct):
    """A deployment that goes on."""

    deployment_id: str
    model: str
    version: str
    stable: str
    state: str
    step: int  # from 1; 0: no traffic yet
    steps_total: int
    traffic_pct: float
    waits_for: str | None  # None: no controller tells


class Status(msgspec.Struct):
    """What `headrace status --json` prints."""

    http: str | None
    nats: str
    queue: QueueStatus
    models: list[ModelStatus]
    workers: list[WorkerStatus]
    scaling: list[ScalingStatus]
    processes: dict[str, ProcessState]  # of the local stack
    rollouts: list[RolloutStatus] = []


async def collect(settings: Settings, stack: state.StackState | None) -> Status:
    """The status of the system that `settings` reach. Raises Unavailable when NATS does not answer."""
    bus = await Bus.connect(settings, "status")
    try:
        versions, routes = await asyncio.gather(registry.list_versions(bus), registry.list_routes(bus))
        leases = await registry.read_bucket(bus, subjects.WORKERS_BUCKET, records.LEASES)
        decisions = await registry.read_bucket(bus, subjects.DECISIONS_BUCKET, records.DECISIONS)
        queue = await _queue(bus, versions)
        going = [each for each in await deployments.list_deployments(bus) if not each.ended]
        told = [await deployment_views.find_progress(bus, each) for each in going]
    finally:
        await bus.close()
    return Status(
        http=stack.http if stack else None,
        nats=settings.nats_shown,
        queue=queue,
        models=[model_status(version, routes.get(version.model)) for version in versions],
        workers=[
            WorkerStatus(
                id=lease.worker,
                pid=lease.pid,
                model=lease.model,
                version=lease.version,
                state=lease.state,
                running=lease.running,
                claims=lease.claims,
                blocks_used=lease.blocks_used,
                blocks_total=lease.blocks_total,
                slots=lease.slots,
                metrics_port=lease.metrics_port,
                fetched_bytes=lease.fetched_bytes,
                fetch_bytes=lease.fetch_bytes,
                reason=lease.reason,
            )
            for lease in sorted(leases, key=lambda lease: lease.started)
        ],
        scaling=[
            ScalingStatus(
                model=decision.model,
                version=decision.version,
                at=decision.at,
                desired=decision.desired,
                spares=decision.spares,
                reasons=decision.reasons,
                signals=decision.signals,
            )
            for decision in sorted(decisions, key=lambda decision: (decision.model, decision.version))
        ],
        processes=dict(stack.processes) if stack else {},
        rollouts=[rollout_status(each, progress) for each, progress in zip(going, told, strict=True)],
    )


def rollout_status(deployment: Deployment, progress: Progress | None) -> RolloutStatus:
    return RolloutStatus(
        deployment_id=deployment.id,
        model=deployment.model,
        version=deployment.version,
        stable=deployment.stable,
        state=deployment.state,
        step=deployment.step + 1,
        steps_total=len(deployment.steps),
        traffic_pct=deployment.basis_points / 100,
        waits_for=progress.waits_for if progress is not None else None,
    )


def model_status(version: Version, route: Route | None) -> ModelStatus:
    weights = {weight.version: weight.basis_points for weight in route.weights} if route else {}
    aliases = route.aliases if route else {}
    return ModelStatus(
        model=version.model,
        version=version.version,
        state=version.state,
        source=version.source,
        traffic_pct=weights.get(version.version, 0) / 100,
        aliases=sorted(alias for alias, target in aliases.items() if target == version.version),
        reason=version.reason,
        withdrawn=route.withdrawn.get(version.version, "") if route else "",
    )


def show(context: Globals, as_json: bool) -> None:
    """Print the status. Raises StackError when no stack runs and no NATS is named."""
    settings = context.settings()
    status = asyncio.run(collect(settings, state.running(settings.data_path)))
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(status), indent=2).decode())
        return
    terminal = console()
    terminal.print(f"http {status.http or '-'}   nats {status.nats}")
    jobs = f", {status.queue.jobs} jobs" if status.queue.jobs else ""
    terminal.print(f"queue: {status.queue.pending} pending, {status.queue.claimed} claimed{jobs}")
    terminal.print(models_table(status.models))
    if status.workers:
        table = Table("worker", "pid", "model", "state", "running", "claims", "blocks", "metrics", box=None)
        for worker in status.workers:
            table.add_row(
                worker.id,
                str(worker.pid),
                f"{worker.model}@{worker.version}" if worker.model else "-",
                " ".join(filter(None, (worker.state, fetch_progress(worker), short(worker.reason)))),
                f"{worker.running}/{worker.slots}",
                str(worker.claims),
                f"{worker.blocks_used}/{worker.blocks_total}",
                str(worker.metrics_port),
            )
        terminal.print(table)
    else:
        terminal.print(without_workers(status))
    for each in status.rollouts:
        terminal.print(rollout_line(each), markup=False, highlight=False)
    if decided := in_service(status):
        terminal.print(scaling_table(decided))


def rollout_line(rollout: RolloutStatus) -> str:
    at = f", step {rollout.step} of {rollout.steps_total}" if rollout.step else ""
    waits = "no controller tells what it waits for" if rollout.waits_for is None else f"waits for {rollout.waits_for}"
    return (
        f"rollout {rollout.deployment_id}: {rollout.model}@{rollout.version} over {rollout.stable}: {rollout.state}{at}, "
        f"{rollout.traffic_pct:g}%{'' if rollout.waits_for == '' else f'; {waits}'}"
    )


def console() -> Console:
    """Where tables go: as wide as the terminal, or, to a file or a pipe, wide enough for a row to be a line."""
    return Console(width=None if sys.stdout.isatty() else COLUMNS)


def without_workers(status: Status) -> str:
    """Why no worker is there, in a line."""
    if all(model.state == "retired" for model in status.models):
        return "no model: `headrace models push` registers one"
    if any(each.desired or each.spares for each in status.scaling):
        return "no worker yet: one is wanted, and not there"
    return "no worker: the next request starts one"


def in_service(status: Status) -> list[ScalingStatus]:
    """The decisions on versions that were not removed; `models decisions` still has those of the others."""
    kept = {(model.model, model.version) for model in status.models if model.state != "retired"}
    return [each for each in status.scaling if (each.model, each.version) in kept]


def scaling_table(decisions: list[ScalingStatus]) -> Table:
    table = Table("model", "wanted", "spares", "because", "since", box=None)
    for each in decisions:
        name = f"{each.model}@{each.version}"
        table.add_row(name, str(each.desired), str(each.spares), ", ".join(each.reasons), utc(each.at))
    return table


def fetch_progress(worker: WorkerStatus) -> str:
    """How much of its files a starting worker has, "43%"; nothing once they are all here."""
    if worker.state != "starting" or worker.fetched_bytes >= worker.fetch_bytes:
        return ""
    return f"{100 * worker.fetched_bytes // worker.fetch_bytes}%"


def models_table(models: list[ModelStatus]) -> Table:
    table = Table("model", "version", "state", "traffic", "aliases", "source", "reason", box=None)
    for model in models:
        table.add_row(
            model.model,
            model.version,
            model.state,
            f"{model.traffic_pct:g}%",
            " ".join(model.aliases),
            model.source,
            short(model.reason or model.withdrawn),
        )
    return table


async def _queue(bus: Bus, versions: list[Version]) -> QueueStatus:
    lane = subjects.LANE_FAST
    names = [
        subjects.consumer(lane, subjects.requests_of_lane(version.model, version.version, lane)) for version in versions
    ]
    backlogged = await bus.subject_counts(subjects.REQ_STREAM, subjects.BACKLOGGED)
    names += [subjects.consumer(subjects.LANE_FAIR, subject) for subject in backlogged]
    consumers = await asyncio.gather(*(bus.consumer_info(subjects.REQ_STREAM, name) for name in names))
    claimed = sum(consumer.num_ack_pending for consumer in consumers if consumer is not None)
    stored = (await bus.stream_info(subjects.REQ_STREAM)).messages
    jobs = (await bus.stream_info(subjects.JOB_STREAM)).messages
    return QueueStatus(pending=max(0, stored - claimed), claimed=claimed, jobs=jobs)


def short(reason: str) -> str:
    """The first line of a reason, as much as a table has room for; `models show --json` has all of it."""
    line = reason.strip().split("\n")[0]
    return line if len(line) <= REASON_CHARACTERS_MAX else line[: REASON_CHARACTERS_MAX - 1] + "…"
