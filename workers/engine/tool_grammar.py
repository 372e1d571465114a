"""Tool calls as a grammar of llguidance: each dialect's syntax around the JSON schemas of the tools.

What a call begins with is a special token in some vocabularies and text in others. Where calls are not required, any text may
come before the first, or instead of it: what begins a call is then looked for in the text (a lazy lexeme).
"""

import json
from collections.abc import Mapping
from typing import Any

from shared.tools import CALLS_MAX, DIALECTS, ToolGrammar
from shared.wire import Grammar

Lines = list[str]


def lark(grammar: ToolGrammar, special: Mapping[str, int], whitespace: str) -> str:
    """The grammar in llguidance's Lark. `special`: the special tokens of the vocabulary by their text.

    Raises ValueError for what is no such grammar.
    """
    if grammar.dialect not in DIALECTS:
        raise ValueError(f"there is no dialect {grammar.dialect!r}")
    if not grammar.tools:
        raise ValueError("there are no tools")
    rules = ["%llguidance {}"]
    match grammar.dialect:
        case "hermes":
            rules += _hermes(grammar, special)
        case "llama3":
            rules += _llama3(grammar, special)
        case "mistral":
            rules += _mistral(grammar, special)
    for index, tool in enumerate(grammar.tools):
        rules.append(f"args_{index}: %json {_schema(tool.parameters, tool.strict, whitespace)}")
    if (otherwise := grammar.otherwise) is not None:
        rules.append(f"otherwise: %json {_schema(_json_schema(otherwise), otherwise.strict, whitespace)}")
    return "\n".join(rules)


def _hermes(grammar: ToolGrammar, special: Mapping[str, int]) -> Lines:
    mark, close = _token("<tool_call>", special), _token("</tool_call>", special)
    return [
        *_start(grammar, mark, f"body {_more(grammar, _text(chr(10)), mark, 'body')}"),
        f"body: {_text(chr(10))} object {_text(chr(10))} {close}",
        *_object(grammar, "arguments"),
    ]


def _llama3(grammar: ToolGrammar, special: Mapping[str, int]) -> Lines:
    """The token is for calls that follow text: the model's own way is the object alone."""
    lines = [f"calls: object {_more(grammar, _text('; '), 'object')}", *_object(grammar, "parameters")]
    if grammar.required or grammar.otherwise is not None:
        return [f"start: calls{' | otherwise' if grammar.otherwise is not None else ''}", *lines]
    # text that begins with a brace would be taken for a call
    text = r"/[ \t\r\n]*([^{ \t\r\n](.|\n)*)?/"
    return [*_start(grammar, _token("<|python_tag|>", special), "calls", text, "calls"), *lines]


def _mistral(grammar: ToolGrammar, special: Mapping[str, int]) -> Lines:
    mark = _token("[TOOL_CALLS]", special)
    if "[ARGS]" not in special:
        return [
            *_start(grammar, mark, "body"),
            f"body: {_text('[')} object {_more(grammar, _text(', '), 'object')} {_text(']')}",
            *_object(grammar, "arguments"),
        ]
    separator = _token("[ARGS]", special)
    calls = [f"{_text(tool.name)} {separator} args_{index}" for index, tool in enumerate(grammar.tools)]
    return [*_start(grammar, mark, f"body {_more(grammar, mark, 'body')}"), f"body: {' | '.join(calls)}"]


def _start(grammar: ToolGrammar, mark: str, calls: str, text: str = r"/(.|\n)*/", otherwise: str = "") -> Lines:
    """Calls behind a mark; where they are not required, also text alone or before them, or what is `otherwise` there."""
    if grammar.required or grammar.otherwise is not None:
        return [f"start: {mark} {calls}{' | otherwise' if grammar.otherwise is not None else ''}"]
    either = f" | {otherwise}" if otherwise else ""
    if mark.startswith("<["):
        return [f"start: TEXT | TEXT {mark} {calls}{either}", f"TEXT: {text}"]
    return [f"start: TEXT | trigger {calls}{either}", f"trigger[lazy]: TEXT {mark}", f"TEXT: {text}"]


def _more(grammar: ToolGrammar, *call: str) -> str:
    """Further calls, if there may be any."""
    return f"({' '.join(call)}){{0,{CALLS_MAX - 1}}}" if grammar.parallel else ""


def _object(grammar: ToolGrammar, key: str) -> Lines:
    """The object of a call, each of JSON's tokens by itself: lexemes are greedy, and another object may stand there, too."""
    name, colon, comma = _text(json.dumps("name")), f"{_text(':')} {_text(' ')}", f"{_text(',')} {_text(' ')}"
    calls = [
        f"{_text(json.dumps(tool.name))} {comma} {_text(json.dumps(key))} {colon} args_{index}"
        for index, tool in enumerate(grammar.tools)
    ]
    return [f"object: {_text('{')} {name} {colon} call {_text('}')}", f"call: {' | '.join(calls)}"]


def _schema(given: dict[str, Any], strict: bool, whitespace: str) -> str:
    """A schema with how it is to be taken. It is of an object, if it does not say of what."""
    how = {"whitespace_pattern": whitespace, "lenient": not strict}
    return json.dumps({"type": "object"} | given | {"x-guidance": how})


def _json_schema(constraint: Grammar) -> dict[str, Any]:
    """Raises ValueError."""
    schema = json.loads(constraint.body) if constraint.kind == "json_schema" else {}
    if constraint.kind not in ("json_schema", "json_object") or not isinstance(schema, dict):
        raise ValueError(f"a {constraint.kind} does not go with tools")
    return schema


def _token(mark: str, special: Mapping[str, int]) -> str:
    return f"<[{special[mark]}]>" if mark in special else _text(mark)


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
