"""What the client of a request has: each token of each choice once, however often it comes. Pure: frames in, deliveries out."""

from shared.actions import Deliver
from shared.errors import Diverged
from shared.terms import Known
from shared.wire import Attach, Frame, Usage, digest


class Choice:
    """One choice of the request as the client has it."""

    __slots__ = ("finished", "ids", "next")

    def __init__(self, ids: list[int]) -> None:
        self.ids = ids
        self.next = len(ids)
        self.finished = False


class Received:
    """The positions of one requester, and what it knows of those that its client had from somebody else."""

    def __init__(self, choices: int, known: Known | None) -> None:
        self.choices = [Choice([]) for _ in range(choices)]
        self.unfinished = choices
        self.duplicates = 0  # tokens trimmed
        self._known: Known | None = None  # set: some choice has not met its digest yet
        self._usage: Usage | None = None
        if known is not None and known.ids is not None:
            self.choices = [Choice(list(ids)) for ids in known.ids]
        elif known is not None and known.next and any(known.next):
            self._known = known

    @property
    def tokens(self) -> int:
        """Of all choices, as far as they are known here."""
        return sum(choice.next for choice in self.choices)

    @property
    def begun(self) -> bool:
        """Whether the client has anything of it."""
        return self._known is not None or any(choice.next or choice.finished for choice in self.choices)

    @property
    def met(self) -> bool:
        """Whether every choice has met its digest, if it had to."""
        return self._known is None

    @property
    def complete(self) -> bool:
        """Whether nothing more comes. After a resume the finish that carries the usage can be behind the last new one."""
        return not self.unfinished and (self._usage is not None or len(self.choices) == 1)

    def attach(self, rid: str, sid: str, reply: str, deaths: int) -> Attach:
        """Asks for what comes next."""
        if self._known is None:
            return Attach(rid, sid, reply, [list(choice.ids) for choice in self.choices], deaths=deaths)
        return Attach(rid, sid, reply, None, self._known.next, self._known.digest, deaths)

    def take(self, frame: Frame) -> Deliver | None:
        """What is new in a frame that begins at or before the position; None: nothing. Raises Diverged."""
        choice = self.choices[frame.choice]
        old = choice.next - frame.index
        ids, text, logprobs = frame.ids, frame.text, frame.logprobs
        if old:
            self.duplicates += min(old, len(ids))
            ids, text, logprobs = ids[old:], text[old:], logprobs and logprobs[old:]
        whole = frame.index + len(frame.ids) >= choice.next  # else its finish is not ours
        finish = frame.finish if whole and not choice.finished else None
        usage = frame.usage if self._usage is None else None
        if choice.finished:
            ids = []
        choice.ids += ids
        choice.next += len(ids)
        if finish is not None:
            choice.finished = True
            self.unfinished -= 1
        if not self._meets(frame.choice):
            raise Diverged("the stream that was to be resumed is not the one that the worker has")
        self._usage = self._usage or usage
        if ids or finish or usage:
            return Deliver(frame.choice, ids, text, logprobs, finish, usage, frame.vector if finish else b"")
        return None

    def _meets(self, at: int) -> bool:
        """Whether choice `at` is still what a digest said of it. The worker has compared it too: this is the proof."""
        if self._known is None or self._known.next is None or self._known.digest is None:
            return True
        choice, position = self.choices[at], self._known.next[at]
        if len(choice.ids) < position:
            return not choice.finished
        if digest(choice.ids[:position]) != self._known.digest[at]:
            return False
        if all(each.next >= needed for each, needed in zip(self.choices, self._known.next, strict=True)):
            self._known = None
        return True
