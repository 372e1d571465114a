"""The worker's half of the wire: what one worker does about every rid it holds. Pure: events and the time in, actions out.

The table of docs/protocol.md, "Worker", is implemented here and nowhere else. A rid is CLAIMED (its messages are held), or
ACKED (done; its finished history is kept for a while for whoever still attaches), or not known.

The driver calls one method for each event and performs the returned actions in their order; `tick` several times a second.
All times are monotonic seconds. A run is one generation in the engine: `Start` names it by a fresh key.
"""

from collections import Counter

import msgspec

from shared import subjects
from shared.errors import Cancelled, Diverged, GenerationDeadline
from shared.usage import COMPLETED
from shared.wire import (
    CANCELLED,
    FINISHED,
    About,
    Accepted,
    Attach,
    Found,
    Frame,
    Input,
    No,
    Ok,
    Release,
    Usage,
    Wait,
    WireError,
    new_id,
)
from workers.actions import Abort, Ack, Action, Bill, DeadLetter, Nak, Send, Start
from workers.delivery import Delivery as Delivery
from workers.engine.request import TokenEvent
from workers.history import History, Match, positions_of
from workers.trials import Trials

_TRUSTED = subjects.frame_address(subjects.INGRESS_OWNER, "")
HANDED_BACK_MAX = 1000  # rids that are remembered


class ClaimLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The timers of a worker's claims, in seconds, and its bounds."""

    resend_s: float = 1.0  # accepted and terminal frames
    orphan_grace_s: float = 15.0
    history_kept_s: float = 60.0
    history_tokens_max: int = 500_000  # of all kept histories together; the oldest go first
    deadline_margin_s: float = 5.0  # the requester's own clock ends a generation first
    deliveries_max: int = 100


class _Subscriber:
    """A requester that is sent frames under `sid`.

    `awaiting` is its attach while the history has not reached its position. `error` ends the request for this one alone.
    """

    __slots__ = ("awaiting", "error", "sid")

    def __init__(self, sid: str, awaiting: Attach | None) -> None:
        self.sid = sid
        self.awaiting = awaiting
        self.error: WireError | None = None


class _Claim:
    """A rid that this worker holds."""

    __slots__ = (
        "calling",
        "deadline",
        "delivery",
        "ended",
        "error",
        "handles",
        "history",
        "id",
        "lost",
        "orphan_at",
        "resend_at",
        "rid",
        "run",
        "runs",
        "seq",
        "subscribers",
        "trusted",
    )

    def __init__(self, delivery: Delivery, now: float, limits: ClaimLimits) -> None:
        self.id = new_id()
        self.rid = delivery.request.rid
        self.delivery = delivery
        self.seq = delivery.seq  # of the latest message
        self.handles = {delivery.seq: delivery.handle}
        self.history: History | None = None  # None: not started
        self.error: WireError | None = None
        self.ended = False  # finished or failed: its terminal is repeated
        self.run = ""  # in the engine, or on its way there
        self.runs = 0
        self.subscribers: dict[str, _Subscriber] = {}
        self.calling = True  # accepted is repeated
        self.lost = False  # somebody it spoke to was not there
        self.trusted = not subjects.is_fair(
            delivery.handle
        )  # it is an ingress's: nobody else has another lane, or it spoke
        self.orphan_at: float | None = None
        self.resend_at = now + limits.resend_s
        self.deadline = now + delivery.generation_s + limits.deadline_margin_s


