"""The worker's table of docs/protocol.md, row by row."""

from typing import Any, TypeVar

import pytest

from shared.wire import (
    CANCELLED,
    FINISHED,
    About,
    Accepted,
    Attach,
    Frame,
    Input,
    Logprob,
    No,
    Ok,
    Release,
    Request,
    Sampling,
    Usage,
    Wait,
    WireError,
    digest,
)
from workers.claims import Abort, Ack, Action, Bill, ClaimLimits, ClaimTable, DeadLetter, Delivery, Nak, Send, Start
from workers.engine.request import TokenEvent
from workers.history import FRAME_SCORED_MAX, FRAME_TOKENS_MAX

HOME = "tok.ingress.home"  # Hr-Reply
AWAY = "tok.ingress.away"
THIRD = "tok.ingress.third"
KIND = TypeVar("KIND")


def table(**limits: Any) -> ClaimTable:
    return ClaimTable("w1", ClaimLimits(**limits))


def delivery(seq: int = 5, choices: int = 1, logprobs: int | None = None, rid: str = "rid", **more: Any) -> Delivery:
    request = Request(rid, "m", "v1", Input(prompt="p"), Sampling(n=choices, logprobs=logprobs))
    more = {"handle": f"ack.{seq}", "reply": HOME, "queued_ms": 3, "tenant": "t", **more}
    return Delivery(request=request, seq=seq, **more)


def claimed(resume: bool = False, choices: int = 1, **limits: Any) -> ClaimTable:
    """A table with one claim; unless `resume`, its run has been started from nothing."""
    claims = table(**limits)
    claims.message(delivery(choices=choices, resume=resume), 0.0)
    return claims


def serving(ids: list[int], choices: int = 1, **limits: Any) -> ClaimTable:
    """HOME is subscribed and has been sent `ids` of choice 0."""
    claims = claimed(choices=choices, **limits)
    claims.attach(attach("s1", [[] for _ in range(choices)]), False, 0.0)
    if ids:
        claims.tokens([event(claims, ids)], 0.0)
    return claims


def attach(sid: str, ids: list[list[int]], reply: str = HOME) -> Attach:
    return Attach("rid", sid, reply, ids)


def by_digest(sid: str, ids: list[int], reply: str = AWAY) -> Attach:
    return Attach("rid", sid, reply, None, [len(ids)], [digest(ids)])


def run_of(claims: ClaimTable) -> str:
    return next(iter(claims._runs))


def event(claims: ClaimTable, ids: list[int], choice: int = 0, **more: Any) -> TokenEvent:
    return TokenEvent(key=run_of(claims), choice=choice, ids=ids, text=[f"<{token}>" for token in ids], **more)


def finish(claims: ClaimTable, ids: list[int], choice: int = 0, usage: bool = True) -> list[Action]:
    end = event(claims, ids, choice, finish="stop", usage=Usage(3, 4) if usage else None)
    return claims.tokens([end], 0.0)


def release(reply: str = HOME, sid: str = "s1", done: bool = True) -> Release:
    return Release("rid", sid, reply, done)


def items(kind: type[KIND], actions: list[Action], reply: str | None = None) -> list[KIND]:
    sent = [action for action in actions if isinstance(action, Send) and reply in (None, action.reply)]
    return [action.item for action in sent if isinstance(action.item, kind)]


def only(kind: type[KIND], actions: list[Action]) -> KIND:
    found = [action for action in actions if isinstance(action, kind)]
    assert len(found) == 1, actions
    return found[0]


def none(kind: type[Any], actions: list[Action]) -> bool:
    return not any(isinstance(action, kind) for action in actions)


# -- messages ----------------------------------------------------------------------------------------------------------


def test_a_first_delivery_is_accepted_and_started_at_once() -> None:
    claims = table()
    actions = claims.message(delivery(choices=2), 0.0)
    (said,) = items(Accepted, actions, HOME)
    assert (said.seq, said.ack, said.queued_ms) == (5, "ack.5", 3)
    start = only(Start, actions)
    assert start.prefix == [[], []]
    assert start.tenant == "t"
    assert (len(claims), claims.holding, claims.handles()) == (1, 1, ["ack.5"])


@pytest.mark.parametrize("more", [{"deliveries": 2}, {"resume": True}])
def test_any_other_delivery_waits_for_an_attach(more: dict[str, Any]) -> None:
    claims = table()
    actions = claims.message(delivery(**more), 0.0)
    assert len(items(Accepted, actions)) == 1
    assert none(Start, actions)
    assert claims.holding == 1


def test_a_tenant_is_not_told_the_ack_subject() -> None:
    claims = table()
    (said,) = items(Accepted, claims.message(delivery(reply="tok.acme.me", tenant="acme"), 0.0))
    assert said.ack == ""
    granted = claims.attach(attach("s1", [[]], "tok.acme.me"), False, 0.0)
    assert items(Ok, granted)[0].ack == ""


