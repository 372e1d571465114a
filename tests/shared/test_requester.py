"""The requester's table of docs/protocol.md, row by row."""

from typing import Any, TypeVar

import pytest

from shared.actions import (
    Action,
    CheckMessage,
    DeadLetter,
    DeleteMessage,
    Deliver,
    End,
    Nak,
    Republish,
    SendAttach,
    SendRelease,
)
from shared.errors import (
    Cancelled,
    Diverged,
    EngineFailed,
    GenerationDeadline,
    HeadraceError,
    Poisoned,
    QueueDeadline,
    StreamGone,
    Unavailable,
    VersionFailed,
)
from shared.requester import Known, Requester, RequesterLimits, unknown_rid
from shared.wire import Accepted, Attach, Frame, Logprob, No, Ok, Release, Usage, Wait, WireError, digest

REPLY = "tok.ingress.here"
ASK = TypeVar("ASK")


def requester(choices: int = 1, publisher: bool = True, has_body: bool = True, **options: Any) -> Requester:
    limits = RequesterLimits(queue_deadline=options.pop("queue_deadline", 300.0), generation_s=600.0)
    return Requester("rid", REPLY, choices, 0.0, limits, publisher=publisher, has_body=has_body, **options)


def streaming(worker: str = "w1", claim: str = "c1", now: float = 0.0, **options: Any) -> Requester:
    """A requester that was accepted, attached and granted."""
    asks = requester(**options)
    asks.published(5, now)
    grant(asks, worker, claim, now)
    return asks


def grant(asks: Requester, worker: str, claim: str, now: float) -> list[Action]:
    actions = asks.accepted(worker, accepted(claim), now)
    asks.ok(worker, ok(asks, claim), now)
    return actions


def accepted(claim: str, seq: int = 5) -> Accepted:
    return Accepted("rid", claim, seq, f"ack.{claim}", 3)


def ok(asks: Requester, claim: str, seq: int = 5) -> Ok:
    return Ok("rid", claim, asks.sid, seq, f"ack.{claim}", 60_000)


def frame(asks: Requester, claim: str, index: int, ids: list[int], choice: int = 0, **more: Any) -> Frame:
    return Frame("rid", claim, more.pop("sid", asks.sid), choice, index, ids, [f"<{token}>" for token in ids], **more)


def only(kind: type[ASK], actions: list[Action]) -> ASK:
    found = [action for action in actions if isinstance(action, kind)]
    assert len(found) == 1, actions
    return found[0]


def none(kind: type[Any], actions: list[Action]) -> bool:
    return not any(isinstance(action, kind) for action in actions)


def end_of(actions: list[Action]) -> HeadraceError | None:
    assert isinstance(actions[-1], End)
    return actions[-1].error


def fail_worker(asks: Requester, worker: str, claim: str, now: float) -> list[Action]:
    """A worker answers the attach and is then gone."""
    grant(asks, worker, claim, now)
    return asks.no_responders(worker, now)


# -- submit and take over ----------------------------------------------------------------------------------------------


def test_submit_waits_for_accepted_without_a_broadcast() -> None:
    asks = requester()
    assert asks.published(5, 0.0) == []
    assert asks.seq == 5
    assert asks.worker is None
    assert asks.next_tick() == 30.0  # the rare look whether the message is still stored
    assert asks.tick(29.9) == []
    assert asks.tick(30.0) == [CheckMessage(5)]
    assert asks.message_state(5, True, 30.0) == []
    assert asks.tick(60.0) == [CheckMessage(5)]


def test_a_queued_message_that_vanished_is_published_again() -> None:
    asks = requester()
    asks.published(5, 0.0)
    asks.tick(30.0)
    assert asks.message_state(5, False, 30.0) == [Republish(1)]
    assert asks.message_state(5, False, 30.1) == []  # one copy at a time
    asks.published(9, 30.2)
    assert asks.seq == 9


def test_who_waits_in_the_queue_looks_for_its_message_after_a_reconnect() -> None:
    asks = requester()
    asks.published(5, 0.0)
    asks.reconnected(1.0)  # an accepted may have been lost
    assert asks.tick(1.0 + asks.limits.ack_wait_s - 0.01) == []
    assert asks.tick(1.0 + asks.limits.ack_wait_s) == [CheckMessage(5)]


