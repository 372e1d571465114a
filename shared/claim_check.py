"""Requests that are too large for the bus: their input goes to the object store, and the message refers to it.

(The pattern is called claim check: Hohpe and Woolf, Enterprise Integration Patterns. It is not about the claims of workers.)
Who publishes, reads or ends a message does it through here; everybody in between has whole requests. An object belongs to
one message: it is put before that is published, and removed once that is gone.

    inputs/<tenant>/<rid>/<id>          of a request
    job-inputs/<tenant>/<rid>/<id>      of a job
    dead-inputs/<tenant>/<rid>/<id>     of one in the DLQ

The key is made of the subject's tenant and of the rid; a reference names no path. So nobody can refer to another tenant's.
"""

import asyncio
import hashlib
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeVar

import msgspec

from shared import subjects, wire
from shared.errors import HeadraceError, NotFound, ObjectsUnavailable, QueueFull, StreamGone, TooLarge
from shared.wire import Input, Request, Sampling, StoredInput

if TYPE_CHECKING:
    from shared.bus import Bus, PubAck
    from shared.objects import ObjectStore
    from shared.streams import StoredMessage

log = logging.getLogger(__name__)

Place = Literal["inputs", "job-inputs", "dead-inputs"]

INPUTS: Place = "inputs"
JOB_INPUTS: Place = "job-inputs"
DEAD_INPUTS: Place = "dead-inputs"
GROWTH_MAX = 4  # an input has at most so many times the bytes of the body that it came in: tools are there twice
CALLS_MAX = 8  # of the object store at the same time

T = TypeVar("T")


class _Large(msgspec.Struct):
    """What an object holds."""

    input: Input
    sampling: Sampling


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Large).decode


def key(tenant: str, rid: str, stored: StoredInput) -> str:
    """Of the object that a request of `tenant` refers to."""
    return f"{stored.place}/{subjects.encode_token(tenant)}/{rid}/{stored.id}"


def split(request: Request, place: Place, message_id: str) -> tuple[Request, bytes]:
    """What goes into the message of that Nats-Msg-Id, and what into the object that it refers to."""
    large = _encode(_Large(request.input, request.sampling))
    name = hashlib.blake2b(message_id.encode(), digest_size=16).hexdigest()
    stored = StoredInput(place, name, len(large), hashlib.sha256(large).hexdigest())
    return msgspec.structs.replace(request, input=Input(), sampling=_small(request.sampling), stored=stored), large


def join(request: Request, large: bytes) -> Request:
    """The whole request, of what `split` made of it. Raises StreamGone when the object is not the one that is meant."""
    stored = request.stored
    if stored is None or (len(large), hashlib.sha256(large).hexdigest()) != (stored.size, stored.sha256):
        raise StreamGone("the input in the object store is not the one that the request refers to")
    try:
        found = _decode(large)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise StreamGone(f"the input in the object store cannot be read: {error}") from None
    if _small(found.sampling) != request.sampling:  # what was decided by the message holds
        raise StreamGone("the input in the object store is of another request")
    return msgspec.structs.replace(request, input=found.input, sampling=found.sampling, stored=None)


def _small(sampling: Sampling) -> Sampling:
    """Without what has no bound."""
    return msgspec.structs.replace(sampling, grammar=None, logit_bias={}, stop=[], stop_token_ids=[], shown=[])


