"""How many replicas each version should have: a pure function of what was observed. No I/O, no clock of its own."""

import math
from collections import deque

from msgspec import Struct


class Lag(Struct, frozen=True):
    """Messages of a version in the queue."""

    pending: int  # stored, not delivered
    claimed: int  # delivered, not acked: in a batch, or held by a worker that died

    @property
    def total(self) -> int:
        return self.pending + self.claimed


class Replica(Struct, frozen=True, kw_only=True):
    """A worker that serves, or will once it is loaded; draining and lost ones are none."""

    active: bool
    slots: int = 0  # sequences in its batch, 0 while unknown
    claims: int = 0


class Sample(Struct, frozen=True):
    """Work that was in the system at one time."""

    at: float  # seconds, on the clock of `now`
    work: int


def remember(history: deque[Sample], sample: Sample, window_s: float) -> None:
    """Add a sample to what the scale-down window holds."""
    while history and history[0].at <= sample.at - window_s:
        history.popleft()
    history.append(sample)


class VersionFacts(Struct, frozen=True, kw_only=True):
    """What is known of one version. Times are seconds on the clock of `now`."""

    model: str
    version: str
    state: str  # of the record; "deleted" when there is none
    min_replicas: int
    max_replicas: int
    idle_seconds: float
    lag: Lag | None  # None: not known
    replicas: tuple[Replica, ...] = ()
    busy_at: float  # when a pending message or a claim was last seen, or a replica was started
    history: tuple[Sample, ...] = ()
    warm: int = 0  # loaded spares that are wanted


class Snapshot(Struct, frozen=True):
    versions: tuple[VersionFacts, ...]


class Policy(Struct, frozen=True, kw_only=True):
    target_utilisation: float = 0.7  # of the slots
    down_window_s: float = 30.0  # fewer replicas only when the need was lower for this long


class Decision(Struct, frozen=True, kw_only=True):
    """`reasons` are stable words, fit for metric labels: the last one decided."""

    model: str
    version: str
    desired: int  # that claim
    spares: int = 0  # that are loaded and claim nothing
    reasons: tuple[str, ...]


def decide(snapshot: Snapshot, now: float, policy: Policy | None = None) -> list[Decision]:
    """One decision per version of `snapshot`, in its order.

    Up at once, down only when the need was lower for the whole window, to zero only after `idle_seconds` without work.
    What is not known holds the present count: it never means zero.
    """
    policy = policy or Policy()
    decisions = []
    for facts in snapshot.versions:
        desired, reasons = _desired(facts, now, policy)
        decisions.append(
            Decision(
                model=facts.model,
                version=facts.version,
                desired=desired,
                reasons=tuple(reasons),
                spares=min(facts.warm, max(0, facts.max_replicas - desired)) if facts.state == "available" else 0,
            )
        )
    return decisions


def _desired(facts: VersionFacts, now: float, policy: Policy) -> tuple[int, list[str]]:
    current = len(facts.replicas)
    if facts.state == "registered":
        return 0, ["registered"]
    if facts.state != "available":
        return 0, [facts.state]
    if facts.lag is None:
        return current, ["lag_unknown"]
    work = max(facts.lag.total, sum(replica.claims for replica in facts.replicas))
    need, reasons = _need(facts, work, policy)
    wanted, bounds = _bounded(facts, need)
    reasons += bounds
    if wanted >= current:
        return wanted, reasons
    if work == 0 and now - facts.busy_at >= facts.idle_seconds:
        return wanted, [*reasons, "idle"]
    recent = [sample.work for sample in facts.history if sample.at > now - policy.down_window_s]
    lately = max((_bounded(facts, _need(facts, work, policy)[0])[0] for work in recent), default=wanted)
    if lately > wanted:
        wanted = min(current, lately)
        reasons.append("stabilising")
    if wanted == 0 and facts.max_replicas > 0:
        return 1, [*reasons, "not_idle"]
    return wanted, reasons


def _need(facts: VersionFacts, work: int, policy: Policy) -> tuple[int, list[str]]:
    """Replicas that `work` asks for. Until one is loaded its slots are unknown: then one, or what is under way already.

    So a backlog that builds up during a cold start does not call for more cold starts.
    """
    if work == 0:
        return 0, ["no_work"]
    slots = [replica.slots for replica in facts.replicas if replica.active and replica.slots > 0]
    if not facts.replicas:
        return 1, ["first_message"]
    if not slots:
        return len(facts.replicas), ["cold_start"]
    per_replica = sum(slots) / len(slots) * policy.target_utilisation
    return math.ceil(work / per_replica), ["work"]


def _bounded(facts: VersionFacts, need: int) -> tuple[int, list[str]]:
    if need > facts.max_replicas:
        return facts.max_replicas, ["max_replicas"]
    if need < facts.min_replicas:
        return min(facts.min_replicas, facts.max_replicas), ["min_replicas"]
    return need, []
