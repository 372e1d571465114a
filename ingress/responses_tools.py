"""Tools as OpenAI's responses have them: flat, where chat has a `function` inside."""

from typing import Any, Literal

import msgspec

from ingress import tool_schemas
from ingress.tool_schemas import Function, ToolName, ToolUse, check_type
from shared.errors import BadRequest


class ResponsesTool(msgspec.Struct):
    """A tool that a request offers. Only functions are served."""

    type: str
    name: ToolName | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema; None: it takes none
    strict: bool | None = None  # its arguments are held to the schema


class FunctionTool(msgspec.Struct, tag="function"):
    """A tool as an answer repeats it."""

    name: str
    description: str | None
    parameters: dict[str, Any] | None
    strict: bool


class NamedFunction(msgspec.Struct):
    type: str
    name: str | None = None


class ChosenTool(NamedFunction):
    """A function that must be called, or (type `allowed_tools`) those that may or must."""

    mode: Literal["auto", "required"] | None = None
    tools: list[NamedFunction] | None = None


ResponsesToolChoice = Literal["none", "auto", "required"] | ChosenTool


def functions_of(tools: list[ResponsesTool] | None) -> list[Function]:
    """The functions that are offered. Raises BadRequest or Unsupported."""
    return tool_schemas.functions_of(tools or [], _function)


def _function(tool: ResponsesTool, where: str) -> Function:
    check_type(tool.type, where)
    if tool.name is None:
        raise BadRequest(f"{where}.name: missing", param=f"{where}.name")
    return Function(tool.name, tool.description, tool.parameters, tool.strict)


def use_of(functions: list[Function], choice: ResponsesToolChoice | None, parallel: bool | None) -> ToolUse | None:
    """What may be called; None: nothing. Raises BadRequest or Unsupported."""
    if not functions:
        if choice not in (None, "none", "auto"):
            raise BadRequest("tool_choice: needs `tools`", param="tool_choice")
        return None
    if choice == "none":
        return None
    if not isinstance(choice, ChosenTool):
        return ToolUse(functions, functions, choice == "required", parallel is not False)
    if choice.type != "allowed_tools":
        return ToolUse(functions, [_named(functions, choice, "tool_choice")], True, False)
    if not choice.tools or choice.mode is None:
        raise BadRequest("tool_choice: `allowed_tools` needs `mode` and `tools`", param="tool_choice")
    named = [_named(functions, each, f"tool_choice.tools[{index}]") for index, each in enumerate(choice.tools)]
    callable_ = [each for each in functions if each in named]
    return ToolUse(functions, callable_, choice.mode == "required", parallel is not False)


def _named(functions: list[Function], named: NamedFunction, where: str) -> Function:
    check_type(named.type, where)
    found = next((each for each in functions if each.name == named.name), None)
    if found is None:
        raise BadRequest(f"{where}.name: there is no tool `{named.name}`", param=f"{where}.name")
    return found
