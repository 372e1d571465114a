"""Whose backlog is taken from next."""

from collections import Counter

from workers.engine.request import Standing, TenantLimits
from workers.turns import Turns


def share(
    turns: Turns,
    credit: int,
    holding: dict[str, int] | None = None,
    service: float = 10.0,
    counters: dict[str, float] | None = None,
    waiting: dict[str, int] | None = None,
    **limits: TenantLimits,
) -> dict[str, int]:
    standings = {
        tenant: Standing((counters or {}).get(tenant, 0.0), (waiting or {}).get(tenant, 0)) for tenant in turns.tenants
    }
    limited = {tenant: limits.get(tenant, TenantLimits()) for tenant in turns.tenants}
    return dict(turns.share(credit, holding or {}, standings, limited, service))


def backlogs(*names: str, left: int = 100, hold_max: int = 50) -> Turns:
    turns = Turns(hold_max)
    turns.look(dict.fromkeys(names, left))
    return turns


def test_many_slots_at_once_are_parted_by_weight() -> None:
    turns = backlogs("a", "b", "c")
    weights = {"b": TenantLimits(weight=2.0), "c": TenantLimits(weight=5.0)}
    assert share(turns, 40, **weights) == {"a": 5, "b": 10, "c": 25}


def test_who_was_served_less_comes_first_and_what_is_held_counts() -> None:
    turns = backlogs("a", "b")
    assert share(turns, 1, counters={"a": 11.0, "b": 9.0}) == {"b": 1}
    assert share(turns, 4, counters={"a": 100.0, "b": 80.0}) == {"a": 1, "b": 3}
    assert share(turns, 2, holding={"b": 3}) == {"a": 2}


def test_a_higher_priority_goes_first() -> None:
    turns = backlogs("a", "b", left=3)
    assert share(turns, 4, a=TenantLimits(priority=1), counters={"a": 1e6}) == {"a": 3, "b": 1}


def test_nobody_gets_more_than_the_batch_has_room_for() -> None:
    turns = backlogs("a", hold_max=9)
    assert share(turns, 20, holding={"a": 4}) == {"a": 5}
    assert share(turns, 20, a=TenantLimits(slots_max=3)) == {"a": 3}
    assert share(turns, 20, holding={"a": 4}, waiting={"a": 1}) == {"a": 5}
    assert share(turns, 20, holding={"a": 4}, waiting={"a": 2}) == {}  # it is memory that it lacks


def test_a_tenant_has_one_pull_at_a_time_and_is_forgotten_when_it_finds_nothing() -> None:
    turns = backlogs("a")
    turns.pulled("a", 3)
    assert (turns.pulling, share(turns, 10)) == (3, {})
    assert not turns.message("a", 5)
    turns.ended("a")
    assert not turns
    turns.hint("a")
    turns.pulled("a", 1)
    assert turns.message("a", 7)
    assert share(turns, 10) == {"a": 7}


def test_a_hint_that_came_while_a_pull_was_open_is_kept() -> None:
    turns = backlogs("a")
    turns.pulled("a", 2)
    turns.hint("a")
    turns.ended("a")
    assert share(turns, 10) == {"a": 1}
    turns.pulled("a", 1)
    assert turns.message("a", 0)
    assert not turns


def test_a_look_forgets_who_has_nothing_and_no_open_pull() -> None:
    turns = backlogs("a", "b", "c")
    turns.pulled("b", 1)
    turns.look({"c": 0, "d": 4})
    assert Counter(turns.tenants) == Counter(["b", "d"])


def test_what_was_handed_back_is_not_counted_by_the_broker_and_is_there_all_the_same() -> None:
    turns = backlogs("a", left=3)
    turns.pulled("a", 2)
    assert [turns.message("a", 0), turns.message("a", 0)] == [False, True]
    assert share(turns, 5) == {"a": 1}
    turns.pulled("a", 1)
    assert turns.message("a", 0)
    assert not turns
