"""One file of a version, read from the object store by several readers at once into its partial file.

    <blob>.partial    as large as the file from the start; its chunks land in any order
    <blob>.journal    one byte for each chunk, written after the chunk: 1 when the chunk is there

The journal outlives the process, so that what was read is not read again, and a hole is not taken for data. After a loss of
power it may say too much: then the sha256, which is taken over the file as it was written, is not the one it should be.
"""

import errno
import hashlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from pathlib import Path
from typing import Self

from shared.errors import Cancelled, Unavailable
from shared.manifests import ManifestFile
from shared.objects import CHUNK_BYTES, ObjectStore

RANGE_CHUNKS = 32  # of one request
AHEAD_CHUNKS = 16 * RANGE_CHUNKS  # asked for and not yet hashed, at most: still in the page cache when they are hashed
HEAD_BYTES = 16  # of the journal: CHUNK_BYTES in digits

OnBytes = Callable[[int], None]  # so many bytes more are here


class Corrupt(Exception):
    """An object is not what its manifest says."""


class Download:
    """The partial file of one blob. Hold the blob's lock; use as a context manager."""

    def __init__(self, objects: ObjectStore, key: str, file: ManifestFile, partial: Path, journal: Path) -> None:
        self._objects, self._key, self._file = objects, key, file
        self._partial, self._journal_path = partial, journal
        self._count = -(-file.size // CHUNK_BYTES)
        self._here = bytearray(self._count)
        self._digest = hashlib.sha256()
        self._hashed = 0  # chunks
        self._buffer = memoryview(bytearray(min(CHUNK_BYTES, file.size)))

    def __enter__(self) -> Self:
        self._out = os.open(self._partial, os.O_RDWR | os.O_CREAT, 0o644)
        self._journal = os.open(self._journal_path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            self._resume()
        except OSError as error:
            self.__exit__()
            raise _no_room(error, self._partial) from error
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._out)
        os.close(self._journal)

    @property
    def bytes_here(self) -> int:
        return sum(self._length(index) for index in range(self._count) if self._here[index])

    def read(self, pool: Executor, on_bytes: OnBytes, cancelled: threading.Event) -> None:
        """Read what is missing, and hash it all. May be called again after ObjectsUnavailable: it goes on.

        Raises ObjectsUnavailable, Cancelled, or Corrupt: then nothing of it is kept.
        """
        stop = threading.Event()
        todo = deque(self._ranges_missing())
        reading: set[Future[None]] = set()
        try:
            while True:
                while self._hashed < self._count and self._here[self._hashed]:
                    self._hash_next()
                while todo and todo[0].start < self._hashed + AHEAD_CHUNKS:
                    reading.add(pool.submit(self._read_range, todo.popleft(), on_bytes, cancelled, stop))
                if self._hashed == self._count:
                    break
                done, reading = wait(reading, return_when=FIRST_COMPLETED)
                for future in done:
                    future.result()
        finally:
            stop.set()
            for future in reading:
                future.cancel()
            wait(reading)
        if self._digest.hexdigest() != self._file.sha256:
            raise Corrupt(f"its sha256 is {self._digest.hexdigest()}, not {self._file.sha256}")

    def discard(self) -> None:
        """Remove the partial file: what is in it is of no use."""
        self._partial.unlink(missing_ok=True)
        self._journal_path.unlink(missing_ok=True)

    def finish(self, blob: Path) -> None:
        """The file is verified: give it its name."""
        self._partial.rename(blob)
        self._journal_path.unlink()

    def _length(self, chunk: int) -> int:
        return min(CHUNK_BYTES, self._file.size - chunk * CHUNK_BYTES)

    def _ranges_missing(self) -> Iterator[range]:
        """The chunks that are not here, in runs of at most RANGE_CHUNKS."""
        begin = 0
        while (begin := self._here.find(0, begin)) >= 0:
            end = self._here.find(1, begin, begin + RANGE_CHUNKS)
            end = min(begin + RANGE_CHUNKS, self._count) if end < 0 else end
            yield range(begin, end)
            begin = end

    def _resume(self) -> None:
        """Take over what an earlier read left. A journal of chunks of another size is of another release."""
        head = b"%0*d" % (HEAD_BYTES, CHUNK_BYTES)
        found = os.pread(self._journal, len(head) + self._count + 1, 0)
        is_ours = found[: len(head)] == head and len(found) == len(head) + self._count
        if is_ours and os.fstat(self._out).st_size == self._file.size:
            self._here[:] = found[len(head) :]
            return
        os.ftruncate(self._journal, 0)
        os.ftruncate(self._out, 0)
        if self._file.size:
            os.posix_fallocate(self._out, 0, self._file.size)
        os.pwrite(self._journal, head + bytes(self._count), 0)

    def _read_range(self, chunks: range, on_bytes: OnBytes, cancelled: threading.Event, stop: threading.Event) -> None:
        begin, end = chunks.start * CHUNK_BYTES, min(chunks.stop * CHUNK_BYTES, self._file.size)
        if stop.is_set():
            return
        try:
            for data, chunk in zip(self._objects.read_range(self._key, begin, end - begin), chunks, strict=False):
                if cancelled.is_set():
                    raise Cancelled("the fetch was cancelled")
                if stop.is_set():
                    return
                if len(data) < self._length(chunk):
                    break
                _write(self._out, data, chunk * CHUNK_BYTES)
                os.pwrite(self._journal, b"\1", HEAD_BYTES + chunk)
                self._here[chunk] = 1
                on_bytes(len(data))
        except OSError as error:
            raise _no_room(error, self._partial) from error
        if not self._here[chunks[-1]]:
            raise Corrupt(f"the object has {self._objects.stat(self._key).size} of {self._file.size} bytes")

    def _hash_next(self) -> None:
        """Hash one chunk as it is in the file: what the disk was given is what is verified."""
        buffer = self._buffer
        offset = self._hashed * CHUNK_BYTES
        end = offset + self._length(self._hashed)
        while offset < end:
            count = os.preadv(self._out, [buffer[: end - offset]], offset)
            if not count:
                raise Corrupt("its partial file was cut off by somebody else")
            self._digest.update(buffer[:count])
            offset += count
        self._hashed += 1


def _write(out: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(out, view, offset)
        view, offset = view[written:], offset + written


def _no_room(error: OSError, path: Path) -> Exception:
    """A full disk as an error of ours, which another try may survive; any other error as it is."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return Unavailable(f"no room for {path.name} in {path.parent}: {error.strerror}")
    return error