def test_who_takes_over_broadcasts_at_once_with_its_ids_or_a_digest() -> None:
    asks = requester(publisher=False, seq=5, known=Known(ids=[[1, 2]]))
    assert asks.next_tick() == 0.0
    sent = only(SendAttach, asks.tick(0.0))
    assert sent.worker is None
    assert sent.attach == Attach("rid", asks.sid, REPLY, [[1, 2]])
    asks = requester(publisher=False, seq=5, known=Known(next=[2], digest=[digest([1, 2])]))
    assert only(SendAttach, asks.tick(0.0)).attach == Attach("rid", asks.sid, REPLY, None, [2], [digest([1, 2])])


def test_who_takes_over_at_the_beginning_needs_no_digest() -> None:
    asks = requester(publisher=False, seq=5, known=Known(next=[0], digest=[digest([])]))
    assert only(SendAttach, asks.tick(0.0)).attach.ids == [[]]


def test_a_refused_first_publish_ends_the_request() -> None:
    error = Unavailable("no bus")
    assert requester().publish_failed(error, 1.0) == [End(error)]


def test_a_refused_publish_of_a_request_that_a_worker_has_is_ignored() -> None:
    asks = requester()
    asks.accepted("w1", accepted("c1"), 0.1)
    assert asks.publish_failed(Unavailable("no ack"), 1.0) == []
    assert asks.worker == "w1"


# -- accepted ----------------------------------------------------------------------------------------------------------


def test_accepted_is_adopted_and_attached_under_a_fresh_sid() -> None:
    asks = requester()
    asks.published(5, 0.0)
    sent = only(SendAttach, asks.accepted("w1", accepted("c1"), 0.1))
    assert sent == SendAttach("w1", Attach("rid", asks.sid, REPLY, [[]]))
    assert (asks.worker, asks.claim, asks.claims, asks.resumes) == ("w1", "c1", 1, 0)
    assert len(asks.sid) == 32


def test_accepted_before_the_publish_ack_brings_the_sequence() -> None:
    asks = requester()
    asks.accepted("w1", accepted("c1", seq=8), 0.1)
    assert asks.seq == 8
    assert asks.published(8, 0.2) == []


def test_accepted_of_another_claim_fences_the_old_worker_and_moves() -> None:
    asks = streaming()
    asks.frame("w1", frame(asks, "c1", 0, [1, 2]), 0.1)
    old = asks.sid
    actions = asks.accepted("w2", accepted("c2", seq=6), 0.2)
    assert actions[0] == SendRelease("w1", Release("rid", old, REPLY, False))
    assert only(SendAttach, actions) == SendAttach("w2", Attach("rid", asks.sid, REPLY, [[1, 2]]))
    assert (asks.seq, asks.claims, asks.resumes, asks.replayed) == (6, 2, 1, 2)


def test_accepted_of_another_claim_of_the_same_worker_needs_no_release() -> None:
    asks = streaming()
    assert none(SendRelease, asks.accepted("w1", accepted("c2"), 0.2))


def test_a_claim_that_comes_back_is_counted_once() -> None:
    asks = streaming()
    asks.accepted("w2", accepted("c2"), 0.2)
    asks.accepted("w1", accepted("c1"), 0.3)
    assert (asks.claims, asks.resumes) == (2, 1)


# -- seek: frame or ok -------------------------------------------------------------------------------------------------


def test_seek_adopts_the_first_claim_that_answers_the_broadcast() -> None:
    asks = requester(publisher=False, seq=5, known=Known(ids=[[1]]))
    asks.tick(0.0)
    assert asks.ok("w3", ok(asks, "c3", seq=6), 0.1) == []
    assert (asks.worker, asks.claim, asks.seq) == ("w3", "c3", 6)
    late = asks.ok("w4", ok(asks, "c4"), 0.1)
    assert late == [SendRelease("w4", Release("rid", asks.sid, REPLY, False))]


