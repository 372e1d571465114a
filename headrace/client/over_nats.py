"""The client over NATS: a requester of its own, which plays the requester's table for the tenant that its key says it is.

A stream goes on whatever ingress or worker dies. An ingress is asked where a request goes before it is published, whether what
waits for a worker waits for a version that takes nothing any more, and for what only it may do: jobs, and ending what is
queued.
"""

import asyncio
import contextlib
import hashlib
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec

from headrace.client.replies import Replies
from headrace.client.told import Candidate, Embeddings, Ended, Token, Usage, vector_of
from headrace.client.transport import JobOperation, all_told
from ingress.admission import Admission
from ingress.decoding import decode
from ingress.embeddings_body import EmbeddingsBody
from ingress.position import Position, parse
from ingress.routes.infer import score
from ingress.schemas import InferBody
from ingress.several import submitted
from shared import services, subjects, wire
from shared.bus import Bus
from shared.dispatch import Dispatcher
from shared.errors import (
    HeadraceError,
    Internal,
    ModelNotFound,
    NoReplicaForPin,
    StreamNotFound,
    Unsupported,
    VersionFailed,
    VersionNotFound,
    VersionRetired,
)
from shared.records import Version
from shared.services import Asked, Routed
from shared.settings import Settings
from shared.stream import Delta, Stream

_infer_decoder, _embeddings_decoder = msgspec.json.Decoder(InferBody), msgspec.json.Decoder(EmbeddingsBody)

LOOK_S = 1.0  # between two looks whether versions still take requests
TRIES_MAX = 5  # of one request, each at the version that takes them then
OUT_OF_SERVICE = (ModelNotFound, NoReplicaForPin, VersionFailed, VersionNotFound, VersionRetired)


class NatsSource:
    """One request of ours, or one that is gone on with."""

    def __init__(
        self,
        bus: Bus,
        stream: Stream,
        seen: Position | None = None,
        anew: Callable[[], Awaitable[Stream]] | None = None,
    ) -> None:
        """`anew`: asks for it once more, where its version may be another one."""
        self.id = stream.rid
        self.ended: Ended | None = None
        self._bus, self._stream, self._anew = bus, stream, anew
        self._tries = 1
        self._index = 0  # of the next token
        self._hash = hashlib.blake2b(digest_size=8)
        self._told = seen.choices[0].next if seen is not None else 0  # tokens that the reader has
        self._digest = seen.digests[0] if seen is not None else self._hash.hexdigest()

    @property
    def position(self) -> str:
        return f"{self.id}.{self._stream.sequence}.{self._told}.{self._digest}"

    async def tokens(self) -> AsyncIterator[Token]:
        finish = ""
        while True:
            try:
                deltas = await self._stream.next()
            except StopAsyncIteration:
                break
            except OUT_OF_SERVICE as error:
                await self._go_elsewhere(error)
                continue
            for delta in deltas:
                finish = delta.finish or finish
                for token in delta.ids:  # one at most
                    self._hash.update(token.to_bytes(4, "little"))
                    self._index += 1
                    if self._index > self._told:
                        self._told, self._digest = self._index, self._hash.hexdigest()
                        yield _token(delta, self._index - 1)
        self.ended = self._end(finish)

    async def _go_elsewhere(self, error: HeadraceError) -> None:
        """Be another request, at the version that takes them now; or raise `error`. What is queued is not to run later."""
        left, sequence = self.position, self._stream.sequence
        try:
            if self._anew is None or self._told or self._tries == TRIES_MAX:
                raise error
            self._tries += 1
            self._stream = await self._anew()
            self.id = self._stream.rid
        finally:
            if sequence:
                with contextlib.suppress(HeadraceError):
                    await _cancel(self._bus, left)

    def _end(self, finish: str) -> Ended:
        stream = self._stream
        if stream.usage is None or not finish:
            raise Internal(f"request {self.id} is complete, but how is not known")
        usage = stream.usage
        return Ended(
            version=stream.version,
            finish_reason=finish,
            usage=Usage(
                prompt_tokens=usage.prompt_tokens,
                completion_tokens=usage.completion_tokens,
                cached_tokens=usage.cached_tokens,
            ),
            claims=stream.claims,
            seed=stream.request.sampling.seed,
        )

    async def cancel(self) -> None:
        stream = self._stream
        queued = not stream.ended and not stream.claims and stream.sequence
        stream.cancel()
        if queued:  # only an ingress may take it out of the queue; else a worker is told to let go of it
            with contextlib.suppress(HeadraceError):
                await _cancel(self._bus, self.position)

    async def detach(self) -> None:
        self._stream.leave()


