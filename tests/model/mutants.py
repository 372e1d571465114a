"""The production state machines with one rule taken away each. The model must find fault with every one of them."""

import dataclasses
import math
from typing import Any

import msgspec

from shared import actions as asks
from shared.errors import HeadraceError
from shared.requester import Requester
from shared.wire import Accepted, Attach, Frame, Ok, Wait
from workers.claims import Action, ClaimTable, Send, _Claim
from workers.history import History, Match, positions_of

NEVER = math.inf


class Unfenced(Requester):
    """Takes frames of any sid from any claim."""

    def frame(self, worker: str, frame: Frame, now: float) -> list[asks.Action]:
        if not self.ended and self.claim is not None:
            frame = msgspec.structs.replace(frame, sid=self.sid, claim=self.claim)
        return super().frame(worker, frame, now)


class FencedBySid(Requester):
    """Takes frames of its sid from any claim: more than one may have answered a broadcast."""

    def frame(self, worker: str, frame: Frame, now: float) -> list[asks.Action]:
        if not self.ended and self.claim is not None and frame.sid == self.sid:
            frame = msgspec.structs.replace(frame, claim=self.claim)
        return super().frame(worker, frame, now)


class Silent(Requester):
    """Drops what it cannot use without a word."""

    def _stray(self, worker: str, item: Frame | Ok) -> list[asks.Action]:
        return []


class Suspicious(Requester):
    """Counts every worker without responders as killed."""

    def no_responders(self, worker: str, now: float) -> list[asks.Action]:
        self._served.add(worker)
        return super().no_responders(worker, now)


class Forgiving(Requester):
    """Counts only the death of the worker that serves it."""

    def no_responders(self, worker: str, now: float) -> list[asks.Action]:
        return super().no_responders(worker, now) if worker == self.worker else []


class Gapless(Requester):
    """Takes an index beyond its position for the next one."""

    def frame(self, worker: str, frame: Frame, now: float) -> list[asks.Action]:
        if not self.ended and frame.sid == self.sid and self.received.met:
            frame = msgspec.structs.replace(frame, index=min(frame.index, self.received.choices[frame.choice].next))
        return super().frame(worker, frame, now)


class Repeating(Requester):
    """Delivers a finish as often as it comes."""

    def frame(self, worker: str, frame: Frame, now: float) -> list[asks.Action]:
        actions = super().frame(worker, frame, now)
        mine = frame.sid == self.sid and frame.finish is not None
        if mine and not any(isinstance(action, asks.Deliver) and action.finish for action in actions):
            actions.insert(0, asks.Deliver(frame.choice, [], [], None, frame.finish, None))
        return actions


class Hasty(Requester):
    """Is complete with the last finish, whether the usage has come or not."""

    def frame(self, worker: str, frame: Frame, now: float) -> list[asks.Action]:
        actions = super().frame(worker, frame, now)
        if not self.ended and not self.received.unfinished:
            self._end(None, actions)
        return actions


class Trusting(Requester):
    """Does not look whether its message is still stored, as long as nobody has accepted it."""

    def message_state(self, seq: int, stored: bool, now: float) -> list[asks.Action]:
        return super().message_state(seq, stored or self.accepted_at is None, now)


class Patient(Requester):
    """Waits without end for a request that is gone and that it cannot publish again."""

    def _gone_at(self) -> float:
        return NEVER


class Loyal(Requester):
    """Adopts a claim of the version that it has left."""

    def accepted(self, worker: str, item: Accepted, now: float) -> list[asks.Action]:
        self._old.clear()
        return super().accepted(worker, msgspec.structs.replace(item, version=self.version), now)


class Careless(Requester):
    """Deletes what it leaves before the copy is stored."""

    def _move(self, version: str, now: float, actions: list[asks.Action]) -> None:
        moves: list[asks.Action] = []
        super()._move(version, now, moves)
        actions += [*(asks.DeleteMessage(seq, True) for seq in self._leaving), *moves]
        self._leaving.clear()


class Nostalgic(Requester):
    """Moves under the sid that it had with a worker of the old version."""

    def _move(self, version: str, now: float, actions: list[asks.Action]) -> None:
        sid = self.sid
        super()._move(version, now, actions)
        self.sid = sid


class Restless(Requester):
    """Moves with what it has."""

    @property
    def may_move(self) -> bool:
        return self.movable


