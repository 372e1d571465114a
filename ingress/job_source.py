"""The answer of a job: as the source of an exchange's answer while it comes to be and after, or whole, without HTTP."""

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable

import msgspec

from ingress.family import Admitted, Choice, Family, decode_framing
from shared import job_records, job_status, results, subjects
from shared.actions import Deliver
from shared.bus import Bus, Message
from shared.errors import Diverged, HeadraceError, JobNotFound, by_code
from shared.job_records import JobRecord
from shared.job_status import State
from shared.jobs import LOOK_S, STORED_S
from shared.results import Part, Result
from shared.stream import Delta, deltas_of
from shared.terms import Known
from shared.wire import Usage, WireError, digest

GIVE_UP_S = 0.5  # within which whoever waits notices that it should not


class JobSource:
    """A job's tokens as they are stored, by checkpoints and then its result: a `relay.Source`, made by `open_source`."""

    def __init__(self, bus: Bus, record: JobRecord, known: Known | None = None) -> None:
        """`known`: what whoever resumes has of it; what is stored has to be the same."""
        self._bus, self._record, self._known = bus, record, known
        self.rid, self.sequence = record.id, record.sequence
        self.version = record.request.version
        self.usage: Usage | None = None
        self.claims = 0
        self.ended = False
        self.ended_at: float | None = None  # unix seconds
        self._ids: list[list[int]] = [[] for _ in range(record.request.sampling.n)]
        self._finished = [False] * record.request.sampling.n
        self._deltas: list[Delta] = []
        self._error: HeadraceError | None = None
        self._look_at = -math.inf  # loop time
        self._news = asyncio.Event()

    def on_news(self, _: Message) -> None:
        """Something is about to be stored, or refused."""
        self._look_at = min(self._look_at, asyncio.get_running_loop().time() + STORED_S)
        self._news.set()

    async def next(self, timeout: float | None = None) -> list[Delta]:
        """As `Stream.next`. Also raises Diverged, JobNotFound when it was deleted, and Unavailable."""
        loop = asyncio.get_running_loop()
        until = math.inf if timeout is None else loop.time() + timeout
        while not self._deltas and not self.ended:
            now = loop.time()
            if now >= self._look_at:
                await self._look()
            elif now >= until:
                return []
            else:
                self._news.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(self._look_at, until) - now):
                        await self._news.wait()
        if self._deltas:
            deltas, self._deltas = self._deltas, []
            return deltas
        if self._error is not None:
            raise self._error
        raise StopAsyncIteration

    def leave(self) -> None:
        """A job goes on."""

    async def _look(self) -> None:
        self._look_at = asyncio.get_running_loop().time() + LOOK_S
        state = await job_status.look(self._bus, self._record.tenant, self.rid)
        if state is None:
            raise JobNotFound(f"the job {self.rid} was deleted")
        self.version, self.claims = version_of(state), state.claims
        for choice, part in enumerate(state.parts[: len(self._ids)]):
            self._extend(choice, part)
        if state.result is not None:
            self.ended, self.ended_at, self.usage = True, state.result.ended_at, state.result.usage
            self._error = None if state.result.error is None else error_of(state.result.error)

    def _extend(self, choice: int, part: Part) -> None:
        told = self._ids[choice]
        count = len(told)
        if part.ids[:count] != told[: len(part.ids)]:
            raise Diverged("the job began anew, and came to something else")
        finish = None if self._finished[choice] else part.finish
        if len(part.ids) < count or (len(part.ids) == count and finish is None):
            return
        self._finished[choice] = part.finish is not None
        told += part.ids[count:]
        self._check_known(choice)
        logprobs = part.logprobs[count:] if part.logprobs is not None else None
        self._deltas += deltas_of(
            Deliver(choice, part.ids[count:], part.text[count:], logprobs, finish, None, part.vector)
        )

    def _check_known(self, choice: int) -> None:
        known, told = self._known, self._ids[choice]
        if known is None or known.next is None or known.digest is None or len(told) < known.next[choice]:
            return
        if digest(told[: known.next[choice]]) != known.digest[choice]:
            raise Diverged("the job came to something else than what Last-Event-ID stands for")


