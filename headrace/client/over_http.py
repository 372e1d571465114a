"""The client over HTTP: the native route with ids, gone on with at any ingress when a connection or an ingress is lost."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar
from urllib.parse import quote

import httpx
import msgspec

from headrace.client.told import Embeddings, Ended, Token, last_told, scored, vector_of
from headrace.client.transport import JobOperation, all_told
from shared.errors import Draining, HeadraceError, Unavailable, by_code

T = TypeVar("T")

CONNECT_TIMEOUT_S = 5.0
SILENCE_MAX_S = 60.0  # an ingress breaks a silence every 10 s: who says nothing for so long is gone
PLAIN_MAX_S = 660.0  # until an answer that is told at once: longer than a request may wait for a worker
AGAIN_EVERY_S, AGAIN_EVERY_MAX_S = 0.1, 1.0
AGAIN_WITHIN_S = 30.0  # without a new event; what is not read is kept for 15 s


class Event(msgspec.Struct):
    id: str | None
    data: dict[str, Any]


class Asking(msgspec.Struct):
    """A POST."""

    path: str
    body: dict[str, Any]
    headers: dict[str, str]


class Embedded(msgspec.Struct):
    embedding: bytes  # JSON has them in base64


class EmbeddedUsage(msgspec.Struct):
    prompt_tokens: int


class EmbeddedAnswer(msgspec.Struct):
    """What counts of an answer of /v1/embeddings."""

    data: list[Embedded]
    usage: EmbeddedUsage


_decode_embedded = msgspec.json.Decoder(EmbeddedAnswer).decode


class HttpSource:
    """A stream of the native route, with ids."""

    def __init__(
        self, http: "OverHttp", position: str = "", asking: Asking | None = None, path: str = "/v1/streams/{id}"
    ) -> None:
        """`asking` for it; None: it is gone on with, from `position`, which may be its id alone. `path`: to go on with it."""
        self.id = position.partition(".")[0]
        self.position = position
        self.ended: Ended | None = None
        self._http, self._asking, self._path = http, asking, path
        self._response: httpx.Response | None = None

    async def open(self) -> None:
        """Ask for it. Raises HeadraceError."""
        try:
            await self._connect()
        except (httpx.TransportError, Draining) as error:
            await self._http.again(self._connect, error)

    async def tokens(self) -> AsyncIterator[Token]:
        while self.ended is None:
            try:
                async for event in self._events():
                    self.position = event.id or self.position
                    if "finish_reason" in event.data:
                        self.ended = last_told(event.data)
                        break
                    yield scored(event.data["token"], event.data["index"], event.data.get("score"))
            except (httpx.TransportError, Draining) as error:
                await self._http.again(self._connect, error)

    async def cancel(self) -> None:
        await self.detach()
        if self.position:
            try:
                await self._http.cancel(self.position)
            except HeadraceError:  # it is over, or ends by itself: nobody reads it
                return

    async def detach(self) -> None:
        if self._response is not None:
            await self._response.aclose()

    async def _events(self) -> AsyncIterator[Event]:
        """What comes on the present connection. Raises TransportError when that ends before the stream does."""
        assert self._response is not None, "it is open"
        async for event in events_of(self._response):
            raise_error_in(event.data)
            yield event
        if self.ended is None:
            raise httpx.RemoteProtocolError("the stream broke off")

    async def _connect(self) -> None:
        if self._response is not None:
            await self._response.aclose()
        if self.position:
            # an id alone is not yet a position: all of it is told
            headers = {"last-event-id": self.position} if "." in self.position else {}
            response = await self._http.send("GET", self._path.format(id=self.id), headers=headers)
        else:
            assert self._asking is not None, "what is not asked for has a position"
            response = await self._http.send(
                "POST", self._asking.path, json=self._asking.body, headers=self._asking.headers
            )
        self._response = response
        if response.status_code == 204:
            raise all_told(self.id)
        self.position = response.headers.get("x-headrace-last-event-id", self.position)
        self.id = self.position.partition(".")[0]


class JobWatch(HttpSource):
    """The events of a job, which goes on whoever reads it."""

    async def cancel(self) -> None:
        await self.detach()


class OverHttp:
    """Ingresses at one URL, or at several of which one after the other is tried."""

    def __init__(self, url: str, key: str | None) -> None:
        self._urls = [each.strip().rstrip("/") for each in url.split(",")]
        self._key = key
        self._client: httpx.AsyncClient | None = None

    @property
    def url(self) -> str:
        return self._urls[0]

    def next_url(self) -> None:
        self._urls.append(self._urls.pop(0))

    async def open(self) -> None:
        timeout = httpx.Timeout(SILENCE_MAX_S, connect=CONNECT_TIMEOUT_S)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=32)
        headers = {"authorization": f"Bearer {self._key}"} if self._key else {}
        self._client = httpx.AsyncClient(timeout=timeout, limits=limits, headers=headers)

    async def close(self) -> None:
        await self._connected.aclose()

    @property
    def _connected(self) -> httpx.AsyncClient:
        if self._client is None:
            raise RuntimeError("the client is not open: use it as an async context")
        return self._client

    async def begin(self, model: str, body: dict[str, Any], version: str | None, session: str | None) -> HttpSource:
        headers = {"x-resumable": "true", **chosen(version, session)}
        asking = Asking(f"/v1/models/{quote(model)}/infer", body | {"stream": True}, headers)
        source = HttpSource(self, asking=asking)
        await source.open()
        return source

    async def resume(self, position: str) -> HttpSource:
        source = HttpSource(self, position)
        await source.open()
        return source

    async def embed(self, body: dict[str, Any], version: str | None, session: str | None) -> Embeddings:
        asked = {"json": body | {"encoding_format": "base64"}, "headers": chosen(version, session)}
        timeout = httpx.Timeout(PLAIN_MAX_S, connect=CONNECT_TIMEOUT_S)

        async def attempt() -> Embeddings:
            async with _closing(await self.send("POST", "/v1/embeddings", timeout=timeout, **asked)) as response:
                try:
                    told = _decode_embedded(await response.aread())
                except msgspec.DecodeError as error:
                    raise Unavailable(f"{self.url} broke off: {error!r}") from error
            vectors = [vector_of(each.embedding) for each in told.data]
            served = response.headers.get("x-headrace-version", "")
            return Embeddings(vectors=vectors, version=served, prompt_tokens=told.usage.prompt_tokens)

        try:
            return await attempt()
        except (httpx.TransportError, Draining) as error:
            return await self.again(attempt, error)

    async def submit(self, order: dict[str, Any], headers: dict[str, str]) -> Any:
        return await self.ask("POST", "/v1/jobs", json=order, headers=headers)

    async def list_jobs(self, asked: dict[str, Any]) -> Any:
        return await self.ask("GET", "/v1/jobs", params=asked)

    async def ask_job(self, job: str, operation: JobOperation, wait_s: float = 0.0) -> Any:
        method, suffix = {"show": ("GET", ""), "cancel": ("POST", "/cancel"), "delete": ("DELETE", "")}[operation]
        wait = {"params": {"wait": wait_s}, "timeout": wait_s + SILENCE_MAX_S} if wait_s else {}
        return await self.ask(method, f"/v1/jobs/{job}{suffix}", **wait)

    async def watch_job(self, job: str, position: str | None) -> JobWatch:
        source = JobWatch(self, position or job, path="/v1/jobs/{id}/events")
        await source.open()
        return source

    async def cancel(self, position: str) -> str:
        headers = {"last-event-id": position} if "." in position else {}
        told = await self.ask("DELETE", f"/v1/streams/{position.partition('.')[0]}", headers=headers)
        status: str = told["status"]
        return status

    async def send(self, method: str, path: str, **more: Any) -> httpx.Response:
        """The head of an answer, which is to be read or closed. Raises HeadraceError for what is none, TransportError."""
        client = self._connected
        response = await client.send(client.build_request(method, self.url + path, **more), stream=True)
        if response.status_code >= 400:
            try:
                await response.aread()
            finally:
                await response.aclose()
            raise error_of(response)
        return response

    async def again(self, attempt: Callable[[], Awaitable[T]], reason: Exception) -> T:
        """Try once more what failed for `reason`, at any ingress. Raises HeadraceError when none takes it."""
        loop = asyncio.get_running_loop()
        pause, deadline = AGAIN_EVERY_S, loop.time() + AGAIN_WITHIN_S
        while loop.time() < deadline:
            await asyncio.sleep(pause)
            pause = min(2 * pause, AGAIN_EVERY_MAX_S)
            self.next_url()
            try:
                return await attempt()
            except httpx.TransportError as error:
                reason = error
            except Unavailable as error:
                if not error.retryable:
                    raise
                reason = error
        raise Unavailable(f"{self.url} cannot be reached or broke off: {reason!r}")

    async def ask(self, method: str, path: str, **more: Any) -> Any:
        """The JSON of an answer; what may be asked again is, at other URLs too. Raises HeadraceError."""
        error: httpx.TransportError | None = None
        for _ in self._urls:
            try:
                async with _closing(await self.send(method, path, **more)) as response:
                    return msgspec.json.decode(await response.aread() or b"null")
            except httpx.ConnectError as refused:
                error = refused
                self.next_url()
            except (httpx.TransportError, msgspec.DecodeError) as broken:
                raise Unavailable(f"{self.url} broke off: {broken!r}") from broken
        raise Unavailable(f"{self.url} cannot be reached: {error}")


def chosen(version: str | None, session: str | None) -> dict[str, str]:
    """The headers that choose a version."""
    given = {"x-version-pin": version, "x-session-id": session}
    return {name: value for name, value in given.items() if value is not None}


@asynccontextmanager
async def _closing(response: httpx.Response) -> AsyncIterator[httpx.Response]:
    try:
        yield response
    finally:
        await response.aclose()


async def events_of(response: httpx.Response) -> AsyncIterator[Event]:
    """The server-sent events of an answer."""
    name: str | None = None
    async for line in response.aiter_lines():
        if line.startswith("id: "):
            name = line[len("id: ") :]
        elif line.startswith("data: ") and line != "data: [DONE]":
            yield Event(name, msgspec.json.decode(line[len("data: ") :]))
            name = None


def raise_error_in(told: dict[str, Any]) -> None:
    if (error := told.get("error")) is not None:
        raise by_code(error["code"], error["message"], error["param"])


def error_of(response: httpx.Response) -> HeadraceError:
    """What an answer with a status of 400 or more says."""
    try:
        error = response.json()["error"]
        found = by_code(error["code"], error["message"], error["param"])
    except (ValueError, KeyError, TypeError):  # somebody else's, in between
        kind = Unavailable if response.status_code >= 500 else HeadraceError
        found = kind(f"{response.request.url} answers {response.status_code}")
    retry_after = response.headers.get("retry-after-ms", "")
    found.retry_after = int(retry_after) / 1000 if retry_after.isdigit() else None
    return found
