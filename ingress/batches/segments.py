"""Results on their way into files: gathered, written as segments, and made into the two files of the batch in the end."""

import io
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial

from ingress.batches.record import BatchRecord, Segment
from ingress.files.store import FileRecord, Files, Purpose, new_id
from ingress.files.upload import ID_PREFIX
from shared import subjects
from shared.errors import ObjectsUnavailable
from shared.objects import ObjectStore
from shared.settings import MIB

SEGMENT_BYTES = 4 * MIB  # a segment is written once it has so many
PURPOSE: Purpose = "batch_output"


class Gathered:
    """The results of consecutive lines, before they are written."""

    def __init__(self, lines_max: int) -> None:
        self._lines_max = lines_max
        self._output: list[bytes] = []
        self._errors: list[bytes] = []
        self._bytes = 0

    @property
    def lines(self) -> int:
        return len(self._output) + len(self._errors)

    @property
    def failed(self) -> int:
        return len(self._errors)

    @property
    def full(self) -> bool:
        return self.lines >= self._lines_max or self._bytes >= SEGMENT_BYTES

    def add(self, line: bytes, is_answer: bool) -> None:
        (self._output if is_answer else self._errors).append(line)
        self._bytes += len(line)

    async def write(self, files: Files, record: BatchRecord) -> Segment:
        """Put what there is into the store, under names that nobody else uses. Raises ObjectsUnavailable."""
        output, errors, name = self._output, self._errors, f"{record.cursor:06d}-{secrets.token_hex(6)}"
        keys = (f"{name}.output" if output else "", f"{name}.errors" if errors else "")

        def put(objects: ObjectStore) -> list[int]:
            sizes = []
            for key, lines in zip(keys, (output, errors), strict=True):
                data = b"".join(lines)
                if key:
                    objects.put(_prefix(record) + key, data)
                sizes.append(len(data))
            return sizes

        sizes = await files.call(put)
        return Segment(keys[0], sizes[0], keys[1], sizes[1])


class _Joined(io.RawIOBase):
    """Objects one after the other, read as one file."""

    def __init__(self, parts: list[tuple[str, int]], objects: ObjectStore) -> None:
        """`parts`: keys and sizes."""
        self._chunks = self._all(objects, parts)
        self._held = bytearray()

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        held = self._held
        while (size < 0 or len(held) < size) and (chunk := next(self._chunks, None)) is not None:
            held += chunk
        data = bytes(held if size < 0 else held[:size])
        del held[: len(data)]
        return data

    @staticmethod
    def _all(objects: ObjectStore, parts: list[tuple[str, int]]) -> Iterator[bytes]:
        for key, size in parts:
            left = size
            for chunk in objects.read_range(key, 0, size):
                left -= len(chunk)
                yield chunk
            if left:
                raise ObjectsUnavailable(f"{key} ends {left} bytes too early")


def file_ids(record: BatchRecord) -> tuple[str, str]:
    """New ids for the output file and the error file; "" for one that has no line."""
    has_output = any(segment.output for segment in record.segments)
    has_errors = any(segment.errors for segment in record.segments)
    return new_id(ID_PREFIX) if has_output else "", new_id(ID_PREFIX) if has_errors else ""


async def make_files(files: Files, record: BatchRecord, check: Callable[[], Awaitable[None]]) -> None:
    """Make the files of the batch from its segments; repeated, it makes the same.

    Raises ObjectsUnavailable, Unavailable, and what `check` raises where the batch is not there any more.
    """
    prefix = _prefix(record)
    for file_id, name, parts in (
        (record.output_file_id, "output", [(each.output, each.output_bytes) for each in record.segments]),
        (record.error_file_id, "errors", [(each.errors, each.errors_bytes) for each in record.segments]),
    ):
        if not file_id:
            continue
        wanted = [(prefix + key, size) for key, size in parts if key]
        size = await files.write(record.tenant, file_id, await files.call(partial(_Joined, wanted)))
        if size != sum(size for _, size in wanted):
            raise ObjectsUnavailable(f"the object store kept {size} bytes of the batch's {name}")
        made = FileRecord(
            id=file_id,
            tenant=record.tenant,
            filename=f"{record.id}_{name}.jsonl",
            purpose=PURPOSE,
            bytes=size,
            created_at=int(time.time()),
            models=record.models,
        )
        await check()  # the bytes may have taken long
        await files.note(made)


async def remove(files: Files, record: BatchRecord) -> None:
    """Remove all segments of a batch, those too that were written in vain. Raises ObjectsUnavailable."""

    def remove_all(objects: ObjectStore) -> None:
        for each in objects.list(_prefix(record)):
            objects.remove(each.key)

    await files.call(remove_all)


def _prefix(record: BatchRecord) -> str:
    return f"batches/{subjects.encode_token(record.tenant)}/{subjects.encode_token(record.id)}/"
