"""What one claim has generated, or embedded, per choice, kept so that a subscriber can be served from any position."""

import enum

import msgspec

from shared.wire import Attach, Frame, Logprob, Usage, digest
from workers.engine.request import TokenEvent

FRAME_TOKENS_MAX = 256  # of one frame when a subscriber is brought up to date
TOKEN_BYTES = 6  # of a packed token
FRAME_SCORED_MAX = 32  # with log probabilities, of which a token can have twenty


_Contents = list[tuple[list[int], list[str], list[Logprob] | None]]  # ids, text and log probabilities, by choice
_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(_Contents).decode


class Match(enum.Enum):
    """How a history relates to what an attaching requester has."""

    EXTENDS = "the requester's ids are a prefix of it: it can be served"
    UNTOLD = "the ids match, but the run has not yet told the text of its prefix"
    SHORTER = "it is shorter than the requester's position, and nothing is known to differ"
    LACKING = "the ids match, but the log probabilities of some that the requester lacks were never known here"
    DIFFERS = "it is another generation"


class Choice:
    """One choice. A run that was started from a prefix tells its text at once, its log probabilities never."""

    __slots__ = ("base", "finish", "ids", "logprobs", "scored", "text", "vector")

    def __init__(self, prefix: list[int], scores: bool) -> None:
        self.ids = list(prefix)
        self.base = len(prefix)  # text[0] belongs to ids[base]
        self.text: list[str] = []
        self.scored = len(prefix) if scores else 0  # logprobs[0] belongs to ids[scored]
        self.logprobs: list[Logprob] | None = None
        self.finish: str | None = None
        self.vector = b""

    def match_ids(self, ids: list[int]) -> Match:
        have, position = len(self.ids), len(ids)
        if have < position:
            return Match.SHORTER if self.finish is None and ids[:have] == self.ids else Match.DIFFERS
        if self.ids[:position] != ids:
            return Match.DIFFERS
        if position < self.scored:
            return Match.LACKING
        return Match.EXTENDS if position >= self.base else Match.UNTOLD

    def match_digest(self, position: int, expected: str) -> Match:
        if len(self.ids) < position:
            return Match.SHORTER if self.finish is None else Match.DIFFERS
        if digest(self.ids[:position]) != expected:
            return Match.DIFFERS
        if position < self.scored:
            return Match.LACKING
        return Match.EXTENDS if self.base == 0 else Match.UNTOLD


def positions_of(attach: Attach) -> list[int]:
    """The position per choice from which the requester wants tokens."""
    if attach.ids is not None:
        return [len(ids) for ids in attach.ids]
    return attach.next or []


class History:
    """The choices of one run and, at its end, its usage."""

    __slots__ = ("_packed", "choices", "tokens", "unfinished", "usage")

    def __init__(self, prefix: list[list[int]], scores: bool) -> None:
        """`scores`: log probabilities were asked for."""
        self.choices = [Choice(ids, scores) for ids in prefix]
        self.unfinished = len(prefix)
        self.usage: Usage | None = None
        self.tokens = sum(map(len, prefix))  # of all choices
        self._packed = b""

    @property
    def weight(self) -> int:
        """The room that it takes once it is packed, in tokens."""
        return self.tokens + sum(len(choice.vector) for choice in self.choices) // TOKEN_BYTES

    def pack(self) -> None:
        """Take little room until `unpack`: a token is six bytes then, and not a hundred in three objects."""
        self._packed = _pack([(choice.ids, choice.text, choice.logprobs) for choice in self.choices])
        for choice in self.choices:
            choice.ids, choice.text, choice.logprobs = [], [], None

    def unpack(self) -> None:
        """Be as before `pack`."""
        if self._packed:
            for choice, contents in zip(self.choices, _unpack(self._packed), strict=True):
                choice.ids, choice.text, choice.logprobs = contents
            self._packed = b""

    def append(self, event: TokenEvent) -> int:
        """Take in what a step added; the index of its first token."""
        choice = self.choices[event.choice]
        index = len(choice.ids)
        if event.before is not None:
            choice.text = event.before + choice.text
            choice.base = 0
        choice.ids += event.ids
        self.tokens += len(event.ids)
        choice.text += event.text
        if event.logprobs is not None:
            choice.logprobs = (choice.logprobs or []) + event.logprobs
        if event.finish is not None and choice.finish is None:
            choice.finish, choice.vector = event.finish, event.vector
            self.unfinished -= 1
        self.usage = event.usage or self.usage
        return index

    def match(self, attach: Attach) -> Match:
        """How this history relates to what the requester has, over all choices: the worst of them."""
        if attach.ids is not None:
            found = [choice.match_ids(ids) for choice, ids in zip(self.choices, attach.ids, strict=True)]
        else:
            expected = zip(self.choices, attach.next or [], attach.digest or [], strict=True)
            found = [choice.match_digest(position, text) for choice, position, text in expected]
        for worst in (Match.DIFFERS, Match.LACKING, Match.SHORTER, Match.UNTOLD):
            if worst in found:
                return worst
        return Match.EXTENDS

    def before(self, positions: list[int]) -> list[list[int]]:
        """The ids before a position, per choice."""
        return [choice.ids[:position] for choice, position in zip(self.choices, positions, strict=True)]

    def frames(self, rid: str, claim: str, sid: str, positions: list[int] | None = None) -> list[Frame]:
        """Everything from `positions` on, finishes included; without positions, the finishes only."""
        frames: list[Frame] = []
        last: Frame | None = None
        for number, choice in enumerate(self.choices):
            end = len(choice.ids)
            start = end if positions is None else positions[number]
            while start < end or choice.finish is not None:
                part = choice.logprobs if start >= choice.scored else None
                stop = min(end, start + (FRAME_TOKENS_MAX if part is None else FRAME_SCORED_MAX))
                if start < choice.scored < stop:
                    stop = choice.scored
                text = choice.text[start - choice.base : stop - choice.base]
                logprobs = part[start - choice.scored : stop - choice.scored] if part is not None else None
                frame = Frame(rid, claim, sid, number, start, choice.ids[start:stop], text, logprobs)
                frames.append(frame)
                start = stop
                if stop == end:
                    frame.finish, frame.vector = choice.finish, choice.vector
                    last = frame if choice.finish is not None else last
                    break
        if last is not None and not self.unfinished:
            last.usage = self.usage
        return frames
