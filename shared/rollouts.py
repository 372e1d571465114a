"""Deployments: how a version is to take over a model's traffic, how far it has come, and the route that follows. Pure.

A deployment is written by whoever creates or commands it and by the controller that leads, always by compare-and-set; each
write raises `serial`. The route that follows from it carries id and serial: a late writer cannot bring an older one back.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from shared import records, refusals
from shared.errors import BadRequest, DeploymentState, Internal
from shared.records import ALL_TRAFFIC, STABLE, Route, Weight
from shared.stored import Stored, json
from shared.webhooks import Webhook

CANARY = "canary"  # the alias of the version that a rollout is about, while it lasts
STEPS_MAX = 100
EVENTS_MAX = 200
SECONDS_MAX = 7 * 24 * 3600.0

Strategy = Literal["canary", "ramp", "blue_green", "immediate"]
State = Literal[
    "pending", "warming", "stepping", "baking", "paused", "promoted", "rolling_back", "rolled_back", "failed"
]
ENDED: tuple[State, ...] = ("promoted", "rolled_back", "failed")
Command = Literal["rollback", "pause", "resume", "promote"]

Seconds = Annotated[float, Meta(ge=0, le=SECONDS_MAX)]
Share = Annotated[float, Meta(ge=0, le=1)]
NUMBER_MAX = 1e9  # ratios and milliseconds: JSON has no infinity


class Step(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A share of the traffic, and how long and for how many of its requests it is looked at before the next one."""

    pct: Annotated[float, Meta(gt=0, le=100)]
    soak_seconds: Seconds = 60.0
    requests_min: Annotated[int, Meta(ge=0, le=1_000_000)] = 100

    @property
    def basis_points(self) -> int:
        return round(self.pct * 100)


