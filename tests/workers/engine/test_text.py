"""Incremental text: it equals the text of decoding all ids, and stops are found wherever tokens end."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.wire import Sampling
from workers.engine.text import HELD_IDS_MAX, Detokenizer, OutputText, StopMatcher, TextStream, stop_ids

TEXT = "naïve 🇨🇭 e\u0301 👩\u200d🚀 漢字かな — done."


def decode(ids: list[int]) -> str:
    """A tokenizer of bytes; 256 and above are special tokens."""
    return bytes(token for token in ids if token < 256).decode(errors="replace")


def stream(context: list[int] | None = None) -> Detokenizer:
    return Detokenizer(decode, context or [])


@given(st.text())
def test_concatenated_deltas_equal_the_whole_text(text: str) -> None:
    it = stream()
    deltas = [it.step(byte) for byte in text.encode()]
    assert "".join(deltas) + it.flush() == text
    # A delta has whole characters only: the text never shows U+FFFD for one that completes later.
    assert all("\ufffd" not in delta for delta in deltas) or "\ufffd" in text


@given(st.binary(max_size=HELD_IDS_MAX - 1))
def test_any_bytes_at_all_give_the_text_of_decoding_them_together(raw: bytes) -> None:
    it = stream()
    assert "".join(map(it.step, raw)) + it.flush() == raw.decode(errors="replace")


def test_a_character_is_released_with_its_last_token() -> None:
    it = stream()
    assert [it.step(byte) for byte in "a🚀b".encode()] == ["a", "", "", "", "🚀", "b"]


def test_an_incomplete_character_comes_at_the_end() -> None:
    it = stream()
    assert [it.step(byte) for byte in "x🚀".encode()[:3]] == ["x", "", ""]
    assert it.flush() == "\ufffd"
    assert it.flush() == ""


def test_special_tokens_release_nothing_and_never_fill_the_window() -> None:
    sizes = []

    def counting(ids: list[int]) -> str:
        sizes.append(len(ids))
        return decode(ids)

    it = Detokenizer(counting, [ord("a")])
    assert [it.step(300) for _ in range(1000)] == [""] * 1000
    assert it.step(ord("b")) == "b"
    assert max(sizes) <= 3


def test_bytes_that_are_no_text_do_not_fill_the_window() -> None:
    sizes = []

    def counting(ids: list[int]) -> str:
        sizes.append(len(ids))
        return decode(ids)

    it = Detokenizer(counting, [])
    text = "".join(it.step(0xFF) for _ in range(1000)) + it.flush()
    assert set(text) == {"\ufffd"}
    assert max(sizes) <= 2 * HELD_IDS_MAX


def test_the_prompt_is_context_and_never_text() -> None:
    def sentence(ids: list[int]) -> str:
        """Words, as SentencePiece writes them: no space before the first."""
        return " ".join("abcdefgh"[token] for token in ids)

    assert Detokenizer(sentence, []).step(1) == "b"
    assert Detokenizer(sentence, [0]).step(1) == " b"
    # the prompt ends in the middle of a character, the output completes it
    raw = "🚀".encode()
    assert stream(list(raw[:2])).step(raw[2]) == ""
    it = stream(list(raw[:2]))
    assert it.step(raw[2]) + it.step(raw[3]) == "🚀"


def naive(text: str, stops: list[str]) -> tuple[str, bool]:
    """The whole text up to the stop that is complete first; of several the longest."""
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)], True
    return text, False


@settings(max_examples=300)
@given(
    st.text(alphabet="abc", max_size=30),
    st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.integers(0, 30), max_size=8),
)
def test_stops_are_found_however_the_text_is_split(text: str, stops: list[str], cuts: list[int]) -> None:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    matcher = StopMatcher(stops)
    released, stopped, seen = "", False, 0
    for start, end in pairwise(edges):
        new, stopped = matcher.push(text[start:end])
        released += new
        seen = end
        if stopped:
            break
        held = len(text[:end]) - len(released)
        longest = max(
            (size for stop in stops for size in range(len(stop)) if text[:end].endswith(stop[:size])), default=0
        )
        assert held == longest, "exactly what may become a stop is held back"
    if not stopped:
        released += matcher.flush()
    assert (released, stopped) == naive(text[:seen], stops)


class Letters(TextStream):
    """Token i is the i-th letter."""

    def step(self, token: int) -> str:
        return chr(ord("a") + token)

    def flush(self) -> str:
        return "!"


def push_all(
    sampling: Sampling, tokens: list[int], count_max: int = 100, ends: frozenset[int] = frozenset({25})
) -> tuple[list[str], str | None]:
    output = OutputText(Letters(), sampling, ends, count_max)
    texts = []
    for token in tokens:
        assert output.finish is None
        texts.append(output.push(token))
    return texts, output.finish


@pytest.mark.parametrize("included", [False, True])
def test_the_stop_string_is_cut_off_or_comes_whole_with_the_last_token(included: bool) -> None:
    sampling = Sampling(stop=["cd", "bcd", "x"], include_stop=included)
    texts = ["a", "", "", "bcd" if included else ""]
    assert push_all(sampling, [0, 1, 2, 3]) == (texts, "stop")


def test_the_end_token_stops_and_has_no_text() -> None:
    assert push_all(Sampling(), [0, 1, 25]) == (["a", "b", "!"], "stop")


def test_the_end_token_can_be_ignored() -> None:
    assert push_all(Sampling(ignore_eos=True), [25, 0]) == (["z", "a"], None)


def test_own_stop_ids_stop_even_then() -> None:
    assert push_all(Sampling(ignore_eos=True, stop_token_ids=[1]), [25, 1]) == (["z", "!"], "stop")


def test_the_length_ends_an_output_with_what_was_held_back() -> None:
    assert push_all(Sampling(stop=["bcd"]), [0, 1, 2], count_max=3) == (["a", "", "bc!"], "length")


def test_a_stop_string_ends_in_the_same_step() -> None:
    assert push_all(Sampling(stop=["bcd"]), [0, 1, 2, 3]) == (["a", "", "", ""], "stop")


def test_what_was_held_back_is_released_when_it_is_no_stop() -> None:
    assert push_all(Sampling(stop=["bcd"]), [0, 1, 2, 1, 2, 3]) == (["a", "", "", "bc", "", ""], "stop")


def test_nothing_stops_before_min_tokens() -> None:
    sampling = Sampling(min_tokens=3, stop=["b"], stop_token_ids=[4])
    assert push_all(sampling, [1, 4, 25, 0, 1]) == (["b", "e", "z", "a", ""], "stop")


def test_a_finish_at_the_last_token_is_a_stop_not_a_length() -> None:
    assert push_all(Sampling(stop=["c"]), [0, 2], count_max=2) == (["a", ""], "stop")


def test_an_output_without_room_is_complete_at_once() -> None:
    assert OutputText(Letters(), Sampling(), frozenset(), 0).finish == "length"


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(), {25}),
        (Sampling(ignore_eos=True), set()),
        (Sampling(stop_token_ids=[3]), {3, 25}),
        (Sampling(stop_token_ids=[3], ignore_eos=True), {3}),
    ],
)
def test_stop_ids(sampling: Sampling, expected: set[int]) -> None:
    assert stop_ids(sampling, frozenset({25})) == expected
