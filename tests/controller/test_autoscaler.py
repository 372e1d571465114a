"""decide(): the cases of the design, and what must hold for every snapshot."""

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from controller.autoscaler import Decision, Lag, Policy, Replica, Sample, Snapshot, VersionFacts, decide

POLICY = Policy(target_utilisation=0.7, down_window_s=30.0)


def facts(**given: object) -> VersionFacts:
    defaults = VersionFacts(
        model="m",
        version="v",
        state="available",
        min_replicas=0,
        max_replicas=4,
        idle_seconds=60.0,
        lag=Lag(0, 0),
        busy_at=0.0,
    )
    return replace(defaults, **given)


def one(given: VersionFacts, now: float = 1000.0) -> Decision:
    (decision,) = decide(Snapshot((given,)), now, POLICY)
    return decision


def active(count: int, slots: int = 10, claims: int = 0) -> tuple[Replica, ...]:
    return (Replica(active=True, slots=slots, claims=claims),) * count


def test_the_first_message_starts_one_replica_and_a_backlog_does_not_amplify_it() -> None:
    assert one(facts(lag=Lag(1, 0))).desired == 1
    first = one(facts(lag=Lag(500, 0)))
    assert (first.desired, first.reasons) == (1, ("first_message",))
    assert one(facts(lag=Lag(500, 0), replicas=(Replica(active=False),))).desired == 1


def test_messages_that_only_a_dead_worker_holds_are_work_too() -> None:
    assert one(facts(lag=Lag(0, 3))).desired == 1


def test_a_backlog_scales_up_at_once_to_what_the_slots_ask_for_and_no_further_than_the_limit() -> None:
    assert one(facts(lag=Lag(5, 2), replicas=active(1))).desired == 1
    assert one(facts(lag=Lag(6, 2), replicas=active(1))).desired == 2
    capped = one(facts(lag=Lag(500, 10), replicas=active(1)))
    assert (capped.desired, capped.reasons[-1]) == (4, "max_replicas")


def test_to_zero_only_after_idle_seconds_without_work() -> None:
    assert one(facts(replicas=active(1), busy_at=941.0)).desired == 1
    gone = one(facts(replicas=active(1), busy_at=940.0))
    assert (gone.desired, gone.reasons[-1]) == (0, "idle")


def test_a_busy_worker_that_keeps_up_is_not_idle() -> None:
    assert one(facts(replicas=active(1, claims=1), busy_at=0.0)).desired == 1
    assert one(facts(lag=Lag(0, 1), replicas=active(1), busy_at=0.0)).desired == 1


def test_what_is_not_known_holds() -> None:
    unknown = one(facts(lag=None, replicas=active(2), busy_at=0.0))
    assert (unknown.desired, unknown.reasons) == (2, ("lag_unknown",))
    assert one(facts(lag=None)).desired == 0


def test_fewer_replicas_only_when_the_need_was_lower_for_the_whole_window() -> None:
    busy = facts(lag=Lag(0, 1), replicas=active(3), busy_at=1000.0, history=(Sample(975.0, 20), Sample(999.0, 1)))
    held = one(busy)
    assert (held.desired, held.reasons[-1]) == (3, "stabilising")
    assert one(busy, now=1006.0).desired == 1


def test_minimum_and_maximum_bound_it() -> None:
    assert one(facts(min_replicas=2)).desired == 2
    assert one(facts(min_replicas=2, replicas=active(2))).desired == 2
    assert one(facts(max_replicas=0, lag=Lag(9, 0))).desired == 0
    assert one(facts(min_replicas=3, max_replicas=2)).desired == 2


def test_only_an_available_version_has_replicas() -> None:
    for state in ("registered", "failed", "retired", "deleted"):
        decision = one(facts(state=state, lag=Lag(9, 0), min_replicas=1, replicas=active(1)))
        assert (decision.desired, decision.reasons) == (0, (state,))


lags = st.none() | st.builds(Lag, st.integers(0, 3000), st.integers(0, 3000))
replicas = st.lists(
    st.builds(Replica, active=st.booleans(), slots=st.integers(0, 64), claims=st.integers(0, 64)), max_size=12
).map(tuple)
histories = st.lists(st.builds(Sample, st.floats(0, 2000), st.integers(0, 3000)), max_size=8).map(tuple)
snapshots = st.builds(
    facts,
    min_replicas=st.integers(0, 4),
    max_replicas=st.integers(0, 12),
    idle_seconds=st.floats(0, 600),
    lag=lags,
    replicas=replicas,
    busy_at=st.floats(0, 2000),
    history=histories,
)
times = st.floats(0, 4000)


def work_of(given: VersionFacts) -> int:
    assert given.lag is not None
    return max(given.lag.total, sum(replica.claims for replica in given.replicas))


@given(snapshots, times)
def test_a_decision_holds_or_is_within_the_limits(given: VersionFacts, now: float) -> None:
    decision = one(given, now)
    current = len(given.replicas)
    if given.lag is None:
        assert decision.desired == current
    else:
        assert 0 <= decision.desired <= max(current, given.max_replicas)
        assert decision.desired >= min(given.min_replicas, given.max_replicas)
    assert decision.reasons


@given(snapshots, times)
def test_more_replicas_than_there_are_never_exceed_the_maximum(given: VersionFacts, now: float) -> None:
    desired = one(given, now).desired
    assert desired <= len(given.replicas) or desired <= given.max_replicas


@given(snapshots, times)
def test_work_never_meets_zero_replicas(given: VersionFacts, now: float) -> None:
    if given.lag is not None and work_of(given) > 0 and given.max_replicas > 0:
        assert one(given, now).desired >= 1


@given(snapshots, times)
def test_a_version_that_is_not_idle_keeps_a_replica(given: VersionFacts, now: float) -> None:
    if given.lag is not None and given.replicas and given.max_replicas > 0 and now - given.busy_at < given.idle_seconds:
        assert one(given, now).desired >= 1


@given(snapshots, times, st.integers(1, 500))
def test_more_work_never_asks_for_fewer(given: VersionFacts, now: float, more: int) -> None:
    if given.lag is not None:
        busier = replace(given, lag=Lag(given.lag.pending + more, given.lag.claimed))
        assert one(busier, now).desired >= one(given, now).desired


@given(snapshots, times)
def test_a_cold_start_never_calls_for_another(given: VersionFacts, now: float) -> None:
    starting = tuple(replace(replica, active=False) for replica in given.replicas)
    cold = replace(given, replicas=starting, min_replicas=0)
    assert one(cold, now).desired <= max(1, len(starting))


@given(snapshots, times)
def test_a_decision_that_was_carried_out_stands(given: VersionFacts, now: float) -> None:
    """No flapping: replicas added like those that are there, or the surplus taken away, and nothing else changed."""
    alike = (Replica(active=True, slots=16),) * len(given.replicas)
    before = replace(given, replicas=alike, history=())
    desired = one(before, now).desired
    if given.replicas and desired > 0:
        after = replace(before, replicas=alike[:1] * desired)
        assert one(after, now).desired == desired
