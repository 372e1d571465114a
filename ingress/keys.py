"""Idempotency keys: one request for each key, however often and wherever it is sent.

The record of a key is created by compare-and-set before its request is published. Whoever comes later with the same key
attaches to that request, or publishes it under the same message id, which JetStream stores once. An answer is written into the
record before its last byte goes to a client: from then on the request never runs again.
"""

import asyncio
import hashlib
import logging
import time
from collections.abc import Coroutine
from typing import Any, Protocol

import msgspec

from shared import records, subjects
from shared.actions import Deliver
from shared.background import Background
from shared.errors import (
    BadRequest,
    Cancelled,
    EngineFailed,
    GenerationDeadline,
    HeadraceError,
    KeyReused,
    Poisoned,
    Unavailable,
    by_code,
)
from shared.records import KeptChoice, KeyRecord, Outcome
from shared.settings import Settings
from shared.stream import Delta, Stream, deltas_of
from shared.wire import Request, Usage, WireError

log = logging.getLogger(__name__)

KEY_CHARACTERS_MAX = 255
POLL_S = 0.03
PUBLISH_SOON_S = 1.0  # after the record; later others may publish, too: it is the same message
ATTEMPTS_MAX = 5  # at a write that others are at, too
TOKEN_BYTES_MIN = 3  # of a token in a record, at least
FINAL = (BadRequest, EngineFailed, Poisoned, GenerationDeadline)  # errors that a repetition would meet again


class KeyValue(Protocol):
    """What is needed of `shared.keyvalue`."""

    async def kv_get(self, bucket: str, key: str) -> tuple[bytes, int] | None: ...

    async def kv_put(self, bucket: str, key: str, value: bytes) -> int: ...

    async def kv_create(self, bucket: str, key: str, value: bytes) -> int | None: ...

    async def kv_update(self, bucket: str, key: str, value: bytes, revision: int) -> int | None: ...

    async def kv_delete(self, bucket: str, key: str, revision: int | None = None) -> None: ...


