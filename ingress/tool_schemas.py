"""Tools in OpenAI's words: what a request offers, what may be called, and the calls of earlier turns."""

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from shared.errors import BadRequest, Unsupported
from shared.records import Version
from shared.tools import DEFAULT, ToolSchema

TOOLS_MAX = 128  # as OpenAI has it
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}

T = TypeVar("T")

ToolName = Annotated[str, Meta(pattern=r"\A[a-zA-Z0-9_-]{1,64}\Z")]


class Function(msgspec.Struct):
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema; None: it takes none
    strict: bool | None = None  # its arguments are held to the schema


class Tool(msgspec.Struct):
    type: str
    function: Function | None = None


class FunctionName(msgspec.Struct):
    name: str


class NamedTool(msgspec.Struct):
    type: str
    function: FunctionName | None = None


class AllowedTools(msgspec.Struct):
    mode: Literal["auto", "required"]
    tools: list[NamedTool]


class Chosen(NamedTool):
    """A function that must be called, or (type `allowed_tools`) those that may or must."""

    allowed_tools: AllowedTools | None = None


ToolChoice = Literal["none", "auto", "required"] | Chosen


class CalledFunction(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any]  # OpenAI has JSON in a string


class ToolCall(msgspec.Struct):
    """A call of an earlier turn."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class ToolUse(msgspec.Struct):
    """What an answer may call."""

    offered: list[Function]  # to the model
    callable: list[Function]  # of them those that may be called
    required: bool  # a call there must be
    parallel: bool  # there may be several

    @property
    def held(self) -> bool:
        """Whether calls are held to a grammar."""
        return self.required or len(self.callable) < len(self.offered) or any(each.strict for each in self.callable)

    def described(self) -> list[dict[str, Any]]:
        """The tools as a chat template takes them."""
        return [
            {
                "type": "function",
                "function": {
                    "name": each.name,
                    "description": each.description or "",
                    "parameters": NO_PARAMETERS if each.parameters is None else each.parameters,
                },
            }
            for each in self.offered
        ]

    def schemas(self) -> list[ToolSchema]:
        """The tools that may be called, as a grammar needs them."""
        return [
            ToolSchema(each.name, NO_PARAMETERS if each.parameters is None else each.parameters, bool(each.strict))
            for each in self.callable
        ]


def tool_use(tools: list[Tool] | None, choice: ToolChoice | None, parallel: bool | None) -> ToolUse | None:
    """None: nothing may be called. Raises BadRequest or Unsupported."""
    if not tools:
        if choice not in (None, "none", "auto"):
            raise BadRequest("tool_choice: needs `tools`", param="tool_choice")
        return None
    functions = functions_of(tools, _function, "function.name")
    if choice == "none":
        return None
    if not isinstance(choice, Chosen):
        return ToolUse(functions, functions, choice == "required", parallel is not False)
    if choice.type != "allowed_tools":
        return ToolUse(functions, [_named(functions, choice, "tool_choice")], True, False)
    allowed = choice.allowed_tools
    if allowed is None or not allowed.tools:
        raise BadRequest("tool_choice.allowed_tools: names no tools", param="tool_choice.allowed_tools")
    where = "tool_choice.allowed_tools.tools[%d]"
    named = [_named(functions, each, where % index) for index, each in enumerate(allowed.tools)]
    may_call = [each for each in functions if each in named]
    return ToolUse(functions, may_call, allowed.mode == "required", parallel is not False)


def functions_of(tools: Sequence[T], function: Callable[[T, str], Function], name: str = "name") -> list[Function]:
    """The functions that `tools` offer: `function(tool, place)` of each, whose name is its field `name`.

    Raises BadRequest for too many and for two of one name, and what `function` raises.
    """
    if len(tools) > TOOLS_MAX:
        raise BadRequest(f"tools: at most {TOOLS_MAX}, got {len(tools)}", param="tools")
    functions: dict[str, Function] = {}
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        found = function(tool, where)
        if found.name in functions:
            raise BadRequest(f"{where}.{name}: `{found.name}` is there twice", param=f"{where}.{name}")
        functions[found.name] = found
    return list(functions.values())


def check_type(type_: str, where: str, served: str = "function") -> None:
    """Raise Unsupported for another type than that which is served."""
    if type_ != served:
        raise Unsupported(f"{where}.type: only `{served}` is served, not `{type_}`", param=f"{where}.type")


def _function(tool: Tool, where: str) -> Function:
    check_type(tool.type, where)
    if tool.function is None:
        raise BadRequest(f"{where}.function: missing", param=f"{where}.function")
    return tool.function


def _named(functions: list[Function], named: NamedTool, where: str) -> Function:
    check_type(named.type, where)
    if named.function is None:
        raise BadRequest(f"{where}.function: missing", param=f"{where}.function")
    found = next((each for each in functions if each.name == named.function.name), None)
    if found is None:
        raise BadRequest(f"{where}: there is no tool `{named.function.name}`", param=where)
    return found


def called(calls: list[ToolCall]) -> list[dict[str, Any]]:
    """Calls of an earlier turn as a chat template takes them: with the arguments as an object, if they are one."""
    return [
        {"id": each.id, "type": each.type, "function": {"name": each.function.name, "arguments": _arguments(each)}}
        for each in calls
    ]


def _arguments(call: ToolCall) -> str | dict[str, Any]:
    given = call.function.arguments
    if isinstance(given, dict):
        return given
    try:
        return msgspec.json.decode(given or "{}", type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return given  # what a model wrote need not be JSON, and it should see what it wrote


def dialect(version: Version) -> str:
    """How a version's model writes its calls."""
    chosen = version.engine.tool_dialect
    return (version.tool_dialect or DEFAULT) if chosen == "auto" else chosen
