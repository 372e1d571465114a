"""allocate(): who gets the devices where there are too few, once and over time."""

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Struct
from msgspec.structs import replace

from controller.allocation import Demand, Turn, Turns, VersionKey, allocate, demand_of
from controller.autoscaler import Decision, Lag, Policy, VersionFacts

POLICY = Policy(turn_s=60.0, turn_min_s=30.0, starved_s=300.0, start_s_max=120.0)


class Wish(Struct, frozen=True, kw_only=True):
    """What one version asks for."""

    name: str
    desired: int = 1
    spares: int = 0
    priority: int = 0
    has_work: bool = True
    held: int = 0
    active: bool = True


def once(
    wishes: list[Wish], devices: int, now: float = 0.0, turns: Turns | None = None
) -> tuple[dict[str, Decision], dict[VersionKey, Turn]]:
    decisions = [
        Decision(model=each.name, version="v", desired=each.desired, spares=each.spares, reasons=("work",))
        for each in wishes
    ]
    demands = {
        (each.name, "v"): Demand(
            priority=each.priority, has_work=each.has_work, held=each.held, active=each.active and each.held > 0
        )
        for each in wishes
    }
    found, turns = allocate(decisions, demands, devices, now, POLICY, turns or {})
    assert [decision.model for decision in found] == [each.name for each in wishes]
    return {decision.model: decision for decision in found}, turns


def counts(found: dict[str, Decision]) -> dict[str, int]:
    return {name: decision.desired for name, decision in found.items()}


def test_enough_devices_change_nothing() -> None:
    found, _ = once([Wish(name="a", desired=2, spares=1), Wish(name="b", desired=1)], devices=4)
    assert (counts(found), found["a"].spares) == ({"a": 2, "b": 1}, 1)
    assert all(decision.reasons == ("work",) for decision in found.values())


def test_among_equals_each_gets_the_same_share_of_what_it_needs() -> None:
    found, _ = once([Wish(name="a", desired=8), Wish(name="b", desired=4), Wish(name="c", desired=1)], devices=7)
    assert counts(found) == {"a": 4, "b": 2, "c": 1}
    assert (found["a"].reasons[-1], found["c"].reasons[-1]) == ("devices_short", "work")


def test_the_higher_priority_goes_first_and_what_has_work_goes_before_what_has_none() -> None:
    found, _ = once([Wish(name="low", desired=2), Wish(name="high", desired=3, priority=1)], devices=4)
    assert counts(found) == {"low": 1, "high": 3}
    found, _ = once([Wish(name="low", desired=2), Wish(name="high", desired=3, priority=1, has_work=False)], devices=4)
    assert counts(found) == {"low": 2, "high": 2}


def test_spares_come_last() -> None:
    found, _ = once([Wish(name="a", spares=2, priority=9), Wish(name="b", desired=2, has_work=False)], devices=4)
    assert (counts(found), found["a"].spares) == ({"a": 1, "b": 2}, 1)
    assert found["a"].reasons[-1] == "spares_short"


def test_an_idle_version_gives_way_at_once_and_says_so() -> None:
    wishes = [Wish(name="idle", has_work=False, held=1), Wish(name="busy", held=0)]
    found, turns = once(wishes, devices=1)
    assert counts(found) == {"idle": 0, "busy": 1}
    assert found["idle"].reasons[-1] == "gave_way"
    found, _ = once(wishes, devices=1, now=1.0, turns=turns)
    assert found["idle"].reasons[-1] == "devices_short"


class World:
    """Devices over time: who is granted one serves `load_s` later; `tick_s` between two allocations."""

    def __init__(self, wishes: list[Wish], devices: int, load_s: float = 5.0, tick_s: float = 1.0) -> None:
        self.wishes, self.devices, self.load_s, self.tick_s = wishes, devices, load_s, tick_s
        self.now = 0.0
        self.turns: Turns = {}
        self.granted: dict[str, int] = {each.name: 0 for each in wishes}
        self.since: dict[str, float] = {}
        self.spans: dict[str, list[tuple[float, float]]] = {each.name: [] for each in wishes}  # without a device
        self.served: dict[str, list[float]] = {each.name: [] for each in wishes}  # lengths of turns that ended
        self._without = {each.name: 0.0 for each in wishes}

    def tick(self) -> None:
        shown = [
            Wish(
                name=each.name,
                desired=each.desired,
                priority=each.priority,
                held=self.granted[each.name],
                active=self.granted[each.name] > 0 and self.now - self.since[each.name] >= self.load_s,
            )
            for each in self.wishes
        ]
        found, self.turns = once(shown, self.devices, self.now, self.turns)
        total = sum(decision.desired for decision in found.values())
        assert total == min(self.devices, sum(each.desired for each in self.wishes)), "over, or work is left"
        for name, decision in found.items():
            before, after = self.granted[name], decision.desired
            if after and not before:
                self.spans[name].append((self._without[name], self.now))
                self.since[name] = self.now
            elif before and not after:
                self._without[name] = self.now
                self.served[name].append(self.now - self.since[name] - self.load_s)
            self.granted[name] = after
        self.now += self.tick_s

    def run(self, seconds: float) -> "World":
        while self.now < seconds:
            self.tick()
        return self

    def longest_wait_s(self, name: str) -> float:
        open_s = [] if self.granted[name] else [self.now - self._without[name]]
        return max([end - begin for begin, end in self.spans[name]] + open_s)


