"""A complete output: its content and its calls."""

import hashlib

import msgspec

from ingress.tool_calls.parser import Arguments, Begin, Content, Parser


class Call(msgspec.Struct):
    name: str
    arguments: str


def parse_whole(parser: Parser, text: str) -> tuple[str, list[Call]]:
    """What the pieces of `text` come to; `parser` is new."""
    content: list[str] = []
    calls: list[Call] = []
    for piece in parser.push(text) + parser.flush():
        match piece:
            case Content():
                content.append(piece.text)
            case Begin():
                calls.append(Call(piece.name, ""))
            case Arguments():
                calls[piece.index].arguments += piece.text
    return "".join(content), calls


def call_id(rid: str, choice: int, index: int, prefix: str = "call_") -> str:
    """The id of a call: the same wherever and how often the answer is told."""
    return prefix + hashlib.blake2b(f"{rid}.{choice}.{index}".encode(), digest_size=12).hexdigest()