@pytest.mark.parametrize("over", [False, True])
def test_a_rid_that_is_known_is_of_no_use_to_another_tenant(over: bool) -> None:
    claims = serving([7])
    if over:
        finish(claims, [8])
        claims.release(release(), 0.0)
    for broadcast in (False, True):
        for ids in ([[]], [[7]], [[9]]):
            told = claims.attach(attach("s2", ids, "tok.other.me"), broadcast, 0.1)
            assert told == ([] if broadcast else [Send("tok.other.me", No("rid", "s2"))])
    assert claims.release(release("tok.other.me", "s2"), 0.1) == []
    buried = only(DeadLetter, claims.message(delivery(seq=9, tenant="other", reply="tok.other.me"), 0.1))
    assert buried.delivery.tenant == "other"
    assert len(claims) == (0 if over else 1)
    assert items(Ok, claims.attach(attach("s3", [[7]], "tok.t.me"), False, 0.1), "tok.t.me")


def test_a_tenant_has_no_say_in_what_its_own_requests_came_to() -> None:
    claims = table()
    me, fair = "tok.t.me", "$JS.ACK.REQ.fair-0.1.5.5.1700000000000000000.0"
    bills = []
    for seq in (5, 9):  # the same rid, as often as it likes
        claims.message(delivery(seq=seq, reply=HOME, handle=fair), 0.0)  # nobody listens there
        claims.attach(attach("s1", [[]], me), False, 0.0)
        claims.tokens([event(claims, [7, 8])], 0.0)
        actions = claims.release(Release("rid", "s1", me, True, Usage(0, 0)), 0.0)
        bills.append(only(Bill, actions))
    assert [(bill.id, bill.outcome, bill.output_tokens) for bill in bills] == [
        ("rid.5", "cancelled", 2),
        ("rid.9", "cancelled", 2),
    ]


def test_an_ingress_tells_what_a_request_came_to_that_its_worker_could_not() -> None:
    claims = table()
    for reply in ("tok.t.me", HOME):
        claims.message(
            delivery(reply=reply, handle="$JS.ACK.REQ.fair-0.2.5.5.1700000000000000000.0", deliveries=2), 0.0
        )
        actions = claims.release(Release("rid", "", reply, True, Usage(3, 4)), 0.0)
        assert [(bill.id, bill.usage) for bill in actions if isinstance(bill, Bill)] == (
            [("rid", Usage(3, 4))] if reply == HOME else []
        )


def test_another_message_of_a_claimed_rid_is_one_more_handle() -> None:
    claims = claimed()
    assert claims.message(delivery(seq=9), 0.1) == []
    assert claims.message(delivery(seq=5, handle="ack.5.2", deliveries=2), 0.1) == []
    assert sorted(claims.handles()) == ["ack.5.2", "ack.9"]
    assert len(claims) == 1


def test_accepted_is_repeated_until_its_address_attaches() -> None:
    claims = claimed()
    assert items(Accepted, claims.tick(0.9)) == []
    assert len(items(Accepted, claims.tick(1.0))) == 1
    assert len(items(Accepted, claims.tick(2.0))) == 1
    claims.attach(attach("s1", [[]], AWAY), False, 2.1)
    assert len(items(Accepted, claims.tick(3.0), HOME)) == 1
    claims.attach(attach("s2", [[]]), False, 3.1)
    assert items(Accepted, claims.tick(4.1)) == []


def test_a_message_that_was_delivered_too_often_is_given_up() -> None:
    claims = table(deliveries_max=100)
    found = delivery(deliveries=101)
    assert only(DeadLetter, claims.message(found, 0.0)).delivery is found
    assert len(claims) == 0


# -- attach ------------------------------------------------------------------------------------------------------------


def test_attach_to_an_unknown_rid_is_no_and_to_a_broadcast_silence() -> None:
    claims = table()
    assert claims.attach(attach("s1", [[]]), False, 0.0) == [Send(HOME, No("rid", "s1"))]
    assert claims.attach(attach("s1", [[]]), True, 0.0) == []


def test_attach_with_ids_starts_a_parked_claim_from_them() -> None:
    claims = claimed(resume=True)
    actions = claims.attach(attach("s1", [[7, 8]]), False, 1.0)
    assert only(Start, actions).prefix == [[7, 8]]
    (granted,) = items(Ok, actions)
    assert (granted.sid, granted.seq, granted.ack) == ("s1", 5, "ack.5")
    assert granted.remaining_ms == 599_000
    (frame,) = items(Frame, claims.tokens([event(claims, [9])], 1.0))
    assert (frame.sid, frame.index, frame.ids, frame.text) == ("s1", 2, [9], ["<9>"])


def test_attach_is_served_from_its_position() -> None:
    claims = serving([1, 2, 3])
    actions = claims.attach(attach("s2", [[1]], AWAY), True, 0.0)
    (frame,) = items(Frame, actions, AWAY)
    assert (frame.sid, frame.index, frame.ids, frame.text) == ("s2", 1, [2, 3], ["<2>", "<3>"])
    frames = items(Frame, claims.tokens([event(claims, [4])], 0.0))
    assert [(frame.sid, frame.index) for frame in frames] == [("s1", 3), ("s2", 3)]


def test_a_second_attach_of_an_address_replaces_its_sid() -> None:
    claims = serving([1])
    claims.attach(attach("s2", [[1]]), False, 0.0)
    assert [frame.sid for frame in items(Frame, claims.tokens([event(claims, [2])], 0.0))] == ["s2"]


