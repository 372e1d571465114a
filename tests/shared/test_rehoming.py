"""A version is rolled back: the rows of docs/protocol.md, "Requester", that tell what becomes of its requests."""

from typing import Any

from shared.actions import (
    Action,
    CheckMessage,
    DeleteMessage,
    End,
    Move,
    Republish,
    SendAttach,
    SendRelease,
)
from shared.errors import NoReplicaForPin, Unavailable
from shared.requester import Requester
from shared.terms import Known, RequesterLimits
from shared.wire import Accepted, Frame, Ok, Release

REPLY = "tok.ingress.here"
ERROR = NoReplicaForPin("m@v2 was rolled back")
LIMITS = RequesterLimits(queue_deadline=300.0, generation_s=600.0)


def requester(publisher: bool = True, has_body: bool = True, movable: bool = True, **options: Any) -> Requester:
    return Requester(
        "rid",
        REPLY,
        1,
        0.0,
        LIMITS,
        publisher=publisher,
        has_body=has_body,
        movable=movable,
        version="v2",
        **options,
    )


def queued(**options: Any) -> Requester:
    asks = requester(**options)
    assert asks.published(5, 0.0) == []
    return asks


def accepted(claim: str = "c1", seq: int = 5, version: str = "v2") -> Accepted:
    return Accepted("rid", claim, seq, f"ack.{claim}", 3, version)


def granted(asks: Requester, worker: str = "w1", claim: str = "c1", now: float = 0.1) -> None:
    asks.accepted(worker, accepted(claim, version=asks.version), now)
    asks.ok(worker, Ok("rid", claim, asks.sid, 5, f"ack.{claim}", 60_000), now)


def token(asks: Requester, claim: str = "c1") -> Frame:
    return Frame("rid", claim, asks.sid, 0, 0, [7], ["x"])


def withdrawn(asks: Requester, now: float = 1.0, target: str | None = "v1") -> list[Action]:
    return asks.withdrawn(ERROR, target, now)


def test_what_waits_moves_and_its_old_message_is_deleted_once_the_copy_is_stored() -> None:
    asks = queued()
    assert withdrawn(asks) == [Move("v1"), Republish(0)]
    assert withdrawn(asks, 1.1) == []  # at every tick
    assert asks.version == "v1"
    assert asks.published(9, 1.2) == [DeleteMessage(5, insist=True)]
    assert asks.seq == 9
    [attach] = asks.accepted("w2", accepted("c2", 9, "v1"), 1.3)
    assert isinstance(attach, SendAttach)
    assert attach.attach.ids == [[]]


def test_a_claim_of_the_version_that_was_left_is_told_to_let_go() -> None:
    asks = queued()
    withdrawn(asks)
    let_go = [SendRelease("w1", Release("rid", "", REPLY, True))]
    assert asks.accepted("w1", accepted(), 1.1) == let_go  # before the copy is stored
    asks.published(9, 1.2)
    assert asks.accepted("w1", accepted(), 1.3) == let_go
    granted(asks, "w2", "c2", 1.4)
    assert asks.accepted("w1", accepted(), 1.5) == let_go  # and while another version serves it
    assert asks.worker == "w2"
    assert asks.accepted("w1", accepted(version=""), 1.6) == let_go  # one of an earlier release


def test_a_grant_from_before_the_move_comes_too_late() -> None:
    asks = queued()
    asks.accepted("w1", accepted(), 0.1)
    sid = asks.sid
    asks.tick(1.2)  # unanswered: SEEK
    assert withdrawn(asks, 1.3)[0] == Move("v1")
    late = asks.ok("w1", Ok("rid", "c1", sid, 5, "ack.c1", 60_000), 1.4)
    assert late == [SendRelease("w1", Release("rid", sid, REPLY, False))]
    assert asks.worker is None


def test_a_copy_that_cannot_be_stored_is_tried_again_under_the_same_id() -> None:
    asks = queued()
    withdrawn(asks)
    for at in (2.0, 4.0):
        assert asks.publish_failed(Unavailable("away"), at) == []
        assert asks.tick(at + 0.9) == []
        assert asks.tick(at + 1.1) == [Republish(0)]
    assert asks.published(9, 9.0) == [DeleteMessage(5, insist=True)]


def test_a_copy_that_is_claimed_before_its_ack_is_stored() -> None:
    asks = queued()
    withdrawn(asks)
    actions = asks.accepted("w2", accepted("c2", 9, "v1"), 1.1)
    assert actions[0] == DeleteMessage(5, insist=True)
    assert asks.published(9, 1.2) == []


