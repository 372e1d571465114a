"""The bodies of the inference routes, decoded by msgspec: types and ranges are checked here, in one pass.

What depends on settings or on the model is checked in `ingress.translate`. Fields that change nothing about the answer
(`metadata`, `store`, `service_tier`, ...) are not listed and so are skipped; fields that would change it and are not served
are in `NotServed` and are refused unless they ask for nothing.
"""

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from ingress.tool_schemas import Tool, ToolCall, ToolChoice, ToolUse, called, tool_use
from shared.errors import BadRequest, Unsupported
from shared.wire import ChatMessage, Input

INT_MAX = 2**31 - 1
LOGPROBS_MAX = 20
COMPLETION_TOKENS_DEFAULT = 16  # of /v1/completions, as OpenAI has it

Count = Annotated[int, Meta(ge=1, le=INT_MAX)]
TokenCount = Annotated[int, Meta(ge=0, le=INT_MAX)]
TokenId = Annotated[int, Meta(ge=0, le=INT_MAX)]
TopCount = Annotated[int, Meta(ge=0, le=LOGPROBS_MAX)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Role = Literal["system", "developer", "user", "assistant", "tool"]


class NotServed(msgspec.Struct, kw_only=True):
    """Fields that are known, would change the answer and are not served."""

    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None
    reasoning_effort: Any = None
    suffix: Any = None
    echo: Any = None
    best_of: Any = None
    use_beam_search: Any = None
    length_penalty: Any = None
    bad_words: Any = None
    prompt_logprobs: Any = None
    truncate_prompt_tokens: Any = None
    chat_template: Any = None
    chat_template_kwargs: Any = None
    continue_final_message: Any = None
    add_generation_prompt: Any = None
    include_stop_str_in_output: Any = None
    skip_special_tokens: Any = None


# the values of them that ask for nothing; null always does
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "reasoning_effort": ("none",),
    "suffix": ("",),
    "echo": (False,),
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "bad_words": ([],),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "n": (1,),
    "stream": (False,),
    "thinking": ({"type": "disabled"},),
    "mcp_servers": ([],),
    "context_management": ({},),
    "output_config": ({},),
    "truncation": ("disabled",),
}

# what to ask for instead
INSTEAD = {
    "stop": "`stop_sequences` has them",
    "functions": "`tools` of /v1/chat/completions has them",
    "function_call": "`tool_choice` of /v1/chat/completions has it",
    "max_tokens": "/v1/responses has `max_output_tokens`",
    "response_format": "/v1/responses has `text.format`",
    "best_of": "`n` gives several choices, all of which are returned",
    "prompt_logprobs": "/v1/completions gives them with `echo` and `logprobs`",
}


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class JsonSchema(msgspec.Struct):
    """What OpenAI has under `response_format.json_schema`. Output is held to the schema whether it is `strict` or not."""

    schema: dict[str, Any]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None  # refuse a schema with a keyword that cannot be enforced; else that keyword is left out


class ResponseFormat(msgspec.Struct):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(msgspec.Struct):
    """What vLLM has under `structured_outputs`: one of them."""

    json: dict[str, Any] | str | None = None  # a schema
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None  # EBNF as llama.cpp has it, or Lark
    json_object: bool | None = None
    structural_tag: Any = None  # refused
    whitespace_pattern: Any = None  # refused


class Body(NotServed, kw_only=True):
    """What the inference routes have in common: how to choose tokens and how to answer."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=INT_MAX)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[TokenId, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    seed: int | None = None
    n: Count | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    min_tokens: TokenCount | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    user: str | None = None
    prompt_cache_key: str | None = None

    SERVED: ClassVar[frozenset[str]] = frozenset()  # fields of NotServed that this route serves after all
    STOP: ClassVar[str] = "stop"  # the field with the stop strings
    EMBEDS: ClassVar[bool] = False  # what is asked for is vectors
    SEVERAL: ClassVar[str] = "prompt"  # the field that may hold several, each with an answer
    INCLUDES_STOP: ClassVar[bool] = False  # the stop string that ended an output has to be known
    FORMAT: ClassVar[str] = "response_format"  # the field that `format_wanted` is of

    @classmethod
    def not_served(cls) -> list[str]:
        """The fields that this route refuses."""
        return [name for name in NotServed.__struct_fields__ if name not in cls.SERVED]

    def to_inputs(self) -> list[Input]:
        """What to continue: one prompt, or several. Raises BadRequest."""
        return [self.to_input()]

    def to_input(self) -> Input:
        """What to continue, when it is one prompt. Raises BadRequest."""
        raise NotImplementedError

    def echoes(self) -> bool:
        """Whether the answer begins with the prompt."""
        return False

    def in_base64(self) -> bool:
        """Whether vectors are written so."""
        return False

    def tool_use(self) -> ToolUse | None:
        """What the answer may call; None: nothing. Raises BadRequest or Unsupported."""
        return None

    def output_tokens_max(self) -> int | None:
        """None: up to the model's length. Raises BadRequest."""
        return self.max_tokens

    def format_wanted(self) -> ResponseFormat | None:
        """What the output has to be. Raises BadRequest."""
        return self.response_format

    def repeated(self) -> bytes:
        """What an answer repeats of its request, as its family reads it."""
        return b""

    def logprobs_wanted(self) -> int | None:
        """None: no log probabilities; k: of the chosen token and of the k most likely. Raises BadRequest."""
        raise NotImplementedError


class Part(msgspec.Struct):
    """A piece of a message's content; text is served, and in the assistant's own turns a refusal, which is text too."""

    type: str
    text: str | None = None
    refusal: str | None = None


