"""How many replicas each version should have: a pure function of what was observed. No I/O, no clock of its own."""

import math
from collections import deque

from msgspec import Struct

from shared.records import Signals
from shared.settings import Settings

ROUNDING = 1e-9


class Lag(Struct, frozen=True):
    """Messages of a version in the queue."""

    pending: int  # stored, not delivered
    claimed: int  # delivered, not acked: in a batch, or held by a worker that died
    jobs: int = 0  # of detached work, delivered or not

    @property
    def requests(self) -> int:
        """Those that somebody waits for."""
        return self.pending + self.claimed

    @property
    def total(self) -> int:
        return self.requests + self.jobs


class Replica(Struct, frozen=True, kw_only=True):
    """A worker that serves, or will once it is loaded; spares, draining and lost ones are none."""

    active: bool
    slots: int = 0  # sequences in its batch, 0 while unknown
    claims: int = 0


class Sample(Struct, frozen=True):
    """What `load` was at one time."""

    at: float  # seconds, on the clock of `now`
    work: float


def remember(history: deque[Sample], sample: Sample, window_s: float) -> None:
    """Add a sample to what the scale-down window holds: of it only peaks count, so one that a later one tops is dropped."""
    while history and history[0].at <= sample.at - window_s:
        history.popleft()
    while history and history[-1].work <= sample.work:
        history.pop()
    history.append(sample)


class VersionFacts(Struct, frozen=True, kw_only=True):
    """What is known of one version. Times are seconds on the clock of `now`; None: not known."""

    model: str
    version: str
    state: str  # of the record; "deleted" when there is none
    min_replicas: int
    max_replicas: int
    idle_seconds: float
    lag: Lag | None
    replicas: tuple[Replica, ...] = ()
    busy_at: float  # when a pending message or a claim was last seen, or a replica was started
    history: tuple[Sample, ...] = ()
    known_since: float = -math.inf  # since when the lag has been known without a gap
    scheduled_min: int = 0  # replicas that a window of the schedule asks for now
    rollout_min: int = 0  # replicas that a deployment needs now
    withdrawn: bool = False  # it was rolled back: what runs is finished, and nothing is started
    warm: int = 0  # loaded spares that are wanted
    spares: int = 0  # that are there
    stranded: int = 0  # of the claimed messages, those that no live worker tells of
    unbatched: int = 0  # of the claimed messages, those that wait in a worker for its batch
    oldest_s: float = 0.0  # how long the oldest pending message has waited
    rate: float | None = None  # requests that come in a second
    service_s: float | None = None  # how long a request holds a slot
    job_service_s: float | None = None  # how long a job does
    cold_start_s: float | None = None  # from the start of a worker until it serves
    ttft_s: float | None = None  # the time to the first token that the version is to keep
    slots: int = 0  # of a replica, as last seen, where no active one says it


class Snapshot(Struct, frozen=True):
    versions: tuple[VersionFacts, ...]


class Policy(Struct, frozen=True, kw_only=True):
    target_utilisation: float = 0.7  # of the slots
    down_margin: float = 0.1  # fewer replicas only if they would do for so much more, too
    down_window_s: float = 30.0  # fewer replicas only when the need was lower for this long, or for a cold start
    cold_start_s: float = 10.0  # where none was measured
    blind_growth: int = 4  # times the replicas that serve, at most, until it is known how long they take for a request
    drain_share: float = 0.5  # of a cold start: how long a backlog may take to clear once there is room for it
    ttft_share: float = 0.5  # of the target for the first token: who waits longer in the queue calls for a replica
    turn_s: float = 60.0  # where devices are short: who has none of those of its priority waits so long,
    turn_min_s: float = 30.0  # and who got one serves with it for so long at least
    starved_s: float = 300.0  # as turn_s, for who has none because of higher priorities
    grace_s: float = 2.0  # without work for so long: others that have work go before
    jobs_clear_s: float = 600.0  # within which what waits of detached work is to be done
    start_s_max: float = 120.0  # of a turn: how long a start may take before others go before


