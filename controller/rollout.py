"""The rollout machine: from what is known of a deployment to what it becomes. Pure: facts and the time in.

    pending -> warming -> stepping 1 .. n -> baking -> promoted
                  any of these -> rolling_back -> rolled_back        paused and back; promoted -> rolling_back by hand

No share of the traffic is given before workers for it serve, and stable keeps what it would need for all of it until the new
version has baked. Gates are looked at in every state with traffic, paused ones too.
"""

import math
from collections import deque
from collections.abc import Sequence

from msgspec import Struct, field

from controller.autoscaler import ROUNDING, Policy, Sample, VersionFacts, load, remember, slots_of
from controller.fleet import Member
from controller.gates import Window, judge
from controller.tallies import Counted
from shared.records import ALL_TRAFFIC, Version
from shared.rollouts import Deployment, Finding, Step, noted, reason_of_rollback
from shared.tally import Tally

PASSED = "gates passed"
LINGER_S = 10.0  # without workers, until what is still queued is left to expire


class Facts(Struct, frozen=True, kw_only=True):
    """What is known of a deployment's two versions. Times are seconds."""

    state: str = "available"  # of the new version's record; "deleted" when there is none
    state_reason: str = ""
    active: int = 0  # workers of the new version that serve
    workers: int = 0  # there are of it, whatever they do
    open_requests: int | None = 0  # of the new version, queued or claimed; None: not known
    work: float = 0.0  # slots that the load of both versions asks for, at its latest peak
    utilisation: float = 0.7  # of the slots, that is aimed at
    slots: int = 0  # of a worker of the new version, 0 while unknown
    stable_slots: int = 0
    replicas_max: int = 1  # of the new version
    stable_max: int = 1
    cold_start_s: float | None = None  # of the new version's workers
    crashes: int = 0  # of its workers, while they started or served
    last_crash: str = ""
    canary_step: Tally = field(default_factory=Tally)  # since the step began
    stable_step: Tally = field(default_factory=Tally)
    canary_all: Tally = field(default_factory=Tally)  # since the deployment began
    stable_all: Tally = field(default_factory=Tally)
    canary_slices: tuple[Tally, ...] = ()  # of all, by time
    stable_slices: tuple[Tally, ...] = ()


def facts_of(
    canary: VersionFacts | None,
    stable: VersionFacts | None,
    workers: Sequence[Member],
    record: Version | None,
    crashes: Sequence[str],
    canary_counts: Counted,
    stable_counts: Counted,
    work: "Work",
    now: float,
) -> Facts:
    """What is known of the new version, `canary`, and the old one. `workers` are the new one's, `crashes` how those that ended
    by themselves did. `now` is on the clock of the versions' facts.
    """
    return Facts(
        state=record.state if record else "deleted",
        state_reason=record.reason if record else "",
        active=sum(member.state == "active" and member.claim for member in workers),
        workers=len(workers),
        open_requests=canary.lag.total if canary and canary.lag else None,
        work=work.peak([each for each in (canary, stable) if each is not None], now),
        utilisation=work.policy.target_utilisation,
        slots=round(slots_of(canary)) if canary else 0,
        stable_slots=round(slots_of(stable)) if stable else 0,
        replicas_max=canary.max_replicas if canary else 1,
        stable_max=stable.max_replicas if stable else 1,
        cold_start_s=canary.cold_start_s if canary else None,
        crashes=len(crashes),
        last_crash=crashes[-1] if crashes else "",
        canary_step=canary_counts.step,
        stable_step=stable_counts.step,
        canary_all=canary_counts.all,
        stable_all=stable_counts.all,
        canary_slices=canary_counts.slices,
        stable_slices=stable_counts.slices,
    )


