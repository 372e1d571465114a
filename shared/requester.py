"""The requester's half of the wire: what one requester does about one request. Pure: events and the time in, actions out.

The table of docs/protocol.md, "Requester", is implemented here and nowhere else. A requester is the only authority on what
its client has seen and on when the request ends. It is in one of two states: SEEK (no worker) and STREAM (one worker).

One sid is one contiguous send from the requester's own position, by one claim, whose history was checked to extend what the
requester has. It takes frames of its latest sid from the claim it has adopted, and of no other. That is the whole fence.

The driver calls one method for each event, performs the returned actions in their order, and calls `tick` when `next_tick`
has come. All times are monotonic seconds. A process has at most one requester for a rid.
"""

from typing import Final

from shared.actions import (
    Action,
    CheckMessage,
    DeadLetter,
    DeleteMessage,
    Deliver,
    End,
    Move,
    Nak,
    Republish,
    SendAttach,
    SendRelease,
)
from shared.errors import (
    Cancelled,
    Diverged,
    GenerationDeadline,
    HeadraceError,
    Poisoned,
    QueueDeadline,
    StreamGone,
    by_code,
)
from shared.received import Received
from shared.terms import Known, RequesterLimits
from shared.wire import Accepted, Attach, Frame, No, Ok, Release, Wait, new_id

NEVER: Final = float("inf")


def unknown_rid(worker: str, item: Accepted | Frame | Ok | Wait | No, reply: str) -> list[Action]:
    """The answer to an item of a rid that this process does not know: whatever speaks of it is told to let go."""
    if isinstance(item, Wait | No):
        return []
    sid = "" if isinstance(item, Accepted) else item.sid
    return [SendRelease(worker, Release(item.rid, sid, reply, True))]


