"""The files of a version, from the object store into the host's cache. Blocking: call it from a thread.

Every byte is hashed while it is written, so what `fetch` returns is what was pushed or nothing.
"""

import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

from shared import manifests
from shared.errors import Cancelled, NotFound, ObjectsUnavailable, VersionFailed
from shared.manifests import MANIFEST_NAME, Manifest, ManifestFile
from shared.objects import RANGE_BYTES, ObjectStore
from shared.records import Version
from shared.settings import Settings
from workers.cache import Cache

log = logging.getLogger(__name__)

BACKOFF_S = 0.2
BACKOFF_MAX_S = 2.0

OnProgress = Callable[[int, int], None]  # (bytes that are here, bytes in all)
T = TypeVar("T")


class _Corrupt(Exception):
    """An object is not what its manifest says."""


def fetch(
    version: Version,
    objects: ObjectStore,
    settings: Settings,
    on_progress: OnProgress = lambda _done, _total: None,
    cancelled: threading.Event | None = None,
) -> Path:
    """The directory with all files of `version`, each verified against its sha256.

    Several workers may fetch at once: one of them reads a file, the others wait for it. A read that was interrupted,
    even by the end of the process, goes on where it was. Nothing is read when the version is in the cache already.

    Raises ObjectsUnavailable when the store did not answer for `fetch_retry_s` (another try may help), VersionFailed when
    an object is missing or corrupt after a second read (another try cannot help), and Cancelled after `cancelled` was set.
    """
    cache = Cache(settings.cache_path, settings.cache_bytes_max, settings.start_seconds_max)
    if (found := cache.find_version(version)) is not None:
        return found
    return _Fetch(version, objects, settings, cache, on_progress, cancelled or threading.Event()).run()


class _Fetch:
    def __init__(
        self,
        version: Version,
        objects: ObjectStore,
        settings: Settings,
        cache: Cache,
        on_progress: OnProgress,
        cancelled: threading.Event,
    ) -> None:
        self._version = version
        self._objects = objects
        self._retry_s = settings.fetch_retry_s
        self._cache = cache
        self._on_progress = on_progress
        self._cancelled = cancelled
        self._heard = time.monotonic()  # when the store last gave us something
        self._done = 0

    def run(self) -> Path:
        raw = self._persist("the manifest", self._read_manifest)
        manifest = manifests.decode(raw)
        missing = [file for file in manifest.files if not self._cache.find_blob(file.sha256, file.size)]
        with self._cache.lock("evict", self._cancelled):
            self._cache.make_room(sum(file.size for file in missing))
        self._done = manifest.size - sum(file.size for file in missing)
        self._on_progress(self._done, manifest.size)
        for file in missing:
            self._persist(file.name, lambda file=file: self._read_file(manifest, file))  # type: ignore[misc]
        with self._cache.lock("evict", self._cancelled):
            return self._cache.find_version(self._version) or self._cache.assemble(manifest, raw)

    def _persist(self, what: str, read: Callable[[], T]) -> T:
        """`read`, again while the store is away (at most `fetch_retry_s` in silence), and once more when corrupt."""
        backoff_s = BACKOFF_S
        name = f"{self._version.model}@{self._version.version}"
        corrupt = False
        while True:
            try:
                return read()
            except (NotFound, _Corrupt) as error:
                if corrupt:
                    raise VersionFailed(f"{what} of {name} cannot be used: {error}") from error
                corrupt = True
                log.warning("%s of %s: %s; reading it once more", what, name, error)
            except ObjectsUnavailable as error:
                silent_s = time.monotonic() - self._heard
                if silent_s + backoff_s > self._retry_s:
                    raise ObjectsUnavailable(f"{what} of {name}: {error} for {silent_s:.0f} s") from error
                log.warning("%s of %s: %s; trying again in %.1f s", what, name, error, backoff_s)
                if self._cancelled.wait(backoff_s):
                    raise Cancelled("the fetch was cancelled") from None
                backoff_s = min(backoff_s * 2, BACKOFF_MAX_S)

    def _read_manifest(self) -> bytes:
        raw = self._objects.get(manifests.object_key(self._version.model, self._version.version, MANIFEST_NAME))
        self._heard = time.monotonic()
        if manifests.sha256_of(raw) != self._version.manifest_sha256:
            raise _Corrupt("its sha256 is not the one that was registered")
        try:
            manifests.decode(raw)
        except msgspec.MsgspecError as error:
            raise _Corrupt(str(error)) from error
        return raw

    def _read_file(self, manifest: Manifest, file: ManifestFile) -> None:
        """Read what is missing of one file into its partial blob; make it a blob when the whole has its sha256."""
        with self._cache.lock(file.sha256, self._cancelled):
            if self._cache.find_blob(file.sha256, file.size):  # by another worker, while we waited
                self._report(file.size, manifest)
                return
            partial = self._cache.partial(file.sha256)
            with open(partial, "a+b") as out:
                digest, start = _hash_existing(out, file.size)
                before, size = self._done, start
                self._report(start, manifest)
                key = manifests.object_key(manifest.model, manifest.version, file.name)
                try:
                    for data in self._objects.read_ranges(key, start, file.size):
                        if self._cancelled.is_set():
                            raise Cancelled("the fetch was cancelled")
                        digest.update(data)
                        out.write(data)
                        size += len(data)
                        self._report(len(data), manifest)
                except ObjectsUnavailable:
                    self._done = before
                    raise
            if size != file.size or digest.hexdigest() != file.sha256:
                partial.unlink()
                self._done = before
                if size < file.size:
                    raise _Corrupt(f"the object has {size} of {file.size} bytes")
                raise _Corrupt(f"its sha256 is {digest.hexdigest()}, not {file.sha256}")
            partial.rename(self._cache.blob(file.sha256))

    def _report(self, more: int, manifest: Manifest) -> None:
        self._heard = time.monotonic()
        self._done += more
        self._on_progress(self._done, manifest.size)


def _hash_existing(out: BinaryIO, size: int) -> tuple["hashlib._Hash", int]:
    """The digest over what a partial file holds already, and its length. One that is too long is emptied first."""
    digest = hashlib.sha256()
    if out.seek(0, os.SEEK_END) > size:
        out.truncate(0)
    out.seek(0)
    length = 0
    while data := out.read(RANGE_BYTES):
        digest.update(data)
        length += len(data)
    return digest, length
