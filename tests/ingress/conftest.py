"""The real application behind a real uvicorn on a free port, in a thread; only what lies behind the dispatcher is faked."""

import asyncio
import http.client
import json
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop

from ingress.context import Context
from ingress.identity import Identities
from ingress.keys import Keys
from ingress.listening import bind
from ingress.main import serve_until
from ingress.registrar import Registrar
from shared import records, wire
from shared.dispatch import Delta
from shared.errors import Cancelled, HeadraceError
from shared.lanes import LaneSwitch
from shared.router import Router
from shared.settings import Settings

DEADLINE_S = 10.0


def wait_for(condition: Callable[[], Any], what: str) -> Any:
    """The first true value of `condition`."""
    deadline = time.monotonic() + DEADLINE_S
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not in time: {what}"
        time.sleep(0.005)
    return found


class FakeStream:
    """The stream of `shared.dispatch`, fed by the test. Its methods run on the front's loop."""

    def __init__(self, request: wire.Request) -> None:
        self.request, self.rid = request, request.rid
        self.claims, self.sequence, self.version = 1, 5, request.version
        self.usage: wire.Usage | None = None
        self.accepted = self.ended = self.cancelled = False
        self.taken = 0  # deltas that the reader took
        self._deltas: deque[Delta] = deque()
        self._error: HeadraceError | None = None
        self._wake = asyncio.Event()

    def push(self, *deltas: Delta) -> None:
        self._deltas.extend(deltas)
        self._wake.set()

    def finish(self, usage: wire.Usage) -> None:
        self.usage, self.ended = usage, True
        self._wake.set()

    def fail(self, error: HeadraceError) -> None:
        self._error, self.ended = error, True
        self._wake.set()

    async def next(self, timeout: float | None = None) -> list[Delta]:
        if not self._deltas and not self.ended:
            self._wake.clear()
            try:
                async with asyncio.timeout(timeout):
                    await self._wake.wait()
            except TimeoutError:
                return []
        if self._deltas:
            deltas = list(self._deltas)
            self._deltas.clear()
            self.taken += len(deltas)
            return deltas
        if self._error is not None:
            raise self._error
        raise StopAsyncIteration

    def leave(self) -> None:
        if not self.ended:
            self.cancelled = True
            self.fail(Cancelled("cancelled"))


class FakeDispatcher:
    """Keeps every stream. `answer`, if set, feeds a new one at once; `refusal`, if set, is raised by submit."""

    def __init__(self) -> None:
        self.streams: list[FakeStream] = []
        self.answer: Callable[[FakeStream], None] | None = None
        self.refusal: HeadraceError | None = None
        self.queued_now = 0
        self.lanes = LaneSwitch(0)
        self.hold: asyncio.Event | None = None  # submit waits for it
        self.versions: list[records.Version] = []
        self.totals = dict.fromkeys(("published", "completed", "failed", "cancelled", "withdrawn"), 0)

    def queued(self, tenant: str) -> int:
        return self.queued_now

    def queued_of_all(self) -> int:
        return self.queued_now

    def version_changed(self, version: records.Version) -> None:
        self.versions.append(version)

    async def submit(
        self, request: wire.Request, tenant: str, keyed: bool = False, resumable: bool = False
    ) -> FakeStream:
        if self.refusal is not None:
            raise self.refusal
        stream = FakeStream(request)
        self.streams.append(stream)
        if self.hold is not None:
            await self.hold.wait()
        if self.answer is not None:
            self.answer(stream)
        return stream


