"""The records of batches in KV: read by anybody, changed by compare-and-set."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from ingress.batches.record import BATCHES, BatchRecord, encode
from shared import subjects
from shared.errors import BatchNotFound, Unavailable

if TYPE_CHECKING:
    from shared.bus import Bus

TRIES = 20  # of a change, against others who change the record too


async def find(bus: "Bus", tenant: str, batch_id: str) -> tuple[BatchRecord, int]:
    """A record and its revision. Raises BatchNotFound and Unavailable."""
    try:
        key = subjects.key(tenant, batch_id)
    except ValueError:
        key = ""
    found = await bus.kv_get(subjects.BATCHES_BUCKET, key) if key else None
    if found is None:
        raise BatchNotFound(f"there is no batch {batch_id}")
    return BATCHES.at(key, found[0]), found[1]


async def ids(bus: "Bus", tenant: str) -> list[str]:
    """Those of a tenant's batches, the oldest first."""
    return sorted(await bus.kv_keys_below(subjects.BATCHES_BUCKET, tenant))


async def open_batches(bus: "Bus", tenant: str) -> list[BatchRecord]:
    """A tenant's batches that have not ended. Raises Unavailable."""
    found = []
    for batch_id in await ids(bus, tenant):
        try:
            record, _ = await find(bus, tenant, batch_id)
        except BatchNotFound:  # its time is over
            continue
        if not record.ended:
            found.append(record)
    return found


async def create(bus: "Bus", record: BatchRecord) -> None:
    """Write the record of a new batch. Raises Unavailable."""
    if await bus.kv_create(subjects.BATCHES_BUCKET, subjects.key(record.tenant, record.id), encode(record)) is None:
        raise Unavailable(f"there is a batch {record.id} already")


async def update(bus: "Bus", record: BatchRecord, revision: int) -> int | None:
    """Write a changed record over that of the revision; the new revision, None: it has another one."""
    key = subjects.key(record.tenant, record.id)
    return await bus.kv_update(subjects.BATCHES_BUCKET, key, encode(record), revision)


async def change(bus: "Bus", tenant: str, batch_id: str, changed: Callable[[BatchRecord], BatchRecord]) -> BatchRecord:
    """Change a record, whoever else does. Raises what `changed` raises, BatchNotFound and Unavailable."""
    for _ in range(TRIES):
        record, revision = await find(bus, tenant, batch_id)
        new = changed(record)
        if new == record or await update(bus, new, revision) is not None:
            return new
    raise Unavailable("the batch is changed by others all the time", retry_after=1.0)
