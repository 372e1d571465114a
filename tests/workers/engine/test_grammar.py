"""Structured output: what is refused, what may come next, and a model that can only say what it is allowed to."""

import ast
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_driver import Outcome, rebuilt, request, run_all
from tiny_models import save_tiny_model

from shared.errors import BadRequest, Unsupported
from shared.records import EngineSettings
from shared.wire import Grammar, Input, Sampling
from workers.engine import grammar as module
from workers.engine.engine import BatchEngine
from workers.engine.grammar import COMPILED_MAX, GrammarFailed, Grammars, Matcher
from workers.engine.load import load_engine
from workers.engine.sim import load_simulated

END = 256
WIDTH = 260  # wider than the vocabulary, as the logits of many models are
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    pieces = [bytes([byte]) for byte in range(256)] + [b"<|end|>", b"", b"", b""]
    return Grammars(WIDTH, pieces.__getitem__, [END], frozenset({END}), lambda text: list(text.encode()))


def allowed(matcher: Matcher) -> set[int]:
    return set(np.flatnonzero(~matcher.forbidden(WIDTH)).tolist())


def feed(matcher: Matcher, text: str) -> list[bool]:
    return [matcher.advance(byte) for byte in text.encode()]


@pytest.mark.parametrize(
    ("kind", "body", "reason"),
    [
        ("json_schema", "{", "EOF"),
        ("json_schema", '{"type": "thing"}', "Invalid type: thing"),
        ("json_schema", '{"type": "object", "not": {"const": 1}}', 'Unimplemented keys: \\["not"\\]'),
        ("json_schema", '{"$ref": "#/nowhere"}', "nowhere"),
        ("json_schema", '{"$ref": "http://example.com/schema"}', "does not fetch"),
        ("json_schema", '{"$ref": "#"}', "cannot be used"),
        ("regex", "a(", "unclosed group"),
        ("choice", "[]", "a list of strings"),
        ("choice", '["a", 1]', "a list of strings"),
        ("choice", "yes", "Expecting value"),
        ("grammar", 'root ::= "a" other', "other"),
        ("grammar", 'start: "a" other', "other"),
        ("grammar", "hello", "Expected ::="),
        ("poem", "", "no kind of grammar named 'poem'"),
    ],
)
def test_what_cannot_compile_is_refused_with_the_reason(grammars: Grammars, kind: str, body: str, reason: str) -> None:
    with pytest.raises(BadRequest, match=reason) as refused:
        grammars.matcher(Grammar(kind, body))
    assert refused.value.param == "response_format"


@pytest.mark.parametrize(
    ("grammar", "whole", "others"),
    [
        (Grammar("choice", '["yes", "no", "né \\"x\\""]'), ["yes", "no", 'né "x"'], ["ya", "yess"]),
        (Grammar("regex", "[ab]{2}c?d"), ["abd", "bbcd"], ["acd", "abb"]),
        (Grammar("grammar", 'root ::= "x" [0-9] | "y" root'), ["x3", "yyx0"], ["xy", "z"]),
        (Grammar("grammar", 'start: "x" /[0-9]/ | "y" start'), ["x3", "yyx0"], ["xy", "z"]),
        (Grammar("json_schema", json.dumps(PERSON)), ['{"name": "Ann",\n "age": 7}'], ['{"age', '{"name": "Ferdinand']),
        (Grammar("json_object"), ['{"a": [1, {"b": null}]}', "{}"], ["[", '"a"', "{a"]),
    ],
)
def test_only_what_fits_may_come_and_the_end_is_seen(
    grammars: Grammars, grammar: Grammar, whole: list[str], others: list[str]
) -> None:
    for text in whole:
        matcher = grammars.matcher(grammar)
        for byte in text.encode():
            assert byte in allowed(matcher)
            assert END not in allowed(matcher)
            complete = matcher.advance(byte)
        assert complete
    for text in others:
        with pytest.raises(GrammarFailed):
            feed(grammars.matcher(grammar), text)


def test_the_end_may_come_only_where_the_grammar_accepts(grammars: Grammars) -> None:
    matcher = grammars.matcher(Grammar("regex", "ab*"))
    assert allowed(matcher) == {ord("a")}
    assert feed(matcher, "abb") == [False] * 3
    assert allowed(matcher) == {ord("b"), END}
    assert matcher.advance(END)


def test_a_schema_that_is_not_strict_leaves_out_what_it_cannot_enforce(grammars: Grammars) -> None:
    schema = json.dumps({"type": "boolean", "not": {"const": True}})
    assert feed(grammars.matcher(Grammar("json_schema", schema, strict=False)), "true")[-1]


def test_space_in_json_is_bounded(grammars: Grammars) -> None:
    matcher = grammars.matcher(Grammar("json_object"))
    feed(matcher, '{"a"' + " " * 24)
    assert allowed(matcher) == {ord(":")}


