"""The weight cache of a host: files by their sha256, and one directory per version that links to them.

    <cache>/blobs/<sha256>              a complete, verified file
    <cache>/blobs/<sha256>.partial      one that is being read; <sha256>.journal says which parts of it are here
    <cache>/locks/<sha256>              flock: one process writes a blob, the others wait for it
    <cache>/versions/<key>-<manifest>/  the files of a version under their names (hard links), and its manifest

A version's directory appears by one rename when all its files are there. Shared by all workers of the host. Nothing is
forced to the disk, which would hold up a cold start: after a boot of the host a file is hashed once more before it is used.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from shared import manifests, subjects
from shared.errors import Cancelled, VersionFailed
from shared.manifests import MANIFEST_NAME, Manifest, ManifestFile
from shared.records import Version

_LOCK_POLL_S = 0.05
_KEY_MAX = 200  # characters of a directory's name: file systems take 255


class Cache:
    """The cache under `root`. `in_use_s`: what was used within that many seconds is never evicted."""

    def __init__(self, root: Path, bytes_max: int, in_use_s: float) -> None:
        self.root = root
        self.bytes_max = bytes_max
        self.in_use_s = in_use_s
        self._blobs, self._locks, self._versions = root / "blobs", root / "locks", root / "versions"
        for directory in (self._blobs, self._locks, self._versions):
            directory.mkdir(parents=True, exist_ok=True)

    def find_version(self, version: Version) -> Path | None:
        """The directory of a version that is complete here, marked as used now; None when it is not."""
        directory = self._directory(version.model, version.version, version.manifest_sha256)
        try:
            raw = (directory / MANIFEST_NAME).read_bytes()
        except OSError:
            return None
        if manifests.sha256_of(raw) != version.manifest_sha256:
            return None
        booted = _booted_at()
        for file in manifests.decode(raw).files:
            if not _intact(directory / file.name, file.sha256, file.size, directory.stat().st_mtime < booted):
                return None
        os.utime(directory)
        return directory

    def find_blob(self, sha256: str, size: int) -> bool:
        """Whether the file is here, marked as used now."""
        path = self.blob(sha256)
        try:
            found = _intact(path, sha256, size, path.stat().st_mtime < _booted_at())
            if found:
                os.utime(path)
            else:
                path.unlink()
        except OSError:
            return False
        return found

    def bytes_lacking(self, file: ManifestFile) -> int:
        """What a file that is not here will add to the cache: a partial one is as large as the whole from the start."""
        try:
            return max(0, file.size - self.partial(file.sha256).stat().st_size)
        except OSError:
            return file.size

    def blob(self, sha256: str) -> Path:
        return self._blobs / sha256

    def partial(self, sha256: str) -> Path:
        return self._blobs / f"{sha256}.partial"

    def journal(self, sha256: str) -> Path:
        return self._blobs / f"{sha256}.journal"

    @contextlib.contextmanager
    def lock(self, name: str, cancelled: threading.Event) -> Iterator[None]:
        """Hold the lock `name` of this cache; its end with the process frees it. Cancelled while waiting raises."""
        with open(self._locks / name, "wb") as file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if cancelled.wait(_LOCK_POLL_S):
                        raise Cancelled("the fetch was cancelled") from None
            yield

    def assemble(self, manifest: Manifest, raw_manifest: bytes) -> Path:
        """Make the version's directory out of blobs that are all here."""
        directory = self._directory(manifest.model, manifest.version, manifests.sha256_of(raw_manifest))
        building = Path(tempfile.mkdtemp(prefix=".building-", dir=self._versions))
        try:
            for file in manifest.files:
                os.link(self.blob(file.sha256), building / file.name)
            (building / MANIFEST_NAME).write_bytes(raw_manifest)
            if directory.exists():  # incomplete, else it would have been found: files were removed by hand
                shutil.rmtree(directory)
            building.rename(directory)
        finally:
            shutil.rmtree(building, ignore_errors=True)
        return directory

    def make_room(self, bytes_needed: int) -> None:
        """Evict the least recently used versions until `bytes_needed` more fit. Call it under a lock.

        Raises VersionFailed when the limit itself is smaller. What is in use stays, so the limit may be exceeded then.
        """
        if bytes_needed > self.bytes_max:
            raise VersionFailed(f"{bytes_needed} bytes of files are over cache_bytes_max of {self.bytes_max} bytes")
        recent = time.time() - self.in_use_s
        used = sum(status.st_size for _, status in self._blob_statuses())
        for directory in sorted(self._versions.iterdir(), key=lambda path: path.stat().st_mtime):
            if used + bytes_needed <= self.bytes_max or directory.stat().st_mtime > recent:
                break
            shutil.rmtree(directory)
            used -= self._drop_unlinked(recent)
        if used + bytes_needed > self.bytes_max:
            self._drop_unlinked(recent)

    def _drop_unlinked(self, recent: float) -> int:
        """Remove the blobs, partial ones too, that no version links and that nobody used lately; their bytes."""
        dropped = 0
        for path, status in self._blob_statuses():
            if status.st_nlink == 1 and status.st_mtime < recent:
                path.unlink()
                dropped += status.st_size
        return dropped

    def _blob_statuses(self) -> Iterator[tuple[Path, os.stat_result]]:
        """What lies there; not what another worker has just renamed, for it is complete."""
        for path in self._blobs.iterdir():
            with contextlib.suppress(FileNotFoundError):
                yield path, path.stat()

    def _directory(self, model: str, version: str, manifest_sha256: str) -> Path:
        """A key may be longer than a file's name; the manifest alone, which names the version, tells them apart."""
        return self._versions / f"{subjects.key(model, version)[:_KEY_MAX]}-{manifest_sha256[:16]}"


def _booted_at() -> float:
    """Unix seconds of the host's boot."""
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)


def _intact(path: Path, sha256: str, size: int, doubtful: bool) -> bool:
    """Whether the file is there, of its size, and if `doubtful` still what it was."""
    try:
        if path.stat().st_size != size:
            return False
        if not doubtful:
            return True
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == sha256
    except OSError:
        return False
