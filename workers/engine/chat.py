"""Messages and tools -> the text of a prompt, by the model's chat template.

A template that shows no tools is helped: tools, calls and their results are written into the messages as the Hermes
models have them (github.com/NousResearch/Hermes-Function-Calling), which other models were trained on, too, or can follow.
"""

import hashlib
import json
from typing import Any

import msgspec

from shared.errors import BadRequest
from shared.tools import dialect_of, takes_tools
from shared.wire import ChatMessage

MISTRAL_ID_LENGTH = 9  # its templates refuse others

HERMES = """You are a function calling AI model. You may call one or more functions to assist with the user query. \
You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a JSON object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


class ChatTemplate:
    """The chat template of a tokenizer. Thread-safe."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        given = tokenizer.chat_template
        text = "\n".join(given.values()) if isinstance(given, dict) else given or ""
        self._takes_tools = takes_tools(text)
        self._short_ids = dialect_of(text) == "mistral"

    def render(self, messages: list[ChatMessage], tools: list[dict[str, Any]] | None) -> str:
        """Raises BadRequest."""
        if not messages:
            raise BadRequest("there are no messages", param="messages")
        if self._tokenizer.chat_template is None:
            raise BadRequest("this model has no chat template: send a prompt instead of messages", param="messages")
        turns = [{"content": None} | msgspec.to_builtins(message) for message in messages]
        if not self._takes_tools:
            turns, tools = with_hermes(turns, tools), None
        elif self._short_ids:
            _shorten_ids(turns)
        try:
            return self._tokenizer.apply_chat_template(
                turns, tools=tools or None, tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # a template is a program of the model's author: anything may come out of it
            raise BadRequest(f"the model's chat template refuses these messages: {error}", param="messages") from error


def with_hermes(turns: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """The same turns with roles and contents only: tools in the system message, calls and results as text."""
    plain: list[dict[str, Any]] = []
    results = False  # the last turn holds results of calls
    for turn in turns:
        if turn["role"] == "tool":
            content = f"<tool_response>\n{turn['content'] or ''}\n</tool_response>"
            if results:
                plain[-1]["content"] += "\n" + content
            else:
                plain.append({"role": "user", "content": content})
            results = True
            continue
        results = False
        if not turn.get("tool_calls"):
            plain.append(turn)
            continue
        parts = [turn["content"]] if turn["content"] else []
        parts += [f"<tool_call>\n{_compact(_named(call))}\n</tool_call>" for call in turn["tool_calls"]]
        plain.append({"role": turn["role"], "content": "\n".join(parts)})
    if not tools:
        return plain
    section = HERMES.format(tools="\n".join(map(_compact, tools)))
    if plain[0]["role"] == "system":
        first = {**plain[0], "content": f"{plain[0]['content']}\n\n{section}"}
        return [first, *plain[1:]]
    return [{"role": "system", "content": section}, *plain]


def _named(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function") or {}
    return {"name": function.get("name"), "arguments": function.get("arguments")}


def _compact(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _shorten_ids(turns: list[dict[str, Any]]) -> None:
    for turn in turns:
        for call in turn.get("tool_calls") or []:
            call["id"] = _short(str(call.get("id", "")))
        if "tool_call_id" in turn:
            turn["tool_call_id"] = _short(turn["tool_call_id"])


def _short(identity: str) -> str:
    if len(identity) == MISTRAL_ID_LENGTH and identity.isalnum():
        return identity
    return hashlib.blake2b(identity.encode()).hexdigest()[:MISTRAL_ID_LENGTH]
