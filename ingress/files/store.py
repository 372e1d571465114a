"""What is kept of files: a record in the bucket `files`, and the bytes as an object. Keys are of the tenant's own.

The object is complete before the record names it, and goes before the record: one that cannot be removed now, since the store
is away, has an owner who asks for it again.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Literal, TypeVar

import msgspec

from shared import subjects
from shared.errors import FileNotFound, NotFound, ObjectsUnavailable, TooManyFiles
from shared.objects import ObjectStore, Source
from shared.settings import MIB, Settings
from shared.stored import Stored, json

if TYPE_CHECKING:
    from shared.bus import Bus

Purpose = Literal["batch", "batch_output"]
T = TypeVar("T")

PART_BYTES = 8 * MIB  # of what is written without knowing its length
READ_BYTES = MIB  # of what is read at once
THREADS = 8


class FileRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A file, in the bucket `files` under key(tenant, id). Ids are ordered by when they were made."""

    id: str
    tenant: str
    filename: str
    purpose: Purpose
    bytes: int
    created_at: int  # unix seconds
    models: tuple[str, ...] = ()  # that it is of: what the key may use that brought it, or the batch's; (): any


FILES = Stored(json(FileRecord), "the record of a file", lambda each: (each.tenant, each.id), 2)


def new_id(prefix: str) -> str:
    """`prefix`, the time in 12 hex digits of milliseconds, and 80 random bits."""
    return f"{prefix}{int(time.time() * 1000):012x}{secrets.token_hex(10)}"


def object_key(tenant: str, file_id: str) -> str:
    """Where a file's bytes are: no name that a caller chose is part of it but as a token."""
    return f"files/{subjects.encode_token(tenant)}/{subjects.encode_token(file_id)}"


class Files:
    """All files. The object store is spoken to from threads of its own."""

    def __init__(self, bus: "Bus", settings: Settings) -> None:
        self._bus, self._settings = bus, settings
        self._threads = ThreadPoolExecutor(THREADS, "objects")
        self._opened: ObjectStore | None = None

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def call(self, function: Callable[[ObjectStore], T]) -> T:
        """What `function` of the object store comes to, in a thread. Raises what it raises, and ObjectsUnavailable."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: function(self._objects()))

    def _objects(self) -> ObjectStore:
        if self._opened is None:
            self._opened = ObjectStore(self._settings)
        return self._opened

    # -- records -------------------------------------------------------------------------------------------------------

    async def find(self, tenant: str, file_id: str) -> FileRecord:
        """Raises FileNotFound and Unavailable."""
        key = _key(tenant, file_id)
        found = await self._bus.kv_get(subjects.FILES_BUCKET, key) if key else None
        if not found:
            raise FileNotFound(f"there is no file {file_id}")
        return FILES.at(key, found[0])

    async def ids(self, tenant: str) -> list[str]:
        """Those of a tenant's files, the oldest first; a few may be gone."""
        return sorted(await self._bus.kv_keys_below(subjects.FILES_BUCKET, tenant))

    async def check_room(self, tenant: str) -> None:
        """Raises TooManyFiles, Unavailable."""
        if len(await self.ids(tenant)) >= self._settings.files_max:
            raise TooManyFiles(f"there are {self._settings.files_max} files, which is the limit: delete some")

    async def note(self, record: FileRecord) -> None:
        """Write the record of a file whose object is there."""
        key = subjects.key(record.tenant, record.id)
        await self._bus.kv_put(subjects.FILES_BUCKET, key, msgspec.json.encode(record))

    async def delete(self, record: FileRecord) -> None:
        """Raises Unavailable and ObjectsUnavailable: it is there as before, or its record alone is."""
        await self.call(lambda objects: objects.remove(object_key(record.tenant, record.id)))
        await self._bus.kv_purge(subjects.FILES_BUCKET, subjects.key(record.tenant, record.id))

    # -- bytes ---------------------------------------------------------------------------------------------------------

    async def write(self, tenant: str, file_id: str, source: Source) -> int:
        """Write a file's bytes from what a thread reads; how many. Raises what `source` raises, and ObjectsUnavailable."""

        def put(objects: ObjectStore) -> int:
            objects.ensure_bucket()
            return objects.put_stream(object_key(tenant, file_id), source, PART_BYTES)

        return await self.call(put)

    async def discard(self, tenant: str, file_id: str) -> None:
        """Remove the bytes of a file that gets no record."""
        await self.call(lambda objects: objects.remove(object_key(tenant, file_id)))

    async def read(self, record: FileRecord, offset: int, length: int = READ_BYTES) -> bytes:
        """Bytes from `offset` on; fewer than `length` at the end only. Raises FileNotFound and ObjectsUnavailable."""
        key = object_key(record.tenant, record.id)
        length = min(length, record.bytes - offset)
        if length <= 0:
            return b""
        try:
            data = await self.call(lambda objects: b"".join(objects.read_range(key, offset, length)))
        except NotFound:
            raise FileNotFound(f"the bytes of file {record.id} are not there any more") from None
        if len(data) != length:
            raise ObjectsUnavailable(f"the object store gave {len(data)} of {length} bytes of file {record.id}")
        return data

    async def stream(self, record: FileRecord, first: bytes) -> AsyncIterator[bytes]:
        """All of its bytes in order, of which the first were read already. Raises as `read` does."""
        offset, data = 0, first
        while data:
            yield data
            offset += len(data)
            data = await self.read(record, offset)


def _key(tenant: str, file_id: str) -> str:
    """Of the record; "" for what is no id of ours."""
    try:
        return subjects.key(tenant, file_id)
    except ValueError:
        return ""
