"""Reading the JSON of a call while it is being written: where a value ends, and the name and arguments of an object."""

import json
from collections.abc import Iterable

SPACE = " \t\r\n"


class ValueReader:
    """Finds the end of one JSON value. It looks at quotes and brackets only: what is between them is the caller's to judge."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self.over = False
        self._depth = 0
        self._quoted = self._escaped = False

    def take(self, char: str) -> bool:
        """Whether `char` belongs to the value; it does not where the value is a number or a word and ends before it."""
        if not self._quoted and self._depth == 0 and self.text and (char in SPACE or char in ",}]"):
            self.over = True
            return False
        self.text.append(char)
        if self._escaped:
            self._escaped = False
        elif self._quoted:
            self._escaped = char == "\\"
            if char == '"':
                self._quoted = False
                self.over = self._depth == 0
        elif char == '"':
            self._quoted = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            self.over = self._depth <= 0
        return True


class CallReader:
    """Reads one `{"name": "f", "arguments": {...}}`, its members in any order.

    The call has `begun` once its name is known and its arguments began; from then on `fresh` gets their text. Before that
    the object may turn out to be none: `broken`.
    """

    def __init__(self, keys: Iterable[str], may_lack_arguments: bool) -> None:
        """`keys` are the names that the arguments may have."""
        self.name = ""
        self.begun = self.over = self.broken = False
        self.fresh: list[str] = []
        self.tail: list[str] = []  # what was taken since the arguments were complete
        self._keys, self._may_lack = tuple(keys), may_lack_arguments
        self._state = self._brace
        self._key = ""
        self._value = ValueReader()
        self._held: list[str] = []  # arguments that came before the name
        self._has_arguments = False

    def take(self, text: str) -> int:
        """How many characters of `text` belong to the object: all, or those up to its end or to what breaks it."""
        for number, char in enumerate(text):
            complete = self.begun and not (self._key in self._keys and self._state == self._in_value)
            if not self._state(char):
                self.broken = True
                return number
            if complete:
                self.tail.append(char)
            if self.over:
                return number + 1
        return len(text)

    def _brace(self, char: str) -> bool:
        self._state = self._member
        return char == "{"

    def _member(self, char: str) -> bool:
        if char in SPACE:
            return True
        if char == "}":
            return self._end()
        self._value = ValueReader()
        self._state = self._in_key
        return char == '"' and self._value.take(char)

    def _in_key(self, char: str) -> bool:
        self._value.take(char)
        if self._value.over:
            self._key, self._state = "".join(self._value.text)[1:-1], self._colon
        return True

    def _colon(self, char: str) -> bool:
        if char == ":":
            self._value, self._state = ValueReader(), self._first
            return True
        return char in SPACE

    def _first(self, char: str) -> bool:
        if char in SPACE:
            return True
        if char in ",}]:" or (self._key in self._keys and (self._has_arguments or char not in '{"n')):
            return False
        self._state = self._in_value
        if self._key in self._keys:
            self._has_arguments = True
            if char == "{" and self.name:
                self.begun = True
        return self._in_value(char)

    def _in_value(self, char: str) -> bool:
        value = self._value
        belongs = value.take(char)
        if belongs and self.begun and self._key in self._keys:
            self.fresh.append(char)
        if not value.over:
            return True
        self._state = self._comma
        return self._known("".join(value.text)) and (belongs or self._comma(char))

    def _known(self, value: str) -> bool:
        """A member is complete. Whether the object can be a call still."""
        if self._key == "name" and not self.begun:
            if self.name or (name := _string(value)) is None or not name:
                return False
            self.name = name
        elif self._key in self._keys and not self.begun:
            if not value.startswith("{"):
                written = "{}" if value == "null" else _string(value)
                if written is None or not written.lstrip().startswith("{"):
                    return False
                value = written
            self._held.append(value)
        if self.name and self._held:
            self.begun = True
            self.fresh += self._held
            self._held = []
        return True

    def _comma(self, char: str) -> bool:
        if char == ",":
            self._state = self._member
            return True
        return self._end() if char == "}" else char in SPACE

    def _end(self) -> bool:
        if not self.begun and self.name and self._may_lack:
            self.begun = True
            self.fresh.append("{}")
        self.over = self.begun
        return self.begun


def _string(value: str) -> str | None:
    try:
        decoded = json.loads(value)
    except ValueError:
        return None
    return decoded if isinstance(decoded, str) else None
