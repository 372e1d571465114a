"""The body of /v1/responses, as OpenAI has it. It becomes the same request on the bus as a chat completion."""

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from ingress.response_items import GivenItem, Item, items_of, turns_of
from ingress.responses_tools import (
    FunctionTool,
    ResponsesTool,
    ResponsesToolChoice,
    functions_of,
    use_of,
)
from ingress.schemas import Body, Count, JsonSchema, ResponseFormat, TopCount
from ingress.tool_schemas import ToolUse
from shared.errors import BadRequest, Unsupported
from shared.wire import Input

LOGPROBS = "message.output_text.logprobs"
Includable = Literal[
    "message.output_text.logprobs",
    # of what is not served, and so is in no answer
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
]
Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]


class TextFormat(msgspec.Struct, omit_defaults=True):
    """What OpenAI has under `text.format`: flat, where chat has a `json_schema` inside."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class Reasoning(msgspec.Struct):
    effort: str | None = None
    summary: str | None = None


class Repeated(msgspec.Struct, kw_only=True):
    """What an answer repeats of its request."""

    background: bool
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: Reasoning
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: bool
    temperature: float
    text: TextConfig
    tool_choice: str | dict[str, Any]
    tools: list[FunctionTool]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    user: str | None


class ResponsesBody(Body, kw_only=True, dict=True):
    """POST /v1/responses."""

    SERVED = frozenset({"tools", "tool_choice"})
    FORMAT = "text.format"
    OTHERS: ClassVar[tuple[str, ...]] = (  # fields that are refused beside those of NotServed
        *("n", "max_tokens", "response_format"),
        *("conversation", "prompt", "truncation", "context_management", "moderation"),
    )

    model: str
    input: str | list[GivenItem] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: Count | None = None
    max_tool_calls: Count | None = None  # of built-in tools, of which there are none
    tools: list[ResponsesTool] | None = None
    tool_choice: ResponsesToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    include: list[Includable] | None = None
    top_logprobs: TopCount | None = None
    reasoning: Reasoning | None = None
    metadata: Metadata | None = None
    store: bool | None = None
    background: bool | None = None
    safety_identifier: str | None = None
    conversation: Any = None
    prompt: Any = None
    truncation: Any = None
    context_management: Any = None
    moderation: Any = None

    @classmethod
    def not_served(cls) -> list[str]:
        return [*super().not_served(), *cls.OTHERS]

    @property
    def history(self) -> list[Item]:
        """The items of the response before and of those before that. Raises Unsupported where they were not asked for."""
        found: list[Item] | None = self.__dict__.get("history")
        if found is None and self.previous_response_id is not None:
            raise Unsupported(
                "previous_response_id: only of a request that is posted to /v1/responses itself",
                param="previous_response_id",
            )
        return found or []

    def prepare(self, history: list[Item], keeps: bool) -> None:
        """`history` is what `previous_response_id` stands for; `keeps`: the response will be, if nothing comes between."""
        self.__dict__.update(history=history, keeps=keeps)

    @property
    def keeps(self) -> bool:
        return bool(self.__dict__.get("keeps"))

    def items(self) -> list[Item]:
        """The request's own input. Raises BadRequest or Unsupported."""
        if self.input is None:
            raise BadRequest("input: missing", param="input")
        return items_of(self.input)

    def to_input(self) -> Input:
        self._refuse_others()
        use = self.tool_use()
        turns = turns_of(self.instructions, self.history, self.items())
        return Input(messages=turns, tools=None if use is None else use.described())

    def tool_use(self) -> ToolUse | None:
        return use_of(functions_of(self.tools), self.tool_choice, self.parallel_tool_calls)

    def output_tokens_max(self) -> int | None:
        return self.max_output_tokens

    def logprobs_wanted(self) -> int | None:
        if LOGPROBS in (self.include or []):
            return self.top_logprobs or 0
        if self.top_logprobs:
            raise BadRequest(f'top_logprobs: needs `include: ["{LOGPROBS}"]`', param="top_logprobs")
        return None

    def format_wanted(self) -> ResponseFormat | None:
        given = None if self.text is None else self.text.format
        if given is None:
            return None
        if given.type != "json_schema":
            return ResponseFormat(given.type)
        if given.schema is None:
            raise BadRequest("text.format.schema: missing", param="text.format.schema")
        return ResponseFormat("json_schema", JsonSchema(given.schema, given.name, given.description, given.strict))

    def repeated(self) -> bytes:
        """The request's part of its answer, as JSON."""
        text = self.text or TextConfig()
        tools = functions_of(self.tools)
        told = Repeated(
            background=bool(self.background),
            instructions=self.instructions,
            max_output_tokens=self.max_output_tokens,
            max_tool_calls=self.max_tool_calls,
            metadata=self.metadata or {},
            parallel_tool_calls=self.parallel_tool_calls is not False,
            previous_response_id=self.previous_response_id,
            prompt_cache_key=self.prompt_cache_key,
            reasoning=Reasoning(),
            safety_identifier=self.safety_identifier,
            service_tier="default",
            store=self.keeps,
            temperature=1.0 if self.temperature is None else self.temperature,
            text=TextConfig(text.format or TextFormat("text"), "medium"),
            tool_choice=_told(self.tool_choice),
            tools=[FunctionTool(each.name, each.description, each.parameters, bool(each.strict)) for each in tools],
            top_logprobs=self.top_logprobs or 0,
            top_p=1.0 if self.top_p is None else self.top_p,
            truncation="disabled",
            user=self.user,
        )
        return msgspec.json.encode(told)

    def _refuse_others(self) -> None:
        reasoning, text = self.reasoning or Reasoning(), self.text or TextConfig()
        if reasoning.effort not in (None, "none") or reasoning.summary is not None:
            raise Unsupported("reasoning: not supported", param="reasoning")
        if self.background and not self.keeps:
            raise Unsupported(
                "background: only of a request that is posted to /v1/responses itself", param="background"
            )
        if text.verbosity not in (None, "medium"):
            raise Unsupported("text.verbosity: only `medium` is served", param="text.verbosity")


def _told(choice: ResponsesToolChoice | None) -> str | dict[str, Any]:
    if choice is None or isinstance(choice, str):
        return choice or "auto"
    if choice.type == "allowed_tools":
        return {"type": choice.type, "mode": choice.mode, "tools": choice.tools}
    return {"type": choice.type, "name": choice.name}