def test_logprobs_go_along_and_a_long_history_comes_in_parts() -> None:
    claims = claimed()
    ids = list(range(FRAME_SCORED_MAX + 10))
    logprobs = scored(ids)
    claims.tokens([event(claims, ids, logprobs=logprobs)], 0.0)
    first, second = items(Frame, claims.attach(attach("s1", [[0, 1]]), False, 0.0))
    assert (first.index, second.index) == (2, FRAME_SCORED_MAX + 2)
    assert first.ids + second.ids == ids[2:]
    assert (first.logprobs or []) + (second.logprobs or []) == logprobs[2:]


def test_a_history_without_scores_comes_in_longer_parts() -> None:
    claims = claimed()
    claims.tokens([event(claims, list(range(FRAME_TOKENS_MAX + 1)))], 0.0)
    frames = items(Frame, claims.attach(attach("s1", [[]]), False, 0.0))
    assert [len(frame.ids) for frame in frames] == [FRAME_TOKENS_MAX, 1]


def test_a_shorter_history_starts_again_from_the_ids() -> None:
    claims = serving([1])
    old = run_of(claims)
    actions = claims.attach(attach("s2", [[1, 2, 3]]), False, 0.0)
    assert only(Abort, actions).run == old
    start = only(Start, actions)
    assert start.prefix == [[1, 2, 3]]
    assert start.run != old
    assert claims.tokens([TokenEvent(key=old, choice=0, ids=[9], text=["x"])], 0.0) == []


def test_another_generation_starts_again_from_the_ids_when_nobody_else_subscribes() -> None:
    claims = serving([1, 2])
    actions = claims.attach(attach("s2", [[4]]), False, 0.0)
    assert only(Start, actions).prefix == [[4]]
    assert [granted.sid for granted in items(Ok, actions)] == ["s2"]


def test_another_generation_is_no_when_somebody_else_subscribes() -> None:
    claims = serving([1, 2])
    actions = claims.attach(attach("s2", [[4]], AWAY), False, 0.0)
    assert actions == [Send(AWAY, No("rid", "s2"))]
    assert claims.attach(attach("s3", [[4]], AWAY), True, 0.0) == []


def test_a_shorter_history_that_somebody_else_is_sent_is_waited_for() -> None:
    claims = serving([1])
    actions = claims.attach(attach("s2", [[1, 2]], AWAY), False, 0.0)
    assert actions == [Send(AWAY, Wait("rid", items(Wait, actions)[0].claim, "s2"))]
    actions = claims.tokens([event(claims, [2, 3])], 0.0)
    assert [granted.sid for granted in items(Ok, actions, AWAY)] == ["s2"]
    assert [(frame.index, frame.ids) for frame in items(Frame, actions, AWAY)] == [(2, [3])]
    assert [(frame.index, frame.ids) for frame in items(Frame, actions, HOME)] == [(1, [2, 3])]


def test_who_waits_with_ids_and_meets_another_generation_is_told_no() -> None:
    claims = serving([1])
    claims.attach(attach("s2", [[1, 2]], AWAY), False, 0.0)
    actions = claims.tokens([event(claims, [5])], 0.0)
    assert items(No, actions, AWAY) == [No("rid", "s2")]
    assert items(Frame, claims.tokens([event(claims, [6])], 0.0), AWAY) == []


@pytest.mark.parametrize("asked", [by_digest("s2", [1]), attach("s2", [[1]], AWAY)])
def test_the_text_of_a_prefix_is_waited_for_until_its_run_tells_it(asked: Attach) -> None:
    claims = claimed(resume=True)
    claims.attach(attach("s1", [[1, 2, 3]]), False, 0.0)
    actions = claims.attach(asked, False, 0.0)
    assert actions == [Send(AWAY, Wait("rid", items(Wait, actions)[0].claim, "s2"))]
    told = TokenEvent(key=run_of(claims), choice=0, before=["<1>", "<2>", "<3>"])
    actions = claims.tokens([told], 0.1)
    assert items(Frame, actions, HOME) == []
    begin = 0 if asked.ids is None else 1
    (frame,) = items(Frame, actions, AWAY)
    assert (frame.index, frame.ids, frame.text) == (begin, [1, 2, 3][begin:], ["<1>", "<2>", "<3>"][begin:])
    frames = items(Frame, claims.tokens([event(claims, [4])], 0.2))
    assert [(frame.sid, frame.index) for frame in frames] == [("s1", 3), ("s2", 3)]


def scored(ids: list[int]) -> list[Logprob]:
    return [Logprob(token, -1.0, b"") for token in ids]