@contextlib.asynccontextmanager
async def open_source(bus: Bus, record: JobRecord, known: Known | None = None) -> AsyncIterator[JobSource]:
    """The source of a job's answer, told from its first token on, for as long as the block runs. Raises Unavailable."""
    source = JobSource(bus, record, known)
    subscription = await bus.subscribe(subjects.results_of_job(record.tenant, record.id), source.on_news)
    try:
        yield source
    finally:
        await subscription.unsubscribe()


async def wait_ended(
    bus: Bus, record: JobRecord, timeout_s: float, give_up: Callable[[], bool] = lambda: False
) -> State | None:
    """What has become of a job, once it has ended, after so long, or soon after `give_up` says so; None: it is not known any
    more. Raises Unavailable.

    What it has come to so far is not read: hundreds may wait for one long job, and all would read all of it each second.
    """
    loop = asyncio.get_running_loop()
    until = loop.time() + timeout_s
    news = asyncio.Event()

    def on_news(_: Message) -> None:
        news.set()

    subscription = await bus.subscribe(subjects.result(record.tenant, record.id), on_news)
    try:
        while not give_up() and (left := until - loop.time()) > 0 and not await _is_over(bus, record):
            await _hear(news, min(left, LOOK_S), give_up)
    finally:
        await subscription.unsubscribe()
    return await job_status.look(bus, record.tenant, record.id)


async def _is_over(bus: Bus, record: JobRecord) -> bool:
    """Whether a job has ended, or is not known any more."""
    known, result = await asyncio.gather(
        job_records.read(bus, record.tenant, record.id), results.read_result(bus, record.tenant, record.id)
    )
    return known is None or result is not None


async def _hear(news: asyncio.Event, seconds: float, give_up: Callable[[], bool]) -> None:
    """Return once what there is news of is stored, after so long, or soon after `give_up` says so."""
    loop = asyncio.get_running_loop()
    until = loop.time() + seconds
    while not news.is_set() and not give_up() and (left := until - loop.time()) > 0:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(left, GIVE_UP_S)):
                await news.wait()
    if news.is_set():
        news.clear()
        await asyncio.sleep(STORED_S)


class StoredAnswer(msgspec.Struct):
    """What a job came to, as its route would have answered it at once."""

    status: int
    body: bytes


def version_of(state: State) -> str:
    """Which served it, as far as is known."""
    kept = state.result or state.checkpoint
    return state.record.request.version if kept is None else kept.version


def error_of(error: WireError) -> HeadraceError:
    return by_code(error.code, error.message, error.param)


def admitted_of(record: JobRecord, version: str) -> Admitted:
    """How a job is answered that has a record; `version` served it."""
    request = msgspec.structs.replace(record.request, version=version)
    return Admitted(request, decode_framing(request.framing))


def choice_of(part: Part) -> Choice:
    """A choice as far as it has come."""
    choice = Choice()
    for delta in deltas_of(Deliver(0, part.ids, part.text, part.logprobs, part.finish, None, part.vector)):
        choice.add(delta)
    return choice


def answer_of(family: Family, admitted: Admitted, result: Result, request_id: str = "") -> StoredAnswer:
    """The plain answer of a job that has ended, or its error."""
    if result.error is not None:
        error = error_of(result.error)
        return StoredAnswer(error.status, msgspec.json.encode(family.errors.body(error, request_id)))
    choices = [choice_of(part) for part in result.parts]
    usage = result.usage or Usage(0, 0)
    request = msgspec.structs.replace(admitted.request, version=result.version)
    served = msgspec.structs.replace(admitted, request=request, ended_at=result.ended_at)
    return StoredAnswer(200, family.plain(served, choices, usage, result.claims))
