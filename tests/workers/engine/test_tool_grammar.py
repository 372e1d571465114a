"""Tool calls held to a grammar: what each dialect lets through, as text and with special tokens, and that parsers read it."""

import json
from typing import Any

import msgspec
import numpy as np
import pytest
from engine_driver import rebuilt, request, run_all
from tiny_models import save_tiny_model

from ingress.tool_calls import new_parser, parse_whole
from shared.errors import BadRequest, Unsupported
from shared.records import EngineSettings
from shared.tools import MARKS, ToolGrammar, ToolSchema
from shared.wire import Grammar, Input, Sampling
from workers.engine.grammar import Grammars, Matcher
from workers.engine.load import load_engine
from workers.engine.sim import load_simulated

END = 256
SPECIAL = ["<|end|>", "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]"]
WIDTH = END + len(SPECIAL)
ROME = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 8}}, "required": ["city"]}
SCHEMA = ROME | {"additionalProperties": False}
NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = [ToolSchema("weather", SCHEMA, strict=True), ToolSchema("weather_now", NOTHING)]


def grammars(special: list[str]) -> Grammars:
    """Bytes and these special tokens."""
    pieces = [bytes([byte]) for byte in range(256)] + [text.encode() if text in special else b"" for text in SPECIAL]
    ids = [END + SPECIAL.index(text) for text in special]
    return Grammars(WIDTH, pieces.__getitem__, ids, frozenset({END}), lambda text: list(text.encode()))


VOCABULARIES = {"text": grammars(["<|end|>"]), "special": grammars(SPECIAL), "old": grammars(SPECIAL[:5])}


def tokens(text: str, vocabulary: str) -> list[int]:
    """The ids of a text in which marks are one token each, where they are tokens."""
    known = {"text": [], "special": SPECIAL[1:], "old": SPECIAL[1:5]}[vocabulary]
    ids: list[int] = []
    while text:
        mark = next((mark for mark in known if text.startswith(mark)), None)
        ids += [END + SPECIAL.index(mark)] if mark else list(text[0].encode())
        text = text[len(mark or " ") :]
    return ids


def tools(dialect: str, **fields: Any) -> Grammar:
    given: dict[str, Any] = {"tools": TOOLS} | fields
    return Grammar("tools", msgspec.json.encode(ToolGrammar(dialect, **given)).decode())


def allowed(matcher: Matcher) -> set[int]:
    return set(np.flatnonzero(~matcher.forbidden(WIDTH)).tolist())


def fits(vocabulary: str, grammar: Grammar, text: str) -> bool:
    """Whether the text may be all of an output. Marks and all else are asked for by the mask, as when they are drawn."""
    matcher = VOCABULARIES[vocabulary].matcher(grammar)
    complete = False
    for token in [*tokens(text, vocabulary), END]:
        if complete:
            return token == END
        if token not in allowed(matcher):
            return False
        complete = matcher.advance(token)
    return complete


ONE, OTHER = ('"name": "weather", "%s": {"city": "Rome"}', '"name": "weather_now", "%s": {}')
HERMES = ["<tool_call>\n{" + each % "arguments" + "}\n</tool_call>" for each in (ONE, OTHER)]
LLAMA = ["{" + each % "parameters" + "}" for each in (ONE, OTHER)]
MISTRAL = ["{" + each % "arguments" + "}" for each in (ONE, OTHER)]
NEW = ['[TOOL_CALLS]weather[ARGS]{"city": "Rome"}', "[TOOL_CALLS]weather_now[ARGS]{}"]

# (dialect, vocabulary, outputs of one call, outputs of two)
CASES = [
    ("hermes", "text", HERMES, ["\n".join(HERMES)]),
    ("hermes", "special", HERMES, ["\n".join(HERMES)]),
    ("llama3", "text", LLAMA, ["; ".join(LLAMA)]),
    ("llama3", "special", LLAMA, ["; ".join(LLAMA)]),
    ("mistral", "text", [f"[TOOL_CALLS][{each}]" for each in MISTRAL], [f"[TOOL_CALLS][{', '.join(MISTRAL)}]"]),
    ("mistral", "old", [f"[TOOL_CALLS][{each}]" for each in MISTRAL], [f"[TOOL_CALLS][{', '.join(MISTRAL)}]"]),
    ("mistral", "special", NEW, ["".join(NEW)]),
]


@pytest.mark.parametrize(("dialect", "vocabulary", "one", "two"), CASES)
def test_required_calls_have_the_form_and_the_arguments_of_the_schema(
    dialect: str, vocabulary: str, one: list[str], two: list[str]
) -> None:
    for text in [*one, *two]:
        assert fits(vocabulary, tools(dialect), text), text
        content, calls = parse_whole(new_parser(dialect, False), text)
        assert content == ""
        assert [call.name for call in calls] == (["weather", "weather_now"] if text in two else [calls[0].name])
        if "Rome" in text:
            assert not fits(vocabulary, tools(dialect), text.replace("Rome", "Llanfair PG"))
        assert not fits(vocabulary, tools(dialect), "So: " + text)
    for text in one:
        assert fits(vocabulary, tools(dialect, parallel=False), text)
    for text in two:
        assert not fits(vocabulary, tools(dialect, parallel=False), text)
    for text in ("", "Hello.", one[0].replace("weather", "clock"), one[0].replace("city", "town")):
        assert not fits(vocabulary, tools(dialect), text), text