def test_scores_that_were_never_known_here_are_generated_again_for_who_is_alone() -> None:
    claims = table()
    claims.message(delivery(resume=True, logprobs=0), 0.0)
    claims.attach(attach("s1", [[1, 2, 3]]), False, 0.0)
    claims.tokens([TokenEvent(key=run_of(claims), choice=0, before=["<1>", "<2>", "<3>"])], 0.0)
    claims.tokens([event(claims, [4], logprobs=scored([4]))], 0.0)
    assert claims.attach(by_digest("s2", [1]), False, 0.0) == [Send(AWAY, No("rid", "s2"))]
    (first, second) = items(Frame, claims.attach(by_digest("s2", [1, 2, 3]), False, 0.0), AWAY)
    assert (first.index, first.ids, first.text, first.logprobs) == (0, [1, 2, 3], ["<1>", "<2>", "<3>"], None)
    assert (second.index, second.ids, second.logprobs) == (3, [4], scored([4]))
    claims.no_responders(HOME, 0.1)
    actions = claims.attach(by_digest("s3", [1]), False, 0.2)
    assert only(Start, actions).prefix == [[1]]
    assert len(items(Wait, actions, AWAY)) == 1
    actions = claims.tokens([TokenEvent(key=run_of(claims), choice=0, before=["<1>"])], 0.3)
    assert [frame.ids for frame in items(Frame, actions, AWAY)] == [[1]]


def test_an_attach_with_another_number_of_choices_is_no() -> None:
    claims = serving([1])
    assert items(No, claims.attach(attach("s2", [[], []], AWAY), False, 0.0)) == [No("rid", "s2")]


# -- attach by digest --------------------------------------------------------------------------------------------------


def test_a_digest_waits_while_the_publisher_may_still_bring_the_ids() -> None:
    claims = claimed(resume=True)
    actions = claims.attach(by_digest("s2", [1, 2]), False, 0.0)
    assert isinstance(items(Wait, actions, AWAY)[0], Wait)
    assert none(Start, actions)
    assert only(Start, claims.attach(attach("s1", [[1, 2]]), False, 0.0)).prefix == [[1, 2]]


@pytest.mark.parametrize("reply", [HOME, AWAY])
def test_a_digest_starts_anew_when_it_is_the_publisher_or_that_one_is_gone(reply: str) -> None:
    claims = claimed(resume=True)
    if reply != HOME:
        claims.no_responders(HOME, 0.0)
    actions = claims.attach(by_digest("s2", [1, 2], reply), False, 0.0)
    assert only(Start, actions).prefix == [[]]
    assert items(Ok, actions) == []
    assert items(Frame, claims.tokens([event(claims, [1])], 0.0)) == []
    actions = claims.tokens([event(claims, [2, 3])], 0.0)
    assert len(items(Ok, actions, reply)) == 1
    assert [(frame.index, frame.ids) for frame in items(Frame, actions, reply)] == [(0, [1, 2, 3])]


def test_a_digest_that_matches_is_served_from_the_first_token_on() -> None:
    claims = serving([1, 2, 3])
    actions = claims.attach(by_digest("s2", [1, 2]), True, 0.0)
    assert items(Ok, actions, AWAY)[0].sid == "s2"
    assert [(frame.index, frame.ids) for frame in items(Frame, actions, AWAY)] == [(0, [1, 2, 3])]


def test_a_digest_that_is_known_to_differ_is_no() -> None:
    claims = serving([1, 2, 3])
    assert claims.attach(by_digest("s2", [1, 9]), False, 0.0) == [Send(AWAY, No("rid", "s2"))]
    claims = serving([1])
    finish(claims, [2])
    assert claims.attach(by_digest("s2", [1, 2, 3]), False, 0.0) == [Send(AWAY, No("rid", "s2"))]


def test_h14_generating_anew_that_does_not_meet_the_digest_is_a_terminal_until_released() -> None:
    claims = claimed(resume=True)
    claims.attach(by_digest("s1", [1, 2], HOME), False, 0.0)
    (frame,) = items(Frame, claims.tokens([event(claims, [1, 9])], 0.0), HOME)
    assert frame.error is not None
    assert frame.error.code == "diverged"
    (again,) = items(Frame, claims.tick(1.0), HOME)
    assert (again.sid, again.error) == ("s1", frame.error)
    (crossed,) = items(Frame, claims.attach(by_digest("s2", [1, 2], HOME), False, 1.1), HOME)
    assert (crossed.sid, crossed.error) == ("s2", frame.error)
    assert items(Frame, claims.tokens([event(claims, [3])], 1.2)) == []
    assert Ack("ack.5") in claims.release(release(), 1.3)


# -- the end of a generation -------------------------------------------------------------------------------------------


def test_the_finish_is_repeated_until_released() -> None:
    claims = serving([1])
    (frame,) = items(Frame, finish(claims, [2]))
    assert (frame.index, frame.ids, frame.finish, frame.usage) == (1, [2], "stop", Usage(3, 4))
    (again,) = items(Frame, claims.tick(1.0))
    assert (again.index, again.ids, again.finish, again.usage) == (2, [], "stop", Usage(3, 4))
    claims.release(release(), 1.1)
    assert claims.tick(2.5) == []


def test_a_finished_claim_holds_its_message_and_no_slot() -> None:
    claims = serving([1])
    finish(claims, [2])
    assert (len(claims), claims.holding, claims.handles()) == (1, 0, ["ack.5"])
    claims.attach(attach("s2", [[1, 9]]), False, 0.0)  # generated again from other ids
    assert claims.holding == 1


def test_every_choice_finishes_and_usage_comes_with_the_last() -> None:
    claims = serving([], choices=2)
    finish(claims, [1], 1, usage=False)
    assert claims.holding == 1
    finish(claims, [2], 0)
    assert claims.holding == 0
    frames = items(Frame, claims.attach(attach("s2", [[], [1]], AWAY), False, 0.0), AWAY)
    assert [(frame.choice, frame.ids, frame.finish) for frame in frames] == [(0, [2], "stop"), (1, [], "stop")]
    assert [frame.usage for frame in frames] == [None, Usage(3, 4)]