class FakeBuckets:
    """Key-value buckets in memory."""

    def __init__(self) -> None:
        self._values: dict[tuple[str, str], tuple[bytes, int]] = {}
        self._revision = 0

    async def kv_get(self, bucket: str, key: str) -> tuple[bytes, int] | None:
        return self._values.get((bucket, key))

    async def kv_put(self, bucket: str, key: str, value: bytes) -> int:
        self._revision += 1
        self._values[bucket, key] = (value, self._revision)
        return self._revision

    async def kv_create(self, bucket: str, key: str, value: bytes) -> int | None:
        return await self.kv_update(bucket, key, value, 0)

    async def kv_update(self, bucket: str, key: str, value: bytes, revision: int) -> int | None:
        if self._values.get((bucket, key), (b"", 0))[1] != revision:
            return None
        self._revision += 1
        self._values[bucket, key] = (value, self._revision)
        return self._revision

    async def kv_delete(self, bucket: str, key: str, revision: int | None = None) -> None:
        if revision in (None, self._values.get((bucket, key), (b"", 0))[1]):
            self._values.pop((bucket, key), None)

    async def last_message(self, stream: str, subject: str) -> None:
        """The streams beside them are empty."""


class Answer:
    def __init__(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.status, self.headers, self.body = status, headers, body

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        assert set(self.json["error"]) == {"message", "type", "param", "code"}, self.body
        error: dict[str, Any] = self.json["error"]
        return error


class Front:
    """A running ingress with a fake dispatcher."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.dispatcher = FakeDispatcher()
        self.router = Router()
        self.bus_usable = True
        self.keys = Keys(FakeBuckets(), settings)
        registrar = Registrar(FakeBuckets(), settings)  # type: ignore[arg-type]
        self.identities = Identities(settings.require_keys)
        self.context = Context(
            settings,
            self.router,
            self.dispatcher,  # type: ignore[arg-type]
            self.keys,
            registrar,
            lambda: self.bus_usable,
            self.identities,
            SimpleNamespace(bus=FakeBuckets()),  # type: ignore[arg-type]  # there are no jobs
        )
        self._bound = bind(settings)
        self.port: int = self._bound.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._run)

    def start(self) -> None:
        started = threading.Event()
        self._started = started.set
        self._thread.start()
        assert started.wait(DEADLINE_S)
        wait_for(self._listens, "the front listens")

    def _listens(self) -> bool:
        try:
            return self.http("GET", "/livez").status == 200
        except ConnectionError:
            return False

    def _run(self) -> None:
        async def main() -> None:
            self.loop, self.stop_event = asyncio.get_running_loop(), asyncio.Event()
            self._started()
            await serve_until(self.stop_event, self.context, self._bound)

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main())

    def stop(self) -> None:
        """Tell it to drain; it may go on."""
        self.loop.call_soon_threadsafe(self.stop_event.set)

    def join(self) -> None:
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive(), "the front does not end"

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run `function` on the front's loop and return what it returns."""

        async def run() -> Any:
            return function(*args)

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(DEADLINE_S)

    def stream(self, index: int = -1) -> FakeStream:
        """A submitted stream, waiting for it."""
        needed = index + 1 if index >= 0 else 1
        wait_for(lambda: len(self.dispatcher.streams) >= needed, "a request is submitted")
        return self.dispatcher.streams[index]

    def http(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Answer:
        """One request; `body` is bytes, or is sent as JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=DEADLINE_S)
        try:
            data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            connection.request(method, path, data, headers or {})
            response = connection.getresponse()
            return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
        finally:
            connection.close()

    def post(self, path: str, body: Any, **headers: str) -> Answer:
        return self.http("POST", path, body, {name.replace("_", "-"): value for name, value in headers.items()})

    def connect(self, path: str, body: Any) -> "RawClient":
        """A raw socket with a request sent."""
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n"
        return RawClient(self.port, head.encode() + data)


class RawClient:
    """A TCP connection; reads what has come so far."""

    def __init__(self, port: int, data: bytes, receive_buffer: int = 0) -> None:
        self.socket = socket.socket()
        if receive_buffer:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.settimeout(DEADLINE_S)
        self.socket.connect(("127.0.0.1", port))
        self.socket.sendall(data)
        self.received = b""

    def read_until(self, mark: bytes) -> bytes:
        """Everything received, once `mark` is in it."""
        while mark not in self.received:
            chunk = self.socket.recv(65536)
            assert chunk, f"closed before {mark!r}: {self.received!r}"
            self.received += chunk
        return self.received

    def read_to_end(self) -> bytes:
        while chunk := self.socket.recv(65536):
            self.received += chunk
        return self.received

    def has_data(self) -> bool:
        self.socket.setblocking(False)
        try:
            chunk = self.socket.recv(65536)
        except BlockingIOError:
            return False
        finally:
            self.socket.settimeout(DEADLINE_S)
        self.received += chunk
        return True

    def closed(self) -> bool:
        """Whether the other side has closed the connection; what came before that is taken in."""
        self.socket.setblocking(False)
        try:
            while chunk := self.socket.recv(65536):
                self.received += chunk
            return True
        except BlockingIOError:
            return False
        except ConnectionResetError:
            return True
        finally:
            self.socket.settimeout(DEADLINE_S)

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> "RawClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def version(name: str = "v1", model: str = "m", **fields: Any) -> records.Version:
    given: dict[str, Any] = {"state": "available", "source": "sim:zero", "max_model_len": 1000, "created": 7} | fields
    return records.Version(model=model, version=name, **given)


def route(*weights: tuple[str, int], model: str = "m", **aliases: str) -> records.Route:
    return records.Route(model, aliases, [records.Weight(*weight) for weight in weights])


def token(text: str, choice: int = 0, finish: str | None = None, logprobs: list[wire.Logprob] | None = None) -> Delta:
    return Delta(choice, [11], text, logprobs, finish)


def says(*texts: str, finish: str = "stop") -> Callable[[FakeStream], None]:
    """An answer for every choice: one delta a text, the last with the finish."""

    def answer(stream: FakeStream) -> None:
        for choice in range(stream.request.sampling.n):
            for text in texts[:-1]:
                stream.push(token(text, choice))
            stream.push(token(texts[-1], choice, finish))
        stream.finish(wire.Usage(5, len(texts) * stream.request.sampling.n, 2))

    return answer


class Make:
    """What tests build things with; importlib mode has no sibling modules to import from."""

    version = staticmethod(version)
    route = staticmethod(route)
    token = staticmethod(token)
    says = staticmethod(says)
    wait_for = staticmethod(wait_for)


@pytest.fixture(scope="session")
def make() -> type[Make]:
    return Make


@pytest.fixture(scope="session")
def start_front() -> Iterator[Callable[..., Front]]:
    """Start a front with changed settings; model `m` with version `v1` (alias `stable`) is served."""
    with ExitStack() as stack:

        def start(**changed: Any) -> Front:
            front = Front(Settings(**({"http_port": 0, "drain_linger_s": 0.0} | changed)))
            front.router.put_version(version())
            front.router.put_route(route(("v1", 10_000), stable="v1"))
            front.start()
            stack.callback(front.join)
            stack.callback(lambda: front.running and front.stop())
            return front

        yield start


@pytest.fixture(scope="session")
def shared_front(start_front: Callable[..., Front]) -> Front:
    return start_front(head_hold_s=0.15, keepalive_s=0.15, request_bytes_max=200_000, choices_max=4)


@pytest.fixture
def front(shared_front: Front) -> Iterator[Front]:
    """A front with short times; every test finds and leaves it idle."""
    dispatcher = shared_front.dispatcher
    dispatcher.streams.clear()
    dispatcher.answer, dispatcher.refusal, dispatcher.hold, dispatcher.queued_now = None, None, None, 0
    yield shared_front
    wait_for(lambda: not shared_front.context.open, "no request is left open")


@pytest.fixture(scope="session")
def raw() -> type[RawClient]:
    """`raw(port, data)`: a TCP connection on which `data` was sent."""
    return RawClient
