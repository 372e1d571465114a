"""A version's files in the object store: checked, written, read. All of it blocks: call it from a thread.

A file lies under its sha256, so what is there already is not sent again, and two pushes at once cannot spoil each other's.
"""

import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from shared import manifests
from shared.errors import BadRequest, NotFound, ObjectsUnavailable, VersionFailed
from shared.manifests import MANIFEST_NAME, Manifest, ManifestFile
from shared.objects import ObjectStore
from shared.records import Version
from shared.settings import Settings

log = logging.getLogger(__name__)

UPLOAD_PAUSES_S = (0.5, 2.0, 5.0)

OnBytes = Callable[[int], None]  # so many bytes more are in the store


def upload(
    objects: ObjectStore, directory: Path, manifest: Manifest, on_bytes: OnBytes, trust_stored: bool = True
) -> None:
    """Write those of a version's files that are not in the store yet, and the manifest.

    What is there is made new, so that no garbage collection takes it before the record names it. `trust_stored` False: send
    everything, since something in the store was found damaged.
    """
    objects.ensure_bucket()
    for file in manifest.files:
        if not (trust_stored and _keep(objects, file)):
            _put_file(objects, directory / file.name, file)
        on_bytes(file.size)
    put_manifest(objects, manifest)


def put_manifest(objects: ObjectStore, manifest: Manifest) -> str:
    """Write a manifest under its sha256, which is returned."""
    raw = manifests.encode(manifest)
    sha256 = manifests.sha256_of(raw)
    objects.put(manifests.blob_key(sha256), raw)
    return sha256


def keep(objects: ObjectStore, manifest: Manifest) -> None:
    """Make the files of a manifest new, as `upload` does. Raises BadRequest when the store lacks some."""
    if lacks := [file.name for file in manifest.files if not _keep(objects, file)]:
        raise BadRequest(f"the object store lacks {', '.join(lacks)}, or has other sizes", param="manifest_sha256")


def name_manifest(objects: ObjectStore, manifest: Manifest) -> None:
    """Put the manifest under its version's name: the record is written, so nobody else writes another one there."""
    objects.put(manifests.manifest_key(manifest.model, manifest.version), manifests.encode(manifest))


def with_manifest(manifest: Manifest) -> list[ManifestFile]:
    """A version's files, and its manifest as one of them."""
    raw = manifests.encode(manifest)
    return [*manifest.files, ManifestFile(MANIFEST_NAME, len(raw), manifests.sha256_of(raw))]


def missing(objects: ObjectStore, files: Iterable[ManifestFile]) -> list[str]:
    """What the store lacks of the files, in words."""
    found = []
    for file in files:
        try:
            size = objects.stat(manifests.blob_key(file.sha256)).size
        except NotFound:
            found.append(f"{file.name} is not in the object store")
        else:
            if size != file.size:
                found.append(f"{file.name} has {size} of {file.size} bytes in the object store")
    return found


def read_manifest(objects: ObjectStore, sha256: str) -> tuple[Manifest, bytes]:
    """The manifest of that sha256, and its bytes. Raises NotFound, or VersionFailed when it is not what it should be."""
    raw = objects.get(manifests.blob_key(sha256))
    if manifests.sha256_of(raw) != sha256:
        raise VersionFailed("the manifest is not the one that was registered")
    try:
        return manifests.decode(raw), raw
    except msgspec.MsgspecError as error:
        raise VersionFailed(f"the manifest cannot be read: {error}") from error


def read_named_manifest(objects: ObjectStore, model: str, version: str) -> Manifest:
    """The manifest under a version's name, whoever put it there. Raises BadRequest when there is none that can be used."""
    key = manifests.manifest_key(model, version)
    try:
        return manifests.decode(objects.get(key))
    except NotFound as error:
        raise BadRequest(
            f"{error.message}; upload it first, or name another by manifest_sha256", param="manifest_sha256"
        ) from error
    except msgspec.MsgspecError as error:
        raise BadRequest(f"{key} is no manifest: {error}", param="manifest_sha256") from error


def verifier(settings: Settings) -> Callable[[Version], None]:
    """What the controller checks before a version becomes available: its manifest, and each file's presence and size.

    The function raises ObjectsUnavailable when it cannot tell, VersionFailed when something is not as the record says.
    The bytes themselves are verified by each worker as it reads them.
    """

    def verify(version: Version) -> None:
        objects = ObjectStore(settings)
        name = f"{version.model}@{version.version}"
        try:
            manifest, _ = read_manifest(objects, version.manifest_sha256)
        except (NotFound, VersionFailed) as error:
            raise VersionFailed(f"{name} is incomplete: {error}") from error
        if lacks := missing(objects, manifest.files):
            raise VersionFailed(f"{name} is incomplete: {'; '.join(lacks)}")

    return verify


def _keep(objects: ObjectStore, file: ManifestFile) -> bool:
    """Whether the store has the file; then it is new again."""
    key = manifests.blob_key(file.sha256)
    try:
        if objects.stat(key).size != file.size:
            return False
        objects.touch(key)
    except NotFound:
        return False
    return True


def _put_file(objects: ObjectStore, path: Path, file: ManifestFile) -> None:
    """Write one file; a store that drops the connection in the middle is asked again, from the file's first byte."""
    key = manifests.blob_key(file.sha256)
    for pause_s in UPLOAD_PAUSES_S:
        try:
            return objects.put_file(key, path, file.size, file.sha256)
        except ObjectsUnavailable as error:
            log.warning("%s is sent again in %g s: %s", file.name, pause_s, error.message)
            time.sleep(pause_s)
    return objects.put_file(key, path, file.size, file.sha256)