def test_a_vector_comes_with_its_finish_again_and_again_and_after_a_new_attach() -> None:
    claims = claimed(choices=2)
    claims.attach(attach("s1", [[], []]), False, 0.0)
    first = event(claims, [], 0, finish="stop", vector=b"1234")
    (frame,) = items(Frame, claims.tokens([first], 1.0))
    assert (frame.choice, frame.ids, frame.finish, frame.vector, frame.usage) == (0, [], "stop", b"1234", None)
    assert items(Frame, claims.tick(5.0)) == [], "the other one is missing"
    again = items(Frame, claims.attach(attach("s2", [[], []]), False, 5.0))
    assert [(each.choice, each.sid, each.vector) for each in again] == [(0, "s2", b"1234")]
    second = event(claims, [], 1, finish="stop", vector=b"5678", usage=Usage(9, 0))
    (frame,) = items(Frame, claims.tokens([second], 6.0))
    assert (frame.vector, frame.usage) == (b"5678", Usage(9, 0))
    repeated = items(Frame, claims.tick(9.0))
    assert [(each.vector, each.usage) for each in repeated] == [(b"1234", None), (b"5678", Usage(9, 0))]
    claims.release(release(sid="s2"), 10.0)
    kept = items(Frame, claims.attach(attach("s3", [[], []]), False, 11.0))
    assert [each.vector for each in kept] == [b"1234", b"5678"]


def test_kept_vectors_count_as_the_room_they_take() -> None:
    claims = table(history_tokens_max=100)
    for number in range(3):
        claims.message(delivery(rid=f"rid{number}", seq=number + 1), 0.0)
        claims.attach(Attach(f"rid{number}", "s1", HOME, [[]]), False, 0.0)
        (run,) = (key for key, claim in claims._runs.items() if claim.rid == f"rid{number}")
        claims.tokens([TokenEvent(key=run, choice=0, finish="stop", usage=Usage(1, 0), vector=b"x" * 300)], 0.0)
        claims.release(Release(f"rid{number}", "s1", HOME, True), 0.0)
    assert list(claims._kept) == ["rid1", "rid2"]


def test_an_engine_error_goes_to_every_subscriber_and_to_who_comes_later() -> None:
    claims = serving([1])
    failed = TokenEvent(key=run_of(claims), choice=0, error=("engine_failed", "it raised"))
    (frame,) = items(Frame, claims.tokens([failed], 0.0), HOME)
    assert frame.error == WireError("engine_failed", "it raised")
    (late,) = items(Frame, claims.attach(attach("s2", [[4]], AWAY), False, 0.1), AWAY)
    assert (late.sid, late.error) == ("s2", frame.error)
    assert claims.holding == 0


def test_h13_an_engine_error_reaches_a_subscriber_that_waits_for_its_digest() -> None:
    claims = claimed(resume=True)
    claims.attach(by_digest("s1", [1, 2], HOME), False, 0.0)
    failed = TokenEvent(key=run_of(claims), choice=0, error=("engine_failed", "it raised"))
    (frame,) = items(Frame, claims.tokens([failed], 0.0), HOME)
    assert frame.error is not None


def test_a_refused_input_is_an_end_like_any_other() -> None:
    claims = claimed()
    error = WireError("invalid_request", "too long", "messages")
    assert claims.failed(run_of(claims), error, 0.1) == []  # nobody is attached yet
    (frame,) = items(Frame, claims.attach(attach("s1", [[]]), False, 0.2))
    assert frame.error == error
    assert Ack("ack.5") in claims.release(release(), 0.3)
    assert len(claims) == 0


def test_a_refusal_of_a_run_that_was_replaced_is_ignored() -> None:
    claims = serving([1, 2])
    old = run_of(claims)
    claims.attach(attach("s2", [[4]]), False, 0.0)
    assert claims.failed(old, WireError("invalid_request", "x"), 0.1) == []
    assert claims.holding == 1


def test_h16_the_own_deadline_ends_a_generation_some_time_after_the_requesters() -> None:
    claims = table(deadline_margin_s=5.0)
    claims.message(delivery(generation_s=10.0), 0.0)
    claims.attach(attach("s1", [[]]), False, 0.0)
    run = run_of(claims)
    assert items(Frame, claims.tick(14.9)) == []
    actions = claims.tick(15.0)
    assert only(Abort, actions).run == run
    (frame,) = items(Frame, actions)
    assert frame.error is not None
    assert frame.error.code == "generation_deadline"


# -- release -----------------------------------------------------------------------------------------------------------


def test_release_done_of_the_last_subscriber_aborts_and_acks_all_handles() -> None:
    claims = serving([1])
    run = run_of(claims)
    claims.message(delivery(seq=9), 0.1)
    actions = claims.release(release(), 0.2)
    assert only(Abort, actions).run == run
    assert [action for action in actions if isinstance(action, Ack)] == [Ack("ack.5"), Ack("ack.9")]
    assert (len(claims), claims.holding, claims.handles()) == (0, 0, [])
    assert items(No, claims.attach(attach("s2", [[1]]), False, 0.3)) == [No("rid", "s2")]  # unfinished: not kept


