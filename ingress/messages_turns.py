"""Turns of Anthropic's messages, with their content blocks -> the messages that a chat template takes."""

from typing import Any, Literal

import msgspec

from shared.errors import BadRequest, Unsupported
from shared.wire import ChatMessage


class ResultPart(msgspec.Struct):
    """A piece of what a tool gave; only text is served."""

    type: str
    text: str | None = None


class Block(msgspec.Struct):
    """A content block: its type says which of the fields it has. `text`, `tool_use` and `tool_result` are served."""

    type: str
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[ResultPart] | None = None
    is_error: bool | None = None


class Turn(msgspec.Struct):
    role: Literal["user", "assistant"]
    content: str | list[Block]


def chat_turns(system: str | None, turns: list[Turn]) -> list[ChatMessage]:
    """Blocks of text are lines; turns of one role that follow each other are one. Raises BadRequest or Unsupported."""
    if not turns:
        raise BadRequest("messages: must not be empty", param="messages")
    if turns[-1].role == "assistant":
        where = f"messages[{len(turns) - 1}].role"
        raise Unsupported(
            f"{where}: the last one must be the user's; an answer is not begun for the model", param=where
        )
    found = [ChatMessage("system", system)] if system else []
    names: dict[str, str] = {}  # of what was called, by the id of the call
    for index, turn in enumerate(turns):
        where = f"messages[{index}].content"
        if isinstance(turn.content, str):
            _append(found, ChatMessage(turn.role, turn.content))
        elif turn.role == "assistant":
            _append(found, _answer(turn.content, where, names))
        elif not turn.content:
            raise BadRequest(f"{where}: must not be empty", param=where)
        else:
            for number, block in enumerate(turn.content):
                _append(found, _asked(block, f"{where}[{number}]", names))
    return found


def _append(found: list[ChatMessage], turn: ChatMessage) -> None:
    if not found or found[-1].role != turn.role or turn.role == "tool":
        found.append(turn)
        return
    last = found[-1]
    texts = [text for text in (last.content, turn.content) if text is not None]
    last.content = "\n".join(texts) if texts else None
    last.tool_calls = [*(last.tool_calls or []), *(turn.tool_calls or [])] or None


def _answer(blocks: list[Block], where: str, names: dict[str, str]) -> ChatMessage:
    """A turn of the assistant: what it said, and then what it called."""
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    for number, block in enumerate(blocks):
        at = f"{where}[{number}]"
        if block.type == "text":
            texts.append(_given(block.text, f"{at}.text"))
        elif block.type == "tool_use":
            identity, name = _given(block.id, f"{at}.id"), _given(block.name, f"{at}.name")
            if block.input is None:
                raise BadRequest(f"{at}.input: missing", param=f"{at}.input")
            names[identity] = name
            calls.append({"id": identity, "type": "function", "function": {"name": name, "arguments": block.input}})
        else:
            raise _unsupported(block.type, at, "`text` and `tool_use` are served in an assistant's turn")
    return ChatMessage("assistant", "\n".join(texts) if texts or not calls else None, tool_calls=calls or None)


def _asked(block: Block, at: str, names: dict[str, str]) -> ChatMessage:
    """A block of a user's turn."""
    if block.type == "text":
        return ChatMessage("user", _given(block.text, f"{at}.text"))
    if block.type != "tool_result":
        raise _unsupported(block.type, at, "`text` and `tool_result` are served in a user's turn")
    identity = _given(block.tool_use_id, f"{at}.tool_use_id")
    if identity not in names:
        where = f"{at}.tool_use_id"
        raise BadRequest(f"{where}: no turn before it has a `tool_use` with this id", param=where)
    text = _result(block.content, f"{at}.content")
    return ChatMessage(
        "tool", f"Error: {text}" if block.is_error else text, name=names[identity], tool_call_id=identity
    )


def _result(content: str | list[ResultPart] | None, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for number, part in enumerate(content):
        at = f"{where}[{number}]"
        if part.type != "text":
            raise _unsupported(part.type, at, "`text` is served in a result")
        texts.append(_given(part.text, f"{at}.text"))
    return "\n".join(texts)


def _given(value: str | None, where: str) -> str:
    if value is None:
        raise BadRequest(f"{where}: missing", param=where)
    return value


def _unsupported(kind: str, at: str, served: str) -> Unsupported:
    return Unsupported(f"{at}.type: `{kind}` is not supported; {served}", param=f"{at}.type")