def test_seek_adopts_a_frame_whose_ok_was_lost() -> None:
    asks = requester(publisher=False, seq=5, known=Known(ids=[[1]]))
    asks.tick(0.0)
    actions = asks.frame("w3", frame(asks, "c3", 1, [2]), 0.1)
    assert actions == [Deliver(0, [2], ["<2>"], None, None, None)]
    assert asks.worker == "w3"


def test_who_came_with_a_digest_is_delivered_everything_and_asks_by_it_until_it_is_met() -> None:
    asks = requester(publisher=False, seq=5, known=Known(next=[2], digest=[digest([1, 2])]))
    asks.tick(0.0)
    asks.ok("w3", ok(asks, "c3"), 0.1)
    assert asks.frame("w3", frame(asks, "c3", 0, [1]), 0.1) == [Deliver(0, [1], ["<1>"], None, None, None)]
    again = only(SendAttach, asks.accepted("w4", accepted("c4"), 0.2)).attach
    assert (again.ids, again.next, again.digest) == (None, [2], [digest([1, 2])])
    delivered = only(Deliver, asks.frame("w4", frame(asks, "c4", 0, [1, 2, 3]), 0.3))
    assert (delivered.ids, asks.received.duplicates) == ([2, 3], 1)
    assert only(SendAttach, asks.accepted("w5", accepted("c5"), 0.4)).attach.ids == [[1, 2, 3]]


@pytest.mark.parametrize("more", [{"ids": [1, 9]}, {"ids": [1], "finish": "stop"}])
def test_ids_that_do_not_meet_the_digest_end_the_request(more: dict[str, Any]) -> None:
    asks = requester(publisher=False, seq=5, known=Known(next=[2], digest=[digest([1, 2])]))
    asks.tick(0.0)
    actions = asks.frame("w3", frame(asks, "c3", 0, more.pop("ids"), **more), 0.1)
    assert none(Deliver, actions)
    assert isinstance(end_of(actions), Diverged)


def test_every_choice_must_meet_its_digest() -> None:
    known = Known(next=[1, 2], digest=[digest([1]), digest([3, 4])])
    asks = requester(choices=2, publisher=False, seq=5, known=known)
    asks.tick(0.0)
    asks.frame("w3", frame(asks, "c3", 0, [1]), 0.1)
    asks.frame("w3", frame(asks, "c3", 0, [3], choice=1), 0.1)
    assert only(SendAttach, asks.accepted("w4", accepted("c4"), 0.2)).attach.next == [1, 2]
    assert isinstance(end_of(asks.frame("w4", frame(asks, "c4", 1, [5], choice=1), 0.3)), Diverged)


def test_who_takes_over_without_a_body_gets_it_with_another_copy() -> None:
    asks = requester(publisher=False, has_body=False, seq=5, known=Known(ids=[[]]))
    asks.tick(0.0)
    assert asks.ok("w3", ok(asks, "c3", seq=8), 0.1) == [CheckMessage(8)]
    asks.message_state(8, True, 0.2)
    assert asks.has_body


# -- stream: frames ----------------------------------------------------------------------------------------------------


def test_frames_in_order_are_delivered() -> None:
    asks = streaming()
    first = asks.frame("w1", frame(asks, "c1", 0, [1, 2]), 0.1)
    assert first == [Deliver(0, [1, 2], ["<1>", "<2>"], None, None, None)]
    assert asks.frame("w1", frame(asks, "c1", 2, [3]), 0.1) == [Deliver(0, [3], ["<3>"], None, None, None)]


def test_a_vector_is_delivered_with_the_first_finish_of_its_choice_and_not_again() -> None:
    asks = streaming(choices=2)
    first = only(Deliver, asks.frame("w1", frame(asks, "c1", 0, [], finish="stop", vector=b"1234"), 0.1))
    assert (first.choice, first.ids, first.finish, first.vector) == (0, [], "stop", b"1234")
    asks.no_responders("w1", 1.0)
    grant(asks, "w2", "c2", 1.1)  # it computes both again
    assert none(Deliver, asks.frame("w2", frame(asks, "c2", 0, [], finish="stop", vector=b"1235"), 1.2))
    last = frame(asks, "c2", 0, [], choice=1, finish="stop", vector=b"5678", usage=Usage(9, 0))
    actions = asks.frame("w2", last, 1.3)
    assert only(Deliver, actions).vector == b"5678"
    assert end_of(actions) is None


