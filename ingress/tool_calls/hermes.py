"""Hermes, Qwen and many others: <tool_call>{"name": "f", "arguments": {...}}</tool_call>, several in a row."""

from ingress.tool_calls.parser import Parser

CLOSE = "</tool_call>"


class HermesParser(Parser):
    mark = "<tool_call>"

    def _marked(self) -> bool:
        return self._space() and self._read_call()

    def _ended(self) -> bool:
        """After the object: its closing tag is left out, if it is there."""
        if not self._space():
            return False
        if self._rest.startswith(CLOSE):
            self._rest, self._raw = self._rest[len(CLOSE) :], ""
        elif CLOSE.startswith(self._rest):
            return False
        self._rest, self._raw = self._raw + self._rest, ""
        self._state = self._in_text
        return True
