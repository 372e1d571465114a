"""What an ingress does about a message that has become of no use: delete it, or keep it where people look."""

import asyncio

from shared import subjects, wire
from shared.claim_check import ClaimCheck
from shared.errors import Unavailable
from shared.stream import Stream

DELETE_AGAIN_S = 1.0


async def delete(claim_check: ClaimCheck, body: bytes, sequence: int, turn: asyncio.Semaphore) -> None:
    """Delete a message that no worker may ever come for, until its queue deadline if need be. `body`: its whole request."""
    deadline = asyncio.get_running_loop().time() + claim_check.settings.queue_deadline_s
    while asyncio.get_running_loop().time() < deadline:
        try:
            async with turn:
                await claim_check.delete(subjects.REQ_STREAM, sequence, body)
            return
        except Unavailable:
            await asyncio.sleep(DELETE_AGAIN_S)


async def bury(claim_check: ClaimCheck, stream: Stream, reason: str) -> None:
    """Keep a request that was given up in the DLQ. Raises TooLarge, QueueFull or Unavailable."""
    subject = subjects.dead_letter(stream.model, stream.version, stream.tenant)
    headers = {
        wire.HEADER_MSG_ID: f"{stream.rid}.dlq",
        wire.HEADER_REASON: reason,
        wire.HEADER_REPLY: stream.requester.reply,
        wire.HEADER_GENERATION_MS: str(int(claim_check.settings.generation_deadline_s * 1000)),
    }
    await claim_check.publish(subject, stream.body, headers)
