"""Structured output in the words of OpenAI and of vLLM -> the one grammar of the wire."""

from typing import Any

import msgspec

from ingress.schemas import Body, ResponseFormat, StructuredOutputs
from ingress.tool_schemas import ToolUse
from shared.errors import BadRequest, Unsupported
from shared.tools import ToolGrammar
from shared.wire import Grammar


def to_grammar(body: Body, use: ToolUse | None, dialect: str) -> Grammar | None:
    """What the output must be; None: anything. Raises BadRequest or Unsupported. That it compiles, the worker finds out.

    `use` and `dialect`: what the output may call, and how.
    """
    given: dict[str, Grammar | None] = {body.FORMAT: _of_format(body.format_wanted())}
    if body.structured_outputs is not None:
        given |= _of_structured(body.structured_outputs)
    given["guided_json"] = _schema(body.guided_json, "guided_json")
    given["guided_regex"] = _text("regex", body.guided_regex)
    given["guided_choice"] = _choice(body.guided_choice, "guided_choice")
    given["guided_grammar"] = _text("grammar", body.guided_grammar)
    named = {name: grammar for name, grammar in given.items() if grammar is not None}
    if len(named) > 1:
        raise BadRequest(f"{' and '.join(named)}: one constraint a request is served", param=list(named)[1])
    name, constraint = next(iter(named.items()), ("", None))
    if use is None:
        return constraint
    if constraint is not None and constraint.kind not in ("json_schema", "json_object"):
        raise BadRequest(f"{name}: not together with tools, unless `tool_choice` is none", param=name)
    if constraint is None and not use.held:
        return None
    otherwise = None if use.required else constraint  # then there is nothing else
    return Grammar("tools", _encode(ToolGrammar(dialect, use.schemas(), use.required, use.parallel, otherwise)))


def _of_format(given: ResponseFormat | None) -> Grammar | None:
    if given is None or given.type == "text":
        return None
    if given.type == "json_object":
        return Grammar("json_object")
    if given.json_schema is None:
        raise BadRequest("response_format.json_schema: missing", param="response_format.json_schema")
    return Grammar("json_schema", _encode(given.json_schema.schema), strict=bool(given.json_schema.strict))


def _of_structured(given: StructuredOutputs) -> dict[str, Grammar | None]:
    for name in ("structural_tag", "whitespace_pattern"):
        if getattr(given, name) is not None:
            raise Unsupported(f"structured_outputs.{name}: not supported", param=f"structured_outputs.{name}")
    return {
        "structured_outputs.json": _schema(given.json, "structured_outputs.json"),
        "structured_outputs.regex": _text("regex", given.regex),
        "structured_outputs.choice": _choice(given.choice, "structured_outputs.choice"),
        "structured_outputs.grammar": _text("grammar", given.grammar),
        "structured_outputs.json_object": Grammar("json_object") if given.json_object else None,
    }


def _schema(given: dict[str, Any] | str | None, param: str) -> Grammar | None:
    if given is None:
        return None
    if isinstance(given, str):
        try:
            given = msgspec.json.decode(given, type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise BadRequest(f"{param}: not a JSON schema: {error}", param=param) from None
    return Grammar("json_schema", _encode(given))


def _text(kind: str, given: str | None) -> Grammar | None:
    return None if given is None else Grammar(kind, given)


def _choice(given: list[str] | None, param: str) -> Grammar | None:
    if given is None:
        return None
    if not given or "" in given:
        raise BadRequest(f"{param}: strings are needed, none of them empty", param=param)
    return Grammar("choice", _encode(given))


def _encode(given: object) -> str:
    return msgspec.json.encode(given).decode()