class Keys:
    """All keys of one ingress process."""

    def __init__(self, store: KeyValue, settings: Settings) -> None:
        self.store, self.settings = store, settings
        self._writes = Background()

    def claim(self, tenant: str, key: bytes, path: bytes, pin: bytes, body: bytes) -> "Claimed":
        """A key as a request has it in its header, bare or quoted, with what is asked for. Raises BadRequest."""
        text = key.decode("latin-1").strip()
        if len(text) > 1 and text[0] == text[-1] == '"':
            text = text[1:-1]
        if not 1 <= len(text) <= KEY_CHARACTERS_MAX or not text.isascii() or not text.isprintable():
            raise BadRequest(
                f"Idempotency-Key: 1 to {KEY_CHARACTERS_MAX} printable ASCII characters", param="Idempotency-Key"
            )
        asked = hashlib.blake2b(digest_size=16)
        try:
            content = msgspec.json.encode(msgspec.json.decode(body), order="deterministic")
        except (
            msgspec.MsgspecError,
            OverflowError,
            RecursionError,
        ) as error:  # of a field that is skipped without a key
            raise BadRequest(f"the body cannot be compared with another one: {error}") from None
        for part in (path, pin, content):
            asked.update(b"%d:" % len(part) + part)
        name = subjects.key(tenant, hashlib.blake2b(text.encode(), digest_size=16).hexdigest())
        return Claimed(self, name, asked.digest())

    def write(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Do `work` whatever becomes of who wants it."""
        return self._writes.do(self._guarded(work))

    async def close(self) -> None:
        """Wait for what is being written."""
        await self._writes.finish(self.settings.publish_timeout_s)

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Unavailable as error:
            log.error("the record of an idempotency key could not be written: %s", error.message)


class Claimed:
    """One key, as one exchange deals with it. `record` once `read` found or `create` made one."""

    record: KeyRecord

    def __init__(self, keys: Keys, name: str, digest: bytes) -> None:
        self.stream: Stream | None = None
        self._keys, self._name, self._digest = keys, name, digest
        self._revision = 0

    async def read(self) -> KeyRecord | None:
        """The record of the key. Raises KeyReused when it is of another request, and Unavailable."""
        found = await self._keys.store.kv_get(subjects.IDEMPOTENCY_BUCKET, self._name)
        if found is None:
            return None
        self.record, self._revision = records.decode_key_record(found[0]), found[1]
        if self.record.digest != self._digest:
            raise KeyReused("Idempotency-Key: it came before, with another body or route", param="Idempotency-Key")
        return self.record

    async def create(self, request: Request) -> bool:
        """Make `request` the key's; False when another one is. Raises KeyReused and Unavailable."""
        stripped = msgspec.structs.replace(request, input=type(request.input)())
        record = KeyRecord(digest=self._digest, request=stripped, created=time.time())
        for _ in range(ATTEMPTS_MAX):
            value = records.encode_key_record(record)
            revision = await self._keys.store.kv_create(subjects.IDEMPOTENCY_BUCKET, self._name, value)
            if revision is not None:
                self.record, self._revision = record, revision
                return True
            if await self.read() is not None:
                return False
        raise Unavailable("the idempotency key is being written to")

    async def published(self) -> bool:
        """Wait for the sequence of the request's message; False when whoever created the record seems to be gone."""
        if time.time() - self.record.created > PUBLISH_SOON_S:
            return self.record.seq > 0
        deadline = time.monotonic() + PUBLISH_SOON_S
        while not self.record.seq and self.record.outcome is None and time.monotonic() < deadline:
            await asyncio.sleep(POLL_S)
            if await self.read() is None:
                return False
        return self.record.seq > 0

    def note_published(self, seq: int) -> None:
        """Tell others the sequence of the message, without waiting for it."""
        if seq:
            self._keys.write(self._note(seq))

    async def may_run(self) -> bool:
        """Whether the request has not been answered, as far as is known. Asked before it is published again."""
        record = await self.read()
        return record is None or record.outcome is None

    async def withdraw(self) -> None:
        """The request was refused: the key is free again."""
        await self._keys.store.kv_delete(subjects.IDEMPOTENCY_BUCKET, self._name, self._revision)

    def recording(self, stream: Stream) -> "Recording":
        """What writes the outcome of `stream` into the record."""
        return Recording(self._keys, self, stream)

    async def answered(self, outcome: Outcome, seq: int, version: str) -> None:
        """Write the outcome and the version that it is of, unless there is one."""
        for _ in range(ATTEMPTS_MAX):
            record = await self.read()
            if record is None or record.outcome is not None:
                return
            request = msgspec.structs.replace(record.request, version=version)
            if await self._replace(
                msgspec.structs.replace(record, request=request, outcome=outcome, seq=seq or record.seq)
            ):
                return
        raise Unavailable("others are writing it")

    async def _note(self, seq: int) -> None:
        await self._replace(msgspec.structs.replace(self.record, seq=seq))

    async def _replace(self, record: KeyRecord) -> bool:
        value = records.encode_key_record(record)
        revision = await self._keys.store.kv_update(subjects.IDEMPOTENCY_BUCKET, self._name, value, self._revision)
        if revision is not None:
            self.record, self._revision = record, revision
        return revision is not None


class Recording:
    """Gathers all of a stream, whether it is read or not, and keeps what it comes to."""

    def __init__(self, keys: Keys, claim: Claimed, stream: Stream) -> None:
        self._keys, self._claim, self._stream = keys, claim, stream
        self._choices = [KeptChoice([], [], None, None) for _ in range(stream.request.sampling.n)]
        self._tokens = 0
        self._tokens_max = keys.settings.idempotency_result_bytes_max // TOKEN_BYTES_MIN
        self._written: asyncio.Task[None] | None = None

    def deliver(self, part: Deliver) -> None:
        self._tokens += len(part.ids) + len(part.vector) // TOKEN_BYTES_MIN
        choice = self._choices[part.choice]
        choice.finish = part.finish or choice.finish
        if self._tokens > self._tokens_max:
            self._choices = [KeptChoice([], [], None, each.finish) for each in self._choices]
            return
        choice.ids += part.ids
        choice.text += part.text
        choice.vector = part.vector or choice.vector
        if part.logprobs is not None:
            choice.logprobs = (choice.logprobs or []) + part.logprobs

    def end(self, error: HeadraceError | None) -> None:
        outcome = self._outcome(error)
        if outcome is not None:
            self._written = self._keys.write(self._claim.answered(outcome, self._stream.sequence, self._stream.version))

    async def settled(self) -> None:
        """Wait until the outcome is written, or can not be."""
        if self._written is not None:
            await asyncio.wait({self._written})

    def _outcome(self, error: HeadraceError | None) -> Outcome | None:
        """None: what ended the stream need not end the next one."""
        stream = self._stream
        if isinstance(error, FINAL) or (isinstance(error, Cancelled) and not stream.requester.abandoned):
            return Outcome([], None, stream.claims, WireError(error.code, error.message, error.param))
        if error is not None:
            return None
        outcome = Outcome(self._choices, stream.usage, stream.claims)
        size = len(records.encode_key_record(msgspec.structs.replace(self._claim.record, outcome=outcome)))
        if self._tokens > self._tokens_max or size > self._keys.settings.idempotency_result_bytes_max:
            return Outcome([], None, stream.claims, too_large=True)
        return outcome


class Replay:
    """An answer that was kept, as the source of another one."""

    def __init__(self, record: KeyRecord) -> None:
        assert record.outcome is not None, "only what has ended can be replayed"
        outcome = record.outcome
        self.rid, self.sequence, self.claims = record.request.rid, record.seq, outcome.claims
        self.version = record.request.version
        self.usage: Usage | None = outcome.usage
        self.ended = True
        self._error = outcome.error
        self._deltas = [
            delta
            for number, choice in enumerate(outcome.choices)
            for delta in deltas_of(
                Deliver(number, choice.ids, choice.text, choice.logprobs, choice.finish, None, choice.vector)
            )
        ]

    async def next(self, timeout: float | None = None) -> list[Delta]:
        """All of it; then StopAsyncIteration, or its error."""
        deltas, self._deltas = self._deltas, []
        if deltas:
            return deltas
        if self._error is not None:
            raise by_code(self._error.code, self._error.message, self._error.param)
        raise StopAsyncIteration

    def leave(self) -> None:
        """Nobody has to know."""