@pytest.mark.parametrize(("dialect", "vocabulary", "one", "two"), CASES)
def test_calls_that_may_come_are_free_text_until_they_begin(
    dialect: str, vocabulary: str, one: list[str], two: list[str]
) -> None:
    grammar = tools(dialect, required=False)
    for text in ("Hello.", "a < b [c] \n\n", "", *one, *two):
        assert fits(vocabulary, grammar, text), text
    mark = "<|python_tag|>" if dialect == "llama3" else ""
    for text in [*one, *two]:
        assert fits(vocabulary, grammar, "So:\n" + mark + text), text
        if "Rome" in text:
            assert not fits(vocabulary, grammar, "So:\n" + mark + text.replace("Rome", "Llanfair PG"))
    assert not fits(vocabulary, tools(dialect, required=False, parallel=False), two[0])
    assert not fits(vocabulary, grammar, "So: " + mark + one[0].replace("weather", "clock"))


@pytest.mark.parametrize(("dialect", "vocabulary", "one", "two"), CASES)
def test_an_output_may_be_calls_or_else_json(dialect: str, vocabulary: str, one: list[str], two: list[str]) -> None:
    steps = {"type": "object", "properties": {"steps": {"type": "integer"}}, "required": ["steps"]}
    otherwise = Grammar("json_schema", json.dumps(steps | {"additionalProperties": False}))
    grammar = tools(dialect, required=False, otherwise=otherwise)
    for text in (*one, *two, '{"steps": 5}'):
        assert fits(vocabulary, grammar, text), text
    for text in ("Hello.", "", '{"stops": 5}', "So: " + one[0], one[0].replace("weather", "clock")):
        assert not fits(vocabulary, grammar, text), text
    anything = tools(dialect, required=False, otherwise=Grammar("json_object"))
    for text in ('{"a": [1, {}]}', '{"name": "Bob", "age": 5}'):
        assert fits(vocabulary, anything, text), text
    assert parse_whole(new_parser(dialect, False), '{"steps": 5}') == ('{"steps": 5}', [])


def test_definitions_of_a_schema_are_found_from_its_root() -> None:
    schema = {"type": "object", "properties": {"at": {"$ref": "#/$defs/place"}}, "required": ["at"]}
    place = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    tool = ToolSchema("go", schema | {"$defs": {"place": place}}, strict=True)
    good = '<tool_call>\n{"name": "go", "arguments": {"at": {"x": 1}}}\n</tool_call>'
    assert fits("text", tools("hermes", tools=[tool]), good)
    assert not fits("text", tools("hermes", tools=[tool]), good.replace("1", '"a"'))


def test_arguments_are_an_object_whatever_the_schema() -> None:
    for parameters in ({}, {"description": "x"}):
        grammar = tools("hermes", tools=[ToolSchema("f", parameters)])
        assert fits("text", grammar, '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>')
        assert not fits("text", grammar, '<tool_call>\n{"name": "f", "arguments": [1]}\n</tool_call>')


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (Grammar("tools", "{"), "cannot be used"),
        (Grammar("tools", '{"dialect": "klingon", "tools": []}'), "no dialect 'klingon'"),
        (tools("hermes", tools=[]), "no tools"),
        (
            tools("hermes", tools=[ToolSchema("f", {"not": {"const": 1}}, strict=True)]),
            'Unimplemented keys: \\["not"\\]',
        ),
        (tools("hermes", required=False, otherwise=Grammar("regex", "a")), "a regex does not go with tools"),
        (tools("hermes", required=False, otherwise=Grammar("json_schema", "[")), "Expecting value"),
        (tools("hermes", tools=[ToolSchema("f", {"$ref": "#/nowhere"})]), "nowhere"),
    ],
)
def test_tools_that_cannot_be_used_are_refused(grammar: Grammar, reason: str) -> None:
    with pytest.raises(BadRequest, match=reason) as refused:
        VOCABULARIES["text"].matcher(grammar)
    assert refused.value.param == "tools"


def test_not_strict_leaves_out_what_cannot_be_enforced() -> None:
    VOCABULARIES["text"].matcher(tools("hermes", tools=[ToolSchema("f", {"not": {"const": 1}})]))


def test_a_simulated_model_refuses_by_name() -> None:
    with pytest.raises(Unsupported, match="tools") as refused:
        load_simulated("zero", EngineSettings()).prepare(Input(token_ids=[1]), Sampling(grammar=tools("hermes")))
    assert refused.value.param == "tools"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = save_tiny_model("llama", tmp_path_factory.mktemp("llama"))
    return load_engine("s3", directory, EngineSettings(dtype="float32"), 1)


@pytest.mark.parametrize("dialect", list(MARKS))
def test_a_model_that_babbles_makes_valid_calls(dialect: str, engine: Any) -> None:
    sampling = {"grammar": tools(dialect, parallel=False), "max_tokens": 150, "temperature": 1.0}
    outcomes = run_all(rebuilt(engine), *(request(str(seed), [5, 6], seed=seed, **sampling) for seed in range(4)))
    for outcome in outcomes:
        content, (call,) = parse_whole(new_parser(dialect, False), outcome.whole_text)
        assert content == ""
        arguments = json.loads(call.arguments)
        assert list(arguments) == {"weather": ["city"], "weather_now": []}[call.name]
        assert outcome.finish == {0: "stop"}
