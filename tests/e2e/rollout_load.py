"""A steady load on a model, and what each of its requests came to: by which version, when, for which session."""

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Sequence

import httpx
from msgspec import Struct

from .conftest import COMPLETIONS


class Seen(Struct, frozen=True):
    """One request."""

    at: float  # unix seconds
    session: str
    status: int
    version: str
    error: str  # its code; "": none
    seconds: float


class Load:
    """`rate` requests a second, half of them of sessions that come again, over all ingresses. `seen` has those that ended."""

    def __init__(self, urls: Sequence[str], model: str, rate: float, tokens: int = 4, sessions: int = 40) -> None:
        self._urls, self._model, self._rate, self._tokens = urls, model, rate, tokens
        self._sessions = [f"session {number}" for number in range(sessions)]
        self._dice = random.Random(7)
        self.seen: list[Seen] = []

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["Load"]:
        """Ask while inside; every request has ended behind it."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        async with httpx.AsyncClient(timeout=60, limits=limits) as client, asyncio.TaskGroup() as group:
            asking = group.create_task(self._ask_on(client, group))
            try:
                yield self
            finally:
                asking.cancel()

    async def _ask_on(self, client: httpx.AsyncClient, group: asyncio.TaskGroup) -> None:
        begun, number = time.monotonic(), 0
        while True:
            number += 1
            await asyncio.sleep(max(0.0, begun + number / self._rate - time.monotonic()))
            fresh = number % 2
            session = f"fresh {number}" if fresh else self._dice.choice(self._sessions)
            group.create_task(self._ask(client, self._urls[number % len(self._urls)], session, number))

    async def _ask(self, client: httpx.AsyncClient, url: str, session: str, number: int) -> None:
        at = time.time()
        body = {"model": self._model, "prompt": f"number {number}", "max_tokens": self._tokens}
        try:
            answer = await client.post(url + COMPLETIONS, json=body, headers={"X-Session-Id": session})
        except httpx.TransportError as error:
            self.seen.append(Seen(at, session, 0, "", type(error).__name__, time.time() - at))
            return
        code = "" if answer.status_code == 200 else answer.json()["error"]["code"]
        version = answer.headers.get("x-headrace-version", "")
        self.seen.append(Seen(at, session, answer.status_code, version, code, time.time() - at))

    def between(self, begin: float, end: float) -> list[Seen]:
        """Those that began then (unix seconds)."""
        return [each for each in self.seen if begin <= each.at < end]

    def failed(self) -> list[Seen]:
        return [each for each in self.seen if each.status != 200]

    def by_session(self) -> dict[str, list[Seen]]:
        found: dict[str, list[Seen]] = {}
        for each in sorted(self.seen, key=lambda each: each.at):
            found.setdefault(each.session, []).append(each)
        return found
