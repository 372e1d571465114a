"""The items of OpenAI's responses: messages, calls and their results, as they are sent, kept, listed and answered."""

from typing import Any, Literal

import msgspec

from ingress.routes.openai import ContentLogprob
from ingress.tool_schemas import CalledFunction, ToolCall, called
from shared.errors import BadRequest, Unsupported
from shared.wire import ChatMessage

Role = Literal["user", "assistant", "system", "developer"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]
TEXTS = ("input_text", "output_text")  # the types of parts that are served


class GivenPart(msgspec.Struct):
    """A piece of a message's content, or of what a function gave; only text is served."""

    type: str
    text: str | None = None


class GivenItem(msgspec.Struct):
    """An item of a request's input: its type (none: a message) says which of the fields it has."""

    type: str | None = None
    id: str | None = None
    role: Role | None = None
    content: str | list[GivenPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[GivenPart] | None = None


class InputText(msgspec.Struct, tag="input_text"):
    text: str


class OutputText(msgspec.Struct, tag="output_text"):
    text: str
    annotations: list[Any] = []
    logprobs: list[ContentLogprob] = []


class MessageItem(msgspec.Struct, tag="message"):
    """`id` is "" until the item is kept."""

    id: str
    role: Role
    content: list[InputText | OutputText]
    status: ItemStatus = "completed"


class CallItem(msgspec.Struct, tag="function_call"):
    id: str
    call_id: str
    name: str
    arguments: str  # JSON, if the model wrote JSON
    status: ItemStatus = "completed"


class CallOutputItem(msgspec.Struct, tag="function_call_output"):
    id: str
    call_id: str
    output: str | list[InputText]
    status: ItemStatus = "completed"


Item = MessageItem | CallItem | CallOutputItem


def items_of(given: str | list[GivenItem]) -> list[Item]:
    """A request's input as items. Raises BadRequest or Unsupported."""
    if isinstance(given, str):
        return [MessageItem("", "user", [InputText(given)])]
    if not given:
        raise BadRequest("input: must not be empty", param="input")
    return [_item(each, f"input[{index}]") for index, each in enumerate(given)]


def _item(given: GivenItem, where: str) -> Item:
    identity = given.id or ""
    match given.type:
        case None | "message":
            if given.role is None:
                raise BadRequest(f"{where}.role: missing", param=f"{where}.role")
            return MessageItem(identity, given.role, _content(given, f"{where}.content"))
        case "function_call":
            name, arguments = _needed(given.name, f"{where}.name"), _needed(given.arguments, f"{where}.arguments")
            return CallItem(identity, _needed(given.call_id, f"{where}.call_id"), name, arguments)
        case "function_call_output":
            output = _output(given.output, f"{where}.output")
            return CallOutputItem(identity, _needed(given.call_id, f"{where}.call_id"), output)
    raise Unsupported(
        f"{where}.type: `{given.type}` is not supported; `message`, `function_call` and `function_call_output` are",
        param=f"{where}.type",
    )


def _content(given: GivenItem, where: str) -> list[InputText | OutputText]:
    if given.content is None:
        raise BadRequest(f"{where}: missing", param=where)
    texts = [given.content] if isinstance(given.content, str) else _texts(given.content, where)
    if given.role == "assistant":
        return [OutputText(text) for text in texts]
    return [InputText(text) for text in texts]


def _output(given: str | list[GivenPart] | None, where: str) -> str | list[InputText]:
    return [InputText(text) for text in _texts(given, where)] if isinstance(given, list) else _needed(given, where)


def _texts(parts: list[GivenPart], where: str) -> list[str]:
    texts = []
    for index, part in enumerate(parts):
        at = f"{where}[{index}]"
        if part.type not in TEXTS:
            raise Unsupported(f"{at}.type: only text is served, not `{part.type}`", param=f"{at}.type")
        texts.append(_needed(part.text, f"{at}.text"))
    return texts


def _needed(value: str | None, where: str) -> str:
    if value is None:
        raise BadRequest(f"{where}: missing", param=where)
    return value


def turns_of(instructions: str | None, history: list[Item], items: list[Item]) -> list[ChatMessage]:
    """Items as the messages that a chat template takes; `history` are those of the responses before. Raises BadRequest.

    What the assistant said and called in a row is one turn, as a chat completion has it.
    """
    turns = [ChatMessage("system", instructions)] if instructions else []
    names: dict[str, str] = {}  # of what was called, by the id of the call
    for index, item in enumerate([*history, *items], start=-len(history)):
        match item:
            case MessageItem():
                text = "".join(part.text for part in item.content)
                if item.role == "assistant" and turns and turns[-1].tool_calls:
                    turns[-1].content = (turns[-1].content or "") + text
                else:
                    turns.append(ChatMessage("system" if item.role == "developer" else item.role, text))
            case CallItem():
                names[item.call_id] = item.name
                if not turns or turns[-1].role != "assistant":
                    turns.append(ChatMessage("assistant"))
                call = ToolCall(item.call_id, CalledFunction(item.name, item.arguments))
                turns[-1].tool_calls = [*(turns[-1].tool_calls or []), *called([call])]
            case CallOutputItem():
                if item.call_id not in names:
                    where = f"input[{index}].call_id"
                    raise BadRequest(f"{where}: no `function_call` before it has this id", param=where)
                output = item.output
                text = output if isinstance(output, str) else "".join(part.text for part in output)
                turns.append(ChatMessage("tool", text, name=names[item.call_id], tool_call_id=item.call_id))
    return turns
