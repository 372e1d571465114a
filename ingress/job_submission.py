"""How a job comes to be: once for each idempotency key, and known from its answer on."""

from collections.abc import Callable

import msgspec

from ingress.answers import Headers
from ingress.context import Context
from ingress.detached import Order
from ingress.family import Admitted
from ingress.keys import Claimed
from shared import job_records
from shared.errors import HeadraceError, ResultGone, Unavailable
from shared.job_records import JobRecord
from shared.wire import Request

Admit = Callable[[str], Admitted]  # of a rid


async def submit(
    context: Context, admit: Admit, rid: str, tenant: str, order: Order, claim: Claimed | None, headers: Headers
) -> JobRecord:
    """The job of what `admit` admits; with a key the one that the key stands for. `headers` are added to for the answer.

    Raises what `admit` and `Detached.submit` raise, KeyReused, and ResultGone where the key's job is not kept any more.
    """
    detached = context.detached
    if claim is None:
        return await detached.submit(context, admit(rid).request, tenant, order, headers)
    if await claim.read() is None:
        request = admit(rid).request
        if await claim.create(request):
            return await _first(context, request, tenant, order, claim, headers)
    request = claim.record.request
    headers.append((b"idempotent-replayed", b"true"))
    await claim.published()
    known = await job_records.read(detached.bus, tenant, request.rid)
    if known is not None and known.sequence:
        return known
    if known is None and claim.record.seq:
        raise ResultGone("the job of this key has ended, and is not kept any more")
    # whoever came first with it has died on the way: it is the same job, whoever publishes it
    request = msgspec.structs.replace(request, input=admit(request.rid).request.input)
    return await _submit(context, request, tenant, order, claim, headers)


async def _first(
    context: Context, request: Request, tenant: str, order: Order, claim: Claimed, headers: Headers
) -> JobRecord:
    try:
        return await _submit(context, request, tenant, order, claim, headers)
    except Unavailable:  # it may be a job all the same
        raise
    except HeadraceError:
        await claim.withdraw()
        raise


async def _submit(
    context: Context, request: Request, tenant: str, order: Order, claim: Claimed, headers: Headers
) -> JobRecord:
    record = await context.detached.submit(context, request, tenant, order, headers)
    claim.note_published(record.sequence)
    return record
