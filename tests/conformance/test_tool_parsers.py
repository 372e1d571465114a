"""Tool calls in text: what each dialect makes of what models of its family write, whole and cut at every character."""

import random
from typing import Any

import pytest

from ingress.tool_calls import Arguments, Begin, Content, Piece, new_parser, parse_whole
from shared.tools import DIALECTS

ROME = '{"city": "Rome"}'
HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
ODD = r'{"a": "x}\"]\\", "b": [{"c": "</tool_call>"}, 1.5e3], "d": null, "é": "\u00e9 😀"}'

# (dialect, text, content, calls)
CALLS: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    ("hermes", HERMES, "", [("weather", ROME)]),
    ("hermes", HERMES + "\n" + HERMES.replace("Rome", "Oslo"), "", [("weather", ROME), ("weather", '{"city": "Oslo"}')]),
    ("hermes", f"Let me look.\n\n{HERMES}\n", "Let me look.", [("weather", ROME)]),
    ("hermes", f"{HERMES}\nThat is it. ", "\nThat is it.", [("weather", ROME)]),
    ("hermes", '<tool_call>{"arguments": {"city": "Rome"}, "name": "weather"}</tool_call>', "", [("weather", ROME)]),
    ("hermes", '<tool_call>{"name": "now"}</tool_call>', "", [("now", "{}")]),
    ("hermes", '<tool_call>{"name": "now", "arguments": null}</tool_call>', "", [("now", "{}")]),
    ("hermes", r'<tool_call>{"name":"f","arguments":"{\"a\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
    ("hermes", '<tool_call>{"id": 7, "name": "f", "arguments": {"a": {}}, "x": [1]}</tool_call>', "", [("f", '{"a": {}}')]),
    ("hermes", '<tool_call>{"name": "odd", "arguments": ' + ODD + "}</tool_call>", "", [("odd", ODD)]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}', "", [("f", '{"a": 1}')]),  # the closing tag was not said
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "b', "", [("f", '{"a": "b')]),  # ended by max_tokens
    ("hermes", HERMES.replace("\n", "") * 2, "", [("weather", ROME)] * 2),
    ("llama3", '<|python_tag|>{"name": "weather", "parameters": {"city": "Rome"}}', "", [("weather", ROME)]),
    ("llama3", '{"name": "weather", "parameters": {"city": "Rome"}}', "", [("weather", ROME)]),
    ("llama3", '\n {"type": "function", "name": "f", "parameters": {}}', "", [("f", "{}")]),
    ("llama3", 'Now: <|python_tag|>{"name": "f", "arguments": {}}', "Now:", [("f", "{}")]),
    ("llama3", '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"a": 1}}', "", [("f", "{}"), ("g", '{"a": 1}')]),
    ("llama3", '{"name": "f", "parameters": {}}\n{"name": "g", "parameters": {}}', "", [("f", "{}"), ("g", "{}")]),
    ("llama3", '{"name": "f", "parameters": {}} and so on', " and so on", [("f", "{}")]),
    ("mistral", '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Rome"}}]', "", [("weather", ROME)]),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {}}, {"name": "g", "arguments": {"a": [1]}}]', "",
     [("f", "{}"), ("g", '{"a": [1]}')]),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}, "id": "abcdefghi"}]', "", [("f", "{}")]),
    ("mistral", '[TOOL_CALLS]weather[ARGS]{"city": "Rome"}', "", [("weather", ROME)]),
    ("mistral", 'Well.[TOOL_CALLS]f[CALL_ID]abc123XYZ[ARGS]{}[TOOL_CALLS]g[ARGS] {"a": 1}', "Well.",
     [("f", "{}"), ("g", '{"a": 1}')]),
    ("mistral", "[TOOL_CALLS]odd[ARGS]" + ODD, "", [("odd", ODD)]),
    ("mistral", '[TOOL_CALLS]{"name": "f", "arguments": {"a": 1}}', "", [("f", '{"a": 1}')]),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a', "", [("f", '{"a')]),
    # what is broken after the arguments is text again
    ("hermes", '<tool_call>{"name": "f", "arguments": {}, so}', ", so}", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}} etc. </tool_call>', " etc. </tool_call>", [("f", "{}")]),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}} so', " so", [("f", "{}")]),
]  # fmt: skip

# (dialect, text that calls nothing): all of it is content
NO_CALLS = [
    *((dialect, text) for dialect in DIALECTS for text in ("", "Hello.", " \n", "a <b> [c] {d} ", "x\n\n", "naïve 😀")),
    ("hermes", "<tool_call"),
    ("hermes", "a <tool_call>"),
    ("hermes", "<tool_call>\nnot JSON\n</tool_call> then"),
    ("hermes", '<tool_call>{"nome": "f", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": 7, "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": "no"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": nul'),
    ("hermes", '<tool_call>{"name": "f" "arguments": {}}'),
    ("hermes", '<tool_call>{"arguments": {"a": 1}'),
    ("hermes", '<tool_call>{"name": "f"'),
    ("hermes", "<tool_call>{}</tool_call>"),
    ("hermes", "a </tool_call> b"),
    ("llama3", '{"name": "Bob", "age": 5}'),
    ("llama3", '{"name": "f"}'),
    ("llama3", '{"steps": ["a"]} and more'),
    ("llama3", 'So {"name": "f", "parameters": {}}'),
    ("llama3", '<|python_tag|>brave_search.call(query="x")'),
    ("llama3", "<|python_tag|>"),
    ("mistral", "[TOOL_CALLS]"),
    ("mistral", "[TOOL_CALLS][]"),
    ("mistral", "[TOOL_CALLS] [1, 2]"),
    ("mistral", "[TOOL_CALLS]two words"),
    ("mistral", "[TOOL_CALLS]f[ARGS]"),
    ("mistral", "[TOOL_CALLS]f[ARGS] "),
    ("mistral", "[TOOL_CALLS]f[ARGS]nothing"),
    ("mistral", "[TOOL_CALLS]f[ARG"),
    ("mistral", "a [TOOL_CALL"),
]