class ClaimCheck:
    """Publishes, reads and ends requests of any size within `request_bytes_max`."""

    def __init__(self, bus: "Bus", may_store: bool = True) -> None:
        """`may_store`: this process has the rights to the object store."""
        self._bus, self.settings, self._may_store = bus, bus.settings, may_store
        self._threads = ThreadPoolExecutor(CALLS_MAX, "claim-check")
        self._objects: ObjectStore | None = None

    @property
    def bytes_max(self) -> int:
        """Of an input in the object store."""
        return GROWTH_MAX * self.settings.request_bytes_max

    async def publish(self, subject: str, body: bytes, headers: Mapping[str, str]) -> "PubAck":
        """`Bus.publish_once` of an encoded request; one that is too large for it goes to the object store first.

        Raises ObjectsUnavailable, and what that raises.
        """
        if len(body) <= self._bus.payload_bytes_max or not self._may_store:
            return await self._bus.publish_once(subject, body, headers)
        tenant = subjects.tenant_of_request(subject)
        place = DEAD_INPUTS if subjects.is_dead_letter(subject) else JOB_INPUTS if subjects.is_job(subject) else INPUTS
        request = await self._call(partial(self._put, place, tenant, body, headers[wire.HEADER_MSG_ID]))
        try:
            return await self._bus.publish_once(subject, wire.encode(request), headers)
        except (QueueFull, TooLarge):  # it was certainly not stored
            await self.discard(request, tenant)
            raise

    async def open(self, request: Request, tenant: str) -> Request:
        """The whole of a request that was read. Raises ObjectsUnavailable, StreamGone and TooLarge."""
        stored = request.stored
        if stored is None:
            return request
        if stored.size > self.bytes_max:
            raise TooLarge(f"the stored input has {stored.size} bytes, the limit is {self.bytes_max} bytes")
        try:
            return await self._call(partial(self._get, key(tenant, request.rid, stored), request))
        except NotFound:
            raise StreamGone("the request's input is no longer in the object store") from None

    async def discard(self, request: Request, tenant: str) -> None:
        """Remove what a request refers to, whose message is gone. What cannot be removed now is by the controller's sweep."""
        if request.stored is None:
            return
        name = key(tenant, request.rid, request.stored)
        try:
            await self._call(lambda: self._store().remove(name))
        except HeadraceError as error:
            log.info("the input of request %s stays for a day: %s", request.rid, error.message)

    async def delete(self, stream: str, sequence: int, body: bytes = b"") -> None:
        """Delete a message, and what it refers to. `body`: the whole request, where it is known. Raises Unavailable."""
        if 0 < len(body) <= self._bus.payload_bytes_max:
            await self._bus.delete_message(stream, sequence)
        elif (message := await self._bus.get_message(stream, sequence)) is not None:
            await self.delete_read(stream, message)

    async def delete_read(self, stream: str, message: "StoredMessage") -> None:
        """The same of a message that has been read."""
        await self._bus.delete_message(stream, message.seq)
        try:
            request = wire.decode_request(message.data, message.headers)
            tenant = subjects.tenant_of_request(message.subject)
        except ValueError:  # not a request: it refers to nothing
            return
        await self.discard(request, tenant)

    async def move(
        self, stream: str, message: "StoredMessage", request: Request, subject: str, headers: Mapping[str, str]
    ) -> None:
        """Publish a stored request on another subject, then delete the message that it was read from.

        Raises QueueFull and Unavailable.
        """
        await self.copy(message, request, subject, headers)
        await self.delete_read(stream, message)

    async def copy(
        self, message: "StoredMessage", request: Request, subject: str, headers: Mapping[str, str]
    ) -> "PubAck":
        """Publish a stored request on another subject. Raises QueueFull and Unavailable."""
        try:
            request = await self.open(request, subjects.tenant_of_request(message.subject))
        except StreamGone as error:
            log.warning("request %s: %s", request.rid, error.message)  # whoever takes it ends it with that
        return await self.publish(subject, wire.encode(request), headers)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _call(self, work: Callable[[], T]) -> T:
        """Do it on a thread. Raises what it raises, and ObjectsUnavailable when it takes too long."""
        budget_s = self.settings.publish_timeout_s
        try:
            async with asyncio.timeout(budget_s):
                return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        except TimeoutError:
            raise ObjectsUnavailable(f"the object store did not answer within {budget_s:g} s") from None

    def _put(self, place: Place, tenant: str, body: bytes, message_id: str) -> Request:
        request, large = split(wire.decode_request(body, {}), place, message_id)
        if len(large) > self.bytes_max or request.stored is None:
            raise TooLarge(f"the request's input has {len(large)} bytes, the limit is {self.bytes_max} bytes")
        name, objects = key(tenant, request.rid, request.stored), self._store()
        try:
            objects.put(name, large)
        except NotFound:  # the bucket: nothing was ever pushed
            objects.ensure_bucket()
            objects.put(name, large)
        return request

    def _get(self, name: str, request: Request) -> Request:
        size = request.stored.size if request.stored is not None else 0
        return join(request, b"".join(self._store().read_range(name, 0, size)))

    def _store(self) -> "ObjectStore":
        if self._objects is None:
            from shared.objects import ObjectStore  # few requests need its libraries

            self._objects = ObjectStore(self.settings)
        return self._objects
