"""A rollout as it moves, in the terminal: the events as they come, and below them weights, workers and gates as they are.

Where no terminal is, the events alone, one a line; when they cease for a while, what is waited for.
"""

import asyncio
import contextlib
import time
from collections import Counter
from typing import Any

import msgspec
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from headrace.deployments import amount, headline
from headrace.status import console
from headrace.tuning import utc
from shared import records, rollouts, subjects
from shared.bus import Bus
from shared.errors import DeploymentNotFound
from shared.records import Lease, Route
from shared.rollouts import Deployment, Event, Finding, Progress

REFRESH_S = 1.0
REFRESH_MIN_S = 0.1
QUIET_S = 10.0  # without an event


class Scene:
    """What is known of one deployment. `changed` is set by each change; leases and progress that are not renewed go."""

    def __init__(self, id_: str, ttl_s: float) -> None:
        self.deployment: Deployment | None = None
        self.changed = asyncio.Event()
        self._id, self._ttl_s = id_, ttl_s
        self._routes: dict[str, Route] = {}
        self._leases: dict[str, tuple[Lease, float]] = {}
        self._progress: tuple[Progress, float] | None = None

    def on_deployment(self, key: str, value: bytes | None) -> None:
        change = rollouts.DEPLOYMENTS.change(key, value) if key == subjects.key(self._id) else None
        if change is not None:
            self.deployment = change.record
            self.changed.set()

    def on_progress(self, key: str, value: bytes | None) -> None:
        change = rollouts.PROGRESS.change(key, value) if key == subjects.key(self._id) else None
        if change is not None and change.record is not None:
            self._progress = (change.record, time.monotonic())
            self.changed.set()

    def on_route(self, key: str, value: bytes | None) -> None:
        change = records.ROUTES.change(key, value)
        if change is not None and change.record is not None:
            self._routes[change.names[0]] = change.record
            self.changed.set()

    def on_lease(self, key: str, value: bytes | None) -> None:
        change = records.LEASES.change(key, value)
        if change is None:
            return
        if change.record is None:
            self._leases.pop(key, None)
        else:
            self._leases[key] = (change.record, time.monotonic())

    @property
    def progress(self) -> Progress | None:
        if self._progress is None or time.monotonic() - self._progress[1] > self._ttl_s:
            return None
        return self._progress[0]

    def workers(self, model: str, version: str) -> str:
        """The version's workers by state, "2 active, 1 starting"."""
        now = time.monotonic()
        live = [lease for lease, heard in self._leases.values() if now - heard <= self._ttl_s]
        states = Counter(lease.state for lease in live if (lease.model, lease.version) == (model, version))
        return ", ".join(f"{count} {state}" for state, count in sorted(states.items())) or "none"

    def weight(self, model: str, version: str) -> float:
        """Percent of the model's traffic, as its route has it."""
        route = self._routes.get(model)
        return sum(each.basis_points for each in route.weights if each.version == version) / 100 if route else 0.0

    def found(self) -> Deployment:
        """Raises DeploymentNotFound."""
        if self.deployment is None:
            raise DeploymentNotFound(f"there is no deployment {self._id}", param="deployment_id")
        return self.deployment


async def follow(bus: Bus, id_: str, as_json: bool) -> Deployment:
    """Show a deployment until it ends; how it ended. Raises DeploymentNotFound and Unavailable."""
    scene = Scene(id_, bus.settings.lease_ttl_s)
    terminal = console()
    live = Live(console=terminal, auto_refresh=False) if terminal.is_terminal and not as_json else None
    watches = []

    def say(line: str) -> None:
        terminal.print(line, markup=False, highlight=False, soft_wrap=True)

    try:
        for bucket, callback in (
            (subjects.ROUTES_BUCKET, scene.on_route),
            (subjects.WORKERS_BUCKET, scene.on_lease),
            (subjects.ROLLOUTS_BUCKET, scene.on_progress),
            (subjects.DEPLOYMENTS_BUCKET, scene.on_deployment),
        ):
            watches.append(await bus.watch(bucket, callback))
        with live or contextlib.nullcontext():
            told, told_at, waits = 0, time.monotonic(), ""
            while True:
                scene.changed.clear()
                deployment = scene.found()
                for event in events_after(deployment, told):
                    say(_as_json(deployment, event) if as_json else event_line(deployment, event))
                    told_at, waits = time.monotonic(), ""
                told = deployment.serial
                if live is not None:
                    live.update(render(scene), refresh=True)
                elif not as_json and time.monotonic() - told_at > QUIET_S:
                    told_at, before, waits = time.monotonic(), waits, _waits(deployment, scene.progress)
                    if waits != before:
                        share = deployment.basis_points / 100
                        now = Event(at=time.time(), state=deployment.state, pct=share, reason=waits)
                        say(event_line(deployment, now))
                if deployment.ended:
                    return deployment
                await asyncio.sleep(REFRESH_MIN_S)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(REFRESH_S):
                        await scene.changed.wait()
    finally:
        for watch in watches:
            await watch.close()


def events_after(deployment: Deployment, serial: int) -> list[Event]:
    """The events since the deployment had that serial: each change adds to both. The oldest may not be kept any more."""
    new = deployment.serial - serial
    return deployment.events[-new:] if new > 0 else []


def event_line(deployment: Deployment, event: Event) -> str:
    return f"{utc(event.at)} {deployment.id} {event.state} {event.pct:g}%: {event.reason}"


def _as_json(deployment: Deployment, event: Event) -> str:
    fields: dict[str, Any] = msgspec.to_builtins(event)
    return msgspec.json.encode({"deployment_id": deployment.id} | fields).decode()


def render(scene: Scene) -> RenderableType:
    """The whole picture of this moment."""
    deployment, progress = scene.found(), scene.progress
    parts: list[RenderableType] = [Text(headline(deployment), style="bold"), Text(_waits(deployment, progress))]
    versions = Table("version", "traffic", "requests in the step", "serve", "needed", "workers", box=None)
    for name, of in ((deployment.version, "canary"), (deployment.stable, "stable")):
        at = getattr(progress, of) if progress is not None else None
        versions.add_row(
            f"{deployment.model}@{name}",
            f"{scene.weight(deployment.model, name):g}%",
            str(at.ended) if at else "-",
            str(at.active) if at else "-",
            str(at.needed) if at else "-",
            scene.workers(deployment.model, name),
        )
    parts.append(versions)
    if progress is not None and progress.findings:
        parts.append(_gates(progress.findings))
    return Group(*parts)


def _waits(deployment: Deployment, progress: Progress | None) -> str:
    if deployment.ended:
        return deployment.reason
    if progress is None:
        return "no controller tells what it waits for"
    return f"waits for {progress.waits_for}" if progress.waits_for else "waits for nothing"


def _gates(findings: list[Finding]) -> Table:
    table = Table("gate", "since", "canary", "limit", "stable", "requests", "", box=None)
    for each in findings:
        table.add_row(
            each.gate,
            each.window,
            amount(each.gate, each.canary),
            amount(each.gate, each.limit),
            amount(each.gate, each.stable),
            f"{each.samples} / {each.stable_samples}",
            Text("breached", style="red") if each.breached else Text("holds", style="green"),
        )
    return table
