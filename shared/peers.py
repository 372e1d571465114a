"""How many ingresses there are: those whose leases were heard of late."""

import time
from typing import TYPE_CHECKING

from shared import subjects

if TYPE_CHECKING:
    from shared.bus import Bus
    from shared.keyvalue import Watch


class Peers:
    """The ingresses that are up. An expiry is not told: who was not heard of for `ttl_s` is gone."""

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._heard: dict[str, float] = {}  # monotonic
        self._watch: Watch | None = None

    async def start(self, bus: "Bus") -> None:
        self._watch = await bus.watch(
            subjects.INGRESSES_BUCKET, lambda key, value: self.note(key, value is not None, time.monotonic())
        )

    async def close(self) -> None:
        if self._watch is not None:
            await self._watch.close()

    def note(self, key: str, lives: bool, now: float) -> None:
        if lives:
            self._heard[key] = now
        else:
            self._heard.pop(key, None)

    def count(self, now: float) -> int:
        """At least 1: this one. While nothing can be heard, as many as before."""
        if self._watch is None or self._watch.live:
            for key, heard in list(self._heard.items()):
                if now - heard > self._ttl_s:
                    del self._heard[key]
        return max(1, len(self._heard))

    def part(self, limit: int, now: float) -> int:
        """Of a limit on how many: this ingress's part, and at least 1."""
        return max(1, limit // self.count(now))