def test_a_frame_is_trimmed_with_its_text_and_logprobs() -> None:
    asks = streaming()
    asks.frame("w1", frame(asks, "c1", 0, [1, 2]), 0.1)
    entries = [Logprob(token, -0.5, b"") for token in (2, 3)]
    part = only(Deliver, asks.frame("w1", frame(asks, "c1", 1, [2, 3], logprobs=entries), 0.1))
    assert (part.ids, part.text, part.logprobs) == ([3], ["<3>"], entries[1:])
    assert asks.frame("w1", frame(asks, "c1", 0, [1, 2]), 0.1) == []
    assert asks.received.duplicates == 3


def test_a_gap_is_attached_again_to_the_same_worker() -> None:
    asks = streaming()
    asks.frame("w1", frame(asks, "c1", 0, [1]), 0.1)
    old = asks.sid
    sent = only(SendAttach, asks.frame("w1", frame(asks, "c1", 2, [3]), 0.1))
    assert sent == SendAttach("w1", Attach("rid", asks.sid, REPLY, [[1]]))
    assert asks.frame("w1", frame(asks, "c1", 1, [2], sid=old), 0.1) == []  # own claim, older sid


def test_a_choice_that_the_request_does_not_have_is_ignored() -> None:
    asks = streaming()
    asks.frame("w1", frame(asks, "c1", 0, [1]), 0.1)
    assert asks.frame("w1", frame(asks, "c1", 0, [1], choice=1), 0.1) == []
    assert asks.frame("w1", frame(asks, "c1", 0, [1], choice=-1), 0.1) == []


def test_a_frame_of_another_claim_is_answered_with_a_fenced_release_of_its_sid() -> None:
    asks = streaming()
    actions = asks.frame("w9", frame(asks, "c9", 0, [1], sid="old"), 0.1)
    assert actions == [SendRelease("w9", Release("rid", "old", REPLY, False))]
    assert asks.frame("w9", frame(asks, "c9", 0, [1]), 0.1) == [
        SendRelease("w9", Release("rid", asks.sid, REPLY, False))
    ]


# -- the end -----------------------------------------------------------------------------------------------------------


def test_finish_with_nothing_missing_ends_and_releases() -> None:
    asks = streaming()
    usage = Usage(3, 1)
    actions = asks.frame("w1", frame(asks, "c1", 0, [1], finish="stop", usage=usage), 0.1)
    assert actions[0] == Deliver(0, [1], ["<1>"], None, "stop", usage)
    assert isinstance(actions[1], SendRelease)
    assert actions[1].release.done
    assert actions[2] == End(None)
    assert asks.ended
    assert asks.next_tick() is None


def test_a_finish_without_ids_completes() -> None:
    asks = streaming()
    asks.frame("w1", frame(asks, "c1", 0, [1]), 0.1)
    actions = asks.frame("w1", frame(asks, "c1", 1, [], finish="length", usage=Usage(3, 1)), 0.1)
    assert only(Deliver, actions) == Deliver(0, [], [], None, "length", Usage(3, 1))
    assert end_of(actions) is None


def test_a_finish_behind_a_gap_does_not_complete() -> None:
    asks = streaming()
    actions = asks.frame("w1", frame(asks, "c1", 2, [], finish="stop", usage=Usage(3, 2)), 0.1)
    assert none(End, actions)
    assert only(SendAttach, actions).worker == "w1"


def test_an_error_ends_the_request_whatever_its_index() -> None:
    asks = streaming()
    actions = asks.frame("w1", frame(asks, "c1", 7, [], error=WireError("engine_failed", "it raised")), 0.1)
    error = end_of(actions)
    assert isinstance(error, EngineFailed)
    assert error.message == "it raised"
    assert only(SendRelease, actions).release.done


def test_every_choice_must_finish_and_the_usage_comes_with_the_last() -> None:
    asks = streaming(choices=2)
    actions = asks.frame("w1", frame(asks, "c1", 0, [1], finish="stop"), 0.1)
    assert none(End, actions)
    actions = asks.frame("w1", frame(asks, "c1", 0, [4], choice=1, finish="length", usage=Usage(3, 2)), 0.1)
    assert only(Deliver, actions).usage == Usage(3, 2)
    assert end_of(actions) is None


