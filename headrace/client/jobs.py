"""Requests that nobody waits for, as their submitter sees them."""

import asyncio
from typing import Any

import msgspec

from headrace.client.generation import Generation
from headrace.client.told import Result, usage_of
from headrace.client.transport import Transport
from shared.errors import Internal, by_code

WAIT_S = 60.0  # of one look; there is another one behind it


class Progress(msgspec.Struct, frozen=True):
    tokens: int  # so far, as of a second ago
    claims: int  # of workers that have served it


class JobStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What has become of a job."""

    id: str
    status: str  # queued | running | completed | failed | cancelled | expired
    version: str
    progress: Progress
    created_at: float  # unix seconds
    deadline_at: float  # by then it has ended
    ended_at: float | None = None
    expires_at: float | None = None  # until then it is kept
    metadata: dict[str, str] = {}
    error: dict[str, Any] | None = None
    result: dict[str, Any] | None = None  # what its route answered, once it is completed

    @property
    def ended(self) -> bool:
        return self.ended_at is not None


class Job:
    """A job by its id, which is all that has to be kept of it: it is durable, and lasts as long as it was told to."""

    def __init__(self, transport: Transport, id: str) -> None:
        self.id = id
        self._transport = transport

    async def status(self) -> JobStatus:
        """What has become of it by now. Raises JobNotFound."""
        return status_of(await self._transport.ask_job(self.id, "show"))

    async def result(self, timeout: float | None = None) -> Result:
        """What it came to, once it has ended. Raises its error, and TimeoutError after `timeout` seconds."""
        async with asyncio.timeout(timeout):
            while not (found := status_of(await self._transport.ask_job(self.id, "show", WAIT_S))).ended:
                pass
        if found.error is not None:
            raise by_code(found.error["code"], found.error["message"], found.error.get("param"))
        if found.result is None:
            raise Internal(f"job {self.id} has ended as {found.status}, without an answer")
        return _result(found.result)

    def events(self, position: str | None = None) -> Generation:
        """Its tokens as they come to be, about a second late: from the first on, or after a `position`.

        Leaving the loop ends nothing; after a job has ended all of them are there at once.
        """
        return Generation(lambda: self._transport.watch_job(self.id, position))

    async def cancel(self) -> JobStatus:
        """End it, queued or running; what has become of it then."""
        return status_of(await self._transport.ask_job(self.id, "cancel"))

    async def delete(self) -> None:
        """Forget one that has ended, with its answer; one that has not is ended."""
        await self._transport.ask_job(self.id, "delete")


def status_of(view: Any) -> JobStatus:
    return msgspec.convert(view, JobStatus)


def _result(answer: dict[str, Any]) -> Result:
    return Result(
        id=answer["id"],
        version=answer["version"],
        text=answer["text"],
        finish_reason=answer["finish_reason"],
        usage=usage_of(answer["usage"]),
        claims=answer["claims"],
        seed=answer["seed"],
    )