def policy_of(settings: Settings) -> Policy:
    """The policy as the settings have it."""
    return Policy(
        target_utilisation=settings.target_utilisation,
        down_window_s=settings.scale_down_window_s,
        turn_s=settings.turn_s,
        turn_min_s=settings.turn_min_s,
        starved_s=settings.starved_s,
        jobs_clear_s=settings.jobs_clear_s,
    )


class Decision(Struct, frozen=True, kw_only=True):
    """`reasons` are stable words, fit for metric labels: the last one decided."""

    model: str
    version: str
    desired: int  # replicas
    reasons: tuple[str, ...]
    spares: int = 0  # workers that are loaded and claim nothing
    signals: Signals = Signals()


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
                spares=_spares(facts, desired),
                signals=signals(facts),
            )
        )
    return decisions


def _spares(facts: VersionFacts, desired: int) -> int:
    if facts.state != "available" or facts.withdrawn:
        return 0
    return min(facts.warm, max(0, facts.max_replicas - desired))


def load(facts: VersionFacts, policy: Policy) -> tuple[float, str]:
    """The slots that a version's work asks for at the target utilisation, and which signal says so.

    Served work is rate x time in a slot (Little), which shows a rise before the batches do; or what is in the batches, if
    that would not even fit into full ones, or if the rate is not known. What waits, and what will have come beyond the
    present capacity when a cold start is over, has to clear within the TTFT target, or within a share of a cold start where
    that is longer: who waits for a start is late whatever is started, and more would be started for those alone.
    """
    if facts.lag is None:
        return 0.0, "lag_unknown"
    total = _requests(facts)
    waiting = min(total, facts.lag.pending + facts.stranded + facts.unbatched)
    batched, service_s, slots = float(total - waiting), facts.service_s, slots_of(facts)
    if service_s is None or facts.rate is None:
        work, reason = batched + waiting, "work"
    else:
        cold_start_s = policy.cold_start_s if facts.cold_start_s is None else facts.cold_start_s
        budget_s = max(facts.ttft_s or 0.0, policy.drain_share * cold_start_s)
        at_once = max(1.0, budget_s / service_s)  # requests that a slot takes until the backlog has to be clear
        backlog, steady = float(waiting), facts.rate * service_s
        if any(replica.active for replica in facts.replicas):
            capacity = (len(facts.replicas) + facts.spares) * slots / service_s
            backlog += max(0.0, facts.rate - capacity) * cold_start_s
        work, reason = steady + backlog / at_once, "rate" if backlog / at_once <= steady else "drain"
        if batched * policy.target_utilisation > work:  # in batches that are full: the headroom is for the mean
            work, reason = batched * policy.target_utilisation, "work"
    late = facts.lag.pending > 0 and facts.ttft_s is not None and facts.oldest_s > policy.ttft_share * facts.ttft_s
    if late and slots and facts.replicas and all(replica.active for replica in facts.replicas):
        one_more = (len(facts.replicas) + 1) * slots * policy.target_utilisation
        if one_more > work:
            return one_more, "ttft"
    return work, reason


def jobs_load(facts: VersionFacts, policy: Policy) -> float:
    """The slots that a version's detached work asks for, so that it is done in time; nobody waits for it.

    Until it is known how long a job takes: one.
    """
    jobs = facts.lag.jobs if facts.lag is not None else 0
    if not jobs or facts.job_service_s is None:
        return float(min(jobs, 1))
    return min(float(jobs), max(1.0, jobs * facts.job_service_s / policy.jobs_clear_s))


def slots_of(facts: VersionFacts) -> float:
    """Sequences in a replica's batch, on average; 0 while that is not known."""
    known = [replica.slots for replica in facts.replicas if replica.active and replica.slots > 0]
    return sum(known) / len(known) if known else float(facts.slots)


def signals(facts: VersionFacts) -> Signals:
    """What a decision rests on, for its record."""
    slots = sum(replica.slots for replica in facts.replicas if replica.active)
    claims = sum(replica.claims for replica in facts.replicas)
    return Signals(
        pending=facts.lag.pending if facts.lag else None,
        claimed=facts.lag.claimed if facts.lag else None,
        jobs=facts.lag.jobs if facts.lag else 0,
        stranded=facts.stranded,
        unbatched=facts.unbatched,
        oldest_s=round(facts.oldest_s, 3),
        rate=None if facts.rate is None else round(facts.rate, 3),
        service_s=None if facts.service_s is None else round(facts.service_s, 3),
        cold_start_s=None if facts.cold_start_s is None else round(facts.cold_start_s, 3),
        saturation=round(claims / slots, 3) if slots else None,
        slots=round(slots_of(facts)),
        replicas=len(facts.replicas),
        spares=facts.spares,
    )