def test_two_models_on_one_device_take_turns() -> None:
    world = World([Wish(name="a"), Wish(name="b")], devices=1).run(1200.0)
    for name in ("a", "b"):
        assert world.longest_wait_s(name) <= POLICY.turn_s + world.tick_s
        assert min(world.served[name]) >= POLICY.turn_min_s
        assert 8 <= len(world.served[name]) <= 10


def test_a_lower_priority_gets_a_short_turn_after_a_long_wait() -> None:
    world = World([Wish(name="high", priority=5, desired=2), Wish(name="low")], devices=2).run(1500.0)
    assert world.longest_wait_s("low") <= POLICY.starved_s + world.tick_s
    assert all(30.0 <= seconds <= 31.0 for seconds in world.served["low"])
    assert len(world.served["low"]) == 4
    assert world.served["high"] == []


def test_a_version_that_does_not_come_up_loses_its_turn_after_a_while() -> None:
    world = World([Wish(name="a"), Wish(name="b")], devices=1, load_s=1e6).run(1000.0)
    assert world.longest_wait_s("b") <= POLICY.start_s_max + world.tick_s


def test_demands_that_swing_do_not_make_devices_swing() -> None:
    turns: Turns = {}
    changes, before = 0, None
    for second in range(120):
        swing = second % 2
        wishes = [Wish(name="a", desired=3 + swing, held=3), Wish(name="b", desired=4 - swing, held=3)]
        found, turns = once(wishes, 6, float(second), turns)
        changes += before is not None and counts(found) != before
        before = counts(found)
    assert changes <= 120 / POLICY.turn_min_s


wishes = st.lists(
    st.builds(
        Wish,
        name=st.sampled_from("abcdef"),
        desired=st.integers(0, 6),
        spares=st.integers(0, 2),
        priority=st.integers(-1, 1),
        has_work=st.booleans(),
        held=st.integers(0, 3),
        active=st.booleans(),
    ),
    max_size=6,
    unique_by=lambda wish: wish.name,
)


@settings(deadline=None)
@given(st.lists(wishes, min_size=1, max_size=5), st.integers(0, 8), st.floats(0.1, 100.0))
def test_no_device_is_given_twice_and_none_is_left_while_somebody_wants_it(
    rounds: list[list[Wish]], devices: int, gap_s: float
) -> None:
    turns: Turns = {}
    for number, asked in enumerate(rounds):
        found, turns = once(asked, devices, number * gap_s, turns)
        given_out = sum(decision.desired + decision.spares for decision in found.values())
        assert given_out == min(devices, sum(each.desired + each.spares for each in asked))
        for each in asked:
            assert 0 <= found[each.name].desired <= each.desired
            assert 0 <= found[each.name].spares <= each.spares
        if any(found[each.name].spares for each in asked):
            assert all(found[each.name].desired == each.desired for each in asked), "spares before replicas"


@settings(deadline=None)
@given(wishes, st.integers(0, 8), st.randoms())
def test_the_order_of_the_versions_does_not_matter(asked: list[Wish], devices: int, random: object) -> None:
    mixed = list(asked)
    random.shuffle(mixed)  # type: ignore[attr-defined]
    assert once(asked, devices)[0] == once(mixed, devices)[0]


@settings(deadline=None)
@given(wishes, st.integers(0, 8))
def test_after_all_hysteresis_priority_holds_and_equals_share(asked: list[Wish], devices: int) -> None:
    """Nobody waits long enough for a turn here; what was gained long ago is not kept."""
    old = {
        (each.name, "v"): Turn(granted=each.held, since=980.0, served_since=900.0, gained_at=0.0)
        for each in asked
        if each.desired and each.held
    }
    found, _ = once(asked, devices, 1000.0, old)
    for one in asked:
        for other in asked:
            if not (one.has_work and other.has_work):
                continue
            mine, theirs = found[one.name].desired, found[other.name].desired
            if one.priority > other.priority and theirs > 0:
                assert mine == one.desired, "a lower priority has what a higher one needs"
            if one.priority == other.priority and mine < one.desired and theirs > 1:
                assert mine / one.desired >= (theirs - 1) / other.desired, "unequal shares"


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(-1, 1)), min_size=2, max_size=5),
    st.integers(1, 4),
    st.floats(0.0, 60.0),
)
def test_nobody_starves_and_nobody_swaps_faster_than_the_hysteresis(
    asked: list[tuple[int, int]], devices: int, load_s: float
) -> None:
    versions = [Wish(name=f"m{n}", desired=desired, priority=priority) for n, (desired, priority) in enumerate(asked)]
    world = World(versions, devices, load_s, tick_s=3.0).run(2500.0)
    turn_s = POLICY.turn_min_s + load_s + 2 * world.tick_s
    for each in versions:
        bound_s = POLICY.starved_s + len(versions) * turn_s
        assert world.longest_wait_s(each.name) <= bound_s
        assert all(served_s >= POLICY.turn_min_s - world.tick_s for served_s in world.served[each.name])


def test_a_version_that_has_nothing_but_jobs_comes_after_all_that_somebody_waits_for() -> None:
    facts = VersionFacts(
        model="m",
        version="v",
        state="available",
        min_replicas=0,
        max_replicas=4,
        idle_seconds=60.0,
        lag=Lag(0, 0, jobs=9),
        busy_at=0.0,
    )
    jobs = demand_of(facts, 5, False, 0.0, Policy())
    asked = demand_of(replace(facts, lag=Lag(1, 0, jobs=9)), 0, False, 0.0, Policy())
    assert jobs.has_work
    assert jobs.priority < asked.priority