def test_a_finish_that_the_next_worker_repeats_is_delivered_once() -> None:
    asks = streaming(choices=2)
    asks.frame("w1", frame(asks, "c1", 0, [1], finish="stop"), 0.1)
    asks.frame("w1", frame(asks, "c1", 0, [4], choice=1), 0.1)
    sent = only(SendAttach, grant(asks, "w2", "c2", 0.2))
    assert sent.attach.ids == [[1], [4]]
    assert asks.frame("w2", frame(asks, "c2", 1, [], finish="stop"), 0.2) == []
    actions = asks.frame("w2", frame(asks, "c2", 1, [5], choice=1, finish="stop", usage=Usage(3, 3)), 0.2)
    assert end_of(actions) is None


def test_usage_on_a_repeated_finish_is_waited_for() -> None:
    asks = streaming(choices=2)
    asks.frame("w1", frame(asks, "c1", 0, [1], finish="stop"), 0.1)
    grant(asks, "w2", "c2", 0.2)
    actions = asks.frame("w2", frame(asks, "c2", 0, [4], choice=1, finish="stop"), 0.2)
    assert only(Deliver, actions).finish == "stop"
    assert none(End, actions)
    actions = asks.frame("w2", frame(asks, "c2", 1, [], finish="stop", usage=Usage(3, 2)), 0.2)
    assert only(Deliver, actions) == Deliver(0, [], [], None, None, Usage(3, 2))
    assert end_of(actions) is None


def test_nothing_comes_after_the_end() -> None:
    asks = streaming()
    late = frame(asks, "c1", 0, [1])
    asks.cancel(0.1)
    told = [SendRelease("w1", Release("rid", late.sid, REPLY, True))]
    assert asks.frame("w1", late, 0.2) == told
    assert asks.accepted("w1", accepted("c1"), 0.2) == [SendRelease("w1", Release("rid", "", REPLY, True))]
    assert asks.cancel(0.2) == []
    assert asks.tick(1000.0) == []
    assert asks.no_responders("w1", 0.2) == []
    assert asks.message_state(5, False, 0.2) == []
    assert asks.unavailable(VersionFailed("x"), 0.2) == []


def test_an_unknown_rid_is_told_to_let_go() -> None:
    release = [SendRelease("w1", Release("rid", "s", REPLY, True))]
    assert unknown_rid("w1", Frame("rid", "c", "s", 0, 0, [], []), REPLY) == release
    assert unknown_rid("w1", Ok("rid", "c", "s", 1, "", 0), REPLY) == release
    assert unknown_rid("w1", accepted("c"), REPLY) == [SendRelease("w1", Release("rid", "", REPLY, True))]
    assert unknown_rid("w1", No("rid", "s"), REPLY) == []
    assert unknown_rid("w1", Wait("rid", "c", "s"), REPLY) == []


# -- silence, no responders, no ----------------------------------------------------------------------------------------


def test_silence_is_a_ping_and_its_answer_counts() -> None:
    asks = streaming()
    asks.frame("w1", frame(asks, "c1", 0, [1]), 0.3)
    assert asks.tick(0.7) == []
    assert asks.next_tick() == pytest.approx(0.8)
    sent = only(SendAttach, asks.tick(0.8))
    assert sent == SendAttach("w1", Attach("rid", asks.sid, REPLY, [[1]]))
    asks.ok("w1", ok(asks, "c1"), 0.9)
    assert asks.next_tick() == pytest.approx(1.4)


def test_an_unanswered_attach_is_followed_by_seek_without_a_nak_and_then_a_broadcast() -> None:
    asks = streaming()
    asks.tick(0.5)
    assert asks.tick(1.4) == []
    assert asks.tick(1.5) == []
    assert asks.worker is None
    sent = only(SendAttach, asks.tick(2.5))
    assert sent.worker is None


def test_a_late_answer_to_the_unanswered_attach_takes_the_worker_back() -> None:
    asks = streaming()
    asks.tick(0.5)
    asks.tick(1.5)
    asks.ok("w1", ok(asks, "c1"), 1.6)
    assert asks.worker == "w1"