class Heedless(Requester):
    """Moves although its version was named."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **(options | {"movable": True}))


class Discouraged(Requester):
    """Does not publish a copy again that could not be stored."""

    def publish_failed(self, error: HeadraceError, now: float) -> list[asks.Action]:
        moving, self._moving = self._moving, False
        return [] if moving else super().publish_failed(error, now)


class Resigned(Requester):
    """Waits for the version that was rolled back."""

    def withdrawn(self, error: HeadraceError, target: str | None, now: float) -> list[asks.Action]:
        return super().withdrawn(error, target, now) if self.may_move else []


class Hopeful(ClaimTable):
    """Waits for ids, and starts for no digest."""

    def _attach_unstarted(self, claim: _Claim, attach: Attach, now: float, actions: list[Action]) -> None:
        if attach.ids is not None:
            super()._attach_unstarted(claim, attach, now, actions)
        else:
            actions.append(Send(attach.reply, Wait(claim.rid, claim.id, attach.sid)))


class Faithful(ClaimTable):
    """Goes on for nobody without end."""

    def _lose(self, claim: _Claim, now: float) -> None:
        claim.lost = True


class Discreet(ClaimTable):
    """Tells of an error only those who are being served when it happens."""

    def _attach(self, claim: _Claim, attach: Attach, now: float, actions: list[Action]) -> None:
        if claim.error is None:
            super()._attach(claim, attach, now, actions)

    def _terminals(self, claim: _Claim, actions: list[Action]) -> None:
        waiting = {reply for reply, each in claim.subscribers.items() if each.awaiting is not None}
        told: list[Action] = []
        super()._terminals(claim, told)
        actions += [each for each in told if not (isinstance(each, Send) and each.reply in waiting)]


class ByPosition(History):
    """Compares positions, not tokens."""

    def match(self, attach: Attach) -> Match:
        short = any(len(choice.ids) < at for choice, at in zip(self.choices, positions_of(attach), strict=True))
        return Match.SHORTER if short else Match.EXTENDS


class Wordless(History):
    """Serves a prefix whose text its run has not told yet."""

    def match(self, attach: Attach) -> Match:
        found = super().match(attach)
        return Match.EXTENDS if found is Match.UNTOLD else found


class Unscored(History):
    """Serves tokens whose log probabilities were never known here."""

    def match(self, attach: Attach) -> Match:
        found = super().match(attach)
        return Match.EXTENDS if found is Match.LACKING else found


@dataclasses.dataclass(frozen=True)
class Rules:
    """The machines of one world, with every rule or without one."""

    says: str = ""
    requester: type[Requester] = Requester
    table: type[ClaimTable] = ClaimTable
    history: type[History] = History
    faults: tuple[str, ...] = ()  # where the rule is hardly needed otherwise
    kills: bool = False  # where it takes a request that kills its workers
    broker: str = ""  # a rule that the model itself breaks


EVERY = Rules()
MOVES = ("withdraw", "kill", "stop", "loss", "ackwait", "nak", "move", "second", "twice", "pubfail")
WITHOUT = {
    "sid": Rules("frames are fenced by (sid, claim)", Unfenced),
    "claim": Rules("a sid is of one claim", FencedBySid),
    "digest": Rules("attach carries the prefix, and the worker compares it", history=ByPosition),
    "gone": Rules("publish again only after the broker says that the message is gone", broker="gone"),
    "body": Rules("whoever attaches reads the body, so it too can publish again", broker="body"),
    "stray": Rules("a frame of a finished or foreign stream is answered with release", Silent, broker="stray"),
    "resend": Rules("accepted and terminal frames are repeated until answered", broker="resend"),
    "poison": Rules("only workers that had answered count as killed", Suspicious, faults=("drain",)),
    "fallen": Rules("a worker that was left counts as killed, too", Forgiving, kills=True),
    "seek": Rules("an attach that a known worker does not answer is followed by a broadcast", broker="seek"),
    "ping": Rules("silence is followed by an attach", broker="ping"),
    "gap": Rules("an index beyond the position is a gap", Gapless),
    "repeat": Rules("a finish is delivered once", Repeating),
    "usage": Rules("a request is complete when its usage has come", Hasty),
    "vanish": Rules("who waits in the queue looks whether its message is still there", Trusting),
    "end": Rules("what is gone and cannot be published again ends", Patient, faults=("rdeath", "kill", "stop")),
    "lost": Rules(
        "what began with somebody who is gone is generated anew for who comes", table=Hopeful, faults=("rdeath", "kill")
    ),
    "grace": Rules("a claim that nobody wants any more ends", table=Faithful),
    "accounts": Rules(
        "who has a request that ended before it was accounted for is told what it came to",
        broker="accounts",
        faults=("kill", "loss", "ackwait"),
    ),
    "told": Rules("an error is told to whoever waits or comes later", table=Discreet),
    "left": Rules("a claim of the version that a request has left is told to let go", Loyal, faults=MOVES),
    "copy": Rules("the copy is stored before what it was made of is deleted", Careless, faults=MOVES),
    "moves": Rules("a request that moves takes a new sid", Nostalgic, faults=MOVES),
    "begun": Rules("what has a token does not move", Restless, faults=MOVES),
    "named": Rules("what was named does not move", Heedless, faults=MOVES),
    "again": Rules(
        "a copy that could not be stored is tried again", Discouraged, faults=("withdraw", "pubfail", "loss")
    ),
    "waits": Rules("what cannot move ends when nobody serves it any more", Resigned, faults=MOVES),
    "text": Rules("a prefix is served once its text is known", history=Wordless),
    "scores": Rules("log probabilities that are not known are generated again", history=Unscored),
}
