"""Requests that nobody waits for: the checks of one that is answered at once, and the way into the queue of jobs.

A line of a batch is admitted here and submitted by its runner; a job, or a response in the background, has a record, too:
`Detached.submit`.
"""

import hashlib
import time

import msgspec

from ingress.answers import Headers
from ingress.asked import Asked, admit, resolve
from ingress.context import Context
from ingress.decoding import decode
from ingress.family import Admitted, Family, encode_framing
from ingress.identity import Caller
from ingress.schemas import Body
from shared import job_records, subjects
from shared.bus import Bus
from shared.errors import BadRequest, QueueFull, TooLarge, Unavailable, Unsupported
from shared.job_records import JobRecord, Kind
from shared.jobs import Jobs
from shared.webhooks import Webhook
from shared.wire import CHOICES_MAX, Malformed, Request, encode_request

RETRY_AFTER_S = 5.0  # where a tenant has as many jobs as it may


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked of a job beside its request."""

    endpoint: str  # the path that it could have been posted to
    kind: Kind = "job"
    deadline_s: float
    keep_s: int
    webhook: Webhook | None = None
    metadata: dict[str, str] = {}
    document: bytes = b""  # what its kind keeps beside


def family_at(families: tuple[Family, ...], path: str) -> Family:
    """The family that serves a POST to `path`. Raises BadRequest."""
    found = next((family for family in families if family.serves(path)), None)
    if found is None:
        raise BadRequest(f"endpoint: {path[:200]} is not an inference route", param="endpoint")
    return found


def admit_detached(
    context: Context,
    family: Family,
    raw: bytes,
    caller: Caller,
    rid: str,
    *,
    path: str,
    pin: str | None = None,
    session: str | None = None,
    created: int | None = None,
) -> Admitted:
    """What to publish for a body that could have been posted to `path`, and how to answer; its request carries the framing.

    The same `rid` gives the same request again: a seed that the caller does not give is made of it. `stream` plays no part.
    Raises what the route would refuse it with, Unsupported for several prompts and for more inputs than one request has.
    """
    asked = Asked(family, decode(family.decoder, raw), len(raw), path, pin, session)
    caller.check_model(asked.reference)
    return admit_asked(context, asked, caller.tenant, rid, created)


def admit_asked(context: Context, asked: Asked, tenant: str, rid: str, created: int | None = None) -> Admitted:
    """The same of a body that has been decoded, for a model that its caller may use."""
    admitted = admit(context, asked, resolve(context, asked, tenant), rid)
    if admitted.parts:
        admitted = _in_one(admitted, asked.body)
    if asked.body.seed is None:
        admitted.request.sampling.seed = int.from_bytes(hashlib.blake2b(rid.encode(), digest_size=8).digest()) >> 1
    if created is not None:
        admitted.framing.created = created
    admitted.request.framing = encode_framing(admitted.framing)
    try:
        encode_request(admitted.request)
    except Malformed as error:
        raise BadRequest(f"the request cannot be stored: {error}") from None
    return admitted


def _in_one(admitted: Admitted, body: Body) -> Admitted:
    """What would be published as several requests, as one: nobody waits for its first part. Raises Unsupported."""
    if not body.EMBEDS:
        raise Unsupported("prompt: several prompts are several jobs", param="prompt")
    if admitted.request.sampling.n > CHOICES_MAX:
        raise Unsupported(
            f"input: at most {CHOICES_MAX} inputs a job, got {admitted.request.sampling.n}", param="input"
        )
    return Admitted(msgspec.structs.replace(admitted.request, input=body.to_input()), admitted.framing)


class Detached:
    """The jobs of one ingress process."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.jobs = Jobs(bus)

    async def check_pending(self, tenant: str, wanted: int = 1) -> None:
        """Raises QueueFull where a tenant has as many jobs that have not ended as it may, and Unavailable."""
        counts = await self.bus.subject_counts(subjects.JOB_STREAM, subjects.jobs_of_tenant(tenant))
        pending, pending_max = sum(counts.values()), self.bus.settings.tenant_jobs_max
        if pending + wanted > pending_max:
            raise QueueFull(f"{pending} jobs have not ended, the limit is {pending_max}", retry_after=RETRY_AFTER_S)

    async def submit(
        self, context: Context, request: Request, tenant: str, order: Order, headers: Headers | None = None
    ) -> JobRecord:
        """Make a job of an admitted request: known and durable when this returns. `headers` get the tenant's standing.

        Repeated with the same rid it is the same job. Raises what the tenant's limits refuse with, QueueFull, TooLarge, and
        Unavailable: then it may be a job all the same.
        """
        await self.check_pending(tenant)
        standing = await context.limits.spend(tenant, request)
        if standing is not None:
            if headers is not None:
                headers += standing.headers
            if standing.refusal is not None:
                raise standing.refusal
        now = time.time()
        record = JobRecord(
            id=request.rid,
            tenant=tenant,
            kind=order.kind,
            endpoint=order.endpoint,
            request=job_records.stripped(request),
            created_at=now,
            deadline=now + order.deadline_s,
            keep_s=order.keep_s,
            webhook=order.webhook,
            metadata=order.metadata,
            document=order.document,
        )
        if await job_records.create(self.bus, record):
            try:
                return await self._publish(request, record)
            except (QueueFull, TooLarge):  # it was certainly not stored
                await job_records.remove(self.bus, tenant, record.id)
                raise
        known = await job_records.read(self.bus, tenant, record.id)
        if known is None:
            raise Unavailable("the record of the job is being written to")
        return known if known.sequence else await self._publish(request, known)

    async def _publish(self, request: Request, record: JobRecord) -> JobRecord:
        deadline_s = max(1.0, record.deadline - time.time())
        ticket = await self.jobs.submit(request, record.tenant, deadline_s, record.keep_s)
        noted = await job_records.note(self.bus, record.tenant, record.id, ticket.sequence, request.version)
        if noted is None:
            raise Unavailable("the job was deleted while it was submitted")
        return noted