def test_no_responders_of_the_worker_is_a_nak_and_seek() -> None:
    asks = streaming()
    assert asks.no_responders("w1", 0.6) == [Nak("ack.c1")]
    assert asks.worker is None
    assert asks.claim is None


def test_no_responders_of_another_worker_changes_nothing() -> None:
    asks = streaming()
    assert asks.no_responders("w2", 0.6) == []
    assert asks.worker == "w1"


def test_an_untrusted_requester_has_no_ack_subject_and_sends_no_nak() -> None:
    asks = requester()
    asks.accepted("w1", Accepted("rid", "c1", 5, "", 0), 0.1)
    assert asks.no_responders("w1", 0.2) == []
    assert asks.worker is None


def test_h11_naks_are_held_after_the_own_reconnect() -> None:
    asks = streaming()
    asks.reconnected(10.0)
    assert asks.no_responders("w1", 10.2) == []
    assert asks.worker == "w1"
    assert asks.tick(11.9) == []
    assert only(SendAttach, asks.tick(12.0)).worker == "w1"
    assert asks.no_responders("w1", 12.0) == [Nak("ack.c1")]


def test_h11_answers_before_the_own_reconnect_is_known_are_no_reason_for_a_nak() -> None:
    asks = streaming()
    asks.disconnected()
    assert asks.no_responders("w1", 10.0) == []
    assert only(SendAttach, asks.tick(10.5)).worker == "w1"
    assert asks.no_responders("w1", 10.6) == []
    asks.reconnected(10.7)
    assert asks.no_responders("w1", 10.8) == []
    assert asks.worker == "w1"
    assert asks.tick(12.6) == []
    assert only(SendAttach, asks.tick(12.7)).worker == "w1"
    assert asks.no_responders("w1", 12.7) == [Nak("ack.c1")]


def test_no_is_seek_without_a_nak() -> None:
    asks = streaming()
    assert asks.no("w1", No("rid", asks.sid), 0.1) == []
    assert asks.worker is None


def test_a_no_under_another_sid_does_not_move_the_stream() -> None:
    asks = streaming()
    asks.no("w1", No("rid", "old"), 0.1)
    assert asks.worker == "w1"


def test_wait_answers_the_ping_and_adopts_nobody() -> None:
    asks = requester(publisher=False, seq=5, known=Known(next=[2], digest=["d"]))
    asks.tick(0.0)
    asks.wait("w1", Wait("rid", "c1", asks.sid), 0.1)
    assert asks.worker is None
    asks.accepted("w2", accepted("c2"), 0.2)
    asks.wait("w2", Wait("rid", "c2", asks.sid), 0.3)
    assert asks.next_tick() == pytest.approx(0.8)  # the next ping, no timeout


# -- seek --------------------------------------------------------------------------------------------------------------


def test_seek_broadcasts_with_backoff_and_looks_for_the_message_from_the_second_round_on() -> None:
    asks = streaming()
    asks.no_responders("w1", 10.0)
    times: list[float] = []
    checks: list[bool] = []
    now = 10.0
    for _ in range(6):
        now = asks.next_tick() or 0.0
        actions = asks.tick(now)
        assert only(SendAttach, actions).worker is None
        times.append(now)
        checks.append(CheckMessage(5) in actions)
    assert times == [11.0, 12.0, 14.0, 18.0, 23.0, 28.0]
    assert checks == [False, True, True, True, True, True]


def test_a_message_that_is_stored_is_not_published_again() -> None:
    asks = streaming()
    asks.no_responders("w1", 10.0)
    assert asks.message_state(5, True, 12.0) == []


def test_a_message_that_is_gone_is_published_again_and_a_failed_copy_under_the_same_number() -> None:
    asks = streaming()
    asks.no_responders("w1", 10.0)
    assert asks.message_state(5, False, 12.0) == [Republish(1)]
    assert asks.publish_failed(Unavailable("x"), 17.0) == []
    assert asks.message_state(5, False, 18.0) == [Republish(1)]
    asks.published(9, 18.1)
    assert asks.message_state(9, False, 20.0) == [Republish(2)]


