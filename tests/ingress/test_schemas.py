"""Bodies: what is accepted and what it becomes, and every refusal with the place that it names."""

import json
from typing import Any

import msgspec
import pytest

from ingress.decoding import decode
from ingress.schemas import Body, ChatBody, CompletionBody, InferBody
from ingress.translate import check_prompt_length, refuse_not_served, to_sampling
from shared.errors import HeadraceError
from shared.records import EngineSettings, Version
from shared.settings import Settings
from shared.tools import MARKS, decode_grammar
from shared.wire import ChatMessage, Grammar, Input, Request, Sampling

DECODERS: dict[str, msgspec.json.Decoder[Any]] = {
    "chat": msgspec.json.Decoder(ChatBody),
    "completions": msgspec.json.Decoder(CompletionBody),
    "infer": msgspec.json.Decoder(InferBody),
}
MINIMAL: dict[str, dict[str, Any]] = {
    "chat": {"model": "m", "messages": [{"role": "user", "content": "Hi"}]},
    "completions": {"model": "m", "prompt": "Hi"},
    "infer": {"input": "Hi"},
}
MODEL = Version(model="m", version="v1", state="available", source="sim:zero", max_model_len=100)


def translate(family: str, raw: bytes, settings: Settings | None = None) -> tuple[Input, Sampling]:
    settings = settings or Settings()
    body: Body = decode(DECODERS[family], raw)
    refuse_not_served(body)
    [prompt] = body.to_inputs()
    sampling = to_sampling(body, MODEL, settings)
    check_prompt_length(prompt, len(raw), MODEL, settings)
    return prompt, sampling


def given(family: str, **fields: Any) -> tuple[Input, Sampling]:
    return translate(family, json.dumps(MINIMAL[family] | fields).encode())


# -- what is accepted --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", MINIMAL)
def test_the_least_body_has_the_defaults(family: str) -> None:
    prompt, sampling = given(family)
    expected = Sampling(seed=sampling.seed, max_tokens=16 if family == "completions" else None)
    assert sampling == expected
    assert (prompt.prompt or prompt.messages[0].content) == "Hi"  # type: ignore[index]


def test_every_field_reaches_the_wire() -> None:
    fields = {
        "max_tokens": 7,
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 4,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": -1,
        "frequency_penalty": 1.5,
        "logit_bias": {"12": -100, "7": 3.5},
        "seed": 42,
        "n": 3,
        "stop": ["a", "b"],
        "stop_token_ids": [2, 3],
        "ignore_eos": True,
        "min_tokens": 2,
    }
    expected = msgspec.convert(fields | {"logit_bias": {12: -100, 7: 3.5}}, Sampling)
    for family in MINIMAL:
        more = {"logprobs": True, "top_logprobs": 5} if family == "chat" else {"logprobs": 5}
        if family == "infer":
            more["n"] = 1
        wanted = msgspec.structs.replace(expected, logprobs=5, n=1 if family == "infer" else 3)
        assert given(family, **(fields | more))[1] == wanted


def test_null_is_the_default_and_harmless_fields_are_accepted() -> None:
    nulls = {name: None for name in ChatBody.__struct_fields__ if name not in ("model", "messages")}
    harmless = {
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "auto",
        "parallel_tool_calls": False,
        "user": "u",
        "tool_choice": "none",
        "tools": [],
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "something_new": [1, {"deep": None}],
    }
    assert msgspec.structs.replace(given("chat", **(nulls | harmless))[1], seed=0) == Sampling()


def test_an_answer_of_no_text_may_be_sent_back() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    for said, content in (
        ({"content": None}, ""),
        ({"content": None, "refusal": None, "tool_calls": []}, ""),
        ({}, ""),
        ({"content": []}, ""),
        ({"content": None, "refusal": "I won't."}, "I won't."),
        ({"content": [{"type": "refusal", "refusal": "I "}, {"type": "text", "text": "won't."}]}, "I won't."),
        ({"content": None, "tool_calls": [call]}, None),
    ):
        turns = [{"role": "user", "content": "x"}, {"role": "assistant", **said}, {"role": "user", "content": "y"}]
        messages = given("chat", messages=turns)[0].messages or []
        assert messages[1].content == content


