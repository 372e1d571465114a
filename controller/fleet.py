"""From desired replicas to actions on workers: who counts as a replica, who is drained, who is killed. Pure."""

from collections.abc import Callable, Iterable, Mapping

from msgspec import Struct

from controller.autoscaler import Decision, Replica
from controller.scalers.base import Managed
from controller.starts import Starts
from shared.records import Lease
from shared.settings import Settings
from shared.wire import Assign

KILL_MARGIN_S = 5.0  # what a worker gets on top of its own budget
LOST_TTLS = 3  # a worker that was active and has been silent for so many lease TTLs hangs: it is killed


class SeenLease(Struct):
    """A worker's last lease. Times are seconds of the monotonic clock."""

    lease: Lease
    heard_at: float
    state_since: float
    was_active: bool
    deleted: bool = False  # by the worker, at its end
    silent: bool = False  # deleted, or not renewed within the TTL


class Told(Struct, frozen=True):
    """What a worker was told last, and when."""

    assign: Assign
    at: float


class Member(Struct, frozen=True, kw_only=True):
    """A worker as its process, its lease and what it was told together show it.

    `lost`: it was warm or more and its lease has expired while its process lives (stopped, hung, cut off). It is no replica.
    """

    worker: str
    model: str = ""  # "" and `version` "": not assigned to any yet
    version: str = ""
    state: str  # starting | warm | loaded | active | draining | failed | lost
    since: float  # seconds on the clock of `now`: when that state began
    slots: int = 0
    claims: int = 0
    jobs: int = 0  # that it holds
    device: str = ""
    claim: bool = True  # it is to claim, not only to be loaded
    config: str = ""  # the digest of the engine settings that it runs with, where it says so
    heard: bool = True  # it has a lease, so that it can be told something
    local: bool = False  # the scaler made it, or took it over

    @property
    def is_replica(self) -> bool:
        return self.model != "" and self.state in ("starting", "loaded", "active")

    @property
    def is_warm(self) -> bool:
        """Whether it waits for a model, or soon will."""
        return self.model == "" and self.state in ("starting", "warm")

    def as_replica(self) -> Replica:
        return Replica(active=self.state == "active", slots=self.slots, claims=self.claims)


class Kill(Struct, frozen=True, kw_only=True):
    worker: str
    reason: str


class Plan(Struct, frozen=True, kw_only=True):
    """What to do about one version. Workers are named by their ids."""

    starts: int = 0  # more of them that claim
    spares: int = 0  # more of them that do not
    claims: tuple[str, ...] = ()  # that are loaded, and are to claim now
    rests: tuple[str, ...] = ()  # that claim, and are only to be loaded from now on
    drains: tuple[str, ...] = ()
    kills: tuple[Kill, ...] = ()


def members(
    processes: Mapping[str, Managed],
    leases: Mapping[str, SeenLease],
    told: Mapping[str, Told],
    owns: Callable[[Lease], bool],
) -> list[Member]:
    """Every worker that is there. A lease that the scaler `owns` without a process is of a dead worker; others count."""
    found = [
        _member(process, leases.get(process.worker), told.get(process.worker), process.worker)
        for process in processes.values()
    ]
    for worker, seen in leases.items():
        if worker not in processes and not owns(seen.lease) and not seen.silent:
            found.append(_member(None, seen, told.get(worker), worker))
    return found


