"""Which lane a request goes to, who is told of it, and what is known of other tenants and ingresses."""

import asyncio

import pytest

from shared import subjects, tenants, wakes
from shared.lanes import LaneSwitch
from shared.peers import Peers
from shared.shares import TenantShares
from shared.subjects import LANE_FAIR, LANE_FAST
from shared.tenants import Tenant
from shared.wire import Malformed

QUEUE = ("a", "m", "v")


def test_at_the_burst_a_tenant_is_backlogged_until_nothing_of_it_is_left_in_the_lane_fair() -> None:
    lanes = LaneSwitch(3)
    places = [lanes.enter(*QUEUE) for _ in range(5)]
    assert [place.lane for place in places] == [LANE_FAST] * 3 + [LANE_FAIR] * 2
    assert lanes.queued("a") == 5
    for place in places[:4]:
        lanes.leave(place)
    assert lanes.lane(*QUEUE) == LANE_FAIR  # else it would overtake the last one
    lanes.leave(places[4])
    assert (lanes.lane(*QUEUE), lanes.queued("a")) == (LANE_FAST, 0)


def test_a_tenant_is_backlogged_for_one_version_and_by_itself_alone() -> None:
    lanes = LaneSwitch(1)
    assert [lanes.enter(*QUEUE).lane for _ in range(2)] == [LANE_FAST, LANE_FAIR]
    assert lanes.lane("a", "m", "other") == LANE_FAST
    assert lanes.lane("b", "m", "v") == LANE_FAST
    lanes.enter("a", "m", "other")
    assert (lanes.queued("a"), lanes.queued("b")) == (3, 0)


@pytest.mark.parametrize(
    ("weight", "processes", "fast"), [(1.0, 1, 8), (2.5, 1, 20), (1.0, 3, 3), (0.01, 1, 1), (1.0, 100, 1)]
)
def test_the_burst_is_by_weight_and_parted_among_the_ingresses(weight: float, processes: int, fast: int) -> None:
    lanes = LaneSwitch(8)
    lanes.weight, lanes.processes = lambda tenant: weight if tenant == "a" else 1.0, lambda: processes
    assert sum(lanes.enter(*QUEUE).lane == LANE_FAST for _ in range(50)) == fast


def test_a_publisher_that_is_no_ingress_has_only_the_lane_fair() -> None:
    assert LaneSwitch(0).lane(*QUEUE) == LANE_FAIR


def test_hints_of_a_flood_are_gathered_and_the_last_one_is_sent() -> None:
    async def main() -> None:
        sent: list[tuple[str, list[str] | None]] = []
        told = asyncio.Event()

        async def send(subject: str, body: bytes) -> None:
            sent.append((subject, wakes.decode(body)))
            if len(sent) == 3:
                told.set()

        hints = wakes.Hints(send)
        for number in range(100):
            hints.hint("m", "v", "a" if number < 50 else "b")
        hints.hint("m", "w", "c")
        await told.wait()
        assert sent[:2] == [(subjects.wake("m", "v"), ["a"]), (subjects.wake("m", "w"), ["c"])]
        assert sent[2:] == [(subjects.wake("m", "v"), ["a", "b"])]

    asyncio.run(main())


@pytest.mark.parametrize("body", [b"{}", b"[1]", b"\xff", b"[" * 10_000])
def test_what_is_no_hint_is_refused(body: bytes) -> None:
    with pytest.raises(Malformed):
        wakes.decode(body)


def test_weights_and_priorities_are_those_of_the_records() -> None:
    shares = TenantShares()
    key = subjects.key("a b")
    shares.on_change(key, tenants.encode(Tenant(name="a b", weight=3.0, priority=-2)))
    assert (shares.weight("a b"), shares.priority("a b")) == (3.0, -2)
    shares.on_change(key, b"no record")
    assert shares.weight("a b") == 3.0
    shares.on_change(key, None)
    assert (shares.weight("a b"), shares.priority("a b")) == (1.0, 0)


def test_an_ingress_counts_as_long_as_it_is_heard() -> None:
    peers = Peers(5.0)
    assert peers.count(0.0) == 1
    for number in range(3):
        peers.note(f"i{number}", True, 0.0)
    assert peers.count(0.0) == 3
    peers.note("i0", True, 4.0)
    peers.note("i1", False, 4.0)
    assert peers.count(4.0) == 2
    assert peers.count(6.0) == 1
    assert peers.count(99.0) == 1  # this one