def _requests(facts: VersionFacts) -> int:
    """Requests in the system. A lease may tell of claims that the last look at the queue does not."""
    assert facts.lag is not None
    return max(facts.lag.requests, sum(replica.claims for replica in facts.replicas))


def _work(facts: VersionFacts) -> int:
    """Requests and jobs in the system."""
    assert facts.lag is not None
    return _requests(facts) + facts.lag.jobs


def _desired(facts: VersionFacts, now: float, policy: Policy) -> tuple[int, list[str]]:
    current = len(facts.replicas)
    if facts.state == "registered":
        return 0, ["registered"]
    if facts.state != "available":
        return 0, [facts.state]
    if facts.withdrawn:
        runs = facts.lag is None or _work(facts) > 0
        return sum(replica.active for replica in facts.replicas) if runs else 0, ["rolled_back"]
    if facts.lag is None:
        return current, ["lag_unknown"]
    idle = _work(facts) == 0 and now - facts.busy_at >= facts.idle_seconds
    work, reason = (0.0, "no_work") if idle else load(facts, policy)
    need, reasons = _need(facts, work, reason, policy)
    wanted, bounds = _bounded(facts, need)
    reasons += bounds
    if wanted >= current:
        return wanted, reasons
    if idle:
        return wanted, [*reasons, "idle"]
    window_s = max(policy.down_window_s, facts.cold_start_s or 0.0)
    recent = [sample.work for sample in facts.history if sample.at > now - window_s]
    peak = max([work, *recent]) * (1 + policy.down_margin)
    lately = _bounded(facts, _need(facts, peak, "", policy)[0])[0]
    if now - facts.known_since < window_s:  # what was needed before is not known
        lately = max(lately, _bounded(facts, current)[0])
    if lately > wanted:
        wanted = min(current, lately)
        reasons.append("stabilising")
    if wanted == 0 and facts.max_replicas > 0:
        return 1, [*reasons, "not_idle"]
    return wanted, reasons


def _need(facts: VersionFacts, work: float, reason: str, policy: Policy) -> tuple[int, list[str]]:
    """Replicas that `work` asks for. While none serves: one, or what is under way already, or what spares can take.

    So a backlog that builds up during a cold start does not call for more cold starts. Detached work has the headroom of the
    other, too, and asks for a replica where that does not do.
    """
    jobs = jobs_load(facts, policy)
    if work <= 0 and jobs <= 0:
        return 0, ["no_work"]
    slots = slots_of(facts)
    need = math.ceil(work / (slots * policy.target_utilisation) - ROUNDING) if slots else int(work > 0)
    with_jobs = math.ceil((work + jobs) / slots - ROUNDING) if slots else 1
    if jobs and with_jobs > need:
        need, reason = with_jobs, "jobs"
    serving = sum(replica.active and replica.slots > 0 for replica in facts.replicas)
    if serving and facts.service_s is None:  # how much a replica does is not known
        need = min(need, max(policy.blind_growth * serving, len(facts.replicas)))
    if serving:
        return max(1, need), [reason]
    at_hand = min(need, len(facts.replicas) + facts.spares)
    if not facts.replicas:
        return max(1, at_hand), ["first_message" if work > 0 else "first_job"]
    return max(len(facts.replicas), at_hand), ["cold_start"]


def _bounded(facts: VersionFacts, need: int) -> tuple[int, list[str]]:
    if need > facts.max_replicas:
        return facts.max_replicas, ["max_replicas"]
    leasts = {"min_replicas": facts.min_replicas, "schedule": facts.scheduled_min, "rollout": facts.rollout_min}
    reason = max(leasts, key=lambda each: leasts[each])
    if need < leasts[reason]:
        return min(leasts[reason], facts.max_replicas), [reason]
    return need, []