def test_a_copy_that_somebody_else_stored_is_looked_for() -> None:
    asks = queued(keyed=True)
    withdrawn(asks)
    assert asks.published(9, 1.2, shared=True) == [DeleteMessage(5, insist=True)]
    [attach] = asks.tick(1.3)
    assert isinstance(attach, SendAttach)
    assert attach.worker is None
    assert CheckMessage(9) in asks.tick(2.4)  # it may have been there long ago


def test_what_is_being_published_moves_after_its_ack() -> None:
    asks = requester()
    assert withdrawn(asks) == []
    asks.published(5, 1.1)
    assert withdrawn(asks, 1.1) == [Move("v1"), Republish(0)]


def test_what_a_worker_has_goes_on() -> None:
    asks = queued()
    granted(asks)
    assert withdrawn(asks) == []
    asks.frame("w1", token(asks), 1.1)
    assert withdrawn(asks) == []


def test_what_lost_its_worker_before_its_first_token_moves_with_its_deaths() -> None:
    asks = queued()
    granted(asks)
    asks.no_responders("w1", 1.0)
    assert withdrawn(asks, 1.1)[0] == Move("v1")
    asks.published(9, 1.2)
    for number in (2, 3):
        granted(asks, f"w{number}", f"c{number}", 2.0)
        asks.no_responders(f"w{number}", 2.5)
    attach = asks.accepted("w4", accepted("c4", 9, "v1"), 3.0)[-1]
    assert isinstance(attach, SendAttach)
    assert attach.attach.deaths == 3
    asks.ok("w4", Ok("rid", "c4", asks.sid, 9, "ack.c4", 60_000), 3.1)
    end = asks.no_responders("w4", 3.5)[-1]
    assert isinstance(end, End)
    assert end.error is not None
    assert end.error.code == "request_poisoned"


def test_what_has_begun_waits_for_its_own_version_and_then_ends() -> None:
    asks = queued()
    granted(asks)
    asks.frame("w1", token(asks), 0.2)
    asks.no_responders("w1", 1.0)
    assert withdrawn(asks, 1.1) == []
    granted(asks, "w2", "c2", 5.0)  # a redelivery
    asks.no_responders("w2", 6.0)
    assert withdrawn(asks, 6.0 + LIMITS.unserved_max_s - 0.1) == []
    assert withdrawn(asks, 6.0 + LIMITS.unserved_max_s) == [DeleteMessage(5, insist=True), End(ERROR)]


def test_what_was_named_ends_at_once_for_everybody() -> None:
    for keyed in (False, True):
        asks = queued(movable=False, keyed=keyed)
        assert withdrawn(asks) == [DeleteMessage(5, insist=True), End(ERROR)]


def test_without_a_version_to_go_to_it_ends() -> None:
    assert withdrawn(queued(), target=None)[-1] == End(ERROR)


def test_who_takes_over_first_looks_for_a_worker_that_has_it() -> None:
    asks = requester(publisher=False, seq=5)
    asks.tick(0.0)
    assert withdrawn(asks, 1.0) == []
    assert withdrawn(asks, LIMITS.found_s) == [Move("v1"), Republish(0)]
    found = requester(publisher=False, seq=5)
    found.tick(0.0)
    found.ok("w1", Ok("rid", "c1", found.sid, 5, "ack.c1", 60_000), 0.5)
    assert withdrawn(found, LIMITS.found_s) == []


def test_who_takes_over_without_a_body_reads_it_first() -> None:
    asks = requester(publisher=False, has_body=False, seq=5)
    assert withdrawn(asks, LIMITS.found_s) == []
    asks.message_state(5, True, LIMITS.found_s)
    assert withdrawn(asks, LIMITS.found_s)[0] == Move("v1")


def test_a_position_is_of_one_version() -> None:
    asks = requester(publisher=False, seq=5, known=Known(next=[1], digest=["0" * 16]))
    assert withdrawn(asks, LIMITS.found_s) == []
    assert withdrawn(asks, LIMITS.unserved_max_s) == [End(ERROR)]
    assert requester(publisher=False, seq=5, known=Known(next=[0], digest=[""])).may_move  # of nothing: none


def test_cancelled_on_the_move_leaves_neither_message() -> None:
    asks = queued()
    withdrawn(asks)
    actions = asks.cancel(1.1)
    assert DeleteMessage(5, insist=True) in actions
    assert asks.published(9, 1.2) == [DeleteMessage(9)]
    shared = queued(keyed=True)
    withdrawn(shared)
    assert shared.client_left(1.1) == []
    assert [type(action) for action in shared.tick(1.2 + LIMITS.orphan_grace_s)] == [End]
    assert shared.published(9, 20.0) == [DeleteMessage(5, insist=True)]  # the copy is for who comes back
