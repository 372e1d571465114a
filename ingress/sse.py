"""Server-sent events: the bytes around the JSON.

No `id:` or `retry:` fields: the OpenAI SDK stumbles over the comment that follows one.
"""

from typing import Protocol

import msgspec

from shared.dispatch import Delta
from shared.errors import HeadraceError
from shared.wire import Usage

DONE = b"data: [DONE]\n\n"
KEEPALIVE = b": keepalive\n\n"

encode = msgspec.json.encode


class Events(Protocol):
    """Turns the deltas of one stream into events. `open_choices` counts the choices that have no finish yet."""

    open_choices: int

    @property
    def keepalive(self) -> bytes:
        """What breaks a silence."""

    def add(self, deltas: list[Delta], out: list[bytes]) -> None:
        """Append the events of `deltas` to `out`."""

    def closing(self, usage: Usage, claims: int) -> bytes:
        """The last events of a complete stream."""

    def failure(self, error: HeadraceError) -> bytes | None:
        """The last events of a stream that failed; None: one in the shape of its family's errors."""


def event(data: object) -> bytes:
    """One event with `data` as JSON."""
    return b"data: " + encode(data) + b"\n\n"


def error_event(error: HeadraceError) -> bytes:
    """The terminal event of a stream that failed after its head was sent."""
    return event(error.body())