class ClaimTable:
    """All rids of one worker."""

    def __init__(self, worker: str, limits: ClaimLimits) -> None:
        self.worker = worker
        self.limits = limits
        self.draining = False
        self.holding_of: Counter[str] = Counter()  # by tenant: claims that hold a slot. A finished one holds none
        self.orphans = 0  # claims ended because nobody was left
        self.restarts = 0  # runs started again from a requester's ids
        self.redeliveries = 0  # claims of a message that was delivered before
        self.outcomes = {"completed": 0, "failed": 0, "cancelled": 0, "moved": 0}  # of claims that are over
        self._claims: dict[str, _Claim] = {}
        self._runs: dict[str, _Claim] = {}
        self._kept: dict[str, tuple[_Claim, float]] = {}  # ACKED, oldest first, with the time to forget it
        self._kept_tokens = 0
        self._trials: Trials[Attach] = Trials()
        self._handed_back: dict[str, None] = {}  # rids, the latest last

    # -- queries -------------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Claims held, finished or not: messages that are not acked."""
        return len(self._claims)

    @property
    def holding(self) -> int:
        """Claims that hold a slot."""
        return self.holding_of.total()

    def of_lane_fair(self) -> Counter[str]:
        """Messages held that came out of the lane fair, by tenant."""
        return Counter(
            claim.delivery.tenant
            for claim in self._claims.values()
            for handle in claim.handles.values()
            if subjects.is_fair(handle)
        )

    def handles(self) -> list[str]:
        """The ack subjects that the in-progress loop keeps alive."""
        return [handle for claim in self._claims.values() for handle in claim.handles.values()]

    # -- the broker ----------------------------------------------------------------------------------------------------

    def message(self, delivery: Delivery, now: float) -> list[Action]:
        """A message was pulled."""
        rid = delivery.request.rid
        claim = self._claims.get(rid)
        known = claim or self._kept.get(rid, (None,))[0]
        if known is not None and known.delivery.tenant != delivery.tenant:
            return [DeadLetter(delivery, "there is a request of another tenant with this rid")]
        if claim is not None:  # one more handle on what runs already
            claim.handles[delivery.seq] = delivery.handle
            claim.seq = delivery.seq
            return []
        if delivery.deliveries > self.limits.deliveries_max:
            return [DeadLetter(delivery, f"delivered {delivery.deliveries} times")]
        if self.draining:
            return [Nak(delivery.handle)]
        self._forget_kept(rid)
        claim = self._claims[rid] = _Claim(delivery, now, self.limits)
        self._hold(claim, 1)
        actions: list[Action] = []
        self._accept(claim, actions)
        if delivery.deliveries == 1 and not delivery.resume:
            # Nobody can have tokens of it yet: the prefill overlaps with the attach.
            self._start(claim, [[] for _ in range(delivery.request.sampling.n)], actions)
        self.redeliveries += delivery.deliveries > 1
        return actions

    # -- requesters ----------------------------------------------------------------------------------------------------

    def attach(self, attach: Attach, broadcast: bool, now: float) -> list[Action]:
        """A requester asks for the tokens after what it has. To a broadcast, "not here" is silence."""
        claim = self._claims.get(attach.rid)
        actions: list[Action] = []
        kept = self._kept.get(attach.rid)
        if claim is None and kept is not None and self._fits(kept[0], attach):
            history = kept[0].history
            if history is not None:
                history.unpack()
                if history.match(attach) is Match.EXTENDS:
                    self._serve(kept[0], attach, now, actions)
        elif claim is not None and self._fits(claim, attach):
            self._attach(claim, attach, now, actions)
        if not actions and not broadcast:
            actions.append(Send(attach.reply, No(attach.rid, attach.sid)))
        return actions

    def release(self, release: Release, now: float) -> list[Action]:
        """A requester is done with the rid, or is served by another claim (fenced)."""
        actions: list[Action] = []
        claim = self._claims.get(release.rid)
        if claim is None:
            return actions
        subscriber = claim.subscribers.get(release.reply)
        told = release.usage if release.reply.startswith(_TRUSTED) else None
        if release.done:
            if release.reply == claim.delivery.reply:
                claim.calling = False
            elif subscriber is None:
                return actions
            claim.subscribers.pop(release.reply, None)
            if not claim.subscribers:
                self._ack(claim, now, actions, keep=True, told=told)
        elif subscriber is not None and subscriber.sid == release.sid:
            del claim.subscribers[release.reply]
            if not claim.subscribers:
                self.outcomes["moved"] += 1
                self._forget(claim, actions)  # no ack and no NAK: the other claim may hold the same message
        return actions

    def no_responders(self, reply: str, now: float) -> list[Action]:
        """Nobody listens on a frame address: after a restart of the broker that may be so for a moment only."""
        for claim in self._claims.values():
            if claim.subscribers.pop(reply, None) is not None:
                self._lose(claim, now)
            elif reply == claim.delivery.reply and claim.calling:
                if claim.subscribers:
                    claim.calling = False
                else:
                    self._lose(claim, now)
        return []

    # -- anybody of the tenant -----------------------------------------------------------------------------------------

    def find(self, about: About) -> Found | None:
        """The request of that rid, its input left out; None: not here."""
        claim = self._claims.get(about.rid)
        if claim is None and about.rid in self._kept:
            claim = self._kept[about.rid][0]
        if claim is None or claim.delivery.tenant != about.tenant:
            return None
        return Found(claim.seq, msgspec.structs.replace(claim.delivery.request, input=Input()))

    def cancel(self, about: About, now: float) -> tuple[bytes, list[Action]]:
        """End a request for everybody: what it has come to (b"": it is not here), and the actions."""
        actions: list[Action] = []
        claim = self._claims.get(about.rid)
        if claim is None:
            kept = self._kept.get(about.rid)
            return FINISHED if kept is not None and kept[0].delivery.tenant == about.tenant else b"", actions
        if claim.delivery.tenant != about.tenant:
            return b"", actions
        if claim.ended:
            return FINISHED if claim.error is None else CANCELLED, actions
        if claim.run:
            actions.append(Abort(claim.run))
        self._fail(claim, WireError(Cancelled.code, "the request was cancelled"), now, actions)
        return CANCELLED, actions

    # -- the engine ----------------------------------------------------------------------------------------------------

    def tokens(self, events: list[TokenEvent], now: float) -> list[Action]:
        """One step's events."""
        actions: list[Action] = []
        for event in events:
            claim = self._runs.get(event.key)
            if claim is None or claim.history is None:
                continue  # aborted in the meantime
            if event.error is not None:
                self._fail(claim, WireError(*event.error), now, actions)
                continue
            index = claim.history.append(event)
            if event.ids or event.vector:
                self._trials.over(claim.rid)
            for reply, subscriber in list(claim.subscribers.items()):
                if subscriber.awaiting is not None:
                    self._settle(claim, reply, subscriber, subscriber.awaiting, now, actions)
                    continue
                if subscriber.error is not None or event.before is not None:
                    continue
                frame = Frame(
                    claim.rid,
                    claim.id,
                    subscriber.sid,
                    event.choice,
                    index,
                    event.ids,
                    event.text,
                    event.logprobs,
                    event.finish,
                    event.usage,
                    vector=event.vector,
                )
                actions.append(Send(reply, frame))
            if not claim.history.unfinished:
                self._run_over(claim, now)
        self._next_trial(now, actions)
        return actions

    def failed(self, run: str, error: WireError, now: float) -> list[Action]:
        """The input of a run was refused, or the engine failed on it."""
        actions: list[Action] = []
        claim = self._runs.get(run)
        if claim is not None:
            self._fail(claim, error, now, actions)
        return actions

    # -- time and the end ------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> list[Action]:
        """All timers that are due."""
        actions: list[Action] = []
        for claim in list(self._claims.values()):
            # past its time every requester has ended it by its own clock: who is still there and says nothing lets go never
            is_left = now >= claim.deadline + self.limits.orphan_grace_s
            if is_left or (claim.orphan_at is not None and now >= claim.orphan_at):
                self.orphans += 1
                self._ack(claim, now, actions, keep=False)
            elif now >= claim.deadline and not claim.ended:
                if claim.run:
                    actions.append(Abort(claim.run))
                error = WireError(GenerationDeadline.code, "the generation did not finish in time")
                self._fail(claim, error, now, actions)
            elif now >= claim.resend_at:
                claim.resend_at = now + self.limits.resend_s
                if claim.calling:
                    self._accept(claim, actions)
                self._terminals(claim, actions)
        self._next_trial(now, actions)
        while self._kept:
            rid, (_, until) = next(iter(self._kept.items()))  # the oldest
            if now < until:
                break
            self._forget_kept(rid)
        return actions

    def hand_back(self, run: str) -> list[Action]:
        """The engine cannot begin this run in time: tell subscribers, hand its messages back. Once for each request."""
        actions: list[Action] = []
        claim = self._runs.get(run)
        if claim is not None and claim.rid not in self._handed_back:
            self._handed_back[claim.rid] = None
            if len(self._handed_back) > HANDED_BACK_MAX:
                del self._handed_back[next(iter(self._handed_back))]
            self._take_leave(claim, actions)
        return actions

    def drain(self) -> None:
        """No new claims from now on; what is claimed goes on."""
        self.draining = True

    def stop(self) -> list[Action]:
        """Leave in good order: tell subscribers, hand all messages back."""
        actions: list[Action] = []
        for claim in list(self._claims.values()):
            self._take_leave(claim, actions)
        return actions

    def abandon(self) -> list[Action]:
        """The engine hangs: hand all messages back and say nothing more."""
        return [Nak(handle) for handle in self.handles()]

    # -- attach ----------------------------------------------------------------------------------------------------------

    def _fits(self, claim: _Claim, attach: Attach) -> bool:
        """Whether its address may have the request's frames, and it speaks of as many choices as the request has."""
        if not subjects.may_have_frames(attach.reply, claim.delivery.tenant):
            return False
        choices = claim.delivery.request.sampling.n
        return len(positions_of(attach)) == choices and (attach.ids is not None or len(attach.digest or []) == choices)

    def _attach(self, claim: _Claim, attach: Attach, now: float, actions: list[Action]) -> None:
        if claim.error is not None:
            self._subscribe(claim, attach, awaiting=False)
            actions.append(Send(attach.reply, self._error_frame(claim, attach.sid, claim.error)))
            return
        if claim.history is None:
            self._attach_unstarted(claim, attach, now, actions)
            return
        match = claim.history.match(attach)
        alone = all(reply == attach.reply for reply in claim.subscribers)
        before = claim.subscribers.get(attach.reply)
        if match is Match.EXTENDS:
            self._subscribe(claim, attach, awaiting=False)
            self._serve(claim, attach, now, actions)
        elif alone and attach.ids is not None and match is not Match.UNTOLD:
            self._restart(claim, attach.ids, attach, now, actions)
        elif alone and match is Match.LACKING:
            self._restart(claim, claim.history.before(positions_of(attach)), attach, now, actions)
        elif match in (Match.SHORTER, Match.UNTOLD):
            # Of a shorter one another is being served, and must not lose the text of what this one has and it has not.
            self._subscribe(claim, attach, awaiting=True)
            actions.append(Send(attach.reply, Wait(claim.rid, claim.id, attach.sid)))
        elif before is not None and before.error is not None:
            before.sid = attach.sid
            actions.append(Send(attach.reply, self._error_frame(claim, attach.sid, before.error)))

    def _attach_unstarted(self, claim: _Claim, attach: Attach, now: float, actions: list[Action]) -> None:
        if attach.ids is not None:
            prefix = attach.ids
        elif claim.lost or attach.reply == claim.delivery.reply:
            # Whoever had the ids is gone: generate anew, and serve it only if that meets the digest.
            prefix = [[] for _ in positions_of(attach)]
        else:
            actions.append(Send(attach.reply, Wait(claim.rid, claim.id, attach.sid)))
            return
        if self._trials.may_start(attach):
            self._restart(claim, prefix, attach, now, actions)
            self._trials.started(attach)
        else:
            actions.append(Send(attach.reply, Wait(claim.rid, claim.id, attach.sid)))

    def _next_trial(self, now: float, actions: list[Action]) -> None:
        while (attach := self._trials.next()) is not None:
            claim = self._claims.get(attach.rid)
            if claim is not None and claim.history is None and claim.error is None:
                self._attach_unstarted(claim, attach, now, actions)

    def _restart(
        self, claim: _Claim, prefix: list[list[int]], attach: Attach, now: float, actions: list[Action]
    ) -> None:
        self.restarts += 1
        self._start(claim, prefix, actions)
        if claim.history is not None and claim.history.match(attach) is Match.EXTENDS:
            self._subscribe(claim, attach, awaiting=False)
            self._serve(claim, attach, now, actions)
        else:
            self._subscribe(claim, attach, awaiting=True)
            actions.append(Send(attach.reply, Wait(claim.rid, claim.id, attach.sid)))

    def _subscribe(self, claim: _Claim, attach: Attach, awaiting: bool) -> None:
        claim.subscribers[attach.reply] = _Subscriber(attach.sid, attach if awaiting else None)
        claim.orphan_at = None
        claim.trusted = claim.trusted or attach.reply.startswith(_TRUSTED)
        if attach.reply == claim.delivery.reply:
            claim.calling = False

    def _serve(self, claim: _Claim, attach: Attach, now: float, actions: list[Action]) -> None:
        """Grant the attach and send everything from its position on; from the first token, if it gave a digest."""
        history = claim.history
        if history is None:
            return
        positions = positions_of(attach) if attach.ids is not None else [0 for _ in history.choices]
        ack = claim.handles.get(claim.seq, "") if attach.reply.startswith(_TRUSTED) else ""
        left = max(claim.deadline - self.limits.deadline_margin_s - now, self.limits.deadline_margin_s)
        actions.append(Send(attach.reply, Ok(claim.rid, claim.id, attach.sid, claim.seq, ack, int(left * 1000))))
        actions += [Send(attach.reply, frame) for frame in history.frames(claim.rid, claim.id, attach.sid, positions)]

    def _settle(
        self, claim: _Claim, reply: str, subscriber: _Subscriber, attach: Attach, now: float, actions: list[Action]
    ) -> None:
        """Check a subscriber that waits for the history to reach its position."""
        match = claim.history.match(attach) if claim.history is not None else Match.SHORTER
        if match is Match.EXTENDS:
            subscriber.awaiting = None
            self._serve(claim, attach, now, actions)
        elif match in (Match.SHORTER, Match.UNTOLD):
            return
        elif match is Match.DIFFERS and attach.ids is None:
            # A terminal like any other: repeated until it is released, for it may cross with the next attach.
            subscriber.awaiting = None
            subscriber.error = WireError(Diverged.code, "generating anew did not give the tokens that were sent before")
            actions.append(Send(reply, self._error_frame(claim, subscriber.sid, subscriber.error)))
        else:
            del claim.subscribers[reply]
            self._lose(claim, now)
            actions.append(Send(reply, No(claim.rid, attach.sid)))

    # -- a claim's life --------------------------------------------------------------------------------------------------

    def _accept(self, claim: _Claim, actions: list[Action]) -> None:
        reply = claim.delivery.reply
        ack = claim.handles[claim.seq] if reply.startswith(_TRUSTED) else ""
        version = claim.delivery.request.version
        actions.append(Send(reply, Accepted(claim.rid, claim.id, claim.seq, ack, claim.delivery.queued_ms, version)))

    def _start(self, claim: _Claim, prefix: list[list[int]], actions: list[Action]) -> None:
        self._stop_run(claim, actions)
        if claim.ended:
            claim.ended = False
            self._hold(claim, 1)
        claim.runs += 1
        claim.run = f"{claim.id}.{claim.runs}"
        claim.history = History(prefix, claim.delivery.request.sampling.logprobs is not None)
        self._runs[claim.run] = claim
        delivery = claim.delivery
        actions.append(Start(claim.run, delivery.request, delivery.tenant, prefix, delivery.queue_deadline))

    def _stop_run(self, claim: _Claim, actions: list[Action]) -> None:
        self._trials.forget(claim.rid)
        if claim.run:
            del self._runs[claim.run]
            actions.append(Abort(claim.run))
            claim.run = ""

    def _run_over(self, claim: _Claim, now: float) -> None:
        self._runs.pop(claim.run, None)
        self._trials.forget(claim.rid)
        claim.run = ""
        claim.ended = True
        self._hold(claim, -1)
        claim.resend_at = now + self.limits.resend_s

    def _fail(self, claim: _Claim, error: WireError, now: float, actions: list[Action]) -> None:
        claim.error = error
        self._run_over(claim, now)
        self._terminals(claim, actions)

    def _terminals(self, claim: _Claim, actions: list[Action]) -> None:
        """What ended the request, to every subscriber for which it has ended."""
        for reply, subscriber in claim.subscribers.items():
            error = claim.error or subscriber.error  # of the claim: to those that wait for their position as well
            if error is not None:
                actions.append(Send(reply, self._error_frame(claim, subscriber.sid, error)))
            elif claim.ended and claim.history is not None:
                frames = claim.history.frames(claim.rid, claim.id, subscriber.sid)
                actions += [Send(reply, frame) for frame in frames]

    def _error_frame(self, claim: _Claim, sid: str, error: WireError) -> Frame:
        return Frame(claim.rid, claim.id, sid, 0, 0, [], [], error=error)

    def _lose(self, claim: _Claim, now: float) -> None:
        claim.lost = True
        if not claim.subscribers and claim.orphan_at is None:
            claim.orphan_at = now + self.limits.orphan_grace_s

    def _forget(self, claim: _Claim, actions: list[Action]) -> None:
        self._stop_run(claim, actions)
        del self._claims[claim.rid]
        if not claim.ended:
            self._hold(claim, -1)

    def _hold(self, claim: _Claim, change: int) -> None:
        tenant = claim.delivery.tenant
        self.holding_of[tenant] += change
        if not self.holding_of[tenant]:
            del self.holding_of[tenant]

    def _take_leave(self, claim: _Claim, actions: list[Action]) -> None:
        for reply, subscriber in claim.subscribers.items():
            actions.append(Send(reply, No(claim.rid, subscriber.sid)))
        actions += [Nak(handle) for handle in claim.handles.values()]
        self.outcomes["moved"] += 1
        self._forget(claim, actions)

    def _ack(self, claim: _Claim, now: float, actions: list[Action], keep: bool, told: Usage | None = None) -> None:
        cancelled = not claim.ended if claim.error is None else claim.error.code == Cancelled.code
        self.outcomes["cancelled" if cancelled else "completed" if claim.error is None else "failed"] += 1
        self._forget(claim, actions)
        if claim.history is not None or told is not None:
            actions.append(self._bill(claim, told, cancelled))
        actions += [Ack(handle) for handle in claim.handles.values()]
        claim.handles = {}
        claim.subscribers = {}
        if keep and claim.ended and claim.error is None and claim.history is not None:
            # The prompt is of no use any more, and it can be long.
            request = msgspec.structs.replace(claim.delivery.request, input=Input())
            claim.delivery = msgspec.structs.replace(claim.delivery, request=request)
            self._kept[claim.rid] = (claim, now + self.limits.history_kept_s)
            self._kept_tokens += claim.history.weight
            claim.history.pack()
            while self._kept_tokens > self.limits.history_tokens_max:
                self._forget_kept(next(iter(self._kept)))

    def _bill(self, claim: _Claim, told: Usage | None, cancelled: bool) -> Bill:
        """What a claim came to; of one that was not started here, what its requester was `told` by the one before."""
        history = claim.history
        id_ = claim.rid if claim.trusted or told is not None else f"{claim.rid}.{claim.delivery.seq}"
        if history is None or (told is not None and history.usage is None):
            return Bill(claim.delivery, id_, COMPLETED, told, 0)
        outcome = claim.error.code if claim.error is not None else Cancelled.code if cancelled else COMPLETED
        return Bill(claim.delivery, id_, outcome, history.usage, history.tokens)

    def _forget_kept(self, rid: str) -> None:
        found = self._kept.pop(rid, None)
        if found is not None and found[0].history is not None:
            self._kept_tokens -= found[0].history.weight