class OverNats:
    """A connection to NATS, as the tenant that its key is of."""

    def __init__(self, url: str, nkey: str | Path | None, settings: Settings | None) -> None:
        given = settings or Settings()
        self._settings = msgspec.structs.replace(given, nats_url=url, nats_nkey=str(nkey or given.nats_nkey))
        self._bus: Bus | None = None

    async def open(self) -> None:
        self._bus = bus = await Bus.connect(self._settings, "client")
        try:
            self.tenant: str = (await services.call(bus, subjects.SERVICE_WHOAMI, {}))["tenant"]
            self._dispatcher = Dispatcher(bus, self._settings, self.tenant)
            self._admission = Admission(self._settings, self._dispatcher)
            await self._dispatcher.start()
            self._watching = asyncio.create_task(self._watch_versions(), name="versions")
        except BaseException:
            await bus.close()
            raise

    async def close(self) -> None:
        self._watching.cancel()
        await asyncio.gather(self._watching, return_exceptions=True)
        for stream in list(self._dispatcher.streams()):
            if not stream.left:
                stream.cancel()
        await self._dispatcher.close()
        await self._connected.close()

    @property
    def _connected(self) -> Bus:
        if self._bus is None:
            raise RuntimeError("the client is not open: use it as an async context")
        return self._bus

    async def begin(self, model: str, body: dict[str, Any], version: str | None, session: str | None) -> NatsSource:
        [request] = await self._admit(_infer_decoder, model, body, version, session)
        stream = await self._dispatcher.submit(request, self.tenant, resumable=True)

        async def anew() -> Stream:
            [request] = await self._admit(_infer_decoder, model, body, version, session)
            return await self._dispatcher.submit(request, self.tenant, resumable=True)

        return NatsSource(self._connected, stream, anew=anew if request.movable else None)

    async def embed(self, body: dict[str, Any], version: str | None, session: str | None) -> Embeddings:
        for tries in itertools.count(1):
            requests = await self._admit(_embeddings_decoder, body["model"], body, version, session)
            try:
                return await self._embed(requests)
            except OUT_OF_SERVICE:
                if tries == TRIES_MAX or not requests[0].movable:
                    raise
        raise AssertionError("it was told or refused")

    async def _embed(self, requests: list[wire.Request]) -> Embeddings:
        vectors: list[list[float]] = [[] for _ in range(sum(request.sampling.n for request in requests))]
        async with submitted(self._dispatcher, requests, self.tenant) as several:
            with contextlib.suppress(StopAsyncIteration):
                while True:
                    for delta in await several.next():
                        vectors[delta.choice] = vector_of(delta.vector)
            if (usage := several.usage) is None:
                raise Internal(f"request {several.rid} is complete, but how is not known")
            return Embeddings(vectors=vectors, version=several.version, prompt_tokens=usage.prompt_tokens)

    async def _watch_versions(self) -> None:
        """End what waits for a version that takes nothing any more: a tenant may not watch the routes."""
        while True:
            await asyncio.sleep(LOOK_S)
            for model, version in {(stream.model, stream.version) for stream in self._waiting()}:
                if (error := await self._refusal(model, version)) is None:
                    continue
                for stream in self._waiting():
                    if (stream.model, stream.version) == (model, version):
                        self._dispatcher.act(stream, stream.requester.unavailable(error, time.monotonic()))

    def _waiting(self) -> list[Stream]:
        """What no worker has, and had: that it may still finish."""
        now = time.monotonic()
        found = ((stream, stream.requester) for stream in self._dispatcher.streams())
        return [
            stream
            for stream, requester in found
            if requester.unserved_s(now)
            >= (LOOK_S if requester.accepted_at is None else requester.limits.unserved_max_s)
        ]

    async def _refusal(self, model: str, version: str) -> HeadraceError | None:
        """Why a version takes no requests any more; None: it does, as far as is known."""
        try:
            await services.call(self._connected, subjects.SERVICE_ROUTE, Asked(model=model, pin=version))
        except OUT_OF_SERVICE as error:
            return error
        except HeadraceError:
            return None
        return None

    async def _admit(
        self, decoder: msgspec.json.Decoder[Any], model: str, body: dict[str, Any], pin: str | None, session: str | None
    ) -> list[wire.Request]:
        """What to publish. Raises what the route of such a body refuses with."""
        encoded = msgspec.json.encode(body)
        decoded = decode(decoder, encoded)
        asked = Asked(model=model, pin=pin, session=session or "")
        told = await services.call(self._connected, subjects.SERVICE_ROUTE, asked)
        routed = msgspec.convert(told, Routed)
        chosen = Version(
            model=routed.model,
            version=routed.version,
            state="available",
            source="",
            max_model_len=routed.max_model_len,
            encoder=routed.encoder,
        )
        requests = self._admission.admit(wire.new_id(), decoded, len(encoded), chosen)
        for request in requests:
            request.movable = routed.movable
        return requests

    async def resume(self, position: str) -> NatsSource:
        seen = parse(position) if "." in position else None
        rid = position.partition(".")[0]
        if seen is not None and seen.complete:
            raise all_told(rid)
        located = await self._dispatcher.locate(rid, self.tenant, seen.sequence if seen is not None else 0)
        if located is None:
            raise StreamNotFound(f"nobody has the request {rid}, or has it any more")
        if located.request.sampling.n != 1:
            raise Unsupported(f"request {rid} has {located.request.sampling.n} choices: it is resumed over HTTP")
        stream = await self._dispatcher.attach(
            located.request,
            self.tenant,
            located.seq,
            located.body,
            located.queue_left_s,
            known=None if seen is None else seen.known,
            resumable=True,
        )
        return NatsSource(self._connected, stream, seen)

    async def cancel(self, position: str) -> str:
        rid = position.partition(".")[0]
        for stream in self._dispatcher.streams():
            if stream.rid == rid:
                await NatsSource(self._connected, stream).cancel()
                return "cancelled"
        return await _cancel(self._connected, position)

    async def submit(self, order: dict[str, Any], headers: dict[str, str]) -> Any:
        return await services.call(self._connected, subjects.service_jobs("submit"), order, headers)

    async def list_jobs(self, asked: dict[str, Any]) -> Any:
        return await services.call(self._connected, subjects.service_jobs("list"), asked)

    async def ask_job(self, job: str, operation: JobOperation, wait_s: float = 0.0) -> Any:
        asked = {"id": job, "wait": wait_s}
        return await services.call(self._connected, subjects.service_jobs(operation), asked, answer_s=wait_s)

    async def watch_job(self, job: str, position: str | None) -> Replies:
        return Replies(self._connected, self.tenant, subjects.service_jobs("events"), job, position or "")


async def _cancel(bus: Bus, position: str) -> str:
    """Have an ingress end a request for everybody."""
    headers = {services.HEADER_LAST_EVENT_ID: position} if "." in position else None
    told = await services.call(bus, subjects.SERVICE_CANCEL, {"id": position.partition(".")[0]}, headers)
    status: str = told["status"]
    return status


def _token(delta: Delta, index: int) -> Token:
    [token] = delta.ids
    if not delta.logprobs:
        return Token(text=delta.text, index=index, id=token)
    told = score(delta.logprobs[0])
    top = tuple(Candidate(each.id, each.token, each.logprob) for each in told.top)
    return Token(text=delta.text, index=index, id=token, logprob=told.logprob, top=top)
