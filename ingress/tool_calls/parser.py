"""What the parsers of all dialects have in common: text between calls, and what is held back until it is known to be which."""

from collections.abc import Callable

import msgspec

from ingress.tool_calls.reader import CallReader


class Content(msgspec.Struct, gc=False):
    text: str


class Begin(msgspec.Struct, gc=False):
    """A call begins: the `index`-th of its output, counted from 0."""

    index: int
    name: str


class Arguments(msgspec.Struct, gc=False):
    """More of the arguments of the call that began last, as the model wrote them."""

    index: int
    text: str


Piece = Content | Begin | Arguments
State = Callable[[], bool]


class Parser:
    """States are methods: each takes what it can from `_rest`, and says whether it is worth to go on.

    A dialect says what a call begins with (`mark`), and what comes then (`_marked`).
    """

    mark: str
    argument_keys: tuple[str, ...] = ("arguments", "parameters")

    def __init__(self, one_call: bool = False) -> None:
        self.calls = 0
        self._one_call = one_call
        self._state: State = self._in_text
        self._rest = ""  # not taken yet
        self._raw = ""  # taken for a call that has not begun: content if it does not
        self._out: list[Piece] = []
        self._reader: CallReader | None = None
        self._may_lack_arguments = True

    def push(self, text: str) -> list[Piece]:
        """What is certain now and was not before."""
        self._rest += text
        while self._rest and self._state():
            pass
        return self._drained()

    def flush(self) -> list[Piece]:
        """The end came: what was held back. Arguments that are not complete stay so."""
        text = self._raw + self._rest
        self._raw = self._rest = ""
        if text.strip() or not self.calls:
            self._say(text)
        return self._drained()

    # -- for the dialects ----------------------------------------------------------------------------------------------

    def _marked(self) -> bool:
        """The state after a mark; `_raw` has the mark."""
        raise NotImplementedError

    def _ended(self) -> bool:
        """The state after the object of a call."""
        raise NotImplementedError

    def _in_text(self) -> bool:
        """Content up to the next mark. White space that may stand before a mark is held back, and left out before a call."""
        text, mark = self._rest, self.mark
        at = text.find(mark)
        end = at if at >= 0 else len(text) - overlap(text, mark)
        said = text[:end].rstrip()
        self._say(said)
        if at < 0:
            self._rest = text[len(said) :]
            return False
        self._raw = text[len(said) : at] + mark
        self._rest = text[at + len(mark) :]
        self._state = self._marked
        return True

    def _read_call(self) -> bool:
        """Go on with the object that begins, or goes on, at `_rest`."""
        if self._reader is None:
            self._reader = CallReader(self.argument_keys, self._may_lack_arguments)
            self._state = self._read_call
        reader = self._reader
        begun = reader.begun
        count = reader.take(self._rest)
        if reader.begun and not begun:
            self._begin(reader.name)
        elif not reader.begun:
            self._raw += self._rest[:count]
        self._rest = self._rest[count:]
        self._say_arguments("".join(reader.fresh))
        reader.fresh.clear()
        if not reader.over and not reader.broken:
            return False
        self._reader = None
        if not reader.begun:
            return self._no_call()
        if reader.broken:
            self._rest = "".join(reader.tail) + self._rest
        self._state = self._ended
        return True

    def _begin(self, name: str) -> None:
        self._raw = ""
        if not self._one_call or self.calls == 0:
            self._out.append(Begin(self.calls, name))
        self.calls += 1

    def _say_arguments(self, text: str) -> None:
        if text and (not self._one_call or self.calls == 1):
            self._out.append(Arguments(self.calls - 1, text))

    def _no_call(self) -> bool:
        """It was none: what was taken for it is content."""
        self._say(self._raw)
        self._raw = ""
        self._state = self._in_text
        return True

    def _space(self) -> bool:
        """Move white space into `_raw`; whether something else follows."""
        rest = self._rest.lstrip()
        self._raw += self._rest[: len(self._rest) - len(rest)]
        self._rest = rest
        return bool(rest)

    def _say(self, text: str) -> None:
        if text:
            self._out.append(Content(text))

    def _drained(self) -> list[Piece]:
        out, self._out = self._out, []
        return out


def overlap(text: str, mark: str) -> int:
    """Length of the longest end of `text` that begins `mark` without being all of it."""
    return next((size for size in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:size])), 0)