def told(dialect: str, parts: list[str], one_call: bool = False) -> list[Piece]:
    parser = new_parser(dialect, one_call)
    return [piece for part in parts for piece in parser.push(part)] + parser.flush()


def sum_of(pieces: list[Piece]) -> tuple[str, list[tuple[str, str]]]:
    """Content and calls, having checked that the pieces come in the order that a stream needs."""
    content, calls = "", []
    for piece in pieces:
        match piece:
            case Content(text):
                assert text
                content += text
            case Begin(index, name):
                assert index == len(calls)
                calls.append((name, ""))
            case Arguments(index, text):
                assert text
                assert index == len(calls) - 1
                calls[-1] = (calls[-1][0], calls[-1][1] + text)
    return content, calls


def cuts(text: str) -> list[list[str]]:
    """In one, in two at every character, in characters, and at random."""
    found = [[text], list(text), *([text[:at], text[at:]] for at in range(1, len(text)))]
    chance = random.Random(text)
    for _ in range(20):
        ends = sorted(chance.sample(range(len(text) + 1), min(len(text), chance.randint(1, 6))))
        found.append([text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)])
    return found


@pytest.mark.parametrize(("dialect", "text", "content", "calls"), CALLS)
def test_calls_are_found_however_the_text_is_cut(dialect: str, text: str, content: str, calls: list[Any]) -> None:
    for parts in cuts(text):
        assert sum_of(told(dialect, parts)) == (content, calls), parts
    whole_content, whole_calls = parse_whole(new_parser(dialect, False), text)
    assert (whole_content, [(call.name, call.arguments) for call in whole_calls]) == (content, calls)


@pytest.mark.parametrize(("dialect", "text"), NO_CALLS)
def test_what_is_no_call_is_content_to_the_last_character(dialect: str, text: str) -> None:
    for parts in cuts(text):
        assert sum_of(told(dialect, parts)) == (text, []), parts


@pytest.mark.parametrize("dialect", DIALECTS)
def test_noise_is_the_same_however_it_is_cut_and_nothing_fails(dialect: str) -> None:
    bits = [
        "<tool_call>",
        "</tool_call>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "[CALL_ID]",
        "<|python_tag|>",
        "[",
        "]",
        "{",
        "}",
        '"',
        ":",
    ]
    bits += ['"name"', '"arguments"', '"parameters"', '"f"', "f", ",", ";", " ", "\n", "\\", "{}", "null", "x"]  # fmt: skip
    chance = random.Random(dialect)
    for _ in range(600):
        text = "".join(chance.choice(bits) for _ in range(chance.randint(1, 25)))
        whole = sum_of(told(dialect, [text]))
        assert sum_of(told(dialect, list(text))) == whole, text
        if not whole[1]:
            assert whole[0] == text


@pytest.mark.parametrize(
    ("dialect", "text"),
    [
        ("hermes", HERMES + HERMES + "end"),
        ("llama3", '{"name": "weather", "parameters": {"city": "Rome"}};{"name": "g", "parameters": {}}end'),
        ("mistral", '[TOOL_CALLS]weather[ARGS]{"city": "Rome"}[TOOL_CALLS]g[ARGS]{"a": 1}end'),
    ],
)
def test_one_call_means_one(dialect: str, text: str) -> None:
    for parts in cuts(text):
        assert sum_of(told(dialect, parts, one_call=True)) == ("end", [("weather", ROME)])


@pytest.mark.parametrize(
    ("dialect", "before"),
    [
        ("hermes", '<tool_call>\n{"name": "f", "arguments": '),
        ("llama3", '{"name": "f", "parameters": '),
        ("mistral", "[TOOL_CALLS]f[ARGS]"),
    ],
)
def test_arguments_come_as_they_are_written(dialect: str, before: str) -> None:
    parser = new_parser(dialect, False)
    pieces = [parser.push(char) for char in before + '{"a": 12']
    assert [piece for each in pieces for piece in each] == [Begin(0, "f"), *(Arguments(0, char) for char in '{"a": 12')]
    assert pieces[len(before)] == [Begin(0, "f"), Arguments(0, "{")]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_text_is_held_back_only_while_it_may_be_a_call(dialect: str) -> None:
    parser = new_parser(dialect, False)
    assert parser.push("Hello") == [Content("Hello")]
    assert parser.push(" ") == []
    assert parser.push("you <") == [Content(" you" if dialect != "mistral" else " you <")]
    assert parser.push("b>") == ([Content(" <b>")] if dialect != "mistral" else [Content("b>")])
