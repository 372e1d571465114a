"""Deployments as people and programs see them, over HTTP and with `--json`: every field is there, whatever its value."""

from typing import TYPE_CHECKING

from msgspec import Struct

from shared import rollouts, subjects, webhooks
from shared.rollouts import Deployment, Event, Gates, Progress, State, Step, Strategy
from shared.webhooks import WebhookShown

if TYPE_CHECKING:
    from shared.bus import Bus


class DeploymentEntry(Struct, frozen=True, kw_only=True):
    """A deployment as it is now, without its history."""

    deployment_id: str
    model: str
    version: str
    stable: str  # the version that had the traffic before
    strategy: Strategy
    state: State
    paused_in: State | None  # of paused: where it goes on
    step: int  # of the traffic's steps, from 1; 0: no traffic yet
    steps_total: int
    traffic_pct: float  # that it gives to the new version
    reason: str  # of the last change
    created: float  # unix seconds
    since: float  # unix seconds: when the state or the step began


class DeploymentDetail(DeploymentEntry, frozen=True, kw_only=True):
    """A deployment, whole. `progress` is null when no controller tells: it has ended, or none leads."""

    steps: tuple[Step, ...]
    gates: Gates
    bake_seconds: float
    events: list[Event]
    progress: Progress | None
    webhook: WebhookShown | None  # without its secret


def entry(deployment: Deployment) -> DeploymentEntry:
    return DeploymentEntry(
        deployment_id=deployment.id,
        model=deployment.model,
        version=deployment.version,
        stable=deployment.stable,
        strategy=deployment.strategy,
        state=deployment.state,
        paused_in=deployment.paused_in,
        step=deployment.step + 1,
        steps_total=len(deployment.steps),
        traffic_pct=deployment.basis_points / 100,
        reason=deployment.reason,
        created=deployment.created,
        since=deployment.since,
    )


def detail(deployment: Deployment, progress: Progress | None) -> DeploymentDetail:
    shown = entry(deployment)
    return DeploymentDetail(
        **{name: getattr(shown, name) for name in shown.__struct_fields__},
        steps=deployment.steps,
        gates=deployment.gates,
        bake_seconds=deployment.bake_seconds,
        events=deployment.events,
        progress=progress,
        webhook=webhooks.shown(deployment.webhook) if deployment.webhook is not None else None,
    )


async def find_progress(bus: "Bus", deployment: Deployment) -> Progress | None:
    """What the controller said last of a deployment that goes on; None: nothing of late. Raises Unavailable."""
    if deployment.ended:
        return None
    key = subjects.key(deployment.id)
    found = await bus.kv_get(subjects.ROLLOUTS_BUCKET, key)
    return rollouts.progress_at(key, found[0]) if found else None