def test_a_top_p_of_0_is_the_likeliest_token_alone() -> None:
    assert 0 < given("chat", top_p=0)[1].top_p < 1e-6


@pytest.mark.parametrize(
    ("fields", "max_tokens"),
    [
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 6}, 6),
        ({"max_tokens": 5, "max_completion_tokens": 6}, 6),
        ({"max_tokens": None}, None),
    ],
)
def test_max_completion_tokens_wins(fields: dict[str, Any], max_tokens: int | None) -> None:
    assert given("chat", **fields)[1].max_tokens == max_tokens


def test_seeds_are_fixed_at_admission() -> None:
    seeds = {given("infer")[1].seed for _ in range(20)}
    assert len(seeds) == 20
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert given("infer", seed=-1)[1].seed == 2**64 - 1
    assert given("infer", seed=0)[1].seed == 0
    wire_safe = Request("r", "m", "v1", *given("infer", seed=-(2**63)))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(wire_safe), type=Request) == wire_safe


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"logprobs": False}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 3}, 3),
        ({"logprobs": False, "top_logprobs": 0}, None),
    ],
)
def test_chat_logprobs(fields: dict[str, Any], expected: int | None) -> None:
    assert given("chat", **fields)[1].logprobs == expected


def test_completion_logprobs_zero_means_the_chosen_token() -> None:
    assert given("completions", logprobs=0)[1].logprobs == 0
    assert given("completions")[1].logprobs is None


SCHEMA = {"type": "object", "properties": {"é": {"type": "integer"}}}
SCHEMA_TEXT = '{"type":"object","properties":{"é":{"type":"integer"}}}'


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"structured_outputs": {}}, None),
        ({"structured_outputs": {"json_object": False}}, None),
        ({"response_format": {"type": "json_object"}}, Grammar("json_object")),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
                }
            },
            Grammar("json_schema", SCHEMA_TEXT),
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
            Grammar("json_schema", SCHEMA_TEXT, strict=False),
        ),
        ({"guided_json": SCHEMA}, Grammar("json_schema", SCHEMA_TEXT)),
        ({"guided_json": json.dumps(SCHEMA)}, Grammar("json_schema", SCHEMA_TEXT)),
        ({"guided_regex": "a+"}, Grammar("regex", "a+")),
        ({"guided_choice": ["a", "b"]}, Grammar("choice", '["a","b"]')),
        ({"guided_grammar": "root ::= x"}, Grammar("grammar", "root ::= x")),
        ({"structured_outputs": {"json": SCHEMA}}, Grammar("json_schema", SCHEMA_TEXT)),
        ({"structured_outputs": {"regex": "a+"}}, Grammar("regex", "a+")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, Grammar("choice", '["a","b"]')),
        ({"structured_outputs": {"grammar": "root ::= x"}}, Grammar("grammar", "root ::= x")),
        ({"structured_outputs": {"json_object": True}}, Grammar("json_object")),
    ],
)
def test_structured_output_is_one_grammar(fields: dict[str, Any], grammar: Grammar | None) -> None:
    for family in MINIMAL:
        assert given(family, **fields)[1].grammar == grammar


def test_an_echo_may_come_alone() -> None:
    sampling = given("completions", echo=True, max_tokens=0, logprobs=3)[1]
    assert (sampling.echo, sampling.max_tokens, sampling.logprobs) == (True, 0, 3)
    assert not given("completions", echo=False)[1].echo


def test_stop_may_be_a_string_and_top_k_minus_one_is_off() -> None:
    assert given("chat", stop="END")[1].stop == ["END"]
    assert given("chat", top_k=-1)[1].top_k == 0


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("Hi", Input(prompt="Hi")),
        (["Hi"], Input(prompt="Hi")),
        ([1, 2], Input(token_ids=[1, 2])),
        ([[1, 2]], Input(token_ids=[1, 2])),
    ],
)
def test_prompts(prompt: Any, expected: Input) -> None:
    assert given("completions", prompt=prompt)[0] == expected


