"""From token ids to text, one id at a time: incremental detokenising and stop strings."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from shared.wire import Grammar, Input, Sampling

if TYPE_CHECKING:
    from workers.engine.grammar import Matcher

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
CONTEXT_IDS = 6  # of the prompt: what a tokenizer needs to know whether a word begins inside a sentence
HELD_IDS_MAX = 64  # ids without a whole character among them; a character has at most 4


class TextStream(Protocol):
    """The text of one output, from its ids."""

    def step(self, token: int) -> str:
        """The text that is certain now and was not before."""

    def flush(self) -> str:
        """The end: the rest, with U+FFFD for an incomplete character."""


class TextSide(Protocol):
    """What an engine needs to know of text."""

    vocabulary_size: int
    end_ids: frozenset[int]  # end of sequence
    special_ids: frozenset[int]  # they add nothing to the text

    def encode(self, prompt: Input) -> list[int]:
        """Prompt ids. Thread-safe. Raises BadRequest."""

    def stream(self, prompt_ids: Sequence[int], shown: Sequence[str] = ()) -> TextStream:
        """The text of an output. `shown`: special tokens whose text is part of it all the same."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, all at once."""

    def matcher(self, grammar: Grammar) -> "Matcher":
        """A matcher at the beginning of an output. Thread-safe. Raises BadRequest or Unsupported."""

    def token_bytes(self, token: int) -> bytes:
        """What a token alone adds to the text."""


class Detokenizer:
    """Incremental decoding, byte for byte the text of decoding all ids at once.

    The algorithm of tokenizers' DecodeStream: decode a short window of ids, and release what it gained when it does not end
    in an incomplete character; the ids of the last release stay in the window as context. Unlike DecodeStream it
    has no failing state, and its window is bounded whatever a client makes a model say.

    `decode` is the tokenizer's decoding of a list of ids, special tokens skipped.
    """

    def __init__(self, decode: Callable[[list[int]], str], context: Sequence[int]) -> None:
        self._decode = decode
        self._window = list(context)
        self._text = decode(self._window)  # of the window
        self._shown = len(self._text.rstrip(INCOMPLETE))  # characters of it that were released or belong to the prompt
        self._fresh = len(self._window)  # ids of the window before those not released yet

    def step(self, token: int) -> str:
        window = self._window
        window.append(token)
        text = self._decode(window)
        if text.endswith(INCOMPLETE) and len(window) - self._fresh < HELD_IDS_MAX:
            self._text = text
            return ""
        if text == self._text:
            window.pop()  # a special token: it must not fill the window
            return ""
        released = text[self._shown :]
        self._window = window[self._fresh :]
        self._text = self._decode(self._window)
        self._shown = len(self._text)
        self._fresh = len(self._window)
        return released

    def flush(self) -> str:
        released = self._text[self._shown :]
        self._shown = len(self._text)
        return released


class ShownTokens:
    """The text of an output in which some special tokens are shown. What comes after one is decoded as a text of its own."""

    def __init__(self, plain: TextStream, shown: Mapping[int, str], fresh: Callable[[], TextStream]) -> None:
        self._plain, self._shown, self._fresh = plain, shown, fresh

    def step(self, token: int) -> str:
        text = self._shown.get(token)
        if text is None:
            return self._plain.step(token)
        before, self._plain = self._plain.flush(), self._fresh()
        return before + text

    def flush(self) -> str:
        return self._plain.flush()


class StopMatcher:
    """Cuts text at the first stop string; of several that end at the same character the longest counts."""

    def __init__(self, stops: Sequence[str], included: bool = False) -> None:
        """`included`: the stop string itself is released."""
        assert all(stops), "a stop string is empty"
        self._stops = tuple(stops)
        self._included = included
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """(what can be released now, whether a stop string is complete). Held back: only what may become one."""
        text = self._held + text
        matches = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if matches:
            self._held = ""
            end, start = min(matches)
            return text[: end if self._included else start], True
        held = max(_overlap(text, stop) for stop in self._stops)
        cut = len(text) - held
        self._held = text[cut:]
        return text[:cut], False

    def flush(self) -> str:
        """The end came: what was held back is text after all."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`, without being all of it."""
    first = stop[0]
    start = text.find(first, max(0, len(text) - len(stop) + 1))
    while start >= 0:
        if stop.startswith(text[start:]):
            return len(text) - start
        start = text.find(first, start + 1)
    return 0


class OutputText:
    """The text of one choice, and when it ends.

    Its ids go through `push` one by one, in order; ids of a resumed prefix too, so that what an id releases, and where a
    grammar stands, depends on the ids up to it and on nothing else.
    """

    __slots__ = ("_count", "_count_max", "_count_min", "_end_ids", "_grammar", "_stops", "_stream", "finish")

    def __init__(
        self,
        stream: TextStream,
        sampling: Sampling,
        end_ids: frozenset[int],
        count_max: int,
        grammar: "Matcher | None" = None,
    ) -> None:
        self._stream = stream
        self._grammar = grammar
        self._stops = StopMatcher(sampling.stop, sampling.include_stop) if sampling.stop else None
        self._end_ids = stop_ids(sampling, end_ids)
        self._count = 0
        self._count_min = sampling.min_tokens
        self._count_max = count_max
        self.finish: str | None = None if count_max > 0 else "length"

    def push(self, token: int) -> str:
        """The text that `token` releases. Sets `finish` if it is the last. Raises GrammarFailed."""
        self._count += 1
        may_stop = self._count > self._count_min
        complete = self._grammar is not None and self._grammar.advance(token)
        if may_stop and token in self._end_ids:
            self.finish = "stop"
            return self._rest()
        text = self._stream.step(token)
        if self._stops is not None and may_stop:
            text, stopped = self._stops.push(text)
            if stopped:
                self.finish = "stop"
                return text
        if complete or self._count >= self._count_max:
            self.finish = "stop" if complete else "length"
            text += self._rest()
        return text

    def end(self, finish: str) -> str:
        """The output ends here, for a reason that is not in its tokens; the text that was held back."""
        self.finish = finish
        return self._rest()

    def _rest(self) -> str:
        rest = self._stream.flush()
        if self._stops is None:
            return rest
        if rest:
            rest, stopped = self._stops.push(rest)
            if stopped:
                return rest
        return rest + self._stops.flush()


def stop_ids(sampling: Sampling, end_ids: frozenset[int]) -> frozenset[int]:
    """The ids that end an output: end of sequence, unless ignored, and the request's own."""
    own = frozenset(sampling.stop_token_ids)
    return own if sampling.ignore_eos else own | end_ids
