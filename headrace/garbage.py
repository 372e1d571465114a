"""Objects that no version needs: those of a version that was just removed, and what pushes that never ended left behind.

A push makes what it relies on new before it writes its record, so that what is old and named by no record is nobody's.
"""

import asyncio
import time

from shared import blobs, manifests, registry
from shared.bus import Bus
from shared.errors import NotFound, VersionFailed
from shared.objects import ObjectInfo, ObjectStore
from shared.records import Version

AGE_S = 3600.0  # what is younger may belong to a push that has not written its record yet


async def collect(bus: Bus, objects: ObjectStore, dry_run: bool = False, age_s: float = AGE_S) -> list[ObjectInfo]:
    """Delete the objects that are older than `age_s` and that no version names; what was, or would be, deleted.

    A store without the bucket is empty before the first push; NotFound where versions have files: it is the wrong one.
    """
    try:
        stored = await asyncio.to_thread(_stored, objects)
    except NotFound:
        if any(
            each.source == registry.STORED and each.state != "retired" for each in await registry.list_versions(bus)
        ):
            raise
        return []
    kept = await _named_by(objects, await registry.list_versions(bus))
    before = time.time() - age_s
    found = [one for one in stored if one.modified <= before and one.key not in kept]
    if dry_run:
        return found
    return await asyncio.to_thread(_delete, objects, [one.key for one in found], before)


async def delete_files(bus: Bus, objects: ObjectStore, removed: Version) -> list[ObjectInfo]:
    """Delete the files of a version that was removed: those that no other version names, and that no push has touched since."""
    if removed.source != registry.STORED:
        return []
    own = await asyncio.to_thread(_keys_of, objects, removed)
    kept = await _named_by(objects, await registry.list_versions(bus))
    return await asyncio.to_thread(_delete_own, objects, removed, sorted(own - kept))


async def _named_by(objects: ObjectStore, versions: list[Version]) -> set[str]:
    """The keys of the objects that versions in service need."""
    needing = [each for each in versions if each.source == registry.STORED and each.state != "retired"]
    return set().union(*[await asyncio.to_thread(_keys_of, objects, each) for each in needing])


def _keys_of(objects: ObjectStore, version: Version) -> set[str]:
    keys = {manifests.blob_key(version.manifest_sha256), manifests.manifest_key(version.model, version.version)}
    try:
        manifest, _ = blobs.read_manifest(objects, version.manifest_sha256)
    except (NotFound, VersionFailed):
        return keys  # without its manifest it is served by nobody; a push of the same sends all of it again
    return keys | {manifests.blob_key(file.sha256) for file in manifest.files}


def _stored(objects: ObjectStore) -> list[ObjectInfo]:
    return [one for prefix in (manifests.BLOBS, manifests.MODELS) for one in objects.list(prefix)]


def _delete_own(objects: ObjectStore, removed: Version, keys: list[str]) -> list[ObjectInfo]:
    """A version's manifest is put under its name last: what is newer than that was touched by the push of another."""
    try:
        named = objects.stat(manifests.manifest_key(removed.model, removed.version))
    except NotFound:
        return []
    return _delete(objects, keys, named.modified)


def _delete(objects: ObjectStore, keys: list[str], before: float) -> list[ObjectInfo]:
    """Delete what is still not newer than `before`."""
    deleted = []
    for key in keys:
        try:
            found = objects.stat(key)
        except NotFound:
            continue
        if found.modified <= before:
            objects.remove(key)
            deleted.append(found)
    return deleted