def test_native_input_is_text_messages_or_token_ids() -> None:
    assert given("infer", input="Hi")[0] == Input(prompt="Hi")
    assert given("infer", input=[5, 6])[0] == Input(token_ids=[5, 6])
    assert given("infer", input=[{"role": "user", "content": "Hi"}])[0] == Input(messages=[ChatMessage("user", "Hi")])


def test_messages_keep_what_a_template_needs() -> None:
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    prompt, _ = given(
        "chat",
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "name": "Ann", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "é"}]},
            {"role": "assistant", "content": None, "tool_calls": calls},
            {"role": "tool", "tool_call_id": "1", "content": ""},
        ],
    )
    assert prompt.messages == [
        ChatMessage("system", "Be brief."),
        ChatMessage("user", "aé", name="Ann"),
        ChatMessage("assistant", None, tool_calls=[calls[0] | {"function": {"name": "f", "arguments": {}}}]),
        ChatMessage("tool", "", name="f", tool_call_id="1"),
    ]


# -- tools -------------------------------------------------------------------------------------------------------------

ROME = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "Of a city", "parameters": ROME}}
CLOCK = {"type": "function", "function": {"name": "clock"}}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def test_tools_go_to_the_template_and_their_marks_stay_in_the_text() -> None:
    prompt, sampling = given("chat", tools=[WEATHER, CLOCK])
    described = {"name": "clock", "description": "", "parameters": NOTHING}
    assert prompt.tools == [WEATHER, {"type": "function", "function": described}]
    assert sampling.shown == ["<tool_call>", "</tool_call>"]
    assert sampling.grammar is None


@pytest.mark.parametrize(
    ("fields", "names", "required", "parallel"),
    [
        ({"tool_choice": "required"}, ["weather", "clock"], True, True),
        ({"tool_choice": "required", "parallel_tool_calls": False}, ["weather", "clock"], True, False),
        ({"tool_choice": {"type": "function", "function": {"name": "clock"}}}, ["clock"], True, False),
        ({"tool_choice": allowed("auto", "clock")}, ["clock"], False, True),
        ({"tool_choice": allowed("required", "clock", "weather")}, ["weather", "clock"], True, True),
        ({"tools": [WEATHER, {"type": "function", "function": {"name": "g", "strict": True}}]}, ["weather", "g"], False, True),
    ],
)  # fmt: skip
def test_calls_that_are_required_or_strict_are_held_to_a_grammar(
    fields: dict[str, Any], names: list[str], required: bool, parallel: bool
) -> None:
    prompt, sampling = given("chat", **({"tools": [WEATHER, CLOCK]} | fields))
    assert sampling.grammar is not None
    assert sampling.grammar.kind == "tools"
    grammar = decode_grammar(sampling.grammar.body)
    assert [tool.name for tool in grammar.tools] == names
    assert (grammar.dialect, grammar.required, grammar.parallel) == ("hermes", required, parallel)
    assert [tool.strict for tool in grammar.tools] == [name == "g" for name in names]
    assert prompt.tools is not None
    assert len(prompt.tools) == 2


def test_an_answer_may_be_calls_or_else_json() -> None:
    _, sampling = given("chat", tools=[WEATHER], response_format={"type": "json_object"})
    assert sampling.grammar is not None
    grammar = decode_grammar(sampling.grammar.body)
    assert (grammar.required, grammar.otherwise) == (False, Grammar("json_object"))
    _, sampling = given("chat", tools=[WEATHER], response_format={"type": "json_object"}, tool_choice="required")
    assert sampling.grammar is not None
    grammar = decode_grammar(sampling.grammar.body)
    assert (grammar.required, grammar.otherwise) == (True, None)


