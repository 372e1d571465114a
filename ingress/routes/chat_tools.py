"""Chat answers that may call tools: OpenAI's deltas, and its messages."""

from typing import Literal

import msgspec

from ingress.family import Admitted, Choice
from ingress.routes.openai import ChunkEvents, chat_logprobs
from ingress.sse import encode
from ingress.tool_calls import Arguments, Begin, Content, Piece, new_parser, parse_whole
from ingress.tool_calls.whole import call_id
from shared.dispatch import Delta

TOOL_CALLS = "tool_calls"  # the finish reason


class FunctionDelta(msgspec.Struct, omit_defaults=True):
    arguments: str
    name: str | None = None


class CallDelta(msgspec.Struct, omit_defaults=True):
    """A piece of a call. Its first one has id, type and name, and no arguments yet; the others have nothing but arguments."""

    index: int
    function: FunctionDelta
    id: str | None = None
    type: str | None = None


class AnsweredFunction(msgspec.Struct):
    name: str
    arguments: str  # JSON, if the model wrote JSON


class AnsweredCall(msgspec.Struct):
    id: str
    function: AnsweredFunction
    type: Literal["function"] = "function"


class ToolChatEvents(ChunkEvents):
    """Each choice's text goes through a parser of its own."""

    object_name = "chat.completion.chunk"
    opening = b'"delta":{"role":"assistant","content":null}'
    before_text = b'"delta":{"content":'
    after_text = b"}"
    finishing = b'"delta":{}'

    def __init__(self, identity: str, admitted: Admitted) -> None:
        choices, framing = admitted.request.sampling.n, admitted.framing
        super().__init__(identity, admitted.created, admitted.reference, choices, admitted.include_usage)
        self._rid = admitted.request.rid
        self._parsers = [new_parser(framing.tools, framing.one_call) for _ in range(choices)]

    def add(self, deltas: list[Delta], out: list[bytes]) -> None:
        for delta in deltas:
            choice, parser = delta.choice, self._parsers[delta.choice]
            if choice in self._unopened:
                self._unopened.remove(choice)
                out.append(self._chunk(choice, self.opening, b"null", b"null"))
            logprobs = encode(chat_logprobs(delta.logprobs)) if delta.logprobs else b"null"
            pieces = parser.push(delta.text)
            if not pieces and delta.logprobs:  # they are told with their token, whatever becomes of its text
                out.append(self._chunk(choice, self.finishing, logprobs, b"null"))
                logprobs = b"null"
            if delta.finish is not None:
                pieces += parser.flush()
            for piece in pieces:
                out.append(self._chunk(choice, self._fields(choice, piece), logprobs, b"null"))
                logprobs = b"null"
            if delta.finish is not None:
                self.open_choices -= 1
                finish = finish_of(delta.finish, parser.calls)
                out.append(self._chunk(choice, self.finishing, b"null", encode(finish)))

    def _fields(self, choice: int, piece: Piece) -> bytes:
        match piece:
            case Content():
                return self.before_text + encode(piece.text) + self.after_text
            case Begin():
                identity = call_id(self._rid, choice, piece.index)
                call = CallDelta(piece.index, FunctionDelta("", piece.name), identity, "function")
            case Arguments():
                call = CallDelta(piece.index, FunctionDelta(piece.text))
        return b'"delta":{"tool_calls":[' + encode(call) + b"]}"


def answered(admitted: Admitted, index: int, choice: Choice) -> tuple[str | None, list[AnsweredCall], str | None]:
    """Content, calls and finish reason of a choice that is complete: what its chunks come to."""
    content, calls = parse_whole(new_parser(admitted.framing.tools, admitted.framing.one_call), choice.text)
    made = [
        AnsweredCall(call_id(admitted.request.rid, index, number), AnsweredFunction(call.name, call.arguments))
        for number, call in enumerate(calls)
    ]
    return content or (None if made else ""), made, finish_of(choice.finish, len(made))


def finish_of(finish: str | None, calls: int) -> str | None:
    """The finish reason of a choice with so many calls."""
    return TOOL_CALLS if calls and finish == "stop" else finish
