"""Who serves what is missing, and on which device."""

from controller.fleet import Member, Plan
from controller.placement import NO_VERSION, Drain, Give, Start, place

A, B = ("a", "v1"), ("b", "v1")


def warm(worker: str, device: str = "", state: str = "warm", heard: bool = True) -> Member:
    return Member(worker=worker, state=state, since=0.0, device=device, heard=heard, local=True)


def serving(worker: str, device: str, state: str = "active") -> Member:
    return Member(worker=worker, model="a", version="v1", state=state, since=0.0, device=device, local=True)


def test_without_devices_every_missing_worker_is_started() -> None:
    assert place([(A, Plan(starts=2)), (B, Plan(starts=1))], [], None, 0) == [Start(A), Start(A), Start(B)]


def test_a_warm_worker_goes_before_a_new_one_and_one_that_is_ready_before_one_that_starts() -> None:
    fleet = [warm("slow", state="starting"), warm("ready"), warm("unheard", state="starting", heard=False)]
    assert place([(A, Plan(starts=3))], fleet, None, 1) == [
        Give("ready", A, True),
        Give("slow", A, True),
        Start(A),
    ]  # the third stays in the pool: it cannot be told anything yet


def test_the_pool_is_filled_up_and_what_is_too_much_ends() -> None:
    assert place([], [], None, 2) == [Start(NO_VERSION), Start(NO_VERSION)]
    assert place([], [warm("one"), warm("two")], None, 1) == [Drain("two")]
    assert place([(A, Plan(starts=1))], [warm("one")], None, 1) == [Give("one", A, True), Start(NO_VERSION)]


def test_without_hands_what_there_is_is_given_and_nothing_is_started_or_too_much() -> None:
    wanted = [(A, Plan(starts=3, spares=1))]
    fleet = [warm("one", "0"), warm("two")]
    assert place(wanted, fleet, None, 0, makes_workers=False) == [Give("one", A, True), Give("two", A, True)]
    assert place([], fleet, None, 0, makes_workers=False) == []
    assert place([], [], None, 2, makes_workers=False) == []


def test_spares_are_made_of_warm_workers_after_all_that_claim() -> None:
    both = [(A, Plan(spares=1)), (B, Plan(starts=1))]
    assert place(both, [warm("one")], None, 0) == [Give("one", B, True), Start(NO_VERSION)]
    assert place([(A, Plan(spares=1))], [warm("one")], None, 0) == [Give("one", A, False)]


def test_a_spare_gets_the_free_device_though_the_warm_workers_are_on_others() -> None:
    fleet = [serving("old", "0"), serving("other", "1"), warm("one", "0"), warm("two", "1")]
    wanted = [(A, Plan(spares=1))]
    assert place(wanted, fleet, ["0", "1", "2"], 1) == [Start(NO_VERSION, "2"), Drain("two")]
    del fleet[-1]
    coming = warm("three", "2", state="starting", heard=False)
    assert place(wanted, [*fleet, coming], ["0", "1", "2"], 1) == []
    assert place(wanted, [*fleet, warm("three", "2")], ["0", "1", "2"], 1) == [Give("three", A, False)]


def test_a_device_is_for_one_worker_even_while_that_drains() -> None:
    fleet = [serving("old", "0", "draining"), serving("other", "1")]
    assert place([(A, Plan(starts=2))], fleet, ["0", "1", "2"], 0) == [Start(A, "2")]
    assert place([(A, Plan(starts=1, spares=1))], fleet, ["0", "1"], 0) == []


def test_a_warm_worker_waits_beside_the_worker_that_has_its_device() -> None:
    fleet = [serving("old", "0"), warm("next", "0")]
    assert place([(B, Plan(starts=1))], fleet, ["0"], 1) == []
    assert place([(B, Plan(starts=1))], [warm("next", "0")], ["0"], 1) == [
        Give("next", B, True),
        Start(NO_VERSION, "0"),
    ]


def test_warm_workers_are_spread_over_the_devices_free_ones_first() -> None:
    assert place([], [serving("a", "0")], ["0", "1"], 3) == [
        Start(NO_VERSION, "1"),
        Start(NO_VERSION, "0"),
        Start(NO_VERSION, "1"),
    ]
