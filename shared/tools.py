"""Tools that a model may call: how families of models write a call, and the grammar of it that goes over the wire.

hermes    <tool_call>{"name": ..., "arguments": {...}}</tool_call>     Hermes, Qwen, SmolLM and many others
llama3    <|python_tag|>{"name": ..., "parameters": {...}}             Llama 3; also without the token, as all there is
mistral   [TOOL_CALLS][{"name": ..., "arguments": {...}}], or          Mistral up to 2024
          [TOOL_CALLS]name[ARGS]{...}                                  and since
"""

import contextlib
import re
from collections.abc import Mapping
from typing import Any, Literal, get_args

import msgspec

from shared.wire import Grammar

Dialect = Literal["hermes", "llama3", "mistral"]
DIALECTS: tuple[Dialect, ...] = get_args(Dialect)
DEFAULT: Dialect = "hermes"

# Tokens that stand around calls. Where they are special their text would be left out of an output.
MARKS: dict[str, tuple[str, ...]] = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "llama3": ("<|python_tag|>",),
    "mistral": ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
}
TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")
CALLS_MAX = 32  # in one output that is held to a grammar

_NAMED = re.compile(r"\btools\b")


class ToolSchema(msgspec.Struct, omit_defaults=True):
    """A tool as a grammar needs it. Not strict: of its schema what cannot be enforced is left out."""

    name: str
    parameters: dict[str, Any]
    strict: bool = False


class ToolGrammar(msgspec.Struct, omit_defaults=True):
    """The body of a `wire.Grammar` of the kind `tools`: calls in the words of a dialect."""

    dialect: str
    tools: list[ToolSchema]  # that may be called
    required: bool = True  # else any text may stand before the first call, or instead of it
    parallel: bool = True  # else one call at most
    otherwise: Grammar | None = None  # what the output is if nothing is called, instead of any text: JSON


decode_grammar = msgspec.json.Decoder(ToolGrammar).decode


def takes_tools(template: str) -> bool:
    """Whether a chat template shows the tools that it is given."""
    return _NAMED.search(template) is not None


def dialect_of(template: str) -> Dialect:
    """How the model of a chat template writes its calls; hermes where the template does not say."""
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if takes_tools(template) and ("<|python_tag|>" in template or "ipython" in template):
        return "llama3"
    return DEFAULT


def template_of(files: Mapping[str, bytes]) -> str:
    """The chat templates among TEMPLATE_FILES of a model, one after the other; "" where there is none."""
    found: list[str] = []
    for name, raw in files.items():
        if name.endswith(".jinja"):
            found.append(raw.decode("utf-8", "replace"))
            continue
        # what is wrong with a file, the worker that loads it will say
        with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
            found += _templates(msgspec.json.decode(raw, type=_Config).chat_template)
    return "\n".join(found)


class _Config(msgspec.Struct):
    chat_template: Any = None


def _templates(given: Any) -> list[str]:
    """One template, or several with their names."""
    if isinstance(given, str):
        return [given]
    if isinstance(given, list):
        return [each["template"] for each in given if isinstance(each, dict) and isinstance(each.get("template"), str)]
    return []
