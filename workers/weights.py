"""The files of a version, from the object store into the host's cache. Blocking: call it from a thread.

Every file is hashed as it lands, so what `fetch` returns is what was pushed or nothing. A fetch holds at most
(READERS + FILES_AT_ONCE) x CHUNK_BYTES of data in memory, 6 MiB, however large the files are.
"""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Executor, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TypeVar

import msgspec

from shared import manifests
from shared.errors import Cancelled, NotFound, ObjectsUnavailable, VersionFailed
from shared.manifests import ManifestFile
from shared.objects import ObjectStore
from shared.records import Version
from shared.settings import Settings
from workers.cache import Cache
from workers.download import Corrupt, Download

log = logging.getLogger(__name__)

READERS = 8  # of ranges, for all files together
FILES_AT_ONCE = 4  # each is hashed by a thread of its own
CANCEL_POLL_S = 0.1
BACKOFF_S = 0.2
BACKOFF_MAX_S = 2.0

OnProgress = Callable[[int, int], None]  # (bytes that are here, bytes in all)
T = TypeVar("T")


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
        self._told = threading.Lock()
        self._cancelled = cancelled
        self._over = threading.Event()  # for the threads of files: cancelled, or one of them has failed
        self._heard = time.monotonic()  # when the store last gave us something
        self._done = self._total = 0  # bytes

    def run(self) -> Path:
        raw = self._persist("the manifest", self._read_manifest, self._cancelled)
        manifest = manifests.decode(raw)
        missing = {file.sha256: file for file in manifest.files if not self._cache.find_blob(file.sha256, file.size)}
        with self._cache.lock("evict", self._cancelled):
            self._cache.make_room(sum(self._cache.bytes_lacking(file) for file in missing.values()))
        self._done = self._total = sum({file.sha256: file.size for file in manifest.files}.values())
        self._report(-sum(file.size for file in missing.values()))
        self._read_files(sorted(missing.values(), key=lambda file: -file.size))
        with self._cache.lock("evict", self._cancelled):
            return self._cache.find_version(self._version) or self._cache.assemble(manifest, raw)

    def _read_files(self, files: list[ManifestFile]) -> None:
        """Several at once, out of one pool of readers. Raises the error of the first that cannot be read."""
        with (
            ThreadPoolExecutor(READERS, "fetch-range") as readers,
            ThreadPoolExecutor(FILES_AT_ONCE, "fetch-file") as pool,
        ):
            reading = {pool.submit(self._read_file, file, readers) for file in files}
            try:
                while reading:
                    done, reading = wait(reading, CANCEL_POLL_S, FIRST_EXCEPTION)
                    for future in done:
                        future.result()
                    if self._cancelled.is_set():
                        raise Cancelled("the fetch was cancelled")
            finally:
                self._over.set()

    def _persist(self, what: str, read: Callable[[], T], over: threading.Event) -> T:
        """`read`, again while the store is away (at most `fetch_retry_s` in silence), and once more when corrupt."""
        backoff_s = BACKOFF_S
        name = f"{self._version.model}@{self._version.version}"
        corrupt = False
        while True:
            try:
                return read()
            except (NotFound, Corrupt) as error:
                if corrupt:
                    raise VersionFailed(f"{what} of {name} cannot be used: {error}") from error
                corrupt = True
                log.warning("%s of %s: %s; reading it once more", what, name, error)
            except ObjectsUnavailable as error:
                silent_s = time.monotonic() - self._heard
                if silent_s + backoff_s > self._retry_s:
                    raise ObjectsUnavailable(f"{what} of {name}: {error} for {silent_s:.0f} s") from error
                log.warning("%s of %s: %s; trying again in %.1f s", what, name, error, backoff_s)
                if over.wait(backoff_s):
                    raise Cancelled("the fetch was cancelled") from None
                backoff_s = min(backoff_s * 2, BACKOFF_MAX_S)

    def _read_manifest(self) -> bytes:
        raw = self._objects.get(manifests.blob_key(self._version.manifest_sha256))
        self._heard = time.monotonic()
        if manifests.sha256_of(raw) != self._version.manifest_sha256:
            raise Corrupt("its sha256 is not the one that was registered")
        try:
            manifests.decode(raw)
        except msgspec.MsgspecError as error:
            raise Corrupt(str(error)) from error
        return raw

    def _read_file(self, file: ManifestFile, readers: Executor) -> None:
        """Make one file a blob of the cache; another worker that is at it already is waited for."""
        with self._cache.lock(file.sha256, self._over):
            self._heard = time.monotonic()
            if self._cache.find_blob(file.sha256, file.size):
                self._report(file.size)
                return
            self._persist(file.name, lambda: self._download(file, readers), self._over)

    def _download(self, file: ManifestFile, readers: Executor) -> None:
        """One try, which goes on where an earlier one was broken off."""
        cache, key = self._cache, manifests.blob_key(file.sha256)
        counted = 0

        def count(more: int) -> None:
            nonlocal counted
            with self._told:
                counted += more
            self._report(more)

        def on_bytes(more: int) -> None:
            self._heard = time.monotonic()
            count(more)

        try:
            with Download(self._objects, key, file, cache.partial(file.sha256), cache.journal(file.sha256)) as download:
                count(download.bytes_here)
                try:
                    download.read(readers, on_bytes, self._over)
                except (Corrupt, NotFound):
                    download.discard()
                    raise
                download.finish(cache.blob(file.sha256))
        except BaseException:
            self._report(-counted)
            raise

    def _report(self, more: int) -> None:
        with self._told:
            self._done += more
            self._on_progress(self._done, self._total)
