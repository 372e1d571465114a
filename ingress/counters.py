"""Counters that all ingresses share, in Redis: what a tenant has taken of its rates, and what it has running.

Everything in it may be lost. One connection a process; what is asked while an answer is awaited travels in the next batch, in
the order in which it was asked. Nothing is connected before the first call. Who asks waits a short while only.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from ingress.counter_scripts import SETTLE, TAKE
from shared.background import end
from shared.settings import Settings, SettingsError

log = logging.getLogger(__name__)

NONE = "none"  # as a URL: there is no Redis
CONNECT_S = 1.0
PROBE_S = 0.25  # between tries to connect
WAITS_MAX = 10  # a batch takes so many times `limit_wait_s` at most; then the connection is given up
VAIN_MAX = 3  # calls in a row that nobody could wait for: the next ones do not wait
BATCH_MAX = 256

Answer = list[int] | None  # None: there is none


class _Call(msgspec.Struct):
    script: str
    keys: list[str]
    arguments: list[Any]
    answer: asyncio.Future[Answer]


class Counters:
    """The connection, and whether it is worth waiting for."""

    def __init__(self, settings: Settings, on_connected: Callable[[], None]) -> None:
        """`on_connected` is called with each new connection, before anything else is asked."""
        self._settings, self._on_connected = settings, on_connected
        self._waiting: list[_Call] = []
        self._wanted = asyncio.Event()
        self._vain = 0
        self._usable = self._tried = self._closing = False
        self._told = False  # its loss is in the log
        self._task: asyncio.Task[None] | None = None

    @property
    def usable(self) -> bool:
        """Whether a call is likely to be answered in time."""
        return self._usable and self._vain < VAIN_MAX

    @property
    def wait_s(self) -> float:
        """How long to wait for an answer: longer while the first connection is being made."""
        return self._settings.limit_wait_s if self._tried else max(CONNECT_S, self._settings.limit_wait_s)

    def start(self) -> None:
        """From now on calls are made. Raises SettingsError for a URL or certificates that cannot be used."""
        if self._settings.redis_url in ("", NONE):
            return
        self._client()
        self._usable = True
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Wait a moment for what was called to be answered, and end."""
        if self._task is None:
            return
        pending = [call.answer for call in self._waiting]
        if pending and self.usable:
            await asyncio.wait(pending, timeout=self._settings.limit_wait_s)
        self._usable, self._closing = False, True  # the client may swallow a cancellation that meets an answer
        self._wanted.set()
        await end(self._task)
        self._fail(self._waiting)

    def take(self, keys: list[str], arguments: list[Any]) -> asyncio.Future[Answer]:
        """Ask for a piece of every limit at once; see `counter_scripts.TAKE`."""
        return self._call(TAKE, keys, arguments)

    def settle(self, keys: list[str], arguments: list[Any]) -> asyncio.Future[Answer]:
        """Give back, take more, let go of and hold on; see `counter_scripts.SETTLE`."""
        return self._call(SETTLE, keys, arguments)

    def vain(self) -> None:
        """Somebody waited as long as may be."""
        self._vain += 1

    def _call(self, script: str, keys: list[str], arguments: list[Any]) -> asyncio.Future[Answer]:
        call = _Call(script, keys, arguments, asyncio.get_running_loop().create_future())
        if not self._usable:
            call.answer.set_result(None)
            return call.answer
        self._waiting.append(call)
        self._wanted.set()
        return call.answer

    async def _run(self) -> None:
        await self._wanted.wait()
        while not self._closing:
            try:
                async with self._connected() as (client, scripts):
                    self._tried = True
                    self._vain = 0
                    if not self._usable and not self._closing:
                        self._usable = True
                        self._on_connected()
                    while not self._closing:
                        await self._serve(client, scripts)
            except (RedisError, OSError, TimeoutError) as error:
                self._usable, self._tried = False, True
                if not self._told:
                    reason = f"{type(error).__name__} {error}"
                    log.warning("Redis does not answer, each ingress counts its part of the limits: %s", reason)
                self._told = True
                self._fail(self._waiting)
                await asyncio.sleep(PROBE_S)

    @contextlib.asynccontextmanager
    async def _connected(self) -> AsyncIterator[tuple[Any, dict[str, str]]]:
        client = self._client()
        try:
            async with asyncio.timeout(CONNECT_S):
                scripts = {script: await client.script_load(script) for script in (TAKE, SETTLE)}
            yield client, scripts
        finally:
            with contextlib.suppress(RedisError, OSError, TimeoutError):
                async with asyncio.timeout(CONNECT_S):
                    await client.aclose()

    def _client(self) -> Any:
        settings = self._settings
        options: dict[str, Any] = {}
        if settings.redis_url.startswith("rediss://") and settings.redis_tls_ca:
            options["ssl_ca_certs"] = settings.redis_tls_ca
        try:
            return Redis.from_url(
                settings.redis_url,
                single_connection_client=True,
                socket_connect_timeout=CONNECT_S,
                retry=Retry(NoBackoff(), 0),
                **options,
            )
        except ValueError as error:
            raise SettingsError(f"redis_url: {error}") from None

    async def _serve(self, client: Any, scripts: dict[str, str]) -> None:
        """Make the calls that wait, as one batch."""
        await self._wanted.wait()
        calls, self._waiting = self._waiting[:BATCH_MAX], self._waiting[BATCH_MAX:]
        if not self._waiting:
            self._wanted.clear()
        pipe = client.pipeline(transaction=False)
        for call in calls:
            pipe.evalsha(scripts[call.script], len(call.keys), *call.keys, *call.arguments)
        try:
            async with asyncio.timeout(WAITS_MAX * self._settings.limit_wait_s):
                answers = await pipe.execute(raise_on_error=False)
        except BaseException:
            self._usable = False  # before anybody is told that there is no answer
            self._fail(calls)
            raise
        self._vain = 0
        failed = next((answer for answer in answers if isinstance(answer, Exception)), None)
        if failed is not None:
            self._usable = False
        for call, answer in zip(calls, answers, strict=True):
            if not call.answer.done():
                call.answer.set_result(None if isinstance(answer, Exception) else answer)
        if failed is not None:
            raise failed
        if self._told:  # not before: one that is full lets everybody connect, and takes nothing
            self._told = False
            log.warning("Redis answers again")

    def _fail(self, calls: list[_Call]) -> None:
        for call in calls:
            if not call.answer.done():
                call.answer.set_result(None)
        if calls is self._waiting:
            self._waiting = []
            self._wanted.clear()