class RateGate(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A share of the requests. Breached when it is surely more than stable's and `difference_max`, or more than `max`."""

    difference_max: Share | None = 0.01
    max: Share | None = None


class LatencyGate(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A 99th percentile. Breached when it is surely more than `ratio_max` times stable's + `slack_ms`, or than `max_ms`."""

    ratio_max: Annotated[float, Meta(ge=1, le=NUMBER_MAX)] | None = 1.5
    slack_ms: Annotated[float, Meta(ge=0, le=NUMBER_MAX)] = 5.0
    max_ms: Annotated[float, Meta(gt=0, le=NUMBER_MAX)] | None = None


class RefusalGate(RateGate, frozen=True, kw_only=True, forbid_unknown_fields=True):
    difference_max: Share | None = 0.05


class TtftGate(LatencyGate, frozen=True, kw_only=True, forbid_unknown_fields=True):
    slack_ms: Annotated[float, Meta(ge=0, le=NUMBER_MAX)] = 50.0


class TpotGate(LatencyGate, frozen=True, kw_only=True, forbid_unknown_fields=True):
    ratio_max: Annotated[float, Meta(ge=1, le=NUMBER_MAX)] | None = 1.25
    slack_ms: Annotated[float, Meta(ge=0, le=NUMBER_MAX)] = 2.0


class Gates(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a canary must keep, against stable at the same time; null: no such gate. The test is in docs/rollouts.md."""

    error_rate: RateGate | None = RateGate()  # answers of 500 and more
    refusal_rate: RefusalGate | None = RefusalGate()  # answers of 400 to 498
    ttft_p99: TtftGate | None = TtftGate()
    tpot_p99: TpotGate | None = TpotGate()
    crashes_max: Annotated[int, Meta(ge=0)] | None = (
        1  # workers that end by themselves; one more, and it is rolled back
    )
    samples_min: Annotated[int, Meta(ge=1)] = 30  # of each version, before it is compared


class NewDeployment(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `POST /v1/deployments` takes. Without `steps`, those of the strategy."""

    model: str
    version: str
    strategy: Strategy = "canary"
    steps: Annotated[tuple[Step, ...], Meta(max_length=STEPS_MAX)] | None = None
    gates: Gates = Gates()
    bake_seconds: Seconds | None = None  # at 100%, with the old version still loaded; None: the strategy's
    webhook: Webhook | None = None  # is told of each change of the state or the step


class Finding(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a gate saw. Rates are shares, times milliseconds."""

    gate: str
    breached: bool
    canary: float
    limit: float
    samples: int
    window: str  # step | deployment: since when
    stable: float | None = None
    stable_samples: int = 0


class Event(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A change of a deployment's state, with what it rests on."""

    at: float  # unix seconds
    state: State
    pct: float  # of the traffic that goes to the new version from then on
    reason: str
    evidence: list[Finding] = []


class VersionProgress(Struct, frozen=True, kw_only=True):
    """Of one of a deployment's two versions."""

    active: int  # workers that serve
    needed: int  # workers that its share of the traffic takes, or the next one's while they are waited for
    ended: int  # requests since the step began


class Progress(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a deployment that goes on is at, said by the controller every second or so: in the bucket `rollouts` under
    key(id), with a TTL."""

    deployment: str
    at: float  # unix seconds
    waits_for: str  # "": for nothing
    canary: VersionProgress
    stable: VersionProgress
    findings: list[Finding] = []


class Deployment(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A deployment as it is now, in the bucket `deployments` under key(id)."""

    id: str
    model: str
    version: str
    stable: str  # the version that had the traffic before
    strategy: Strategy
    steps: tuple[Step, ...]
    gates: Gates
    bake_seconds: float
    state: State = "pending"
    step: int = -1  # which one it is at; -1: no traffic yet
    since: float = 0.0  # unix seconds: when the state or the step began
    created: float = 0.0  # unix seconds
    serial: int = 1
    paused_in: State | None = None  # of paused: where it goes on
    hurried: bool = False  # `promote`: neither soak nor bake nor gates are waited for
    reason: str = ""  # of the last change
    events: list[Event] = []
    webhook: Webhook | None = None
    tenant: str = ""  # whose the webhook is

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    @property
    def phase(self) -> State:
        """The state, or the one that it was paused in."""
        return self.paused_in if self.state == "paused" and self.paused_in is not None else self.state

    @property
    def basis_points(self) -> int:
        """Of the traffic, for the new version."""
        if self.phase == "stepping":
            return self.steps[self.step].basis_points
        return ALL_TRAFFIC if self.phase in ("baking", "promoted") else 0


DEFAULT_STEPS: dict[Strategy, tuple[Step, ...]] = {
    "canary": tuple(Step(pct=pct) for pct in (1, 5, 25, 100)),
    "ramp": tuple(Step(pct=pct, soak_seconds=15.0, requests_min=50) for pct in range(10, 101, 10)),
    "blue_green": (Step(pct=100),),
    "immediate": (Step(pct=100, soak_seconds=0.0, requests_min=0),),
}
DEFAULT_BAKE_S: dict[Strategy, float] = {"canary": 120.0, "ramp": 120.0, "blue_green": 300.0, "immediate": 0.0}


def checked(asked: NewDeployment) -> NewDeployment:
    """What is asked for, as it was: a struct that was made in Python has not met its own bounds. Raises BadRequest."""
    try:
        return msgspec.convert(msgspec.to_builtins(asked), NewDeployment)
    except msgspec.ValidationError as error:
        param, problem = refusals.read(str(error), NewDeployment)
        raise BadRequest(f"{param}: {problem}" if param else problem, param=param or None) from None


def plan_of(asked: NewDeployment, id_: str, stable: str, now: float, tenant: str = "") -> Deployment:
    """The deployment that a tenant asks for, about to begin; `now` in unix seconds. Raises BadRequest."""
    steps = asked.steps or DEFAULT_STEPS[asked.strategy]
    if asked.steps and (asked.strategy == "immediate" or (asked.strategy == "blue_green" and len(steps) > 1)):
        raise BadRequest(f"steps: {asked.strategy} gives all the traffic at once", param="steps")
    if asked.version == stable:
        raise BadRequest(f"{asked.model}@{stable} has all the traffic already", param="version")
    shares = [step.basis_points for step in steps]
    if shares != sorted(set(shares)) or shares[-1] != ALL_TRAFFIC or shares[0] < 1:
        raise BadRequest("steps: each needs a higher `pct` than the one before, the last one 100", param="steps")
    return noted(
        Deployment(
            id=id_,
            model=asked.model,
            version=asked.version,
            stable=stable,
            strategy=asked.strategy,
            steps=steps,
            gates=asked.gates,
            bake_seconds=DEFAULT_BAKE_S[asked.strategy] if asked.bake_seconds is None else asked.bake_seconds,
            created=now,
            serial=0,
            webhook=asked.webhook,
            tenant=tenant if asked.webhook is not None else "",
        ),
        "pending",
        "created",
        now,
    )


def noted(
    deployment: Deployment,
    state: State,
    reason: str,
    now: float,
    *,
    step: int | None = None,
    evidence: list[Finding] | None = None,
    paused_in: State | None = None,
    hurried: bool | None = None,
) -> Deployment:
    """The deployment in another state or step, with the event that tells of it."""
    moved = replace(
        deployment,
        state=state,
        step=deployment.step if step is None else step,
        since=deployment.since if "paused" in (state, deployment.state) else now,
        paused_in=paused_in,
        hurried=deployment.hurried if hurried is None else hurried,
        reason=reason,
        serial=deployment.serial + 1,
    )
    event = Event(at=now, state=state, pct=moved.basis_points / 100, reason=reason, evidence=evidence or [])
    return replace(moved, events=[*deployment.events, event][-EVENTS_MAX:])


def commanded(deployment: Deployment, what: Command, why: str, now: float) -> Deployment:
    """The deployment as somebody wants it: the same one where it is so already. Raises DeploymentState."""
    state = deployment.state
    if what == "rollback" and state in ("rolling_back", "rolled_back"):
        return deployment
    if what == "rollback" and state != "failed":
        return noted(deployment, "rolling_back", why, now)
    if deployment.ended or state == "rolling_back":
        raise DeploymentState(f"{deployment.id} is {state}: there is nothing to {what}")
    if what == "pause":
        return deployment if state == "paused" else noted(deployment, "paused", why, now, paused_in=state)
    if what == "resume":
        if state != "paused":
            raise DeploymentState(f"{deployment.id} is {state}, not paused")
        return noted(deployment, deployment.phase, f"resumed {why}", now)
    return noted(deployment, deployment.phase, f"to be promoted {why}", now, hurried=True)


def route_of(deployment: Deployment, route: Route) -> Route:
    """The model's route as the deployment wants it. Both versions keep their place: raising a weight only moves keys over."""
    new, old = deployment.version, deployment.stable
    aliases = {name: target for name, target in route.aliases.items() if name != CANARY}
    withdrawn = {name: why for name, why in route.withdrawn.items() if name != new}
    weights = [Weight(old, ALL_TRAFFIC)]
    phase = deployment.phase
    if phase in ("rolling_back", "rolled_back"):
        withdrawn[new] = f"deployment {deployment.id} was rolled back: {reason_of_rollback(deployment)}"
        if aliases.get(STABLE) == new:  # it had been promoted
            aliases[STABLE] = old
    elif phase == "promoted":
        aliases[STABLE] = new
        weights = [Weight(new, ALL_TRAFFIC)]
    elif phase != "failed":
        aliases[CANARY] = new
        share = deployment.basis_points
        weights = [each for each in (Weight(old, ALL_TRAFFIC - share), Weight(new, share)) if each.basis_points]
    return replace(
        route,
        aliases=aliases,
        weights=weights,
        withdrawn=withdrawn,
        deployment=deployment.id,
        serial=deployment.serial,
        rolling=not deployment.ended,
    )


def reason_of_rollback(deployment: Deployment) -> str:
    """Why it was rolled back, or is being."""
    return next((event.reason for event in reversed(deployment.events) if event.state == "rolling_back"), "")


def is_newer(deployment: Deployment, route: Route) -> bool:
    """Whether the route does not say what the deployment says, and is not of a later one."""
    mine, written = _number(deployment.id), _number(route.deployment)
    return mine > written or (mine == written and deployment.serial > route.serial)


ID_PREFIX = "d-"


def id_of(number: int) -> str:
    return f"{ID_PREFIX}{number}"


def _number(id_: str) -> int:
    return number_of(id_) if id_ else 0


def number_of(id_: str) -> int:
    """The place of a deployment in the order in which they were created. Raises Internal for what is no id."""
    digits = id_.removeprefix(ID_PREFIX)
    if digits == id_ or not digits.isascii() or not digits.isdigit():
        raise Internal(f"{id_} is no deployment's id")
    return int(digits)


def _named(deployment: Deployment) -> tuple[str]:
    number_of(deployment.id)
    return (deployment.id,)


DEPLOYMENTS = Stored(json(Deployment), "a deployment", _named)
PROGRESS = Stored(json(Progress), "the progress of a deployment", lambda each: (each.deployment,))

deployment_at, progress_at = DEPLOYMENTS.at, PROGRESS.at
encode = records.encode
