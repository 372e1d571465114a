"""decide(): the cases of the design, and what must hold for every snapshot."""

import math
import random
from collections import deque
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from controller.autoscaler import (
    Decision,
    Lag,
    Policy,
    Replica,
    Sample,
    Snapshot,
    VersionFacts,
    decide,
    load,
    remember,
)
from controller.history import VersionHistory
from shared.records import Lease
from shared.settings import Settings
from shared.streams import ConsumerInfo, Delivered

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
    capped = one(facts(lag=Lag(500, 10), replicas=active(1), max_replicas=3))
    assert (capped.desired, capped.reasons[-1]) == (3, "max_replicas")


def test_until_it_is_known_how_long_requests_take_a_backlog_multiplies_the_fleet_by_four_at_most() -> None:
    blind = facts(lag=Lag(800, 10), replicas=active(1), max_replicas=99, rate=20.0)
    assert one(blind).desired == 4
    assert one(replace(blind, replicas=(*active(1), *(Replica(active=False),) * 5))).desired == 6
    assert one(replace(blind, service_s=0.5, cold_start_s=40.0)).desired == math.ceil((10 + (800 + 0.0) / 40) / 7)


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


# -- leading signals ---------------------------------------------------------------------------------------------------


def test_a_rise_of_the_rate_counts_before_the_batches_are_full() -> None:
    risen = one(facts(lag=Lag(0, 7), replicas=active(1), rate=5.0, service_s=4.0, cold_start_s=0.0))
    assert (risen.desired, risen.reasons) == (3, ("rate",))  # 20 slots at 70% of 10


def test_what_comes_during_a_cold_start_is_counted_in_and_clears_within_a_share_of_it() -> None:
    spike = facts(lag=Lag(0, 10), replicas=active(1), max_replicas=99, rate=20.0, service_s=1.0, cold_start_s=30.0)
    growth = (20.0 - 10.0) * 30.0
    assert one(spike).desired == math.ceil((20.0 + growth / 15.0) / 7.0)
    coming = replace(spike, replicas=(*active(1), *(Replica(active=False),) * 5))
    assert one(coming).reasons[0] == "rate"  # they will have room for all of it,
    assert one(replace(coming, history=(Sample(990.0, load(spike, POLICY)[0]),))).desired == 6  # and stay
    at_hand = replace(spike, spares=5)
    assert one(at_hand).desired == math.ceil(20.0 / 7.0)  # loaded spares can claim at once: nothing piles up


def test_a_long_cold_start_lets_a_slot_take_several_of_a_backlog() -> None:
    backlog = facts(lag=Lag(600, 10), replicas=active(1), max_replicas=99, rate=5.0, service_s=2.0, cold_start_s=40.0)
    assert one(backlog).desired == math.ceil((10 + 600 / 10) / 7)
    assert one(replace(backlog, cold_start_s=0.0)).desired == math.ceil(610 / 7)
    assert one(replace(backlog, cold_start_s=0.0, ttft_s=4.0)).desired == math.ceil((10 + 600 / 2) / 7)


def test_who_waits_for_half_of_its_target_calls_for_one_replica_at_a_time() -> None:
    late = facts(lag=Lag(1, 2), replicas=active(1), ttft_s=1.0, oldest_s=0.6)
    assert (one(late).desired, one(late).reasons) == (2, ("ttft",))
    assert one(replace(late, oldest_s=0.4)).desired == 1
    assert one(replace(late, replicas=(*active(1), Replica(active=False)))).desired <= 2


def test_claims_that_no_live_worker_tells_of_wait() -> None:
    held = facts(
        lag=Lag(0, 60), replicas=active(1), max_replicas=99, rate=10.0, service_s=1.0, cold_start_s=8.0, stranded=50
    )
    assert one(held).desired == math.ceil((10 + 50 / 4) / 7)


def test_spares_are_kept_beside_the_replicas_and_taken_first() -> None:
    assert one(facts(warm=2)).spares == 2
    assert one(facts(warm=2, max_replicas=3, lag=Lag(20, 0), replicas=active(2))).spares == 0
    assert one(facts(warm=2, state="failed")).spares == 0
    with_spares = one(facts(lag=Lag(40, 0), warm=3, spares=3, slots=10))
    assert (with_spares.desired, with_spares.reasons) == (3, ("first_message",))


def test_a_scheduled_minimum_goes_before_the_usual_one() -> None:
    assert one(facts(scheduled_min=3, min_replicas=1)).desired == 3
    assert one(facts(scheduled_min=3, min_replicas=1)).reasons[-1] == "schedule"
    assert one(facts(scheduled_min=9, max_replicas=4)).desired == 4


def test_nothing_is_taken_away_before_the_window_was_watched_and_a_long_cold_start_makes_it_longer() -> None:
    idle = facts(lag=Lag(0, 1), replicas=active(3), busy_at=1000.0)
    assert one(replace(idle, known_since=980.0)).desired == 3
    assert one(replace(idle, known_since=970.0)).desired == 1
    peak = replace(idle, history=(Sample(940.0, 20), Sample(999.0, 1)), cold_start_s=90.0)
    assert one(peak).desired == 3


