"""POST /v1/messages, and POST /v1/messages/count_tokens."""

from typing import Any, Literal

import msgspec

from ingress.error_shapes import ANTHROPIC, ErrorShape
from ingress.family import Admitted, Choice, OnePath
from ingress.messages_body import CountBody, MessagesBody
from ingress.routes.messages_events import MessageEvents, MessagesUsage, TextBlock, ToolUseBlock, messages_usage, whole
from ingress.sse import Events, encode
from shared.wire import Usage

PATH = "/v1/messages"
COUNT_PATH = PATH + "/count_tokens"


class MessagesAnswer(msgspec.Struct):
    id: str
    model: str
    content: list[TextBlock | ToolUseBlock]
    stop_reason: str
    stop_sequence: str | None
    usage: MessagesUsage
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"


class TokenCount(msgspec.Struct):
    input_tokens: int


class Messages(OnePath):
    """Anthropic's family: content blocks."""

    route, summary = PATH, "Message, as Anthropic has it"
    decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(MessagesBody)
    answer_type: type = MessagesAnswer
    errors: ErrorShape = ANTHROPIC

    def events(self, admitted: Admitted) -> Events:
        return MessageEvents(_id(admitted), admitted)

    def plain(self, admitted: Admitted, choices: list[Choice], usage: Usage, claims: int) -> bytes:
        blocks, ending = whole(admitted, choices[0])
        reason, sequence = ending.stop_reason, ending.stop_sequence
        return encode(
            MessagesAnswer(_id(admitted), admitted.reference, blocks, reason, sequence, messages_usage(usage))
        )


class CountTokens(Messages):
    """How long the prompt is, told by a worker: only they have the model's tokenizer. Never streamed."""

    route, summary = COUNT_PATH, "The tokens of a message's prompt, as Anthropic has it"
    decoder = msgspec.json.Decoder(CountBody)
    answer_type = TokenCount

    def plain(self, admitted: Admitted, choices: list[Choice], usage: Usage, claims: int) -> bytes:
        return encode(TokenCount(usage.prompt_tokens))


def _id(admitted: Admitted) -> str:
    return f"msg_{admitted.request.rid}"