def test_h10_release_done_frees_only_its_sender() -> None:
    claims = serving([1])
    claims.attach(attach("s2", [[]], AWAY), False, 0.1)
    assert claims.release(release(), 0.2) == []
    assert [frame.sid for frame in items(Frame, claims.tokens([event(claims, [2])], 0.3))] == ["s2"]
    assert Ack("ack.5") in claims.release(release(AWAY, "s2"), 0.4)


def test_release_done_instead_of_an_attach_acks() -> None:
    claims = claimed()
    assert Ack("ack.5") in claims.release(release(sid=""), 0.1)
    assert len(claims) == 0


def test_release_of_somebody_who_has_no_part_in_the_claim_is_ignored() -> None:
    claims = claimed()
    assert claims.release(release(AWAY, ""), 0.1) == []
    assert claims.release(Release("other", "s1", HOME, True), 0.1) == []
    assert len(claims) == 1


def test_a_finished_history_is_kept_for_a_time() -> None:
    claims = serving([1], history_kept_s=60.0)
    finish(claims, [2])
    claims.release(release(), 1.0)
    actions = claims.attach(attach("s2", [[1]], AWAY), True, 60.0)
    (granted,) = items(Ok, actions, AWAY)
    assert granted.ack == ""
    (frame,) = items(Frame, actions, AWAY)
    assert (frame.index, frame.ids, frame.finish, frame.usage) == (1, [2], "stop", Usage(3, 4))
    assert claims.attach(attach("s3", [[9]], AWAY), False, 60.0) == [Send(AWAY, No("rid", "s3"))]
    claims.tick(61.0)
    assert claims.attach(attach("s4", [[1]], AWAY), True, 61.0) == []


def test_a_kept_history_takes_little_room_and_loses_nothing() -> None:
    ids = list(range(1000, 1100))
    claims = claimed()
    claims.tokens([event(claims, ids, logprobs=scored(ids))], 0.0)
    claims.attach(attach("s1", [[]]), False, 0.0)
    finish(claims, [7])
    before = items(Frame, claims.attach(attach("s2", [[1000]]), False, 0.2))
    only(Ack, claims.release(release(sid="s2"), 0.3))
    history = claims._kept["rid"][0].history
    assert history is not None
    assert history.choices[0].ids == []
    after = items(Frame, claims.attach(attach("s2", [[1000]]), False, 0.4))
    assert after == before
    assert (sum(len(frame.ids) for frame in after), after[0].logprobs) == (100, scored(ids)[1 : FRAME_SCORED_MAX + 1])


def test_a_kept_history_does_not_keep_the_prompt() -> None:
    claims = serving([1])
    finish(claims, [2])
    claims.release(release(), 1.0)
    kept, _ = claims._kept["rid"]
    assert kept.delivery.request.input == Input()


def test_kept_histories_are_bounded_by_their_tokens() -> None:
    claims = table(history_tokens_max=5)
    for number in (1, 2, 3):
        request = Request(f"rid{number}", "m", "v1", Input(prompt="p"))
        claims.message(Delivery(request=request, tenant="t", seq=number, handle="h", reply=HOME), 0.0)
        finish(claims, [1, 2])
        claims.release(Release(f"rid{number}", "", HOME, True), 0.0)
    found = [bool(claims.attach(Attach(f"rid{number}", "s", HOME, [[]]), True, 1.0)) for number in (1, 2, 3)]
    assert found == [False, True, True]


def test_a_message_after_the_ack_is_a_new_claim() -> None:
    claims = serving([1])
    finish(claims, [2])
    claims.release(release(), 1.0)
    actions = claims.message(delivery(seq=6, deliveries=2), 2.0)
    assert len(items(Accepted, actions)) == 1
    assert none(Start, actions)
    assert len(claims) == 1


def test_a_fenced_release_of_the_current_sid_forgets_without_ack_or_nak() -> None:
    claims = serving([1])
    assert claims.release(release(sid="old", done=False), 0.1) == []
    assert claims.handles() == ["ack.5"]
    run = run_of(claims)
    assert claims.release(release(done=False), 0.2) == [Abort(run)]
    assert (len(claims), claims.handles()) == (0, [])


def test_a_fenced_release_leaves_other_subscribers() -> None:
    claims = serving([1])
    claims.attach(attach("s2", [[]], AWAY), False, 0.1)
    assert claims.release(release(done=False), 0.2) == []
    assert len(claims) == 1


# -- nobody there ------------------------------------------------------------------------------------------------------


def test_a_subscriber_that_is_gone_starts_the_grace_and_its_end_acks() -> None:
    claims = serving([1], orphan_grace_s=15.0)
    run = run_of(claims)
    claims.no_responders(HOME, 10.0)
    assert none(Ack, claims.tick(24.9))
    actions = claims.tick(25.0)
    assert Abort(run) in actions
    assert Ack("ack.5") in actions
    assert (len(claims), claims.orphans) == (0, 1)