def test_gone_in_the_meantime_matters_only_to_who_seeks() -> None:
    asks = streaming()
    assert asks.message_state(5, False, 1.0) == []


def test_gone_without_a_body_ends_after_the_grace_and_two_ack_waits() -> None:
    asks = requester(publisher=False, has_body=False, seq=5, known=Known(ids=[[]]))
    asks.tick(0.0)
    asks.message_state(5, False, 1.0)
    assert none(End, asks.tick(24.9))
    assert isinstance(end_of(asks.tick(25.0)), StreamGone)


def test_gone_without_a_body_is_no_end_while_a_worker_speaks_of_it() -> None:
    asks = requester(publisher=False, has_body=False, seq=5, known=Known(next=[1], digest=["d"]))
    asks.tick(0.0)
    asks.message_state(5, False, 1.0)
    asks.wait("w1", Wait("rid", "c1", asks.sid), 20.0)
    assert none(End, asks.tick(44.9))


def test_a_slow_republish_is_not_a_gone_stream() -> None:
    asks = requester(publisher=False, seq=5, known=Known(ids=[[]]))
    asks.tick(0.0)
    assert asks.message_state(5, False, 100.0) == [Republish(1)]
    assert none(End, asks.tick(100.1))


# -- poison ------------------------------------------------------------------------------------------------------------


def test_four_workers_that_answered_and_died_without_a_token_end_the_request() -> None:
    asks = requester()
    asks.published(5, 0.0)
    for number in (1, 2, 3):
        assert none(End, fail_worker(asks, f"w{number}", f"c{number}", float(number)))
    actions = fail_worker(asks, "w4", "c4", 4.0)
    assert isinstance(end_of(actions), Poisoned)
    assert "4 workers" in only(DeadLetter, actions).reason


def test_a_token_takes_the_suspicion_away() -> None:
    asks = requester()
    asks.published(5, 0.0)
    for number in (1, 2, 3):
        fail_worker(asks, f"w{number}", f"c{number}", float(number))
    assert only(SendAttach, asks.accepted("w4", accepted("c4"), 4.0)).attach.deaths == 3
    grant(asks, "w4", "c4", 4.0)
    asks.frame("w4", frame(asks, "c4", 0, [1]), 4.1)
    assert none(End, asks.no_responders("w4", 4.2))
    assert only(SendAttach, asks.accepted("w5", accepted("c5"), 5.0)).attach.deaths == 1


def test_h12a_a_late_accepted_of_a_dead_worker_counts_it_once() -> None:
    asks = requester()
    asks.published(5, 0.0)
    for number in (1, 2, 3):
        fail_worker(asks, f"w{number}", f"c{number}", float(number))
    asks.accepted("w3", accepted("c3"), 4.0)
    assert none(End, asks.no_responders("w3", 4.1))


def test_h12b_workers_that_never_answered_or_took_leave_are_not_counted() -> None:
    asks = requester()
    asks.published(5, 0.0)
    for number in range(10):
        asks.accepted(f"w{number}", accepted(f"c{number}"), float(number))
        assert none(End, asks.no_responders(f"w{number}", float(number)))
    for number in range(10, 20):
        grant(asks, f"w{number}", f"c{number}", float(number))
        asks.no(f"w{number}", No("rid", asks.sid), float(number))
        assert none(End, asks.no_responders(f"w{number}", float(number)))


def test_h12c_no_responders_to_a_fenced_release_counts() -> None:
    asks = requester()
    asks.published(5, 0.0)
    ends: list[Action] = []
    for number in range(1, 6):
        released = [
            action.worker for action in grant(asks, f"w{number}", f"c{number}", 0.1) if type(action) is SendRelease
        ]
        for worker in released:  # redelivered faster than the ping: the old worker is not the current one any more
            ends += asks.no_responders(worker, 0.1)
    assert isinstance(end_of(ends), Poisoned)


# -- clients and deadlines ---------------------------------------------------------------------------------------------


def test_cancel_of_a_request_that_nobody_claimed_deletes_the_message() -> None:
    asks = requester()
    asks.published(5, 0.0)
    actions = asks.cancel(1.0)
    assert actions[0] == DeleteMessage(5)
    assert isinstance(end_of(actions), Cancelled)


