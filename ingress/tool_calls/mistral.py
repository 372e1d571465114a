"""Mistral: [TOOL_CALLS][{"name": "f", "arguments": {...}}, ...], and since v11 [TOOL_CALLS]f[ARGS]{...} for each call."""

import re

from ingress.tool_calls.parser import Parser
from ingress.tool_calls.reader import ValueReader

ARGS = "[ARGS]"
# a name, perhaps with an id behind it; the second pattern is of what may still become one
_HEAD = re.compile(r"([\w.-]{1,256})(?:\[CALL_ID\][\w-]{0,64})?" + re.escape(ARGS))
_HEAD_SO_FAR = re.compile(r"[\w.-]{0,256}(\[[A-Z_]{0,7}\]?[\w-]{0,64}(\[[A-Z]{0,4})?)?")


class MistralParser(Parser):
    mark = "[TOOL_CALLS]"

    def __init__(self, one_call: bool = False) -> None:
        super().__init__(one_call)
        self._in_list = False
        self._value = ValueReader()

    def _marked(self) -> bool:
        if not self._space():
            return False
        self._in_list = self._rest[0] == "["
        if self._in_list:
            self._raw, self._rest = self._raw + "[", self._rest[1:]
            self._state = self._item
            return True
        return self._read_call() if self._rest[0] == "{" else self._named()

    def _item(self) -> bool:
        return self._space() and self._read_call()

    def _named(self) -> bool:
        """A name, and its arguments once `[ARGS]{` is there."""
        self._state = self._named
        head = _HEAD.match(self._rest)
        if head is None:
            return False if _HEAD_SO_FAR.fullmatch(self._rest) else self._no_call()
        after = self._rest[head.end() :].lstrip()
        if not after:
            return False
        if after[0] != "{":
            return self._no_call()
        self._begin(head[1])
        self._rest, self._value, self._state = after, ValueReader(), self._arguments
        return True

    def _arguments(self) -> bool:
        value, text = self._value, self._rest
        count = 0
        while count < len(text) and not value.over:
            value.take(text[count])
            count += 1
        self._say_arguments(text[:count])
        self._rest = text[count:]
        if value.over:
            self._state = self._ended
        return value.over

    def _ended(self) -> bool:
        """After a call: in a list another one or the list's end; else text."""
        if not self._space():
            return False
        closes = self._in_list and self._rest[0] == "]"
        if self._in_list and self._rest[0] == ",":
            self._raw, self._rest = self._raw + ",", self._rest[1:]
            self._state = self._item
            return True
        self._rest = self._rest[1:] if closes else self._raw + self._rest
        self._raw, self._in_list = "", False
        self._state = self._in_text
        return True
