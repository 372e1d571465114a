"""What a model wrote -> Anthropic's content blocks, told as the events of a stream or gathered for a plain answer."""

from typing import Any

import msgspec

from ingress.family import Admitted, Choice
from ingress.sse import KEEPALIVE, encode
from ingress.tool_calls import Arguments, Begin, Content, Piece, new_parser
from ingress.tool_calls.whole import call_id
from shared.dispatch import Delta
from shared.errors import HeadraceError
from shared.wire import Usage

INVALID_JSON = "INVALID_JSON"  # the key of arguments that are no JSON object, as Anthropic suggests it
PING = b'event: ping\ndata: {"type":"ping"}\n\n'


class MessagesUsage(msgspec.Struct):
    input_tokens: int  # those that were not cached
    output_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int


class TextBlock(msgspec.Struct, tag="text"):
    text: str


class ToolUseBlock(msgspec.Struct, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


class Ending(msgspec.Struct):
    """Why an output ended."""

    stop_reason: str
    stop_sequence: str | None


def messages_usage(usage: Usage) -> MessagesUsage:
    cached = usage.cached_tokens
    return MessagesUsage(usage.prompt_tokens - cached, usage.completion_tokens, 0, cached)


class Reader:
    """Reads an output piece by piece: its stop string is taken off, and calls are told from text."""

    def __init__(self, admitted: Admitted) -> None:
        framing, self._rid = admitted.framing, admitted.request.rid
        self._stops = sorted(admitted.request.sampling.stop, key=len, reverse=True)
        self._parser = new_parser(framing.tools, framing.one_call) if framing.tools else None
        self._held = ""  # a stop string, if the output ends here

    def push(self, text: str) -> list[Piece]:
        """A stop string ends an output, and comes with one token."""
        text = self._held + text
        self._held = next((each for each in self._stops if text.endswith(each)), "")
        return self._pieces(text[: len(text) - len(self._held)])

    def end(self, finish: str | None) -> tuple[list[Piece], Ending]:
        """The last pieces, and why there are no more."""
        pieces = [] if self._parser is None else self._parser.flush()
        if self._held:
            return pieces, Ending("stop_sequence", self._held)
        if finish == "length":
            return pieces, Ending("max_tokens", None)
        return pieces, Ending("tool_use" if self._parser is not None and self._parser.calls else "end_turn", None)

    def call_id(self, index: int) -> str:
        return call_id(self._rid, 0, index, "toolu_")

    def _pieces(self, text: str) -> list[Piece]:
        if self._parser is not None:
            return self._parser.push(text)
        return [Content(text)] if text else []


class MessageEvents:
    """The events of a stream. `message_start` has no usage yet: a prompt is counted by the worker, who tells it at the end."""

    def __init__(self, identity: str, admitted: Admitted) -> None:
        self.open_choices = 1
        self._reader = Reader(admitted)
        self._started = False
        self._message = {"id": identity, "type": "message", "role": "assistant", "model": admitted.reference}
        self._index = -1  # of the block that was begun last
        self._block: type[TextBlock | ToolUseBlock] | None = None  # that is open
        self._ending = Ending("end_turn", None)

    @property
    def keepalive(self) -> bytes:
        return PING if self._started else KEEPALIVE  # nothing comes before `message_start`

    def add(self, deltas: list[Delta], out: list[bytes]) -> None:
        for delta in deltas:
            if not self._started:
                self._started = True
                nothing: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
                message = self._message | nothing | {"usage": MessagesUsage(0, 0, 0, 0)}
                out.append(_event("message_start", message=message))
            for piece in self._reader.push(delta.text):
                self._tell(piece, out)
            if delta.finish is not None:
                pieces, self._ending = self._reader.end(delta.finish)
                for piece in pieces:
                    self._tell(piece, out)
                self._stop_block(out)
                self.open_choices -= 1

    def closing(self, usage: Usage, claims: int) -> bytes:
        told = _event("message_delta", delta=self._ending, usage=messages_usage(usage))
        return told + _event("message_stop")

    def failure(self, error: HeadraceError) -> bytes | None:
        return None

    def _tell(self, piece: Piece, out: list[bytes]) -> None:
        match piece:
            case Content():
                if self._block is not TextBlock:
                    self._start_block(TextBlock(""), out)
                out.append(self._delta(b'"text_delta","text":', piece.text))
            case Begin():
                self._start_block(ToolUseBlock(self._reader.call_id(piece.index), piece.name, {}), out)
            case Arguments():
                out.append(self._delta(b'"input_json_delta","partial_json":', piece.text))

    def _delta(self, kind: bytes, text: str) -> bytes:
        return (
            b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":%b%b}}\n\n'
        ) % (self._index, kind, encode(text))

    def _start_block(self, block: TextBlock | ToolUseBlock, out: list[bytes]) -> None:
        self._stop_block(out)
        self._index, self._block = self._index + 1, type(block)
        out.append(_event("content_block_start", index=self._index, content_block=block))

    def _stop_block(self, out: list[bytes]) -> None:
        if self._block is not None:
            out.append(_event("content_block_stop", index=self._index))
        self._block = None


def whole(admitted: Admitted, choice: Choice) -> tuple[list[TextBlock | ToolUseBlock], Ending]:
    """The blocks of an output that is complete: what its events come to."""
    reader = Reader(admitted)
    pieces = reader.push(choice.text)
    rest, ending = reader.end(choice.finish)
    blocks: list[TextBlock | ToolUseBlock] = []
    arguments: list[str] = []  # of the calls
    for piece in pieces + rest:
        match piece:
            case Content():
                if blocks and isinstance(blocks[-1], TextBlock):
                    blocks[-1].text += piece.text
                else:
                    blocks.append(TextBlock(piece.text))
            case Begin():
                blocks.append(ToolUseBlock(reader.call_id(piece.index), piece.name, {}))
                arguments.append("")
            case Arguments():
                arguments[-1] += piece.text
    calls = (block for block in blocks if isinstance(block, ToolUseBlock))
    for block, text in zip(calls, arguments, strict=True):
        block.input = _input(text)
    return blocks, ending


def _input(text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text or "{}", type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return {INVALID_JSON: text}


def _event(kind: str, **fields: object) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), encode({"type": kind, **fields}))
