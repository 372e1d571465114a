"""POST /v1/chat/completions."""

import msgspec

from ingress.error_shapes import OPENAI, ErrorShape
from ingress.family import Admitted, Choice, OnePath
from ingress.routes.chat_tools import AnsweredCall, ToolChatEvents, answered
from ingress.routes.openai import ChatLogprobs, ChunkEvents, UsageBody, chat_logprobs, usage_body
from ingress.schemas import ChatBody
from ingress.sse import Events, encode
from shared.dispatch import Delta
from shared.wire import Usage

PATH = "/v1/chat/completions"


class ChatAnswerMessage(msgspec.Struct):
    content: str | None
    role: str = "assistant"
    refusal: None = None
    tool_calls: list[AnsweredCall] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct):
    index: int
    message: ChatAnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None


class ChatAnswer(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageBody
    object: str = "chat.completion"


class ChatEvents(ChunkEvents):
    object_name = "chat.completion.chunk"
    opening = b'"delta":{"role":"assistant","content":""}'
    before_text = b'"delta":{"content":'
    after_text = b"}"
    finishing = b'"delta":{}'

    def logprobs(self, delta: Delta) -> bytes:
        return encode(chat_logprobs(delta.logprobs or []))


class Chat(OnePath):
    """The chat family: `delta` and `message`."""

    route, summary = PATH, "Chat completion, as OpenAI has it"
    decoder, answer_type = msgspec.json.Decoder(ChatBody), ChatAnswer
    errors: ErrorShape = OPENAI

    def events(self, admitted: Admitted) -> Events:
        if admitted.framing.tools:
            return ToolChatEvents(_id(admitted), admitted)
        choices = admitted.request.sampling.n
        return ChatEvents(_id(admitted), admitted.created, admitted.reference, choices, admitted.include_usage)

    def plain(self, admitted: Admitted, choices: list[Choice], usage: Usage, claims: int) -> bytes:
        wanted = admitted.request.sampling.logprobs is not None
        answers = []
        for index, choice in enumerate(choices):
            message, finish = _message(admitted, index, choice)
            answers.append(ChatChoice(index, message, chat_logprobs(choice.logprobs) if wanted else None, finish))
        return encode(ChatAnswer(_id(admitted), admitted.created, admitted.reference, answers, usage_body(usage)))


def _message(admitted: Admitted, index: int, choice: Choice) -> tuple[ChatAnswerMessage, str | None]:
    if not admitted.framing.tools:
        return ChatAnswerMessage(choice.text), choice.finish
    content, calls, finish = answered(admitted, index, choice)
    return ChatAnswerMessage(content, tool_calls=calls or msgspec.UNSET), finish


def _id(admitted: Admitted) -> str:
    return f"chatcmpl-{admitted.request.rid}"
