"""Where a client is in a resumable stream: the ids of its events, and the events that they belong to.

An id is `<rid>.<sequence>.<next>.<digest>`: the request, its message, and of each choice (joined by `-`) how many tokens the
client has and the digest of their ids. Marks in `next` say which events were told that are no tokens: `o` after a choice that
was opened (its role) and has no token yet, `f` after one whose finish was told, `u` at the end once the usage was, `e` at the
end once the stream was complete. What comes next may make several events (a tool call that begins); `p2` after a choice says
that two of them were told.
"""

import hashlib
import re
from typing import TYPE_CHECKING

import msgspec

from ingress.sse import Events
from shared.errors import BadRequest, HeadraceError
from shared.requester import Known
from shared.wire import Usage

if TYPE_CHECKING:
    from ingress.relay import Source
    from shared.stream import Delta

HEADER = "Last-Event-ID"
NEXT_MAX = 2**31 - 1

_ID = re.compile(
    r"(?P<rid>[0-9a-f]{32})\.(?P<sequence>[0-9]{1,19})"
    r"\.(?P<next>[0-9]{1,10}(?:[of]|p[0-9]{1,6})?(?:-[0-9]{1,10}(?:[of]|p[0-9]{1,6})?)*)(?P<last>[ue]?)"
    r"\.(?P<digest>[0-9a-f]{16}(?:-[0-9a-f]{16})*)"
)


class At(msgspec.Struct):
    """What a client has of one choice."""

    next: int = 0  # tokens
    opened: bool = False
    finished: bool = False
    parts: int = 0  # events of what comes next: a token, or the finish


UNSEEN = At()


class Position(msgspec.Struct):
    """What a client has of a stream."""

    rid: str
    sequence: int
    choices: list[At]
    digests: list[str]
    usage_told: bool = False
    complete: bool = False

    @property
    def known(self) -> Known:
        return Known(next=[choice.next for choice in self.choices], digest=self.digests)


def parse(text: str) -> Position:
    """The position that an event's id stands for. Raises BadRequest."""
    found = _ID.fullmatch(text.strip())
    items = found["next"].split("-") if found else []
    digests = found["digest"].split("-") if found else []
    choices = [_at(item) for item in items]
    if found is None or len(choices) != len(digests) or any(choice.next > NEXT_MAX for choice in choices):
        raise BadRequest(f"{HEADER}: not an id of an event of a resumable stream", param=HEADER)
    for choice in choices:
        choice.opened |= choice.next > 0 or choice.parts > 0
    last = found["last"]
    return Position(found["rid"], int(found["sequence"]), choices, digests, last != "", last == "e")


def _at(item: str) -> At:
    count, _, parts = item.partition("p")
    return At(int(count.rstrip("of")), count[-1] in "of", count[-1] == "f", int(parts or 0))


class NumberedEvents:
    """The events of a stream with their ids, around those of its family.

    It is fed the stream from its first token on. What a client that resumes has `seen` is not told again, but a family's
    own events are made of it all the same, so that the rest is what it would have been.
    """

    def __init__(self, inner: Events, stream: "Source", choices: int, seen: Position | None) -> None:
        self._inner, self._stream = inner, stream
        self._seen = seen
        self._choices = [At() for _ in range(choices)]
        self._hashes = [hashlib.blake2b(digest_size=8) for _ in range(choices)]
        self._mark = ""
        self.open_choices = inner.open_choices

    @property
    def keepalive(self) -> bytes:
        return self._inner.keepalive

    def id(self) -> bytes:
        """The id of the events told so far."""
        items, digests = [], []
        for number, choice in enumerate(self._choices):
            seen = self._seen.choices[number] if self._seen is not None else UNSEEN
            behind = choice.next < seen.next  # of what is told again, one choice comes after the other
            position = seen.next if behind else choice.next
            parts = max(choice.parts, seen.parts if position == seen.next else 0)
            if choice.finished or seen.finished:
                mark = "f"
            elif parts:
                mark = f"p{parts}"
            else:
                mark = "o" if not position and (choice.opened or seen.opened) else ""
            items.append(f"{position}{mark}")
            digests.append(self._seen.digests[number] if self._seen and behind else self._hashes[number].hexdigest())
        stream = self._stream
        return f"{stream.rid}.{stream.sequence}.{'-'.join(items)}{self._mark}.{'-'.join(digests)}".encode()

    def add(self, deltas: "list[Delta]", out: list[bytes]) -> None:
        for delta in deltas:
            number = delta.choice
            choice = self._choices[number]
            seen = self._seen.choices[number] if self._seen is not None else UNSEEN
            if not choice.opened:
                choice.opened = True
                made = self._made(msgspec.structs.replace(delta, ids=[], text="", logprobs=None, finish=None))
                self._tell(number, made, seen.opened, out)
            if delta.ids or delta.text or delta.finish is None:
                made = self._made(delta if delta.finish is None else msgspec.structs.replace(delta, finish=None))
                old = choice.next < seen.next if delta.ids else False
                last = self._tell_parts(number, made, old, out)
                for token in delta.ids:  # one at most
                    choice.next += 1
                    self._hashes[number].update(token.to_bytes(4, "little"))
                self._tell(number, last, old, out)
            if delta.finish is not None:
                made = self._made(msgspec.structs.replace(delta, ids=[], text="", logprobs=None))
                last = self._tell_parts(number, made, seen.finished, out)
                choice.finished = True
                self._tell(number, last, seen.finished, out)

    def closing(self, usage: Usage, claims: int) -> bytes:
        *before, last = self._inner.closing(usage, claims).split(b"\n\n")[:-1]
        self._mark = "u"
        told = self._seen is not None and self._seen.usage_told
        parts = [] if told else [self._numbered(event) for event in before]
        self._mark = "e"
        parts.append(self._numbered(last))
        return b"".join(parts)

    def failure(self, error: HeadraceError) -> bytes | None:
        return self._inner.failure(error)

    def _made(self, delta: "Delta") -> list[bytes]:
        """The family's events of `delta`."""
        made: list[bytes] = []
        self._inner.add([delta], made)
        self.open_choices = self._inner.open_choices
        return made

    def _tell_parts(self, number: int, made: list[bytes], old: bool, out: list[bytes]) -> list[bytes]:
        """Tell all of `made` but the last, which is returned: with it the client has all of a token, or of a finish.

        Of the first that the client does not have all of, it may have some.
        """
        choice = self._choices[number]
        seen = self._seen.choices[number] if self._seen is not None else UNSEEN
        told = seen.parts if choice.next == seen.next and not old else 0
        for part, event in enumerate(made[:-1], start=1):
            choice.parts = part
            if part > told:
                self._tell(number, [event], old, out)
        choice.parts = 0
        return made[-1:]

    def _tell(self, number: int, made: list[bytes], old: bool, out: list[bytes]) -> None:
        if not old:
            out += [b"id: %b\n%b" % (self.id(), event) for event in made]

    def _numbered(self, event: bytes) -> bytes:
        return b"id: %b\n%b\n\n" % (self.id(), event)
