"""From desired replicas to actions on workers: who counts as a replica, who is drained, who is killed. Pure."""

from collections.abc import Iterable, Mapping

from msgspec import Struct

from controller.autoscaler import Decision, Replica
from controller.scalers.process import WorkerProcess
from controller.starts import Starts
from shared.records import Lease
from shared.settings import Settings

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


class Member(Struct, frozen=True, kw_only=True):
    """A worker as its process and its lease together show it.

    `lost`: it was active and its lease has expired while its process lives (stopped, hung, cut off). It is no replica.
    """

    worker: str
    model: str
    version: str
    state: str  # starting | active | draining | failed | lost
    since: float  # seconds on the clock of `now`: when that state began
    slots: int = 0
    claims: int = 0
    local: bool = False  # a process of this host, which can be signalled

    @property
    def is_replica(self) -> bool:
        return self.state in ("starting", "active")

    def as_replica(self) -> Replica:
        return Replica(active=self.state == "active", slots=self.slots, claims=self.claims)


class Kill(Struct, frozen=True, kw_only=True):
    worker: str
    reason: str


class Plan(Struct, frozen=True, kw_only=True):
    """What to do about one version."""

    starts: int = 0
    drains: tuple[str, ...] = ()  # worker ids
    kills: tuple[Kill, ...] = ()


def members(processes: Mapping[str, WorkerProcess], leases: Mapping[str, SeenLease], host: str) -> list[Member]:
    """Every worker that is there. A lease of `host` without a process is of a dead worker; other hosts' leases count."""
    found = [_of_process(process, leases.get(process.worker)) for process in processes.values()]
    for worker, seen in leases.items():
        if worker not in processes and seen.lease.host != host and not seen.silent:
            found.append(_of_lease(seen))
    return found


def _of_lease(seen: SeenLease) -> Member:
    lease = seen.lease
    return Member(
        worker=lease.worker,
        model=lease.model,
        version=lease.version,
        state=lease.state,
        since=seen.state_since,
        slots=lease.slots,
        claims=lease.claims,
    )


def _of_process(process: WorkerProcess, seen: SeenLease | None) -> Member:
    state, since = "starting", process.started
    if process.drained_at is not None:
        state, since = "draining", process.drained_at
    elif seen is not None and seen.lease.state != "starting":
        state, since = seen.lease.state, seen.state_since
        if seen.silent and state == "active":
            state, since = "lost", seen.heard_at
    return Member(
        worker=process.worker,
        model=process.model,
        version=process.version,
        state=state,
        since=since,
        slots=seen.lease.slots if seen else 0,
        claims=seen.lease.claims if seen else 0,
        local=True,
    )


def plan(decision: Decision, fleet: Iterable[Member], starts: Starts, now: float, settings: Settings) -> Plan:
    """The difference between what is desired of one version and `fleet`, its members.

    Starts wait for the back-off, and until a worker that failed is gone and judged. Drained are those with the fewest
    claims, a cold one before a loaded one, the oldest first; killed are only those that overran their budget or hang.
    """
    fleet = list(fleet)
    replicas = [member for member in fleet if member.is_replica]
    surplus = len(replicas) - decision.desired
    failing = any(member.state == "failed" for member in fleet)
    may_start = not starts.hopeless and not failing and now >= starts.retry_at
    drains: tuple[str, ...] = ()
    if surplus > 0:
        ours = [member for member in replicas if member.local]
        ours.sort(key=lambda member: (member.claims, member.state == "active", member.since))
        drains = tuple(member.worker for member in ours[:surplus])
    return Plan(
        starts=-surplus if surplus < 0 and may_start else 0,
        drains=drains,
        kills=tuple(
            Kill(worker=member.worker, reason=reason)
            for member in fleet
            if member.local and (reason := _overdue(member, now, settings))
        ),
    )


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
