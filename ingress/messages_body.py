"""The bodies of /v1/messages and of /v1/messages/count_tokens, as Anthropic has them.

They are bodies like those of the other inference routes, so that all that is common to them is served here too.
"""

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from ingress.messages_turns import Turn, chat_turns
from ingress.schemas import Body, Count
from ingress.tool_schemas import Function, ToolUse, check_type, functions_of
from shared.errors import BadRequest
from shared.wire import Input


class MessagesTool(msgspec.Struct):
    name: Annotated[str, Meta(pattern=r"\A[a-zA-Z0-9_-]{1,128}\Z")]
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    type: str | None = None
    strict: bool | None = None  # calls are held to the schema


class MessagesToolChoice(msgspec.Struct):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Metadata(msgspec.Struct):
    user_id: str | None = None


class SystemBlock(msgspec.Struct):
    type: str
    text: str | None = None


class PromptBody(Body, kw_only=True):
    """What both routes have in common: what makes the prompt."""

    SERVED = frozenset({"tools", "tool_choice"})
    OTHERS: ClassVar[tuple[str, ...]] = (  # fields that are refused beside those of NotServed
        *("n", "stop", "stream_options"),
        *("thinking", "mcp_servers", "container", "context_management", "output_config", "output_format"),
    )

    model: str
    messages: list[Turn]
    system: str | list[SystemBlock] | None = None
    tools: list[MessagesTool] | None = None
    tool_choice: MessagesToolChoice | None = None
    metadata: Metadata | None = None
    thinking: Any = None
    mcp_servers: Any = None
    container: Any = None
    context_management: Any = None
    output_config: Any = None
    output_format: Any = None

    def __post_init__(self) -> None:
        if self.user is None and self.metadata is not None:
            self.user = self.metadata.user_id

    @classmethod
    def not_served(cls) -> list[str]:
        return [*super().not_served(), *cls.OTHERS]

    def to_input(self) -> Input:
        use = self._use()
        turns = chat_turns(_system(self.system), self.messages)
        return Input(messages=turns, tools=None if use is None else use.described())

    def logprobs_wanted(self) -> int | None:
        return None

    def _use(self) -> ToolUse | None:
        choice = self.tool_choice or MessagesToolChoice("auto")
        if not self.tools:
            if choice.type in ("any", "tool"):
                raise BadRequest("tool_choice: needs `tools`", param="tool_choice")
            return None
        functions = functions_of(self.tools, _function)
        if choice.type == "none":
            return None
        if choice.type != "tool":
            return ToolUse(functions, functions, choice.type == "any", not choice.disable_parallel_tool_use)
        named = [each for each in functions if each.name == choice.name]
        if not named:
            raise BadRequest(f"tool_choice.name: there is no tool `{choice.name}`", param="tool_choice.name")
        return ToolUse(functions, named, True, False)


class MessagesBody(PromptBody, kw_only=True):
    """POST /v1/messages."""

    STOP, INCLUDES_STOP = "stop_sequences", True

    max_tokens: Count
    stop_sequences: list[str] | None = None

    def tool_use(self) -> ToolUse | None:
        return self._use()


class CountBody(PromptBody, kw_only=True):
    """POST /v1/messages/count_tokens: a request that generates nothing. `tool_use` is None: nothing is called."""

    TAKEN: ClassVar[frozenset[str]] = frozenset(
        {"model", "messages", "system", "tools", "tool_choice", "metadata", "user", "prompt_cache_key"}
    )

    @classmethod
    def not_served(cls) -> list[str]:
        return [name for name in cls.__struct_fields__ if name not in cls.TAKEN]

    def output_tokens_max(self) -> int | None:
        return 0


def _function(tool: MessagesTool, where: str) -> Function:
    check_type("custom" if tool.type is None else tool.type, where, "custom")
    if tool.input_schema is None:
        raise BadRequest(f"{where}.input_schema: missing", param=f"{where}.input_schema")
    return Function(tool.name, tool.description, tool.input_schema, tool.strict)


def _system(given: str | list[SystemBlock] | None) -> str | None:
    if given is None or isinstance(given, str):
        return given
    texts = []
    for index, block in enumerate(given):
        where = f"system[{index}]"
        check_type(block.type, where, "text")
        if block.text is None:
            raise BadRequest(f"{where}.text: missing", param=f"{where}.text")
        texts.append(block.text)
    return "\n".join(texts)