def test_without_an_end_id_only_the_grammar_ends_an_output() -> None:
    grammars = Grammars(256, lambda token: bytes([token]), [], frozenset(), lambda text: list(text.encode()))
    matcher = grammars.matcher(Grammar("regex", "ab?"))
    assert not matcher.advance(ord("a"))
    assert np.flatnonzero(~matcher.forbidden(256)).tolist() == [ord("b")]
    assert matcher.advance(ord("b"))


def test_a_grammar_is_compiled_once_and_the_oldest_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []
    source = module._source
    monkeypatch.setattr(module, "_source", lambda grammar: compiled.append(grammar.body) or source(grammar))
    grammars = Grammars(256, lambda token: bytes([token]), [], frozenset(), lambda text: list(text.encode()))
    first = Grammar("regex", "a")
    for body in ("a", "b", "a", "a"):
        assert grammars.matcher(Grammar("regex", body)).advance(ord(body))
    assert compiled == ["a", "b"]
    for index in range(COMPILED_MAX):
        grammars.matcher(Grammar("regex", f"c{index}"))
    grammars.matcher(first)
    assert compiled.count("a") == 2


def test_the_library_is_imported_with_the_first_grammar_only() -> None:
    for node in ast.parse(Path(module.__file__).read_text()).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            assert "llguidance" not in ast.dump(node)


# -- a model -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> BatchEngine:
    directory = save_tiny_model("llama", tmp_path_factory.mktemp("llama"))
    return load_engine("s3", directory, EngineSettings(dtype="float32"), 1)  # type: ignore[return-value]


def run(engine: BatchEngine, *requests: Any) -> list[Outcome]:
    return run_all(rebuilt(engine), *requests)


def person(key: str, **more: Any) -> Any:
    schema = Grammar("json_schema", json.dumps(PERSON))
    return request(key, [5, 6, 7], **({"max_tokens": 150, "temperature": 1.0, "seed": 4, "grammar": schema} | more))


def test_a_model_that_babbles_gives_what_the_schema_says(engine: BatchEngine) -> None:
    outcomes = run(engine, *(person(str(seed), seed=seed, n=2) for seed in range(3)), request("free", [5, 6, 7]))
    texts = ["".join(text) for outcome in outcomes[:3] for text in outcome.text.values()]
    assert len(set(texts)) == 6
    for text in texts:
        given = json.loads(text)
        assert list(given) == ["name", "age"]
        assert len(given["name"]) <= 5
        assert 0 <= given["age"] <= 99
    assert all(set(outcome.finish.values()) == {"stop"} for outcome in outcomes[:3])
    assert outcomes[3].finish == {0: "length"}


def test_a_resumed_output_goes_on_in_the_same_json(engine: BatchEngine) -> None:
    (whole,) = run(engine, person("whole"))
    ids = whole.ids[0]
    prefixes = range(1, len(ids), 3)
    rests = run(engine, *(person(str(done), prefix=[ids[:done]]) for done in prefixes))
    assert [rest.ids[0] for rest in rests] == [ids[done:] for done in prefixes]
    assert {rest.finish[0] for rest in rests} == {"stop"}
    (complete,) = run(engine, person("complete", prefix=[ids]))
    assert (complete.ids, complete.finish) == ({0: []}, {0: "stop"})


def test_a_prefix_that_does_not_fit_the_grammar_fails_its_own_request_only(engine: BatchEngine) -> None:
    wrong, right = run(engine, person("wrong", prefix=[[65]]), person("right"))
    assert wrong.error is not None
    assert wrong.error[0] == "engine_failed"
    assert "grammar" in wrong.error[1]
    assert right.finish == {0: "stop"}


def test_the_end_of_sequence_ends_it_even_when_it_is_to_be_ignored(engine: BatchEngine) -> None:
    open_ended = Grammar("regex", "b*")
    settings: dict[str, Any] = {"grammar": open_ended, "ignore_eos": True, "max_tokens": 5, "logit_bias": {END: 100.0}}
    (outcome,) = run(engine, request("a", [1], **settings))
    assert (outcome.ids, outcome.whole_text, outcome.finish) == ({0: [END]}, "", {0: "stop"})


def test_stop_strings_and_max_tokens_still_end_it(engine: BatchEngine) -> None:
    many = Grammar("regex", "(ab){50}")
    cut, short = run(
        engine, request("cut", [1], grammar=many, stop=["bab"]), request("short", [1], grammar=many, max_tokens=7)
    )
    assert (cut.whole_text, cut.finish) == ("a", {0: "stop"})
    assert (short.whole_text, short.finish) == ("abababa", {0: "length"})


def test_prepare_refuses_what_cannot_compile(engine: BatchEngine) -> None:
    with pytest.raises(BadRequest, match="unclosed"):
        engine.prepare(Input(token_ids=[1]), Sampling(grammar=Grammar("regex", "(")))


def test_the_simulated_engine_refuses_every_grammar() -> None:
    simulated = load_simulated("zero", EngineSettings())
    with pytest.raises(Unsupported) as refused:
        simulated.prepare(Input(token_ids=[1]), Sampling(grammar=Grammar("json_object")))
    assert refused.value.code == "unsupported_parameter"
