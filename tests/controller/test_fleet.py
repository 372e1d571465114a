"""Who counts as a replica, and what is done about the difference."""

from controller.autoscaler import Decision
from controller.fleet import KILL_MARGIN_S, LOST_TTLS, Kill, Member, Plan, SeenLease, members, plan
from controller.scalers.process import WorkerProcess
from controller.starts import Starts
from shared.records import Lease
from shared.settings import Settings

SETTINGS = Settings(lease_ttl_s=5.0, drain_budget_s=30.0, start_seconds_max=600.0)
NOW = 1000.0


def seen(worker: str, state: str, host: str = "here", silent: bool = False, since: float = 900.0) -> SeenLease:
    lease = Lease(worker=worker, model="m", version="v", state=state, pid=1, host=host, started=0.0, slots=8, claims=3)
    return SeenLease(lease=lease, heard_at=990.0, state_since=since, was_active=state == "active", silent=silent)


def process(worker: str, drained_at: float | None = None) -> WorkerProcess:
    return WorkerProcess(worker=worker, model="m", version="v", pid=1, started=950.0, drained_at=drained_at)


def member(
    worker: str = "w", state: str = "active", since: float = 990.0, claims: int = 0, local: bool = True
) -> Member:
    return Member(worker=worker, model="m", version="v", state=state, since=since, claims=claims, local=local)


def planned(desired: int, *fleet: Member, starts: Starts | None = None) -> Plan:
    decision = Decision(model="m", version="v", desired=desired, reasons=("test",))
    return plan(decision, fleet, starts or Starts(), NOW, SETTINGS)


def is_here(lease: Lease) -> bool:
    return lease.host == "here"


def state_of(of_process: WorkerProcess, lease: SeenLease | None) -> tuple[str, float]:
    (found,) = members({of_process.worker: of_process}, {of_process.worker: lease} if lease else {}, {}, is_here)
    assert found.local
    return found.state, found.since


def test_a_process_is_what_its_lease_says_once_it_has_one() -> None:
    assert state_of(process("w"), None) == ("starting", 950.0)
    assert state_of(process("w"), seen("w", "starting", silent=True)) == ("starting", 950.0)
    assert state_of(process("w"), seen("w", "active")) == ("active", 900.0)
    assert state_of(process("w"), seen("w", "failed")) == ("failed", 900.0)
    assert state_of(process("w", drained_at=995.0), seen("w", "active")) == ("draining", 995.0)
    assert state_of(process("w"), seen("w", "active", silent=True)) == ("lost", 990.0)


def test_a_lease_of_this_host_without_a_process_is_of_a_dead_worker_and_one_of_another_host_counts() -> None:
    leases = {"dead": seen("dead", "active"), "far": seen("far", "active", host="there")}
    leases["quiet"] = seen("quiet", "active", host="there", silent=True)
    (found,) = members({}, leases, {}, is_here)
    assert (found.worker, found.state, found.slots, found.claims, found.local) == ("far", "active", 8, 3, False)


def test_starts_make_up_the_difference_and_only_replicas_count() -> None:
    assert planned(2).starts == 2
    assert planned(2, member(), member(state="starting")).starts == 0
    assert planned(2, member(), member(state="draining"), member(state="lost")).starts == 1


def test_starts_wait_for_the_back_off_and_for_a_failed_worker_to_be_gone() -> None:
    assert planned(1, starts=Starts(retry_at=NOW + 0.1)).starts == 0
    assert planned(1, starts=Starts(retry_at=NOW)).starts == 1
    assert planned(1, starts=Starts(hopeless=True)).starts == 0
    assert planned(1, member(state="failed", since=NOW)).starts == 0


def test_the_least_loaded_is_drained_first_then_the_cold_then_the_oldest() -> None:
    fleet = (
        member("busy", claims=5),
        member("old", since=10.0),
        member("new", since=20.0),
        member("cold", state="starting", since=999.0),
        member("far", local=False),
    )
    assert planned(5, *fleet).drains == ()
    assert planned(3, *fleet).drains == ("cold", "old")
    assert planned(0, *fleet).drains == ("cold", "old", "new", "far", "busy")


def test_only_a_worker_over_its_budget_is_killed() -> None:
    budgets = {
        "starting": SETTINGS.start_seconds_max,
        "draining": SETTINGS.drain_budget_s + KILL_MARGIN_S,
        "failed": KILL_MARGIN_S,
        "lost": LOST_TTLS * SETTINGS.lease_ttl_s,
    }
    for state, budget_s in budgets.items():
        assert planned(9, member(state=state, since=NOW - budget_s)).kills == ()
        (kill,) = planned(9, member(state=state, since=NOW - budget_s - 0.1)).kills
        assert kill == Kill(worker="w", reason=kill.reason)
        assert kill.reason
        assert planned(9, member(state=state, since=0.0, local=False)).kills == ()
    assert planned(9, member(state="active", since=0.0)).kills == ()
