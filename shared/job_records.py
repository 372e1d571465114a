"""What is known of a job beside its request in JOB and its result in RES: the bucket `jobs`, under key(tenant, id).

The record is written before the request is published, so that whatever comes of a job belongs to something that is known.
What a job's state is stands in no record: `shared.job_status` reads it off what is stored.
"""

import math
import secrets
import time
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import Meta

from shared import subjects
from shared.errors import Unavailable
from shared.jobs import TTL_MARGIN_S, Ticket
from shared.stored import Stored
from shared.webhooks import Webhook
from shared.wire import Input, Request

if TYPE_CHECKING:
    from shared.bus import Bus

ATTEMPTS_MAX = 5  # at a write that others are at, too
METADATA_MAX = 16

Kind = Literal["job", "response"]
MetadataName = Annotated[str, Meta(min_length=1, max_length=64)]
MetadataValue = Annotated[str, Meta(max_length=512)]
Metadata = Annotated[dict[MetadataName, MetadataValue], Meta(max_length=METADATA_MAX)]


class JobRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A job. Whatever its state is, only `sequence` changes, and with it the version: a rollback moves what waits."""

    id: str  # the rid of its request
    tenant: str
    kind: Kind = "job"
    endpoint: str  # the path that it could have been posted to
    request: Request  # with its framing, less what is big
    created_at: float  # unix seconds
    deadline: float  # unix seconds: by then it has ended
    keep_s: int  # for how long it is kept after its end
    sequence: int = 0  # of its message in JOB; 0: not known to be published
    webhook: Webhook | None = None
    metadata: dict[str, str] = {}
    document: bytes = b""  # what its kind keeps beside

    @property
    def ticket(self) -> Ticket:
        request = self.request
        return Ticket(
            id=self.id,
            tenant=self.tenant,
            model=request.model,
            version=request.version,
            sequence=self.sequence,
            deadline=self.deadline,
            keep_s=self.keep_s,
        )

    @property
    def expires_at(self) -> float:
        """Until when it is known at the latest, in unix seconds."""
        return self.deadline + TTL_MARGIN_S + self.keep_s


encode = msgspec.msgpack.Encoder().encode
JOBS = Stored(msgspec.msgpack.Decoder(JobRecord).decode, "the record of a job", lambda each: (each.tenant, each.id), 2)
job_at = JOBS.at


def new_job_id(now: float) -> str:
    """32 hex digits, as any rid: the milliseconds of `now` (unix seconds), so that ids sort by age, and 80 random bits."""
    return f"{int(now * 1000):012x}{secrets.token_hex(10)}"


def stripped(request: Request) -> Request:
    """A request less what is big, and what only its worker needs."""
    sampling = msgspec.structs.replace(request.sampling, grammar=None, logit_bias={})
    return msgspec.structs.replace(request, input=Input(), sampling=sampling)


async def create(bus: "Bus", record: JobRecord) -> bool:
    """Write it, unless there is one of that id. Raises Unavailable."""
    name = subjects.key(record.tenant, record.id)
    return await bus.kv_create(subjects.JOBS_BUCKET, name, encode(record), _ttl_s(record)) is not None


async def read(bus: "Bus", tenant: str, job: str) -> JobRecord | None:
    """None: there is none, or not any more. Raises Unavailable."""
    found = await _read(bus, tenant, job)
    return None if found is None else found[0]


async def note(bus: "Bus", tenant: str, job: str, sequence: int, version: str) -> JobRecord | None:
    """Write down where its message is, and for which version; the record then. Raises Unavailable.

    None: there is none. A message before the one that is known is none of it any more.
    """
    for _ in range(ATTEMPTS_MAX):
        found = await _read(bus, tenant, job)
        if found is None or found[0].sequence >= sequence:
            return None if found is None else found[0]
        before, revision = found
        request = msgspec.structs.replace(before.request, version=version)
        record = msgspec.structs.replace(before, request=request, sequence=sequence)
        name = subjects.key(tenant, job)
        if await bus.kv_update(subjects.JOBS_BUCKET, name, encode(record), revision, _ttl_s(record)) is not None:
            return record
    raise Unavailable("the record of the job is being written to")


async def remove(bus: "Bus", tenant: str, job: str) -> None:
    """Raises Unavailable."""
    await bus.kv_purge(subjects.JOBS_BUCKET, subjects.key(tenant, job))


async def ids(bus: "Bus", tenant: str) -> list[str]:
    """Of all jobs of a tenant that have records, the newest first. Raises Unavailable."""
    return sorted(await bus.kv_keys_below(subjects.JOBS_BUCKET, tenant), reverse=True)


async def _read(bus: "Bus", tenant: str, job: str) -> tuple[JobRecord, int] | None:
    name = subjects.key(tenant, job)
    found = await bus.kv_get(subjects.JOBS_BUCKET, name)
    return None if found is None else (JOBS.at(name, found[0]), found[1])


def _ttl_s(record: JobRecord) -> int:
    return max(1, math.ceil(record.expires_at - time.time()))