def test_a_sample_that_a_later_one_tops_is_not_kept() -> None:
    history: deque[Sample] = deque()
    for at, work in ((0.0, 5.0), (1.0, 3.0), (2.0, 4.0), (40.0, 1.0)):
        remember(history, Sample(at, work), 30.0 if at < 40 else 39.0)
    assert list(history) == [Sample(2.0, 4.0), Sample(40.0, 1.0)]


# -- whatever is seen --------------------------------------------------------------------------------------------------

lags = st.none() | st.builds(Lag, st.integers(0, 3000), st.integers(0, 3000))
replicas = st.lists(
    st.builds(Replica, active=st.booleans(), slots=st.integers(0, 64), claims=st.integers(0, 64)), max_size=12
).map(tuple)
histories = st.lists(st.builds(Sample, st.floats(0, 2000), st.floats(0, 3000)), max_size=8).map(tuple)
snapshots = st.builds(
    facts,
    min_replicas=st.integers(0, 4),
    max_replicas=st.integers(0, 12),
    scheduled_min=st.integers(0, 4),
    idle_seconds=st.floats(0, 600),
    lag=lags,
    replicas=replicas,
    busy_at=st.floats(0, 2000),
    history=histories,
    known_since=st.floats(0, 2000),
    warm=st.integers(0, 3),
    spares=st.integers(0, 3),
    stranded=st.integers(0, 100),
    unbatched=st.integers(0, 100),
    oldest_s=st.floats(0, 60),
    rate=st.none() | st.floats(0, 500),
    service_s=st.none() | st.floats(0.01, 60),
    cold_start_s=st.none() | st.floats(0, 120),
    ttft_s=st.none() | st.floats(0.1, 10),
    slots=st.integers(0, 64),
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
        assert decision.desired >= min(max(given.min_replicas, given.scheduled_min), given.max_replicas)
    assert decision.reasons
    assert 0 <= decision.spares <= given.warm
    assert decision.spares == 0 or decision.desired + decision.spares <= given.max_replicas


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


@given(snapshots, times, st.integers(1, 500), st.integers(1, 500), st.floats(0, 100))
def test_more_load_never_asks_for_fewer(given: VersionFacts, now: float, more: int, held: int, faster: float) -> None:
    if given.lag is not None:
        before = one(given, now).desired
        assert one(replace(given, lag=Lag(given.lag.pending + more, given.lag.claimed)), now).desired >= before
        assert one(replace(given, lag=Lag(given.lag.pending, given.lag.claimed + held)), now).desired >= before
        if given.rate is not None:
            assert one(replace(given, rate=given.rate + faster), now).desired >= before


@given(snapshots, times)
def test_what_busy_workers_need_is_never_taken_away(given: VersionFacts, now: float) -> None:
    """Fewer replicas only when the claims of those that are there fit into the ones that stay."""
    alike = tuple(Replica(active=True, slots=16, claims=min(16, each.claims)) for each in given.replicas)
    claims = sum(each.claims for each in alike)
    if alike and given.lag is not None:
        desired = one(replace(given, replicas=alike, lag=Lag(0, claims), stranded=0, unbatched=0), now).desired
        assert desired * 16 >= min(claims, given.max_replicas * 16)


@given(snapshots, times)
def test_a_cold_start_calls_for_no_other_but_for_spares(given: VersionFacts, now: float) -> None:
    starting = tuple(replace(replica, active=False) for replica in given.replicas)
    cold = replace(given, replicas=starting, min_replicas=0, scheduled_min=0)
    assert one(cold, now).desired <= max(1, len(starting) + given.spares)


@given(snapshots, times)
def test_a_decision_that_was_carried_out_stands(given: VersionFacts, now: float) -> None:
    """No flapping: replicas added like those that are there, or the surplus taken away, and nothing else changed."""
    alike = (Replica(active=True, slots=16),) * len(given.replicas)
    before = replace(given, replicas=alike, history=(), oldest_s=0.0, spares=0, known_since=-math.inf)
    before = replace(before, service_s=given.service_s or 1.0)
    before = replace(before, history=(Sample(now, load(before, POLICY)[0]),))
    desired = one(before, now).desired
    if given.replicas and desired > 0:
        after = replace(before, replicas=alike[:1] * desired)
        assert one(after, now).desired == desired


@settings(max_examples=6, deadline=None)
@given(st.floats(0.5, 20.0), st.floats(0.5, 12.0), st.floats(0.0, 40.0), st.integers(0, 8), st.integers(1, 1000))
def test_constant_load_settles_and_stays(rate: float, service_s: float, cold_s: float, first: int, seed: int) -> None:
    """Requests at random times, workers that take a while to start: once settled, the fleet only follows the dice."""
    fleet = Fluid(rate, service_s, cold_s, first, seed)
    fleet.run(600.0)
    needed = rate * service_s / Fluid.SLOTS
    counts = [count for at, count in fleet.changes if at > 300.0] or [fleet.desired]
    assert sum(max(0, after - before) for before, after in pairwise(counts)) <= 3 + needed / 2, "flaps"
    assert max(counts) - min(counts) <= 2 + needed / 3, "swings"
    assert min(counts) >= math.floor(needed), "too few"
    assert fleet.most <= max(first, 3 + 8 * needed / POLICY.target_utilisation), "amplifies"
    ups = [at for (_, before), (at, after) in pairwise([(0.0, first), *fleet.changes]) if after > before]
    downs = [at for (_, before), (at, after) in pairwise([(0.0, first), *fleet.changes]) if after < before]
    assert all(down - max([up for up in ups if up < down], default=0.0) >= POLICY.down_window_s - 1 for down in downs)


def test_it_reaches_zero_and_comes_back() -> None:
    fleet = Fluid(rate=3.0, service_s=2.0, cold_s=10.0, first=0, seed=1)
    fleet.run(100.0)
    assert fleet.desired >= 1
    fleet.rate = 0.0
    fleet.run(100.0 + 60.0 + 30.0)
    assert (fleet.desired, fleet.work) == (0, 0)
    fleet.rate = 3.0
    fleet.run(300.0)
    assert fleet.desired >= 1
    assert fleet.pending == 0


class Fluid:
    """A version and its workers, coarsely: `SLOTS` a worker, each request holds one for `service_s`."""

    SLOTS = 10
    TICK_S = 0.25

    def __init__(self, rate: float, service_s: float, cold_s: float, first: int, seed: int) -> None:
        self.rate, self._service_s, self._cold_s = rate, service_s, cold_s
        self._dice = random.Random(seed)
        self._history = VersionHistory(POLICY, Settings(lease_every_s=1.0))
        self._ready = [0.0] * first  # when each worker serves
        self._ends: list[float] = []
        self._delivered, self._busy_at, self._due, self.now = 0, 0.0, 0.0, 0.0
        self.pending = 0
        self.desired = self.most = first
        self.changes: list[tuple[float, int]] = []

    @property
    def work(self) -> int:
        return self.pending + len(self._ends)

    def run(self, until: float) -> None:
        while self.now < until:
            self._tick()

    def _tick(self) -> None:
        self.now += self.TICK_S
        now, dice = self.now, self._dice
        self._due = max(self._due, now - self.TICK_S)
        while self.rate and self._due <= now:
            self.pending += 1
            self._due += dice.expovariate(self.rate)
        self._ends = [end for end in self._ends if end > now]
        serving = sum(ready <= now for ready in self._ready)
        taken = min(self.pending, max(0, serving * self.SLOTS - len(self._ends)))
        self._ends += [now + self._service_s] * taken
        self.pending -= taken
        self._delivered += taken
        if self.work:
            self._busy_at = now
        self._decide(now, serving)

    def _decide(self, now: float, serving: int) -> None:
        claims = len(self._ends)
        lease = Lease(
            worker="w", model="m", version="v", state="active", pid=1, host="h", started=0.0, slots=10, claims=claims
        )
        consumer = ConsumerInfo(num_pending=self.pending, num_ack_pending=claims, delivered=Delivered(self._delivered))
        leases = [lease] if serving else []
        self._history.read(now, consumer, leases)
        known = facts(
            max_replicas=1000,
            lag=Lag(self.pending, claims),
            busy_at=self._busy_at,
            replicas=tuple(Replica(active=ready <= now, slots=self.SLOTS * (ready <= now)) for ready in self._ready),
        )
        desired = one(self._history.complete(known, leases, now), now).desired
        if desired != self.desired:
            self.changes.append((now, desired))
        for _ in range(desired - len(self._ready)):
            self._ready.append(now + self._cold_s)
            self._history.loaded(self._cold_s)
        self._ready = sorted(self._ready)[:desired]
        self.desired, self.most = desired, max(self.most, desired)


def test_a_version_at_zero_is_woken_by_a_job_and_is_not_idle_while_one_is_there() -> None:
    first = one(facts(lag=Lag(0, 0, jobs=500)))
    assert (first.desired, first.reasons) == (1, ("first_job",))
    kept = one(facts(lag=Lag(0, 0, jobs=1), replicas=active(1)))
    assert kept.desired == 1
    assert "idle" not in kept.reasons
    assert one(facts(lag=Lag(0, 0), replicas=active(1))).desired == 0


def test_jobs_have_the_headroom_and_call_for_replicas_where_that_does_not_do_in_time() -> None:
    busy = {"lag": Lag(0, 14, jobs=30), "replicas": active(2, claims=7), "service_s": 10.0, "rate": 1.4}
    assert one(facts(**busy, job_service_s=10.0)).desired == 2  # 14 of 20 slots, and one for the jobs
    found = one(facts(**(busy | {"lag": Lag(0, 14, jobs=1200)}), job_service_s=10.0))
    assert (found.desired, found.reasons[0]) == (4, "jobs")  # 20 slots for ten minutes, and 14
    assert one(facts(**(busy | {"lag": Lag(0, 14, jobs=1200)}))).desired == 2  # how long they take is not known


def test_jobs_alone_call_for_no_more_than_they_can_use() -> None:
    found = one(facts(lag=Lag(0, 0, jobs=3), replicas=active(1, slots=2), job_service_s=10_000.0))
    assert found.desired == 2