def test_cancel_before_the_publish_ack_deletes_when_it_comes() -> None:
    asks = requester()
    assert isinstance(end_of(asks.cancel(0.1)), Cancelled)
    assert asks.published(5, 0.2) == [DeleteMessage(5)]


def test_h17_cancel_of_a_keyed_or_a_claimed_request_deletes_nothing() -> None:
    asks = requester(keyed=True)
    asks.published(5, 0.0)
    assert none(DeleteMessage, asks.cancel(1.0))
    asks = streaming()
    actions = asks.cancel(1.0)
    assert none(DeleteMessage, actions)
    assert only(SendRelease, actions).release.done


def test_a_cancel_for_everybody_deletes_what_nobody_has_claimed() -> None:
    asks = requester(keyed=True)
    asks.published(5, 0.0)
    assert asks.cancel(1.0, everybody=True)[0] == DeleteMessage(5)
    asks = requester(publisher=False, seq=5)
    assert asks.cancel(1.0, everybody=True)[0] == DeleteMessage(5)
    assert none(DeleteMessage, streaming(keyed=True).cancel(1.0, everybody=True))


def test_a_publish_that_was_there_already_makes_a_taker() -> None:
    asks = requester(keyed=True)
    assert asks.published(5, 1.0, shared=True) == []
    assert only(SendAttach, asks.tick(1.0)).worker is None
    assert none(DeleteMessage, asks.cancel(2.0))
    asks = requester(keyed=True)
    asks.cancel(0.5)
    assert asks.published(5, 1.0, shared=True) == []


def test_a_client_that_cannot_come_back_cancels_by_leaving() -> None:
    assert isinstance(end_of(streaming().client_left(1.0)), Cancelled)


@pytest.mark.parametrize("option", ["keyed", "resumable"])
def test_h18_a_client_that_may_come_back_is_waited_for(option: str) -> None:
    options: dict[str, Any] = {option: True}
    asks = streaming(**options)
    asks.frame("w1", frame(asks, "c1", 0, [1]), 0.9)
    assert asks.client_left(1.0) == []
    assert only(Deliver, asks.frame("w1", frame(asks, "c1", 1, [2]), 1.1)).ids == [2]
    asks.ok("w1", ok(asks, "c1"), 15.8)
    actions = asks.tick(16.0)
    assert isinstance(end_of(actions), Cancelled)
    assert only(SendRelease, actions).release.done


def test_the_queue_deadline_ends_a_request_that_nobody_accepted() -> None:
    asks = requester(queue_deadline=20.0)
    asks.published(5, 0.0)
    assert asks.next_tick() == 20.0
    actions = asks.tick(20.0)
    assert actions[0] == DeleteMessage(5)
    assert isinstance(end_of(actions), QueueDeadline)


def test_the_generation_deadline_counts_from_the_first_accepted() -> None:
    asks = requester(queue_deadline=20.0)
    asks.published(5, 0.0)
    assert asks.generation_left_s(5.0) == 600.0
    asks.accepted("w1", accepted("c1"), 10.0)
    asks.no("w1", No("rid", asks.sid), 10.1)
    asks.accepted("w2", accepted("c2"), 100.0)
    assert asks.generation_left_s(110.0) == pytest.approx(500.0)
    actions = asks.tick(610.0)
    assert isinstance(end_of(actions), GenerationDeadline)
    assert only(SendRelease, actions).worker == "w2"


def test_h16_who_takes_over_inherits_the_generation_clock() -> None:
    asks = requester(publisher=False, seq=5, known=Known(ids=[[]]))
    asks.tick(0.0)
    asks.ok("w1", ok(asks, "c1"), 1.0)
    assert asks.generation_left_s(1.0) == pytest.approx(60.0)


def test_a_version_that_fails_ends_only_requests_that_no_worker_serves() -> None:
    error = VersionFailed("cannot be loaded")
    asks = requester()
    asks.published(5, 0.0)
    assert asks.unavailable(error, 1.0) == [DeleteMessage(5), End(error)]
    assert streaming().unavailable(error, 1.0) == []
