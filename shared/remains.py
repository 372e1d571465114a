"""What is stored under a tenant's name beside its record, and its removal with the tenant.

Usage stays, for accounting, and what is streamed goes on to its end. A job that a worker has ends with its next checkpoint,
which follows none any more, and a batch with its record.
"""

import asyncio
from typing import TYPE_CHECKING

from shared import subjects
from shared.errors import NotFound

if TYPE_CHECKING:
    from shared.bus import Bus
    from shared.settings import Settings

WATCHED = (subjects.BATCHES_BUCKET, subjects.NOTICES_BUCKET)  # who runs batches and who sends notices have to be told
BUCKETS = (subjects.IDEMPOTENCY_BUCKET, subjects.RESPONSES_BUCKET, subjects.JOBS_BUCKET, subjects.FILES_BUCKET)
WITH_OBJECTS = (subjects.BATCHES_BUCKET, subjects.FILES_BUCKET)
PLACES = ("batches", "files")  # of its objects


async def remove(bus: "Bus", tenant: str) -> None:
    """Remove all of it; what is removed already is fine. Raises Unavailable and ObjectsUnavailable."""
    token = subjects.encode_token(tenant)
    for bucket in WATCHED:
        for each in await bus.kv_keys_below(bucket, tenant):
            await bus.kv_delete(bucket, subjects.key(tenant, each))
    # a deletion leaves a mark, and objects go before the records of files: repeated, it finds them
    if [each for bucket in WITH_OBJECTS for each in await bus.kv_keys_below(bucket, tenant)]:
        await asyncio.to_thread(_remove_objects, bus.settings, token)
    for bucket in BUCKETS:
        await bus.kv_purge(bucket, f"{token}.*")
    for stream, of_tenant in (
        (subjects.JOB_STREAM, subjects.jobs_of_tenant(tenant)),
        (subjects.RES_STREAM, subjects.kept_of_tenant(tenant)),
        (subjects.DLQ_STREAM, subjects.dead_letters_of_tenant(tenant)),
    ):
        await bus.purge(stream, of_tenant)


def _remove_objects(settings: "Settings", token: str) -> None:
    from shared.objects import ObjectStore

    objects = ObjectStore(settings)
    try:
        found = [each.key for place in PLACES for each in objects.each(f"{place}/{token}/")]
    except NotFound:  # the bucket: nothing was ever stored
        return
    for key in found:
        objects.remove(key)