def _member(process: Managed | None, seen: SeenLease | None, told: Told | None, worker: str) -> Member:
    lease = seen.lease if seen else None
    said = (lease.model, lease.version) if lease else ("", "")
    name = said
    if not name[0] and process is not None:
        name = process.model, process.version
    if not name[0] and told is not None:  # it does not say so yet
        name = told.assign.model, told.assign.version
    state, since = "starting", told.at if told else 0.0
    if process is not None:
        since = process.assigned_at or process.started
    if seen is not None and lease is not None:
        if said == name and (lease.state != "starting" or process is None):
            state, since = lease.state, seen.state_since
        if process is not None and seen.silent and lease.state in ("warm", "active", "loaded"):
            state, since = "lost", seen.heard_at
    if process is not None and process.drained_at is not None:
        state, since = "draining", process.drained_at
    return Member(
        worker=worker,
        model=name[0],
        version=name[1],
        state=state,
        since=since,
        slots=lease.slots if lease else 0,
        claims=lease.claims if lease else 0,
        jobs=lease.jobs if lease else 0,
        device=process.device if process else lease.device if lease else "",
        claim=told.assign.claim if told else state != "loaded",
        config=lease.config if lease else "",
        heard=seen is not None,
        local=process is not None,
    )


def plan(
    decision: Decision,
    fleet: Iterable[Member],
    starts: Starts,
    now: float,
    settings: Settings,
    config: str = "",
    surge: bool = True,
) -> Plan:
    """The difference between what is desired of one version and `fleet`, its members.

    Starts wait for the back-off, and until a worker that failed is gone and judged. Drained are those with the fewest
    claims, a cold one before a loaded one, the oldest first; killed are only those that overran their budget or hang.
    Workers that run with other engine settings than `config` are replaced one by one: the new one first with `surge`,
    else the old one has to make room.
    """
    fleet = list(fleet)
    replicas = sorted(
        (member for member in fleet if member.is_replica),
        key=lambda member: (member.claims, member.jobs, member.state == "active", member.since),
    )
    stale = [member.worker for member in replicas if member.config and config and member.config != config]
    claiming = [member.worker for member in replicas if member.claim]
    resting = [member.worker for member in sorted(replicas, key=_readiness) if not member.claim]
    missing = decision.desired + (1 if stale and surge and decision.desired else 0) - len(claiming)
    claims, resting = resting[: max(0, missing)], resting[max(0, missing) :]
    surplus = claiming[: max(0, -missing)]
    kept = min(len(surplus), max(0, decision.spares - len(resting)))
    drains = surplus[: len(surplus) - kept] + resting[decision.spares :]
    if stale and missing <= 0 and not drains and not any(member.state in ("starting", "draining") for member in fleet):
        drains = stale[:1]
    failing = any(member.state == "failed" for member in fleet)
    may_start = not starts.hopeless and not failing and now >= starts.retry_at
    return Plan(
        starts=max(0, missing - len(claims)) if may_start else 0,
        spares=max(0, decision.spares - len(resting) - kept) if may_start else 0,
        claims=tuple(claims),
        rests=tuple(surplus[len(surplus) - kept :]),
        drains=tuple(drains),
        kills=tuple(overdue(fleet, now, settings)),
    )


def _readiness(member: Member) -> tuple[bool, float]:
    return member.state != "loaded", member.since


def overdue(fleet: Iterable[Member], now: float, settings: Settings) -> list[Kill]:
    """Those of our workers that have to be killed: they overran their budget, or hang."""
    return [
        Kill(worker=member.worker, reason=reason)
        for member in fleet
        if member.local and (reason := _overdue(member, now, settings))
    ]


def _overdue(member: Member, now: float, settings: Settings) -> str:
    """Why `member` has to be killed, or ""."""
    age_s = now - member.since
    if member.state == "starting" and age_s > settings.start_seconds_max:
        return f"the worker was not active within {settings.start_seconds_max:g} s"
    if member.state == "draining" and age_s > settings.drain_budget_s + KILL_MARGIN_S:
        return f"the worker did not drain within {settings.drain_budget_s:g} s"
    if member.state == "failed" and age_s > KILL_MARGIN_S:
        return f"the worker failed and did not end within {KILL_MARGIN_S:g} s"
    if member.state == "lost" and age_s > LOST_TTLS * settings.lease_ttl_s:
        return f"the worker was silent for {LOST_TTLS * settings.lease_ttl_s:g} s"
    return ""
