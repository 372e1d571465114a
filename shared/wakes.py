"""Hints to workers and the controller that something waits. A hint may be lost: whoever waits for one also looks by itself."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from shared import subjects
from shared.background import Background
from shared.wire import Malformed

EVERY_S = 0.01  # of hints about one version: what comes in between is gathered

_decode = msgspec.json.Decoder(list[str]).decode


def encode(tenants: set[str]) -> bytes:
    """The body of a hint about what these tenants have in the lane fair; with "" among them it names none."""
    return b"" if "" in tenants else msgspec.json.encode(sorted(tenants))


def decode(body: bytes) -> list[str] | None:
    """The tenants that a hint names; None: it names none, and whoever wants to know has to look. Raises Malformed."""
    if not body:
        return None
    try:
        return _decode(body)
    except msgspec.DecodeError as error:
        raise Malformed(f"no hint: {error}") from None


class Hints:
    """Gathers hints about what waits, so that a flood costs one in `every_s`, and sends the last one, too."""

    def __init__(self, send: Callable[[str, bytes], Coroutine[Any, Any, Any]], every_s: float = EVERY_S) -> None:
        """`send(subject, body)`."""
        self._send, self._every_s = send, every_s
        self._gathered: dict[tuple[str, str], set[str]] = {}  # versions with a hint within the last `every_s`
        self._sending = Background()

    def hint(self, model: str, version: str, tenant: str) -> None:
        """`tenant` has something waiting in the lane fair; "": somebody, anywhere."""
        name = (model, version)
        if name in self._gathered:
            self._gathered[name].add(tenant)
            return
        self._gathered[name] = set()
        self._publish(name, {tenant})
        asyncio.get_running_loop().call_later(self._every_s, self._go_on, name)

    def _go_on(self, name: tuple[str, str]) -> None:
        tenants = self._gathered.pop(name)
        if tenants:
            self._gathered[name] = set()
            self._publish(name, tenants)
            asyncio.get_running_loop().call_later(self._every_s, self._go_on, name)

    def _publish(self, name: tuple[str, str], tenants: set[str]) -> None:
        self._sending.do(self._send(subjects.wake(*name), encode(tenants)))
