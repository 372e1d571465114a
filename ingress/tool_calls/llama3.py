"""Llama 3: <|python_tag|>{"name": "f", "parameters": {...}}, or the object alone at the beginning; several with `;` between."""

from ingress.tool_calls.parser import Parser


class Llama3Parser(Parser):
    mark = "<|python_tag|>"

    def __init__(self, one_call: bool = False) -> None:
        super().__init__(one_call)
        self._may_lack_arguments = False  # an object with a name need not be a call
        self._state = self._at_start

    def _at_start(self) -> bool:
        if not self._space():
            return False
        if self._rest[0] == "{":
            return self._read_call()
        return self._as_text()

    def _marked(self) -> bool:
        return self._space() and self._read_call()

    def _ended(self) -> bool:
        """After an object: another one, or text."""
        if not self._space():
            return False
        if self._rest[0] == ";":
            self._raw, self._rest = self._raw + ";", self._rest[1:]
            self._state = self._marked
            return True
        if self._rest[0] == "{":
            return self._read_call()
        return self._as_text()

    def _as_text(self) -> bool:
        self._rest, self._raw = self._raw + self._rest, ""
        self._state = self._in_text
        return True
