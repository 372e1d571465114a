"""Detached work as whoever submits it sees it: a job is stored, somebody generates, what came of it is kept for days.

Nobody has to stay for the answer, and nobody is told of it: `wait` looks. Workers' half is `workers.detached`.
"""

import asyncio
import math
import time

import msgspec

from shared import results, subjects, wire
from shared.bus import Bus, Message
from shared.claim_check import ClaimCheck
from shared.errors import Cancelled, QueueDeadline, Unavailable
from shared.results import Checkpoint, Result
from shared.wakes import Hints
from shared.wire import CANCELLED, About, Request, WireError

TTL_MARGIN_S = 3600  # a message outlives its deadline: until somebody has written down that the job has ended
WAKE_EVERY_S = 0.05  # hints about one version; a worker looks no sooner
ASK_S = 2.0  # within which a worker that has a job says that it is cancelled
LOOK_S = 2.0  # between two looks at what is kept, for news that was lost
STORED_S = 0.02  # after news of a result, until it is stored
GONE_S = 10.0  # after its deadline: whoever has the job still then has ended it


class Ticket(msgspec.Struct, frozen=True, kw_only=True):
    """What has to be kept of a job to ask for it."""

    id: str  # the rid of its request
    tenant: str
    model: str
    version: str
    sequence: int  # in JOB; 0: not known
    deadline: float  # unix seconds
    keep_s: int = 0  # how long its result is kept; 0: as long as any


class Jobs:
    """Submits jobs, and looks after them. Of one process."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._claim_check = ClaimCheck(bus)
        self._hints = Hints(bus.publish, WAKE_EVERY_S)

    async def submit(self, request: Request, tenant: str, deadline_s: float | None = None, keep_s: int = 0) -> Ticket:
        """Store a request as a job; it is durable when this returns. Its rid is the job's id, and makes a repetition one job.

        `deadline_s`: after so long it ends with an error. `keep_s`: how long its result is kept.
        Raises QueueFull, TooLarge, Malformed and Unavailable.
        """
        deadline_s = self._bus.settings.job_deadline_s if deadline_s is None else deadline_s
        deadline = time.time() + deadline_s
        headers = {
            wire.HEADER_MSG_ID: request.rid,
            wire.HEADER_TTL: str(math.ceil(deadline_s) + TTL_MARGIN_S),
            wire.HEADER_WIRE: wire.WIRE_VERSION,
            wire.HEADER_DEADLINE: str(int(deadline * 1000)),
        }
        if keep_s:
            headers[wire.HEADER_KEEP] = str(keep_s)
        name = (request.model, request.version)
        subject = subjects.job(*name, tenant)
        sequence = (await self._claim_check.publish(subject, wire.encode_request(request), headers)).seq
        self._hints.hint(*name, "")
        return Ticket(
            id=request.rid,
            tenant=tenant,
            model=request.model,
            version=request.version,
            sequence=sequence,
            deadline=deadline,
            keep_s=keep_s,
        )

    async def result(self, ticket: Ticket) -> Result | None:
        """What came of a job; None: nothing yet. Raises Unavailable."""
        return await results.read_result(self._bus, ticket.tenant, ticket.id)

    async def checkpoint(self, ticket: Ticket) -> Checkpoint | None:
        """How far it has come, as of a second ago or so; None: it has not begun, or has ended. Raises Unavailable."""
        return (await results.read(self._bus, ticket.tenant, ticket.id)).checkpoint

    async def wait(self, ticket: Ticket, timeout_s: float) -> Result:
        """What came of a job, once it has ended. Raises TimeoutError when that takes longer, and Unavailable.

        Of one that nobody has any more, without a result, it is an error: `queue_deadline` after its deadline.
        """
        news = asyncio.Event()
        gone = False

        def on_result(_: Message) -> None:
            news.set()

        subscription = await self._bus.subscribe(subjects.result(ticket.tenant, ticket.id), on_result)
        try:
            async with asyncio.timeout(timeout_s):
                while (found := await self.result(ticket)) is None:
                    if gone:
                        return _lost(ticket)
                    gone = await self._is_gone(ticket)
                    try:
                        async with asyncio.timeout(STORED_S if news.is_set() or gone else LOOK_S):
                            await news.wait()
                            await asyncio.sleep(STORED_S)
                    except TimeoutError:
                        news.clear()
                return found
        finally:
            await subscription.unsubscribe()

    async def cancel(self, ticket: Ticket) -> bool:
        """End a job, wherever it is; whether it has ended by that, and not by itself. Raises Unavailable."""
        about = wire.encode(About(ticket.id, ticket.tenant))
        try:
            answer = await self._bus.request(subjects.CANCEL_JOB, about, ASK_S)
        except Unavailable:  # no worker has it, or the one that had it is dead
            error = WireError(Cancelled.code, "the job was cancelled")
            result = await end(self._bus, ticket.tenant, ticket.id, ticket.version, error, ticket.keep_s)
            await self.withdraw(ticket.sequence)
            await self._bus.publish(subjects.CANCEL_JOB, about)  # it may have been taken in between
            return result.error is not None and result.error.code == Cancelled.code
        return answer.data == CANCELLED

    async def withdraw(self, sequence: int) -> None:
        """Delete a job's message (0: it has none), and what it refers to in the object store. Raises Unavailable."""
        if sequence:
            await self._claim_check.delete(subjects.JOB_STREAM, sequence)

    async def _is_gone(self, ticket: Ticket) -> bool:
        """Whether it has expired, and no worker has had it since."""
        if time.time() < ticket.deadline + GONE_S:
            return False
        return not ticket.sequence or await self._bus.get_message(subjects.JOB_STREAM, ticket.sequence) is None


async def end(bus: Bus, tenant: str, job: str, version: str, error: WireError, keep_s: int = 0) -> Result:
    """Give a job that no worker has its result, unless it has one; what it has. Raises QueueFull and Unavailable."""
    kept = await results.read(bus, tenant, job)
    if kept.result is not None:
        return kept.result
    before = kept.checkpoint
    result = Result(
        version=version,
        claim="",
        parts=before.parts if before is not None else [],
        ended_at=time.time(),
        error=error,
        claims=before.claims if before is not None else 0,
        gpu_s=before.gpu_s if before is not None else 0.0,
    )
    return await results.store(bus, tenant, job, result, keep_s)


def _lost(ticket: Ticket) -> Result:
    error = WireError(QueueDeadline.code, "no worker had room for the job in time")
    return Result(version=ticket.version, claim="", parts=[], ended_at=ticket.deadline, error=error)