class Work:
    """What the load of both versions together asks for, at its latest peak. The sum of the peaks of each would count twice
    what moves from the one to the other.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._history: deque[Sample] = deque()

    def peak(self, versions: Sequence[VersionFacts], now: float) -> float:
        """Slots; within the window in which the autoscaler takes nothing away."""
        window_s = max([self.policy.down_window_s, *(each.cold_start_s or 0.0 for each in versions)])
        remember(self._history, Sample(now, sum(load(each, self.policy)[0] for each in versions)), window_s)
        return self._history[0].work


def replicas_for(facts: Facts, basis_points: int) -> int:
    """Workers of the new version that such a share of the traffic takes; at least one, and at most what it may have."""
    work = facts.work * basis_points / ALL_TRAFFIC
    need = math.ceil(work / (facts.slots * facts.utilisation) - ROUNDING) if facts.slots else 1
    return min(max(1, need), max(1, facts.replicas_max))


def floors(deployment: Deployment, facts: Facts, now: float) -> tuple[int, int]:
    """Replicas that the new and the old version have to have, whatever their load of the moment asks for."""
    phase = deployment.phase
    if deployment.ended or phase == "pending" or deployment.strategy == "immediate":
        return 0, 0
    need = math.ceil(facts.work / (facts.stable_slots * facts.utilisation) - ROUNDING) if facts.stable_slots else 1
    stable = min(max(1, need), facts.stable_max) if facts.work > 0 else 0
    if phase == "rolling_back":
        return 0, stable
    if phase == "warming":
        return replicas_for(facts, deployment.steps[0].basis_points), stable
    share = deployment.basis_points
    following = _following(deployment)
    if phase == "stepping" and following is not None and deployment.state != "paused":
        lead_s = 1.5 * facts.cold_start_s if facts.cold_start_s is not None else 30.0
        if deployment.hurried or now - deployment.since >= deployment.steps[deployment.step].soak_seconds - lead_s:
            share = following.basis_points
    return replicas_for(facts, share), stable


def advance(deployment: Deployment, facts: Facts, now: float) -> Deployment:
    """The deployment as of `now` (unix seconds): the same one, or one change further."""
    if deployment.ended:
        return deployment
    if deployment.state == "rolling_back":
        left_alone = facts.workers == 0 and now - deployment.since >= LINGER_S
        if facts.open_requests == 0 or left_alone:
            return noted(deployment, "rolled_back", reason_of_rollback(deployment), now)
        return deployment
    trouble, evidence = _trouble(deployment, facts)
    if trouble:
        return noted(deployment, "rolling_back", trouble, now, evidence=evidence)
    match deployment.state:
        case "pending" if facts.state == "available":
            if deployment.strategy == "immediate":
                return noted(deployment, "promoted", "immediate: nothing is waited for", now)
            first = replicas_for(facts, deployment.steps[0].basis_points)
            return noted(deployment, "warming", f"workers to be loaded before any traffic: {first}", now)
        case "warming" if facts.active >= replicas_for(facts, deployment.steps[0].basis_points):
            return noted(deployment, "stepping", f"workers that serve: {facts.active}", now, step=0)
        case "stepping" if not waits_for(deployment, facts, now):
            found = [] if deployment.hurried else findings(deployment, facts)
            reason = "promoted by hand" if deployment.hurried else PASSED
            if _following(deployment) is None:
                return noted(deployment, "baking", reason, now, evidence=found)
            return noted(deployment, "stepping", reason, now, step=deployment.step + 1, evidence=found)
        case "baking" if not waits_for(deployment, facts, now):
            reason = "promoted by hand" if deployment.hurried else "baked"
            return noted(deployment, "promoted", reason, now, evidence=findings(deployment, facts))
    return deployment


def waits_for(deployment: Deployment, facts: Facts, now: float) -> str:
    """What the deployment waits for in its state, in words; "": for nothing."""
    phase = deployment.phase
    if deployment.ended:
        return ""
    if deployment.state == "paused":
        return "`resume`, `promote` or `rollback`"
    if phase == "rolling_back":
        return f"{facts.open_requests} requests that run" if facts.open_requests else ""
    if phase == "pending":
        return "the version to be available" if facts.state != "available" else ""
    if phase == "warming":
        return _lacks(facts, deployment.steps[0])
    soaked_s = now - deployment.since
    if phase == "baking":
        left_s = 0.0 if deployment.hurried else deployment.bake_seconds - soaked_s
        return f"{left_s:.0f} s of baking" if left_s > 0 else ""
    step = deployment.steps[deployment.step]
    if not deployment.hurried:
        lacks, ended = [], facts.canary_step.ended
        if soaked_s < step.soak_seconds:
            lacks.append(f"{step.soak_seconds - soaked_s:.0f} s of soaking")
        if ended < step.requests_min:
            lacks.append(f"requests from {step.pct:g}% of the traffic: {ended} of {step.requests_min} have ended")
        if lacks:
            return " and ".join(lacks)
    following = _following(deployment)
    return _lacks(facts, following) if following is not None else ""


def _following(deployment: Deployment) -> Step | None:
    later = deployment.steps[deployment.step + 1 :]
    return later[0] if later else None


def _lacks(facts: Facts, step: Step) -> str:
    needed = replicas_for(facts, step.basis_points)
    return f"workers: {facts.active} of {needed} serve" if facts.active < needed else ""


def _trouble(deployment: Deployment, facts: Facts) -> tuple[str, list[Finding]]:
    """Why the deployment has to be rolled back, with the evidence; "": it need not."""
    name = f"{deployment.model}@{deployment.version}"
    if facts.state in ("failed", "retired", "deleted"):
        return f"{name} is {facts.state}{f': {facts.state_reason}' if facts.state_reason else ''}", []
    if facts.replicas_max == 0:
        return f"{name} has max_replicas 0: no worker can serve it", []
    if deployment.hurried:
        return "", []
    most = deployment.gates.crashes_max
    if most is not None and facts.crashes > most:
        return f"{facts.crashes} workers of {name} ended by themselves, the last one: {facts.last_crash}", []
    found = findings(deployment, facts)
    breached = [finding for finding in found if finding.breached]
    if breached:
        return "; ".join({finding.gate: _said(finding) for finding in breached}.values()), found
    return "", []


def findings(deployment: Deployment, facts: Facts) -> list[Finding]:
    """What the gates say of the step and of the whole deployment; while stable has no traffic, against what it had."""
    if deployment.basis_points == 0:
        return []
    alone = deployment.basis_points == ALL_TRAFFIC
    stable_step, slices = facts.stable_all if alone else facts.stable_step, (facts.canary_slices, facts.stable_slices)
    found = judge(deployment.gates, Window("step", facts.canary_step, stable_step, *slices))
    return found + judge(deployment.gates, Window("deployment", facts.canary_all, facts.stable_all, *slices))


def _said(finding: Finding) -> str:
    unit, scale = ("%", 100.0) if finding.gate.endswith("rate") else (" ms", 1.0)
    than = f", stable has {finding.stable * scale:.4g}{unit}" if finding.stable is not None else ""
    return (
        f"{finding.gate} is {finding.canary * scale:.4g}{unit} of {finding.samples} requests, surely over the limit of "
        f"{finding.limit * scale:.4g}{unit}{than}"
    )
