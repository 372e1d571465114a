"""The rollout machine: every state and what leads on from it, and what holds whatever is seen and commanded."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from controller.autoscaler import Lag, Policy, Replica, VersionFacts
from controller.fleet import Member
from controller.rollout import LINGER_S, Facts, Work, advance, facts_of, floors, replicas_for, waits_for
from controller.tallies import SLICES_MAX, Counted, Slices, Tallies
from shared import subjects, tally
from shared.errors import BadRequest, DeploymentState
from shared.records import ALL_TRAFFIC, Route, Version, Weight
from shared.rollouts import (
    CANARY,
    DEFAULT_STEPS,
    ENDED,
    Command,
    Deployment,
    NewDeployment,
    Step,
    commanded,
    is_newer,
    plan_of,
    route_of,
)
from shared.router import Router
from shared.tally import IngressLease, Tally, VersionTally

STEPS = (Step(pct=10, soak_seconds=10, requests_min=20), Step(pct=50, soak_seconds=10), Step(pct=100, soak_seconds=10))
ROUTE = Route("chat", {"stable": "v1", "tests": "v1"}, [Weight("v1", ALL_TRAFFIC)])


def answered(count: int, errors: int = 0) -> Tally:
    found = Tally()
    for number in range(count):
        found.note(500 if number < errors else 200, 0.05, 0.02)
    return found


GOOD, BAD = answered(500), answered(500, errors=100)
READY = Facts(
    active=8,
    workers=8,
    open_requests=9,
    work=28.0,
    slots=8,
    stable_slots=8,
    replicas_max=20,
    stable_max=20,
    cold_start_s=4.0,
    canary_step=GOOD,
    canary_all=GOOD,
    stable_step=GOOD,
    stable_all=GOOD,
)


def planned(**changes: Any) -> Deployment:
    values: dict[str, Any] = {"model": "chat", "version": "v2", "steps": STEPS, "bake_seconds": 20}
    return plan_of(NewDeployment(**(values | changes)), "d-1", "v1", 1000.0)


def at(state: str, **changes: Any) -> Deployment:
    """A deployment as it gets into a state if all is well, at its beginning; `stepping` is at the first step."""
    deployment, now = planned(**changes), 1000.0
    while deployment.state != state:
        now = deployment.since + 1000
        after = advance(deployment, READY, now)
        assert after is not deployment
        deployment = after
    return deployment


def test_from_the_beginning_to_the_end() -> None:
    deployment, seen = planned(), []
    for now in range(1000, 1100):
        seen.append((deployment.state, deployment.step, deployment.basis_points))
        deployment = advance(deployment, READY, float(now))
    assert list(dict.fromkeys(seen)) == [
        ("pending", -1, 0),
        ("warming", -1, 0),
        ("stepping", 0, 1000),
        ("stepping", 1, 5000),
        ("stepping", 2, 10_000),
        ("baking", 2, 10_000),
        ("promoted", 2, 10_000),
    ]
    times = [event.at for event in deployment.events]
    assert [later - one for one, later in pairwise(times)] == [0, 1, 10, 10, 10, 20]
    assert all(event.evidence for event in deployment.events[3:])
    assert deployment.serial == len(deployment.events) == 7


@pytest.mark.parametrize(
    ("state", "now_s", "seen", "what"),
    [
        ("pending", 0, {"state": "registered"}, "the version to be available"),
        ("warming", 99, {"active": 0}, "workers: 0 of 1 serve"),
        ("stepping", 9, {}, "1 s of soaking"),
        ("stepping", 99, {"canary_step": answered(19)}, "requests from 10% of the traffic: 19 of 20 have ended"),
        (
            "stepping",
            9,
            {"canary_step": Tally()},
            "1 s of soaking and requests from 10% of the traffic: 0 of 20 have ended",
        ),
        ("stepping", 99, {"active": 2}, "workers: 2 of 3 serve"),  # 28 slots, half of it, 8 at 70%
        ("baking", 15, {}, "5 s of baking"),
        ("rolling_back", 99, {}, "9 requests that run"),
        ("paused", 99, {}, "`resume`, `promote` or `rollback`"),
    ],
)
def test_what_is_waited_for_is_waited_for(state: str, now_s: float, seen: dict[str, Any], what: str) -> None:
    if state in ("rolling_back", "paused"):
        command: Command = "rollback" if state == "rolling_back" else "pause"
        deployment = commanded(at("stepping"), command, "by hand", 2000.0)
    else:
        deployment = at(state)
    facts, now = replace(READY, **seen), deployment.since + now_s
    assert waits_for(deployment, facts, now) == what
    assert advance(deployment, facts, now) is deployment
    if state != "paused":
        assert waits_for(deployment, replace(READY, open_requests=0), deployment.since + 100) == ""
        assert advance(deployment, replace(READY, open_requests=0), deployment.since + 100) is not deployment


@pytest.mark.parametrize("state", ["pending", "warming", "stepping", "baking", "paused"])
@pytest.mark.parametrize(
    ("seen", "reason"),
    [
        ({"state": "failed", "state_reason": "no such file"}, "chat@v2 is failed: no such file"),
        ({"replicas_max": 0}, "chat@v2 has max_replicas 0: no worker can serve it"),
        ({"state": "deleted"}, "chat@v2 is deleted"),
        (
            {"crashes": 2, "last_crash": "exit code 9"},
            "2 workers of chat@v2 ended by themselves, the last one: exit code 9",
        ),
    ],
)
def test_a_version_that_cannot_serve_is_taken_back_in_every_state(
    state: str, seen: dict[str, Any], reason: str
) -> None:
    deployment = commanded(at("stepping"), "pause", "", 1.0) if state == "paused" else at(state)
    after = advance(deployment, replace(READY, **seen), deployment.since)
    assert (after.state, after.reason, after.basis_points) == ("rolling_back", reason, 0)
    done = advance(after, replace(READY, open_requests=0), 9000.0)
    assert (done.state, advance(done, READY, 9999.0)) == ("rolled_back", done)


@pytest.mark.parametrize("state", ["stepping", "baking", "paused"])
@pytest.mark.parametrize("window", ["step", "all"])
def test_a_breach_takes_it_back_wherever_it_has_traffic(state: str, window: str) -> None:
    deployment = commanded(at("stepping"), "pause", "", 1.0) if state == "paused" else at(state)
    after = advance(deployment, replace(READY, **{f"canary_{window}": BAD}), deployment.since)
    assert after.state == "rolling_back"
    assert after.reason.startswith("error_rate is 20% of 500 requests, surely over the limit of 1%, stable has 0%")
    assert [each.window for each in after.events[-1].evidence if each.breached] == [
        "step" if window == "step" else "deployment"
    ]


def test_at_all_traffic_it_is_compared_with_what_stable_had() -> None:
    deployment = at("baking")
    assert advance(deployment, replace(READY, canary_step=BAD, stable_step=Tally()), deployment.since) is not deployment
    early = at("stepping")
    assert advance(early, replace(READY, canary_step=BAD, stable_step=Tally()), early.since) is early


def test_one_crash_is_not_two() -> None:
    deployment = at("stepping")
    assert advance(deployment, replace(READY, crashes=1), deployment.since) is deployment


def test_a_rollback_ends_when_nothing_runs_or_when_nobody_is_there_to_run_it() -> None:
    back = commanded(at("stepping"), "rollback", "it is rude", 2000.0)
    unknown, alone = replace(READY, open_requests=None), replace(READY, workers=0)
    assert advance(back, unknown, 2100.0) is back
    assert advance(back, alone, 2000.0 + LINGER_S - 1) is back
    assert advance(back, alone, 2000.0 + LINGER_S).state == "rolled_back"


def test_all_at_once() -> None:
    immediate = planned(strategy="immediate", steps=None)
    assert advance(immediate, replace(READY, active=0), 1000.0).state == "promoted"
    assert floors(immediate, READY, 1000.0) == (0, 0)
    both = at("stepping", strategy="blue_green", steps=None)
    assert both.basis_points == ALL_TRAFFIC
    assert floors(both, READY, both.since) == (5, 5)


@pytest.mark.parametrize(
    "changes",
    [
        {"version": "v1"},
        {"steps": (Step(pct=50),)},
        {"steps": (Step(pct=50), Step(pct=10), Step(pct=100))},
        {"steps": (Step(pct=50), Step(pct=50), Step(pct=100))},
        {"steps": (Step(pct=0.001), Step(pct=100))},
        {"strategy": "immediate"},
    ],
)
def test_a_plan_that_is_none_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(BadRequest):
        planned(**changes)


# -- commands ----------------------------------------------------------------------------------------------------------


def test_a_pause_keeps_the_share_and_a_resumed_step_has_soaked_meanwhile() -> None:
    deployment = at("stepping")
    paused = commanded(deployment, "pause", "by hand", deployment.since + 5)
    assert (paused.state, paused.phase, paused.basis_points) == ("paused", "stepping", 1000)
    assert commanded(paused, "pause", "again", 9.0) is paused
    resumed = commanded(paused, "resume", "by hand", deployment.since + 8)
    assert (resumed.state, resumed.step, resumed.since) == ("stepping", 0, deployment.since)
    assert advance(resumed, READY, deployment.since + 10).step == 1
    with pytest.raises(DeploymentState):
        commanded(resumed, "resume", "", 9.0)


def test_promote_hurries_but_not_past_the_workers() -> None:
    deployment = commanded(at("stepping"), "promote", "by hand", 2000.0)
    bad = replace(READY, canary_step=BAD, canary_all=BAD)
    assert advance(deployment, replace(bad, active=2), 2000.0) is deployment
    seen = [deployment]
    while (after := advance(seen[-1], bad, 2000.0)) is not seen[-1]:
        seen.append(after)
    assert [(each.state, each.step) for each in seen[1:]] == [
        ("stepping", 1),
        ("stepping", 2),
        ("baking", 2),
        ("promoted", 2),
    ]
    assert advance(deployment, replace(bad, state="failed"), 2000.0).state == "rolling_back"


@pytest.mark.parametrize("what", ["pause", "resume", "promote"])
@pytest.mark.parametrize("state", ["promoted", "rolling_back", "rolled_back"])
def test_what_has_ended_is_left_alone(what: Command, state: str) -> None:
    ended = at("promoted")
    if state != "promoted":
        ended = commanded(ended, "rollback", "by hand", 3000.0)
        ended = advance(ended, replace(READY, open_requests=0), 3000.0) if state == "rolled_back" else ended
        assert commanded(ended, "rollback", "again", 3001.0) is ended
    with pytest.raises(DeploymentState):
        commanded(ended, what, "", 3001.0)


# -- capacity ----------------------------------------------------------------------------------------------------------


@given(st.floats(0, 1e4), st.integers(0, 64), st.floats(0.1, 1.0), st.integers(0, 300), st.integers(0, 10_000))
def test_replicas_are_enough_and_not_one_too_many(
    work: float, slots: int, utilisation: float, most: int, share: int
) -> None:
    facts = replace(READY, work=work, slots=slots, utilisation=utilisation, replicas_max=most)
    found = replicas_for(facts, share)
    assert 1 <= found <= max(1, most)
    assert found <= replicas_for(facts, ALL_TRAFFIC)
    need = work * share / ALL_TRAFFIC
    if slots and found < most:
        assert found * slots * utilisation >= need - 1e-6 * max(1.0, need)
    if slots and found > 1:
        assert (found - 1) * slots * utilisation < need


def test_the_next_share_s_workers_are_started_a_cold_start_before_it_and_stable_s_are_kept() -> None:
    deployment = at("stepping")
    assert [floors(deployment, READY, deployment.since + after_s) for after_s in (0, 3.9, 4.0)] == [
        (1, 5),
        (1, 5),
        (3, 5),
    ]
    paused = commanded(deployment, "pause", "", deployment.since)
    assert floors(paused, READY, deployment.since + 99) == (1, 5)
    assert floors(at("warming"), READY, 0.0) == (1, 5)
    assert floors(at("baking"), READY, 0.0) == (5, 5)
    assert floors(commanded(deployment, "rollback", "", 0.0), READY, 0.0) == (0, 5)
    assert floors(planned(), READY, 0.0) == floors(at("promoted"), READY, 0.0) == (0, 0)
    assert floors(at("baking"), replace(READY, stable_max=2, replicas_max=3), 0.0) == (3, 2)
    assert floors(at("baking"), replace(READY, work=0.0), 0.0) == (1, 0)


def version_facts(version: str, claimed: int, at_s: float = 0.0) -> VersionFacts:
    return VersionFacts(
        model="chat",
        version=version,
        state="available",
        min_replicas=0,
        max_replicas=9,
        idle_seconds=60.0,
        lag=Lag(0, claimed),
        busy_at=at_s,
        replicas=(Replica(active=True, slots=8, claims=claimed),),
        cold_start_s=3.0,
    )


def test_load_that_moves_from_one_version_to_the_other_is_counted_once() -> None:
    work, peaks = Work(Policy(down_window_s=30.0)), []
    for now in range(60):
        moved = min(20, now)
        peaks.append(work.peak([version_facts("v1", 20 - moved), version_facts("v2", moved)], float(now)))
    assert set(peaks) == {20.0}
    assert work.peak([version_facts("v1", 0), version_facts("v2", 5)], 80.0) == 20.0
    assert work.peak([version_facts("v2", 5)], 100.0) == 5.0


def test_what_is_known_of_both_versions() -> None:
    members = [
        Member(worker="a", model="chat", version="v2", state="active", since=0.0),
        Member(worker="b", model="chat", version="v2", state="loaded", since=0.0, claim=False),
        Member(worker="c", model="chat", version="v2", state="draining", since=0.0),
    ]
    record = Version(model="chat", version="v2", state="failed", source="sim", reason="no such file")
    counted = (
        Counted(step=answered(1), all=answered(3), slices=(answered(2),)),
        Counted(step=answered(4), all=answered(5)),
    )
    versions = version_facts("v2", 6), version_facts("v1", 7)
    found = facts_of(*versions, members, record, ["exit 1", "exit 2"], *counted, Work(Policy()), 0.0)
    assert (found.state, found.state_reason) == ("failed", "no such file")
    assert (found.active, found.workers, found.open_requests, found.work) == (1, 3, 6, 13.0)
    assert (found.slots, found.stable_slots, found.replicas_max, found.cold_start_s) == (8, 8, 9, 3.0)
    assert (found.crashes, found.last_crash) == (2, "exit 2")
    assert [each.ended for each in (found.canary_step, found.canary_all, found.stable_step, found.stable_all)] == [
        1,
        3,
        4,
        5,
    ]
    assert [each.ended for each in found.canary_slices] == [2]
    nothing = facts_of(None, None, [], None, [], *counted, Work(Policy()), 0.0)
    assert (nothing.state, nothing.open_requests, nothing.work) == ("deleted", None, 0.0)


# -- counts ------------------------------------------------------------------------------------------------------------


def told(by: str, count: int) -> tuple[str, bytes]:
    mine = VersionTally(model="chat", version="v2", deployment="d-1", tally=answered(count))
    return subjects.key(by), tally.encode(IngressLease(ingress=by, pid=1, host="", started=0.0, tallies=[mine]))


def test_counts_of_all_ingresses_by_step_and_by_time() -> None:
    tallies, deployment = Tallies(), at("stepping")
    for now in range(6):
        for name in ("one", "other"):
            tallies.on_lease(*told(name, 10 * now))
        counted = tallies.of(deployment, "v2", float(now))
    assert (counted.all.ended, counted.step.ended) == (100, 100)
    assert [each.ended for each in counted.slices] == [40, 40]
    after = advance(deployment, READY, deployment.since + 10)
    tallies.on_lease(subjects.key("one"), None)  # it is gone, and what it counted stays
    tallies.on_lease(subjects.key("other"), b"{")
    assert tallies.of(after, "v2", 6.0).step.ended == 0
    tallies.on_lease(*told("other", 70))
    counted = tallies.of(after, "v2", 7.0)
    assert (counted.all.ended, counted.step.ended) == (120, 20)
    tallies.forget(set())
    assert tallies.of(after, "v2", 8.0).all.ended == 0


@given(st.lists(st.integers(0, 3), min_size=1, max_size=400))
def test_slices_are_all_that_was_counted_and_never_many(counts: list[int]) -> None:
    slices, counted, taken = Slices(0.0), Tally(), 0
    for second, count in enumerate(counts, 1):
        counted += answered(count)
        before = list(slices.slices)
        slices.take(counted, float(second))
        taken = counted.ended if slices.slices != before else taken
        assert len(slices.slices) < SLICES_MAX
    assert sum(each.ended for each in slices.slices) == taken


# -- whatever happens --------------------------------------------------------------------------------------------------

SEEN = st.builds(
    lambda active, work, bad, soaked, more: replace(
        READY, active=active, workers=active, work=work, canary_all=BAD if bad else GOOD, canary_step=soaked, **more
    ),
    st.integers(0, 12),
    st.sampled_from([0.0, 5.0, 28.0, 60.0]),
    st.sampled_from([False] * 9 + [True]),
    st.sampled_from([Tally(), GOOD]),
    st.sampled_from(
        [{}] * 12 + [{"state": "registered"}, {"state": "failed"}, {"crashes": 2}, {"open_requests": 0}, {"slots": 0}]
    ),
)
COMMANDS = st.sampled_from([None] * 8 + ["pause", "resume", "resume", "promote", "rollback"])
MOVES = st.lists(st.tuples(SEEN, COMMANDS, st.sampled_from([0.25, 5.0, 30.0])), max_size=60)


@settings(max_examples=200, deadline=None)
@given(MOVES, st.sampled_from(["canary", "ramp", "blue_green", "immediate"]))
def test_what_holds_whatever_is_seen_and_commanded(moves: list[Any], strategy: Any) -> None:
    deployment = planned(strategy=strategy, steps=None)
    route, now, router = route_of(deployment, ROUTE), 1000.0, Router()
    for name in ("v1", "v2"):
        router.put_version(Version(model="chat", version=name, state="available", source="sim"))
    for facts, command, passed_s in moves:
        now += passed_s
        before = deployment
        if command is not None:
            try:
                deployment = commanded(before, command, "by hand", now)
            except DeploymentState:
                assert command != "rollback"
            _holds(before, deployment, None, router, route)
            route = route_of(deployment, route)
        before = deployment
        deployment = advance(before, facts, now)
        _holds(before, deployment, facts, router, route)
        route = route_of(deployment, route)


def _holds(before: Deployment, after: Deployment, facts: Facts | None, router: Router, route: Route) -> None:
    """Of one change, by the machine or (no facts) by a command."""
    if after is before:
        return
    assert after.serial == before.serial + 1
    assert (after.events[-1].state, after.events[-1].pct) == (after.state, after.basis_points / 100)
    assert before.state not in ENDED or (before.state == "promoted" and after.state == "rolling_back")
    raised = after.basis_points > before.basis_points
    if raised:  # by a step, by one, with the workers for it, and never by a command
        assert facts is not None
        assert after.state == "stepping" or after.strategy == "immediate"
        assert after.strategy == "immediate" or after.step == before.step + 1
        assert after.strategy == "immediate" or facts.active >= replicas_for(facts, after.basis_points)
    if facts is not None and before.state == "paused":
        assert after.state == "rolling_back"  # paused ones are guarded, and that is all
    if after.state == "promoted" and facts is not None:
        assert before.state == "baking" or after.strategy == "immediate"
    if facts is not None and not before.ended and before.state != "rolling_back" and not before.hurried:
        bad = facts.state == "failed" or facts.crashes > 1 or (before.basis_points > 0 and facts.canary_all is BAD)
        assert bad is (after.state == "rolling_back")
    _routes(after, route, router)


def _routes(deployment: Deployment, before: Route, router: Router) -> None:
    after = route_of(deployment, before)
    assert sum(weight.basis_points for weight in after.weights) == ALL_TRAFFIC
    assert (after.rolling, after.serial) == (not deployment.ended, deployment.serial)
    assert not is_newer(deployment, after)
    assert is_newer(deployment, before)
    assert ("v2" in after.withdrawn) is (deployment.state in ("rolling_back", "rolled_back"))
    assert after.aliases["tests"] == "v1"
    assert (after.aliases.get(CANARY) == "v2") is (deployment.phase in ("pending", "warming", "stepping", "baking"))
    assert after.aliases["stable"] == ("v2" if deployment.state == "promoted" else "v1")
    keys = [str(number) for number in range(60)]
    router.put_route(before)
    old = {key for key in keys if router.resolve("chat", None, key).version == "v2"}
    router.put_route(after)
    new = {key for key in keys if router.resolve("chat", None, key).version == "v2"}
    assert old <= new or not new  # raising a weight only moves keys over; a rollback moves all back


def test_the_steps_that_come_without_asking_rise_to_all() -> None:
    for steps in DEFAULT_STEPS.values():
        assert [step.pct for step in steps] == sorted({step.pct for step in steps})
        assert steps[-1].pct == 100