def test_without_a_choice_of_tools_there_are_none() -> None:
    prompt, sampling = given("chat", tools=[WEATHER], tool_choice="none", response_format={"type": "json_object"})
    assert (prompt.tools, sampling.shown, sampling.grammar) == (None, [], Grammar("json_object"))


@pytest.mark.parametrize(
    ("engine", "found", "dialect"),
    [("auto", "", "hermes"), ("auto", "mistral", "mistral"), ("llama3", "mistral", "llama3")],
)
def test_the_dialect_is_the_settings_else_the_templates(engine: Any, found: str, dialect: str) -> None:
    version = msgspec.structs.replace(MODEL, tool_dialect=found, engine=EngineSettings(tool_dialect=engine))
    body = decode(DECODERS["chat"], json.dumps(MINIMAL["chat"] | {"tools": TOOLS, "tool_choice": "required"}).encode())
    sampling = to_sampling(body, version, Settings())
    assert sampling.grammar is not None
    assert decode_grammar(sampling.grammar.body).dialect == dialect
    assert sampling.shown == list(MARKS[dialect])


@pytest.mark.parametrize(
    ("written", "template"),
    [('{"a": 1}', {"a": 1}), ("", {}), ({"a": 1}, {"a": 1}), ('{"a": ', '{"a": '), ("[1]", "[1]")],
)
def test_arguments_of_earlier_calls_are_objects_where_they_are_json(written: Any, template: Any) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": written}}
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]
    prompt, _ = given("chat", messages=turns)
    assert prompt.messages is not None
    assert prompt.messages[1].tool_calls == [call | {"function": {"name": "f", "arguments": template}}]


# -- what is refused ---------------------------------------------------------------------------------------------------

NOT_JSON = [
    (b"", "not JSON"),
    (b"{", "not JSON"),
    (b"model=m", "not JSON"),
    (b'{"model":"\xff","messages":[]}', "UTF-8"),
    (b'{"model":"\\ud800","messages":[]}', "surrogate"),
    (b'{"model":"m","messages":[],"temperature":NaN}', "not JSON"),
    (b'{"model":"m","messages":[]} trailing', "not JSON"),
    (b'{"x":' + b"[" * 100_000, "nested too deeply"),
]


@pytest.mark.parametrize(("raw", "words"), NOT_JSON, ids=[words + str(i) for i, (_, words) in enumerate(NOT_JSON)])
def test_what_is_not_json_is_refused(raw: bytes, words: str) -> None:
    with pytest.raises(HeadraceError, match=words) as caught:
        translate("chat", raw)
    assert (caught.value.status, caught.value.code) == (400, "invalid_request")