class Message(msgspec.Struct):
    role: Role
    content: str | list[Part] | None = None
    refusal: str | None = None  # what the assistant said instead
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class ChatBody(Body, kw_only=True):
    """POST /v1/chat/completions."""

    SERVED = frozenset({"tools", "tool_choice"})

    model: str
    messages: list[Message]
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: TopCount | None = None

    def to_input(self) -> Input:
        use = self.tool_use()
        tools = None if use is None else use.described()
        return Input(messages=chat_messages(self.messages, "messages"), tools=tools)

    def tool_use(self) -> ToolUse | None:
        return tool_use(self.tools, self.tool_choice, self.parallel_tool_calls)

    def output_tokens_max(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def logprobs_wanted(self) -> int | None:
        if self.logprobs:
            return self.top_logprobs or 0
        if self.top_logprobs:
            raise BadRequest("top_logprobs: needs `logprobs: true`", param="top_logprobs")
        return None


class CompletionBody(Body, kw_only=True):
    """POST /v1/completions."""

    SERVED = frozenset({"echo"})

    model: str
    prompt: str | list[str | TokenId | list[TokenId]]
    max_tokens: TokenCount | None = None  # 0: nothing but the echo
    echo: bool | None = None
    logprobs: TopCount | None = None

    def to_inputs(self) -> list[Input]:
        prompt = self.prompt
        if not isinstance(prompt, list) or not prompt or isinstance(prompt[0], int):
            return [_text_or_tokens(prompt, "prompt")]
        if len(prompt) == 1:
            return [_text_or_tokens(prompt[0], "prompt")]
        return [_text_or_tokens(each, f"prompt[{index}]") for index, each in enumerate(prompt)]

    def to_input(self) -> Input:
        [prompt] = self.to_inputs()
        return prompt

    def echoes(self) -> bool:
        return bool(self.echo)

    def output_tokens_max(self) -> int | None:
        if self.max_tokens == 0 and not self.echo:
            raise BadRequest("max_tokens: at least 1 without `echo`", param="max_tokens")
        return COMPLETION_TOKENS_DEFAULT if self.max_tokens is None else self.max_tokens

    def logprobs_wanted(self) -> int | None:
        return self.logprobs


class InferBody(Body, kw_only=True):
    """POST /v1/models/{model}/infer: text, messages or token ids."""

    input: str | list[Message | TokenId]
    logprobs: TopCount | None = None

    def to_input(self) -> Input:
        if self.n is not None and self.n > 1:
            raise Unsupported("n: one choice a request is served here; /v1/completions serves more", param="n")
        given = self.input
        if isinstance(given, list) and given and not isinstance(given[0], int):
            messages = [item for item in given if isinstance(item, Message)]
            if len(messages) < len(given):
                raise BadRequest("input: messages or token ids, not both", param="input")
            return Input(messages=chat_messages(messages, "input"))
        return _text_or_tokens(given, "input")

    def logprobs_wanted(self) -> int | None:
        return self.logprobs


def chat_messages(messages: list[Message], path: str) -> list[ChatMessage]:
    """The messages as a chat template takes them: content parts joined, `developer` as `system`."""
    if not messages:
        raise BadRequest(f"{path}: must not be empty", param=path)
    names = _names_of_results(messages, path)
    return [
        ChatMessage(
            role="system" if message.role == "developer" else message.role,
            content=_content(message, f"{path}[{index}]"),
            name=message.name or names.get(index),
            tool_calls=called(message.tool_calls) if message.tool_calls else None,
            tool_call_id=message.tool_call_id,
        )
        for index, message in enumerate(messages)
    ]


def _names_of_results(messages: list[Message], path: str) -> dict[int, str]:
    """What was called, by the index of the result; some templates ask for it. Raises BadRequest for one of no call."""
    made: dict[str | None, str] = {}
    names = {}
    for index, message in enumerate(messages):
        where = f"{path}[{index}].tool_call_id"
        if message.role == "tool" and message.tool_call_id is None:
            raise BadRequest(f"{where}: missing", param=where)
        if message.role == "tool":
            if message.tool_call_id not in made:
                raise BadRequest(f"{where}: no message before it has a call with this id", param=where)
            names[index] = made[message.tool_call_id]
        made.update((call.id, call.function.name) for call in message.tool_calls or [])
    return names


def _content(message: Message, path: str) -> str | None:
    content = message.content
    if isinstance(content, str):
        return content
    if content is None:
        if message.role == "assistant":  # as SDKs gather an answer of no text, and send it back
            return message.refusal or (None if message.tool_calls else "")
        raise BadRequest(f"{path}.content: a message of role {message.role} needs content", param=f"{path}.content")
    texts = []
    for index, part in enumerate(content):
        where = f"{path}.content[{index}]"
        refused = part.type == "refusal" and message.role == "assistant"
        if part.type != "text" and not refused:
            raise Unsupported(f"{where}: only text parts are served, not `{part.type}`", param=where)
        text = part.refusal if refused else part.text
        if text is None:
            raise BadRequest(f"{where}.{part.type}: missing", param=f"{where}.{part.type}")
        texts.append(text)
    return "".join(texts)


def _text_or_tokens(given: Any, path: str) -> Input:
    if not given and given != 0:
        raise BadRequest(f"{path}: must not be empty", param=path)
    if isinstance(given, str):
        return Input(prompt=given)
    if not isinstance(given, list):
        raise BadRequest(f"{path}: prompts and token ids do not mix", param=path)
    for index, token in enumerate(given):
        if not isinstance(token, int):
            where = f"{path}[{index}]"
            raise BadRequest(f"{where}: token ids and other items do not mix", param=where)
    return Input(token_ids=given)