class Requester:
    """One requester of one rid. Every event method returns the actions to perform, in order; none after `End`."""

    def __init__(
        self,
        rid: str,
        reply: str,
        choices: int,
        now: float,
        limits: RequesterLimits,
        publisher: bool,
        has_body: bool,
        keyed: bool = False,
        resumable: bool = False,
        seq: int | None = None,
        known: Known | None = None,
        version: str = "",
        movable: bool = False,
    ) -> None:
        """`publisher`: the driver publishes the request itself; else it takes over and is due at once (`next_tick`).

        `reply` is the frame address. `has_body`: the driver can publish the request again. `keyed`: others may share the
        rid by an idempotency key. `seq`: of the message, where it is known before the publish ack. `movable`: another version
        may take the place of `version` until the first token.
        """
        self.rid = rid
        self.reply = reply
        self.limits = limits
        self.publisher = publisher
        self.has_body = has_body
        self.keyed = keyed
        self.resumable = resumable
        self.seq = seq
        self.version = version
        self.movable = movable

        self.sid = ""
        self.claim: str | None = None
        self.worker: str | None = None  # None: SEEK
        self.ended = False
        self.abandoned = False  # ended because its client did not come back in time

        # counters
        self.resumes = 0  # claims adopted after the first
        self.replayed = 0  # tokens that those had to take over
        self._claims: set[str] = set()

        self.received = Received(choices, known)
        self._choices = self.received.choices

        self._ack = ""
        self.held: int | None = None  # the message that a worker had last
        self._served: set[str] = set()  # workers that answered since the last token
        self._dead: set[str] = set()  # those of them that then had no responders
        self._plain = False  # the adopted claim streams: its next frame in order needs no thought

        self._heard = now
        self._attached: float | None = None  # when the unanswered attach was sent
        self._seek_since = now
        self._seek_round = 0
        self._seek_at = now + 2 * limits.orphan_grace_s if publisher else now
        self._gone = False  # the message is not stored and there is no body
        self._publishing = publisher and seq is None
        self._copies = 0
        self._moving = False  # its copy for another version is not stored as far as is known
        self._leaving: list[int] = []  # the messages that it leaves: deleted once the copy is stored
        self._old: set[int] = set()  # all that it has left: a worker that does not tell its version is known by them
        self._hold_until = -NEVER
        self._seen = False  # some worker has spoken of this request
        self._left = False  # the client left, it may come back
        self._leave_at = NEVER
        self._deadline = limits.queue_deadline
        self._accepted_at: float | None = None
        self._delete_late = False
        self._due = self._next_due()

    # -- queries -------------------------------------------------------------------------------------------------------

    @property
    def claims(self) -> int:
        """Distinct claims adopted so far."""
        return len(self._claims)

    @property
    def accepted_at(self) -> float | None:
        """When the first claim was adopted; None: the request is still queued."""
        return self._accepted_at

    @property
    def may_move(self) -> bool:
        """Whether another version may serve it: nobody chose this one, and the client has nothing of it."""
        return self.movable and not self.received.begun

    def unserved_s(self, now: float) -> float:
        """For how long no worker has had it; 0: one has."""
        return 0.0 if self.ended or self.worker is not None else now - self._seek_since

    def generation_left_s(self, now: float) -> float:
        """What a re-publish may promise: what is left of the generation deadline."""
        return self.limits.generation_s if self._accepted_at is None else max(0.0, self._deadline - now)

    @property
    def tokens(self) -> int:
        """Of all choices, as far as they are known here."""
        return self.received.tokens

    def next_tick(self) -> float | None:
        """When `tick` is next needed, or a little before; None: ended. Frames in order never bring it forward."""
        return None if self.ended else self._due

    # -- the broker ----------------------------------------------------------------------------------------------------

    def published(self, seq: int, now: float, shared: bool = False) -> list[Action]:
        """The publish ack, of the first publish or of a `Republish`.

        `shared`: it was there already, and perhaps of another requester, which alone is told of claims.
        """
        self._publishing = False
        actions: list[Action] = []
        if self._moving:
            self._moved(now, actions)
        if self.ended:
            if self._delete_late and not shared:
                actions.append(DeleteMessage(seq))
            return actions
        if shared:
            self.publisher = False
            self._seek_at = min(self._seek_at, now)
        if self.seq is None or self.worker is None:
            self.seq = seq
            self._gone = False
        return self._changed(actions)

    def publish_failed(self, error: HeadraceError, now: float) -> list[Action]:
        """A publish was given up. The first one ends the request, unless a worker has it after all; a copy is tried again."""
        self._publishing = False
        actions: list[Action] = []
        if self._moving:
            self._seek_at = now + self.limits.seek_every_s  # then it is tried again
        elif self._copies:
            self._copies -= 1  # the same Msg-Id again: if it was stored, the broker answers with its sequence
        elif not self.ended and not self._seen:
            self._end(error, actions)
        return self._changed(actions)

    def message_state(self, seq: int, stored: bool, now: float) -> list[Action]:
        """The answer to `CheckMessage`. `stored`: the driver has now got the body. Only "no message found" is not stored."""
        actions: list[Action] = []
        if self.ended:
            return actions
        if stored:
            self.has_body = True
        if seq == self.seq and self.worker is None:
            self._gone = not stored and not self.has_body
            if not stored and self.has_body and not self._publishing:
                self._publishing = True
                self._copies += 1
                actions.append(Republish(self._copies))
        return self._changed(actions)

    # -- workers -------------------------------------------------------------------------------------------------------

    def accepted(self, worker: str, item: Accepted, now: float) -> list[Action]:
        """A claim holds the message: the last one to say so is adopted. One of a version that was left is told to let go."""
        if self.ended or item.version not in ("", self.version) or item.seq in self._old:
            return unknown_rid(worker, item, self.reply)
        actions: list[Action] = []
        if self._moving:  # it has the copy
            self._moved(now, actions)
        if self.worker is not None and self.worker != worker:
            actions.append(SendRelease(self.worker, Release(self.rid, self.sid, self.reply, False)))
        self._adopt(worker, item.claim, now, actions)
        self._holds(item.seq, item.ack, actions)
        self._attach(now, actions)
        return self._changed(actions)

    def frame(self, worker: str, frame: Frame, now: float) -> list[Action]:
        """Tokens. The first branch is the hot path: the next tokens of the adopted claim, nothing special about them."""
        if (
            frame.sid == self.sid
            and frame.claim == self.claim
            and self._plain
            and 0 <= frame.choice < len(self._choices)
        ):
            choice = self._choices[frame.choice]
            if frame.index == choice.next and frame.finish is None and frame.error is None and not choice.finished:
                self._heard = now
                choice.ids += frame.ids
                choice.next += len(frame.ids)
                return [Deliver(frame.choice, frame.ids, frame.text, frame.logprobs, None, None)]
        return self._frame(worker, frame, now)

    def ok(self, worker: str, item: Ok, now: float) -> list[Action]:
        """An attach was granted: frames of this sid follow."""
        if self.ended or not self._mine(item):
            return self._stray(worker, item)
        actions: list[Action] = []
        first = self._accepted_at is None
        self._adopt(worker, item.claim, now, actions)
        self._holds(item.seq, item.ack, actions)
        if first and not self.publisher:
            self._deadline = now + item.remaining_ms / 1000  # the clock that was started for whoever came before
        self._answered(worker, now)
        return self._changed(actions)

    def wait(self, worker: str, item: Wait, now: float) -> list[Action]:
        """Claimed, and the tokens before this requester's position are not there yet."""
        if not self.ended and item.sid == self.sid:
            self._seen = True
            self._heard = now
            if worker == self.worker:
                self._attached = None
        return self._changed([])

    def no(self, worker: str, item: No, now: float) -> list[Action]:
        """Not there, or leaving in good order: such a worker was not killed by this request."""
        if not self.ended:
            self._served.discard(worker)
            self._dead.discard(worker)
            self._plain = False
            if worker == self.worker and item.sid == self.sid:
                self._seek(now)
        return self._changed([])

    def no_responders(self, worker: str, now: float) -> list[Action]:
        """An attach to `worker`, or a release(fenced), had no responders."""
        actions: list[Action] = []
        if self.ended:
            return actions
        if now < self._hold_until:  # after our own reconnect everybody is absent for a moment: ask again, later
            if worker == self.worker:
                self._attached = None
                self._heard = now if self._hold_until == NEVER else self._hold_until - self.limits.silence_s
            return self._changed(actions)
        if worker in self._served:
            self._dead.add(worker)
            self._plain = False
        if len(self._dead) >= self.limits.deaths_max:
            message = f"the request ended {len(self._dead)} workers without a token: {', '.join(sorted(self._dead))}"
            if self.has_body:
                actions.append(DeadLetter(message))
            self._end(Poisoned(message), actions)
        elif worker == self.worker:
            if self._ack:
                actions.append(Nak(self._ack))
            self._seek(now)
        return self._changed(actions)

    # -- the client, the version, the own connection ---------------------------------------------------------------------

    def cancel(self, now: float, everybody: bool = False) -> list[Action]:
        """The client asked for it, or left for good. `everybody`: it is cancelled for whoever else shares it, too."""
        actions: list[Action] = []
        if not self.ended:
            self._end(Cancelled("the request was cancelled"), actions, everybody)
        return self._changed(actions)

    def client_left(self, now: float) -> list[Action]:
        """The client is gone. If it may come back, elsewhere or with its key, go on for the grace, delivering as before."""
        if not (self.resumable or self.keyed):
            return self.cancel(now)
        if not self._left:
            self._left = True
            self._leave_at = now + self.limits.orphan_grace_s
        return self._changed([])

    def unavailable(self, error: HeadraceError, now: float) -> list[Action]:
        """The version cannot be served. A request that a worker is serving all the same is left alone."""
        actions: list[Action] = []
        if not self.ended and self.worker is None:
            self._end(error, actions)
        return self._changed(actions)

    def withdrawn(self, error: HeadraceError, target: str | None, now: float) -> list[Action]:
        """Its version was rolled back: what a worker has goes on, else it moves to `target`, or ends when it may not.

        Told on the change, after a publish ack and at every tick. Who takes over looks for a worker first; what a worker had
        waits for a redelivery.
        """
        actions: list[Action] = []
        if self.ended or self.worker is not None or self._publishing:
            return actions
        unserved_s = now - self._seek_since
        if self.may_move and target is not None:
            if self.has_body and (self.publisher or unserved_s >= self.limits.found_s):
                self._move(target, now, actions)
        elif (fresh := self.publisher and self._accepted_at is None) or unserved_s >= self.limits.unserved_max_s:
            if self.seq is not None and (fresh or self._alone):
                self._leaving.append(self.seq)
            self._end(error, actions, everybody=fresh)
        return self._changed(actions)

    def disconnected(self) -> None:
        """The own bus connection is lost. Answers may come before `reconnected`, as soon as there is a new one."""
        self._hold_until = NEVER

    def reconnected(self, now: float) -> list[Action]:
        """The own bus connection was lost and is back."""
        self._hold_until = now + self.limits.nak_hold_s
        if self.worker is None:  # an accepted may have been lost, and with it the claim
            self._seek_at = min(self._seek_at, now + self.limits.ack_wait_s)
        return self._changed([])

    # -- time ------------------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> list[Action]:
        """All timers that are due."""
        actions: list[Action] = []
        if self.ended or now < self._due:
            return actions
        if now >= self._deadline:
            self._end(self._overdue(), actions)
        elif now >= self._leave_at:
            self.abandoned = True
            self._end(Cancelled("the client left and did not come back"), actions)
        elif self.worker is None:
            self._tick_seek(now, actions)
        elif self._attached is None:
            if now >= self._heard + self.limits.silence_s:
                self._attach(now, actions)
        elif now >= self._attached + self.limits.attach_timeout_s:
            # A hung worker, or one behind a partition. The sid stays: if it answers after all, it is taken back.
            sid = self.sid
            self._seek(now)
            self.sid = sid
        return self._changed(actions)

    def _overdue(self) -> HeadraceError:
        if self._accepted_at is None:
            return QueueDeadline("no worker took the request before its queue deadline")
        return GenerationDeadline(f"the generation did not finish within {self.limits.generation_s:g} s")

    def _tick_seek(self, now: float, actions: list[Action]) -> None:
        if self._gone and now >= self._gone_at():
            self._end(StreamGone("the request is no longer stored and no worker has it"), actions)
            return
        if now < self._seek_at:
            return
        if self._moving and not self._publishing:
            self._publishing = True
            actions.append(Republish(0))
        queued = self.publisher and self._accepted_at is None
        if queued:
            # A long queue must cause no broadcasts; but a message can vanish (the ack of an orphan's timer, a lost disk).
            every = 2 * self.limits.orphan_grace_s
        else:
            every = min(self.limits.seek_every_s * 2**self._seek_round, self.limits.seek_every_max_s)
            self.sid = new_id()
            actions.append(SendAttach(None, self._build_attach()))
        if self.seq is not None and (queued or self._seek_round):
            actions.append(CheckMessage(self.seq))  # not in the first round of a broadcast: that may find it running
        self._seek_round = min(self._seek_round + 1, 16)
        self._seek_at = now + every

    def _gone_at(self) -> float:
        return max(self._seek_since, self._heard) + self.limits.orphan_grace_s + 2 * self.limits.ack_wait_s

    def _next_due(self) -> float:
        due = min(self._deadline, self._leave_at)
        if self.worker is None:
            return min(due, self._seek_at, self._gone_at() if self._gone else NEVER)
        if self._attached is not None:
            return min(due, self._attached + self.limits.attach_timeout_s)
        return min(due, self._heard + self.limits.silence_s)

    def _changed(self, actions: list[Action]) -> list[Action]:
        self._due = self._next_due()
        return actions

    # -- state -----------------------------------------------------------------------------------------------------------

    @property
    def _alone(self) -> bool:
        """Whether nobody else can be waiting for the request."""
        return self.publisher and not (self.keyed or self._left)

    def _mine(self, item: Frame | Ok) -> bool:
        return item.sid == self.sid and self.claim in (None, item.claim)

    def _stray(self, worker: str, item: Frame | Ok) -> list[Action]:
        """An item under a sid or of a claim that is not the current one."""
        if self.ended:
            return unknown_rid(worker, item, self.reply)
        self._seen = True
        if item.claim == self.claim:
            return []  # sent before our latest attach reached it
        return [SendRelease(worker, Release(self.rid, item.sid, self.reply, False))]

    def _adopt(self, worker: str, claim: str, now: float, actions: list[Action]) -> None:
        self._seen = True
        self._gone = False
        if self._accepted_at is None:
            self._accepted_at = now
            self._deadline = now + self.limits.generation_s
        if claim not in self._claims:
            if self._claims:
                self.resumes += 1
                self.replayed += self.tokens
            self._claims.add(claim)
        if claim != self.claim:
            self.claim = claim
            self._ack = ""
            self._plain = False
        self.worker = worker
        self._seek_round = 0

    def _holds(self, seq: int, ack: str, actions: list[Action]) -> None:
        changed, self._ack = seq != self.seq, ack
        self.seq = self.held = seq
        if changed and not self.has_body:
            actions.append(CheckMessage(seq))  # a copy that someone published: its body makes us equal to the publisher

    def _seek(self, now: float) -> None:
        self.worker = self.claim = None
        self.sid = new_id()
        self._attached = None
        self._ack = ""
        self._seek_since = now
        self._seek_round = 0
        self._seek_at = now + self.limits.seek_every_s

    def _move(self, version: str, now: float, actions: list[Action]) -> None:
        """Be a request for another version. From now on no claim of the old one is adopted: its sid is another, too."""
        if self.seq is not None:
            self._leaving.append(self.seq)
            self._old.add(self.seq)
        self.version = version
        self.seq = None
        self._gone = False
        self._copies = 0
        self._moving = self._publishing = True
        self._seek(now)
        actions += [Move(version), Republish(0)]

    def _moved(self, now: float, actions: list[Action]) -> None:
        """The copy is stored: what it was made of is not needed any more."""
        self._moving = False
        self._delete_left(actions)
        if self.publisher and self._accepted_at is None:
            self._seek_at = now + 2 * self.limits.orphan_grace_s

    def _delete_left(self, actions: list[Action]) -> None:
        actions += [DeleteMessage(seq, insist=True) for seq in self._leaving]
        self._leaving.clear()

    def _build_attach(self) -> Attach:
        return self.received.attach(self.rid, self.sid, self.reply, len(self._dead))

    def _attach(self, now: float, actions: list[Action]) -> None:
        self.sid = new_id()
        self._attached = now
        self._plain = False
        actions.append(SendAttach(self.worker, self._build_attach()))

    def _answered(self, worker: str, now: float) -> None:
        self._heard = now
        self._attached = None
        if worker not in self._served:
            self._served.add(worker)
            self._plain = False

    def _frame(self, worker: str, frame: Frame, now: float) -> list[Action]:
        if self.ended or not self._mine(frame):
            return self._stray(worker, frame)
        actions: list[Action] = []
        if self.claim is None:
            self._adopt(worker, frame.claim, now, actions)
        self._answered(worker, now)
        if frame.error is not None:
            self._end(by_code(frame.error.code, frame.error.message, frame.error.param), actions)
        elif not 0 <= frame.choice < len(self._choices):
            pass  # not a choice of ours: a defect of the worker, and the silence will tell
        elif frame.index > self._choices[frame.choice].next:
            self._attach(now, actions)  # a gap
        else:
            self._take(worker, frame, actions)
        return self._changed(actions)

    def _take(self, worker: str, frame: Frame, actions: list[Action]) -> None:
        """Deliver what is new in a frame that begins at or before our position."""
        try:
            delivered = self.received.take(frame)
        except Diverged as error:
            self._end(error, actions)
            return
        if delivered is not None:
            actions.append(delivered)
            if delivered.ids:
                self._served = {worker}
                self._dead.clear()
                self._plain = self._plain or self.received.met
        if self.received.complete:
            self._end(None, actions)

    def _end(self, error: HeadraceError | None, actions: list[Action], everybody: bool = False) -> None:
        if self.worker is not None:
            actions.append(SendRelease(self.worker, Release(self.rid, self.sid, self.reply, True)))
        elif error is not None and not self._seen and (everybody or self._alone) and self.seq not in self._leaving:
            self._delete_late = self.seq is None
            if self.seq is not None:
                actions.append(DeleteMessage(self.seq))
        if everybody or self._alone:
            self._delete_left(actions)
        actions.append(End(error))
        self.ended = True
        self.worker = self.claim = None
        self.sid = ""