IMAGE = [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": "u"}}]}]

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


def numbered(number: int) -> dict[str, Any]:
    return {"type": "function", "function": {"name": f"f{number}"}}


INVALID: list[tuple[str, Any, str | None, str]] = [
    # family, fields (or a whole body that is no object), param, words of the message
    ("chat", [], None, "expected `object`, got `array`"),
    ("chat", {"model": ...}, "model", "model: missing"),
    ("chat", {"messages": ...}, "messages", "messages: missing"),
    ("chat", {"model": 3}, "model", "expected `str`, got `int`"),
    ("chat", {"messages": {}}, "messages", "expected `array`"),
    ("chat", {"messages": []}, "messages", "must not be empty"),
    ("chat", {"messages": [{"role": "user", "content": "x"}, "y"]}, "messages[1]", "expected `object`"),
    ("chat", {"messages": [{"content": "x"}]}, "messages[0].role", "missing"),
    ("chat", {"messages": [{"role": 1, "content": "x"}]}, "messages[0].role", "expected `str`, got `int`"),
    (
        "chat",
        {"messages": [{"role": "robot", "content": "x"}]},
        "messages[0].role",
        "'robot', one of assistant, developer, system, tool, user",
    ),
    ("chat", {"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "got `int`"),
    ("chat", {"messages": [{"role": "user"}]}, "messages[0].content", "needs content"),
    ("chat", {"messages": [{"role": "user", "content": None, "refusal": "x"}]}, "messages[0].content", "needs content"),
    (
        "chat",
        {"messages": [{"role": "assistant", "content": [{"type": "refusal"}]}]},
        "messages[0].content[0].refusal",
        "missing",
    ),
    ("chat", {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text", "missing"),
    ("chat", {"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0].type", "missing"),
    ("chat", {"stream": "yes"}, "stream", "expected `bool | null`, got `str`"),
    ("chat", {"stream_options": {"include_usage": True}}, "stream_options", "only with `stream: true`"),
    ("chat", {"stream": False, "stream_options": {}}, "stream_options", "only with `stream: true`"),
    ("chat", {"max_tokens": 0}, "max_tokens", ">= 1"),
    ("chat", {"max_tokens": -5}, "max_tokens", ">= 1"),
    ("chat", {"max_tokens": 1.5}, "max_tokens", "got `float`"),
    ("chat", {"max_tokens": "9"}, "max_tokens", "got `str`"),
    ("chat", {"max_tokens": 2**40}, "max_tokens", "<= 2147483647"),
    ("chat", {"max_completion_tokens": 0}, "max_completion_tokens", ">= 1"),
    ("chat", {"min_tokens": 9, "max_tokens": 8}, "min_tokens", "9 is over max_tokens, 8"),
    ("chat", {"min_tokens": -1}, "min_tokens", ">= 0"),
    ("chat", {"temperature": -0.1}, "temperature", ">= 0"),
    ("chat", {"temperature": 2.1}, "temperature", "<= 2"),
    ("chat", {"temperature": True}, "temperature", "got `bool`"),
    ("chat", {"top_p": -0.1}, "top_p", ">= 0"),
    ("chat", {"top_p": 1.1}, "top_p", "<= 1"),
    ("chat", {"top_k": -2}, "top_k", ">= -1"),
    ("chat", {"min_p": 1.1}, "min_p", "<= 1"),
    ("chat", {"repetition_penalty": 0}, "repetition_penalty", "> 0"),
    ("chat", {"presence_penalty": 2.5}, "presence_penalty", "<= 2"),
    ("chat", {"frequency_penalty": -2.5}, "frequency_penalty", ">= -2"),
    ("chat", {"logit_bias": {"5": 101}}, "logit_bias", "<= 100"),
    ("chat", {"logit_bias": {"x": 1}}, "logit_bias", "got `str`"),
    ("chat", {"logit_bias": {"-1": 1}}, "logit_bias", ">= 0"),
    ("chat", {"seed": "x"}, "seed", "got `str`"),
    ("chat", {"seed": 2**64}, "seed", "64 bits"),
    ("chat", {"seed": -(2**63) - 1}, "seed", "64 bits"),
    ("chat", {"n": 0}, "n", ">= 1"),
    ("chat", {"n": 17}, "n", "at most 16, got 17"),
    ("chat", {"stop": ["a", "b", "c", "d", "e"]}, "stop", "at most 4 strings, got 5"),
    ("chat", {"stop": ""}, "stop", "empty string"),
    ("chat", {"stop": [1]}, "stop[0]", "got `int`"),
    ("chat", {"stop_token_ids": [-1]}, "stop_token_ids[0]", ">= 0"),
    ("chat", {"logprobs": 5}, "logprobs", "got `int`"),
    ("chat", {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "<= 20"),
    ("chat", {"top_logprobs": 2}, "top_logprobs", "needs `logprobs: true`"),
    ("completions", {"prompt": ...}, "prompt", "missing"),
    ("completions", {"prompt": ""}, "prompt", "must not be empty"),
    ("completions", {"prompt": []}, "prompt", "must not be empty"),
    ("completions", {"prompt": [[]]}, "prompt", "must not be empty"),
    ("completions", {"prompt": [1, "a"]}, "prompt[1]", "do not mix"),
    ("completions", {"prompt": [1, [2]]}, "prompt[1]", "do not mix"),
    ("completions", {"prompt": [[1, "2"]]}, "prompt[0][1]", "got `str`"),
    ("completions", {"prompt": [-1]}, "prompt[0]", ">= 0"),
    ("completions", {"prompt": ["a", ""]}, "prompt[1]", "must not be empty"),
    ("completions", {"prompt": ["a", 1]}, "prompt[1]", "do not mix"),
    ("completions", {"prompt": ["a", [1, "b"]]}, "prompt[1][1]", "got `str`"),
    ("completions", {"logprobs": -1}, "logprobs", ">= 0"),
    ("completions", {"max_tokens": 0}, "max_tokens", "at least 1 without `echo`"),
    ("chat", {"response_format": {"type": "yaml"}}, "response_format.type", "'yaml'"),
    ("chat", {"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing"),
    (
        "chat",
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "response_format.json_schema.schema",
        "missing",
    ),
    ("chat", {"guided_json": "not json"}, "guided_json", "not a JSON schema"),
    ("chat", {"guided_json": "[1]"}, "guided_json", "not a JSON schema"),
    ("chat", {"guided_choice": []}, "guided_choice", "none of them empty"),
    ("chat", {"guided_choice": ["a", ""]}, "guided_choice", "none of them empty"),
    ("chat", {"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "guided_regex and guided_choice"),
    ("chat", {"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex", "one constraint"),
    (
        "chat",
        {"structured_outputs": {"regex": "a", "choice": ["a"]}},
        "structured_outputs.choice",
        "structured_outputs.regex and structured_outputs.choice",
    ),
    ("chat", {"tool_choice": "required"}, "tool_choice", "needs `tools`"),
    ("chat", {"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice", "needs `tools`"),
    ("chat", {"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice", "tool_choice"),
    ("chat", {"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice.function", "missing"),
    ("chat", {"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools", "names no tools"),
    (
        "chat",
        {"tools": TOOLS, "tool_choice": allowed("auto", "f", "g")},
        "tool_choice.allowed_tools.tools[1]",
        "no tool `g`",
    ),
    (
        "chat",
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "tool_choice",
        "no tool `g`",
    ),
    ("chat", {"tools": [{"type": "function"}]}, "tools[0].function", "missing"),
    ("chat", {"tools": [{"function": {"name": "f"}}]}, "tools[0].type", "missing"),
    (
        "chat",
        {"tools": [{"type": "function", "function": {"name": "a b"}}]},
        "tools[0].function.name",
        "matching regex",
    ),
    ("chat", {"tools": TOOLS * 2}, "tools[1].function.name", "twice"),
    ("chat", {"tools": [numbered(n) for n in range(129)]}, "tools", "at most 128, got 129"),
    ("chat", {"tools": TOOLS, "guided_regex": "a"}, "guided_regex", "not together with tools"),
    ("chat", {"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id", "missing"),
    (
        "chat",
        {"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]},
        "messages[0].tool_call_id",
        "no message",
    ),
    ("infer", {"input": ...}, "input", "missing"),
    ("infer", {"input": ""}, "input", "must not be empty"),
    ("infer", {"input": []}, "input", "must not be empty"),
    ("infer", {"input": [{"role": "user", "content": "x"}, 5]}, "input", "not both"),
    ("infer", {"input": [5, {"role": "user", "content": "x"}]}, "input[1]", "do not mix"),
    ("infer", {"input": [{"role": "x", "content": "x"}]}, "input[0].role", "one of assistant, developer, system"),
]


@pytest.mark.parametrize(("family", "fields", "param", "words"), INVALID)
def test_invalid_bodies_are_refused_by_place(family: str, fields: Any, param: str | None, words: str) -> None:
    body = fields
    if isinstance(fields, dict):
        body = {name: value for name, value in (MINIMAL[family] | fields).items() if value is not ...}
    with pytest.raises(HeadraceError) as caught:
        translate(family, json.dumps(body).encode())
    error = caught.value
    assert (error.status, error.code) == (400, "invalid_request"), error.message
    assert error.param == param, error.message
    assert words in error.message


UNSUPPORTED: list[tuple[str, dict[str, Any], str]] = [
    ("completions", {"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ("infer", {"tool_choice": "required"}, "tool_choice"),
    ("chat", {"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
    ("chat", {"tools": TOOLS, "tool_choice": {"type": "custom", "custom": {"name": "f"}}}, "tool_choice.type"),
    ("chat", {"functions": [{"name": "f"}]}, "functions"),
    ("chat", {"function_call": {"name": "f"}}, "function_call"),
    ("chat", {"modalities": ["text", "audio"]}, "modalities"),
    ("chat", {"audio": {"voice": "alloy", "format": "mp3"}}, "audio"),
    ("chat", {"prediction": {"type": "content", "content": "x"}}, "prediction"),
    ("chat", {"web_search_options": {}}, "web_search_options"),
    ("chat", {"reasoning_effort": "high"}, "reasoning_effort"),
    ("chat", {"chat_template": "{{ x }}"}, "chat_template"),
    ("completions", {"suffix": "end"}, "suffix"),
    ("completions", {"best_of": 3}, "best_of"),
    ("completions", {"prompt_logprobs": 1}, "prompt_logprobs"),
    ("chat", {"echo": True}, "echo"),
    ("infer", {"echo": True}, "echo"),
    ("chat", {"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
    (
        "chat",
        {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
        "structured_outputs.whitespace_pattern",
    ),
    ("infer", {"n": 2}, "n"),
    ("chat", {"messages": IMAGE}, "messages[0].content[1]"),
    (
        "chat",
        {"messages": [{"role": "user", "content": [{"type": "refusal", "refusal": "x"}]}]},
        "messages[0].content[0]",
    ),
]


@pytest.mark.parametrize(("family", "fields", "param"), UNSUPPORTED)
def test_what_is_not_served_is_refused_clearly(family: str, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(HeadraceError) as caught:
        given(family, **fields)
    error = caught.value
    assert (error.status, error.code, error.param) == (400, "unsupported_parameter", param)
    assert error.message.startswith(param)


@pytest.mark.parametrize(("param", "words"), [("prompt_logprobs", "`echo`"), ("best_of", "`n`")])
def test_a_refusal_says_what_is_served_instead(param: str, words: str) -> None:
    with pytest.raises(HeadraceError, match=words):
        given("completions", **{param: 2})


def test_lengths_name_both_numbers() -> None:
    cases: list[tuple[str, dict[str, Any], list[str], str | None]] = [
        ("chat", {"max_tokens": 101}, ["101", "100"], "max_tokens"),
        ("completions", {"prompt": [1] * 101}, ["101", "100"], None),
        ("completions", {"prompt": "é" * 801}, ["1602", "100", "1600"], None),
        ("chat", {"messages": [{"role": "user", "content": "x" * 800}] * 3}, ["2400", "100", "1600"], None),
    ]
    for family, fields, numbers, param in cases:
        with pytest.raises(HeadraceError) as caught:
            given(family, **fields)
        assert (caught.value.code, caught.value.param) == ("context_length_exceeded", param)
        assert all(number in caught.value.message for number in numbers)
    assert given("chat", max_tokens=100)[1].max_tokens == 100
    assert given("completions", prompt="x" * 1600)[0].prompt == "x" * 1600
    # what is in the body beside the prompt does not count
    assert given("completions", prompt="x" * 100, metadata={"x": "x" * 5000})[0].prompt == "x" * 100


def test_settings_bound_choices_and_stop_strings() -> None:
    body = json.dumps(MINIMAL["chat"] | {"n": 3, "stop": ["a", "b"]}).encode()
    assert translate("chat", body, Settings(choices_max=3, stop_strings_max=2))[1].n == 3
    for settings in (Settings(choices_max=2), Settings(stop_strings_max=1)):
        with pytest.raises(HeadraceError, match="at most"):
            translate("chat", body, settings)