def test_an_attach_within_the_grace_saves_the_claim() -> None:
    claims = serving([1], orphan_grace_s=15.0)
    claims.no_responders(HOME, 10.0)
    claims.attach(attach("s2", [[1]]), False, 12.0)
    assert none(Ack, claims.tick(26.0))
    claims.no_responders(HOME, 30.0)
    assert none(Ack, claims.tick(44.0))
    assert Ack("ack.5") in claims.tick(45.0)


def test_a_claim_that_nobody_lets_go_of_ends_some_time_after_its_deadline() -> None:
    for claims in (serving([1], orphan_grace_s=15.0), claimed(orphan_grace_s=15.0)):
        claims.tick(605.0)  # 600 s, and the margin: it failed
        assert [action for action in claims.tick(619.9) if isinstance(action, Ack)] == []
        assert [action for action in claims.tick(620.0) if isinstance(action, Ack)] == [Ack("ack.5")]
        assert (len(claims), claims.holding, claims.orphans) == (0, 0, 1)


def test_h11_no_responders_to_accepted_starts_the_grace_and_accepted_goes_on() -> None:
    claims = claimed(orphan_grace_s=15.0)
    claims.no_responders(HOME, 0.1)
    assert len(items(Accepted, claims.tick(1.0))) == 1
    assert Ack("ack.5") in claims.tick(15.1)


def test_no_responders_of_the_publisher_is_no_loss_to_who_is_being_served() -> None:
    claims = claimed(orphan_grace_s=15.0)
    claims.attach(attach("s2", [[]], AWAY), True, 0.1)
    claims.no_responders(HOME, 0.2)
    assert items(Accepted, claims.tick(1.5)) == []
    assert none(Ack, claims.tick(20.0))
    claims.no_responders(THIRD, 20.0)
    assert none(Ack, claims.tick(40.0))


# -- leaving -----------------------------------------------------------------------------------------------------------


def test_drain_takes_no_new_claims_and_goes_on_with_the_others() -> None:
    claims = serving([1])
    claims.drain()
    request = Request("other", "m", "v1", Input(prompt="p"))
    new = Delivery(request=request, tenant="t", seq=9, handle="ack.9", reply=HOME)
    assert claims.message(new, 0.1) == [Nak("ack.9")]
    assert len(items(Frame, claims.tokens([event(claims, [2])], 0.2))) == 1


def test_stop_tells_subscribers_and_hands_all_messages_back() -> None:
    claims = serving([1])
    run = run_of(claims)
    claims.attach(attach("s2", [[]], AWAY), False, 0.1)
    claims.message(delivery(seq=9), 0.1)
    actions = claims.stop()
    assert items(No, actions, HOME) == [No("rid", "s1")]
    assert items(No, actions, AWAY) == [No("rid", "s2")]
    assert Nak("ack.5") in actions
    assert Nak("ack.9") in actions
    assert Abort(run) in actions
    assert len(claims) == 0


def test_abandon_hands_all_messages_back_in_silence() -> None:
    claims = serving([1])
    assert claims.abandon() == [Nak("ack.5")]


# -- find and cancel -----------------------------------------------------------------------------------------------------


def about(tenant: str = "t") -> About:
    return About("rid", tenant)


def test_a_request_is_found_while_it_is_held_and_while_its_history_is_kept() -> None:
    claims = table()
    assert claims.find(about()) is None
    claims.message(delivery(), 0.0)
    found = claims.find(about())
    assert found is not None
    assert (found.seq, found.request.rid, found.request.input) == (5, "rid", Input())
    assert claims.find(about("other")) is None
    claims.attach(attach("s1", [[]]), False, 0.0)
    finish(claims, [1])
    claims.release(release(), 0.0)
    assert len(claims) == 0
    assert claims.find(about()) == found
    assert claims.find(about("other")) is None


def test_a_cancel_for_everybody_ends_the_run_and_tells_every_subscriber() -> None:
    claims = serving([1])
    run = run_of(claims)
    claims.attach(attach("s2", [[]], AWAY), False, 0.0)
    assert claims.cancel(about("other"), 0.1) == (b"", [])
    status, actions = claims.cancel(about(), 0.1)
    assert status == CANCELLED
    assert actions[0] == Abort(run)
    for reply in (HOME, AWAY):
        (frame,) = items(Frame, actions, reply)
        assert frame.error is not None
        assert frame.error.code == "cancelled"
    assert (claims.holding, claims.handles()) == (0, ["ack.5"])
    assert claims.cancel(about(), 0.2) == (CANCELLED, [])
    claims.release(release(HOME), 0.3)
    assert Ack("ack.5") in claims.release(release(AWAY, "s2"), 0.3)
    assert claims.cancel(about(), 0.4) == (b"", [])


def test_a_claim_that_was_cancelled_before_anybody_attached_tells_who_comes() -> None:
    claims = claimed(resume=True)
    assert claims.cancel(about(), 0.1)[0] == CANCELLED
    assert len(items(Accepted, claims.tick(1.1))) == 1
    (frame,) = items(Frame, claims.attach(attach("s1", [[7]]), False, 1.2))
    assert frame.error is not None
    assert Ack("ack.5") in claims.release(release(), 1.3)


