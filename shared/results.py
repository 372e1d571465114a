"""What is kept of detached work in the stream RES: how far a job has come, and then what came of it.

Both are written by compare-and-set. A checkpoint follows the one that its writer knows: so a claim that another one has
taken the place of learns it by its next checkpoint. A result follows nothing: each job has one, whoever else computes it too.
"""

import asyncio
from typing import TYPE_CHECKING, TypeVar

import msgspec

from shared import subjects
from shared.errors import Unavailable
from shared.wire import HEADER_MSG_ID, HEADER_TTL, Logprob, Usage, WireError, new_id

if TYPE_CHECKING:
    from shared.bus import Bus
    from shared.streams import StoredMessage

KEEP_MARGIN_S = 3600  # as long as a result is stored no worker runs its job again, whoever died before the ack
EXPECTED_SEQUENCE = "Nats-Expected-Last-Subject-Sequence"

Record = TypeVar("Record")


class Part(msgspec.Struct, omit_defaults=True):
    """One choice, as far as it has come."""

    ids: list[int] = []
    text: list[str] = []  # what each id added
    logprobs: list[Logprob] | None = None  # of each id
    finish: str | None = None  # "stop" | "length": it is complete
    vector: bytes = b""  # of what is embedded


class Checkpoint(msgspec.Struct, omit_defaults=True, kw_only=True):
    """How far a job has come."""

    version: str
    claim: str  # that wrote this
    held: bool  # by that claim; False: it has handed the job back
    parts: list[Part]
    deaths: int = 0  # claims in a row that ended without a word, and without a token
    claims: int = 0  # so far
    gpu_s: float = 0.0  # of claims that are over


class Result(msgspec.Struct, omit_defaults=True, kw_only=True):
    """What came of a job. With an error, `parts` are what it had come to."""

    version: str
    claim: str  # that wrote this; "": nobody's, it was ended in the queue
    parts: list[Part]
    ended_at: float  # unix seconds
    usage: Usage | None = None  # None: nothing was computed
    error: WireError | None = None
    claims: int = 0
    queue_s: float = 0.0  # from its storing to the claim that ended it
    gpu_s: float = 0.0


class Kept(msgspec.Struct):
    """What is stored of a job."""

    checkpoint: Checkpoint | None
    sequence: int  # of the checkpoint, 0: there is none
    result: Result | None


encode = msgspec.msgpack.Encoder().encode


async def read(bus: "Bus", tenant: str, job: str) -> Kept:
    """What is stored of a job. Raises Unavailable."""
    checkpoint, result = await asyncio.gather(
        bus.last_message(subjects.RES_STREAM, subjects.checkpoint(tenant, job)),
        bus.last_message(subjects.RES_STREAM, subjects.result(tenant, job)),
    )
    return Kept(
        None if checkpoint is None else _decoded(checkpoint, Checkpoint),
        0 if checkpoint is None else checkpoint.seq,
        None if result is None else _decoded(result, Result),
    )


async def read_result(bus: "Bus", tenant: str, job: str) -> Result | None:
    """What came of a job; None: nothing yet. Raises Unavailable."""
    found = await bus.last_message(subjects.RES_STREAM, subjects.result(tenant, job))
    return None if found is None else _decoded(found, Result)


async def save(bus: "Bus", tenant: str, job: str, checkpoint: Checkpoint, last: int) -> int | None:
    """Store a checkpoint after that of the sequence `last`; its own, or None: another claim's came after that.

    Raises QueueFull, TooLarge and Unavailable.
    """
    subject = subjects.checkpoint(tenant, job)
    sequence = await _write(bus, subject, encode(checkpoint), last)
    if sequence is not None:
        return sequence
    found = await bus.last_message(subjects.RES_STREAM, subject)  # an answer to the first try may have been lost
    if found is not None and found.seq > last and found.data == encode(checkpoint):
        return found.seq
    return None


async def store(bus: "Bus", tenant: str, job: str, result: Result, keep_s: int = 0) -> Result:
    """Store what came of a job, and delete its checkpoint; what is stored then: another one, if that was there before.

    `keep_s`: it is of use for so long, and goes away by itself some time after that; 0: when everything that is so old does.

    Raises QueueFull, TooLarge and Unavailable.
    """
    while await _write(bus, subjects.result(tenant, job), encode(result), 0, keep_s) is None:
        if (before := await read_result(bus, tenant, job)) is not None:
            result = before
            break
    await bus.purge(subjects.RES_STREAM, subjects.checkpoint(tenant, job))
    return result


async def forget(bus: "Bus", tenant: str, job: str) -> None:
    """Delete all that is kept of a job. Raises Unavailable."""
    await bus.purge(subjects.RES_STREAM, subjects.results_of_job(tenant, job))


async def _write(bus: "Bus", subject: str, data: bytes, last: int, keep_s: int = 0) -> int | None:
    headers = {HEADER_MSG_ID: new_id(), EXPECTED_SEQUENCE: str(last)}
    if keep_s:
        headers[HEADER_TTL] = str(keep_s + KEEP_MARGIN_S)
    try:
        return await bus.publish_durable(subject, data, headers)
    except Unavailable as error:
        if "wrong last sequence" not in error.message:
            raise
        return None


def _decoded(message: "StoredMessage", kind: type[Record]) -> Record:
    try:
        return msgspec.msgpack.decode(message.data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Unavailable(f"what is kept on {message.subject} cannot be read: {error}") from None