def test_what_has_finished_is_not_cancelled() -> None:
    claims = serving([1])
    finish(claims, [2])
    assert claims.cancel(about(), 0.1) == (FINISHED, [])
    claims.release(release(), 0.2)
    assert claims.cancel(about(), 0.3) == (FINISHED, [])


# -- suspects ----------------------------------------------------------------------------------------------------------


def suspect(rid: str, deaths: int = 2, sid: str = "s") -> Attach:
    return Attach(rid, sid, HOME, [[]], deaths=deaths)


def holding(*rids: str) -> ClaimTable:
    claims = table()
    for number, rid in enumerate(rids):
        claims.message(delivery(rid=rid, seq=number, handle=f"ack.{number}", deliveries=3), 0.0)
    return claims


def test_suspects_are_tried_one_at_a_time() -> None:
    claims = holding("a", "b", "c", "d")
    first = claims.attach(suspect("a"), False, 0.0)
    assert (len(items(Ok, first)), only(Start, first).request.rid) == (1, "a")
    assert [item.rid for item in items(Wait, claims.attach(suspect("b"), False, 0.0))] == ["b"]
    assert [item.rid for item in items(Wait, claims.attach(suspect("c", 3), False, 0.0))] == ["c"]
    assert only(Start, claims.attach(suspect("d", 1), False, 0.0)).request.rid == "d"  # no suspect: waits for nobody
    run = only(Start, first).run
    second = claims.tokens([TokenEvent(key=run, choice=0, ids=[1], text=["<1>"])], 0.1)
    assert only(Start, second).request.rid == "b"
    assert [item.rid for item in items(Ok, second)] == ["b"]
    assert items(Wait, claims.attach(suspect("c", 3, "again"), False, 0.2))
    third = claims.release(Release("b", "s", HOME, True), 0.3) + claims.tick(0.4)
    assert [action.request.rid for action in third if isinstance(action, Start)] == ["c"]
    assert items(Ok, third)[0].sid == "again"


def test_a_suspect_that_ends_without_a_token_makes_room() -> None:
    claims = holding("a", "b")
    run = only(Start, claims.attach(suspect("a"), False, 0.0)).run
    claims.attach(suspect("b"), False, 0.0)
    claims.failed(run, WireError("engine_failed", "no"), 0.1)
    assert only(Start, claims.tick(0.2)).request.rid == "b"


def test_a_suspect_that_left_the_line_gets_no_turn() -> None:
    claims = holding("a", "b", "c")
    run = only(Start, claims.attach(suspect("a"), False, 0.0)).run
    claims.attach(suspect("b"), False, 0.0)
    claims.attach(suspect("c"), False, 0.0)
    claims.release(Release("b", "s", HOME, True), 0.1)
    actions = claims.tokens([TokenEvent(key=run, choice=0, ids=[1], text=["<1>"])], 0.2)
    assert only(Start, actions).request.rid == "c"


# -- totals ------------------------------------------------------------------------------------------------------------


def test_each_claim_that_is_over_is_counted_once() -> None:
    over = []
    for end in ("completed", "failed", "cancelled", "revoked", "moved", "stopped"):
        claims = serving([1])
        if end == "completed":
            finish(claims, [2])
        elif end == "failed":
            claims.failed(run_of(claims), WireError("engine_failed", "no"), 0.1)
        elif end == "revoked":
            claims.cancel(About("rid", "t"), 0.1)
        if end == "stopped":
            claims.stop()
        else:
            claims.release(Release("rid", "s1", HOME, end != "moved"), 0.2)
        assert (len(claims), sum(claims.outcomes.values())) == (0, 1)
        over += [name for name, count in claims.outcomes.items() if count]
    assert over == ["completed", "failed", "cancelled", "cancelled", "moved", "moved"]


# -- accounting --------------------------------------------------------------------------------------------------------


def test_what_a_request_came_to_is_said_before_it_is_acknowledged() -> None:
    claims = serving([1, 2])
    finish(claims, [3])
    actions = claims.release(release(), 0.3)
    bill = only(Bill, actions)
    assert (bill.outcome, bill.usage, bill.output_tokens, bill.delivery.tenant) == ("completed", Usage(3, 4), 3, "t")
    assert actions.index(bill) < actions.index(Ack("ack.5"))

    cancelled = only(Bill, serving([1, 2]).release(release(), 0.3))
    assert (cancelled.outcome, cancelled.usage, cancelled.output_tokens) == ("cancelled", None, 2)

    claims = serving([1, 2])
    claims.failed(run_of(claims), WireError("engine_failed", "no"), 0.2)
    assert only(Bill, claims.release(release(), 0.3)).outcome == "engine_failed"


def test_of_a_request_that_had_ended_its_requester_tells_what_it_came_to() -> None:
    told = only(Bill, claimed(resume=True).release(Release("rid", "", HOME, True, Usage(7, 8)), 0.1))
    assert (told.outcome, told.usage) == ("completed", Usage(7, 8))
    assert none(Bill, claimed(resume=True).release(release(sid=""), 0.1))  # nothing is known of it
    assert none(Bill, serving([1]).release(release(done=False), 0.1))  # another claim has it
    own = serving([1, 2])
    finish(own, [3])
    assert only(Bill, own.release(Release("rid", "s1", HOME, True, Usage(7, 8)), 0.3)).usage == Usage(3, 4)
