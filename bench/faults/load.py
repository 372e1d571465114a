"""Clients that ask, read, sometimes leave, and write down what became of every request."""

import asyncio
import math
import random
import time

import aiohttp
import msgspec

from faults.answers import Answer
from faults.corpus import TOKENS_MAX, Question
from faults.fleet import MODEL

PAUSE_S = 0.45  # between two tokens: longer is a pause
STUCK_S = 90.0  # without a token: given up, and a failure of the service
REFUSED_RETRY_S = 0.05


class Pause(msgspec.Struct):
    """A stretch in which a client waited for its next token. Monotonic seconds; `first`: it had none yet."""

    begin: float
    end: float
    first: bool


class Record(msgspec.Struct, kw_only=True):
    """One request. `outcome`: completed | cancelled | broken | wrong | stuck, or an error's code after `failed:`."""

    rid: str = ""
    kind: str = ""
    ingress: int = 0
    begin: float = 0.0
    end: float = 0.0
    outcome: str = ""
    detail: str = ""
    pauses: list[Pause] = []
    claims: int = 0
    tokens: int = 0


class Load:
    """`clients` clients in a closed loop, each with dice of its own, against whichever ingress is there."""

    def __init__(
        self,
        seed: int,
        questions: list[Question],
        urls: list[str],
        clients: int,
        cancel_share: float = 0.0,
        plain_share: float = 0.2,
        tokens: tuple[int, int] = (20, TOKENS_MAX),
    ) -> None:
        self.records: list[Record] = []
        self.open: dict[int, Record] = {}
        self.refused = 0  # connections that were not taken: no request
        self.tokens_read = 0
        self._seed, self._questions, self._urls = seed, questions, urls
        self._clients, self._cancel_share, self._plain_share, self._tokens = clients, cancel_share, plain_share, tokens
        self._stopping = asyncio.Event()
        self._left, self._cancels_wanted = 0, math.inf
        self._task: asyncio.Task[None] | None = None
        self._asked = 0

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Ask nothing more; returns when every request has ended."""
        self._stopping.set()
        if self._task is not None:
            await self._task

    async def cancelled(self, count: int) -> None:
        """Returns when so many clients have left their requests; asks nothing more then."""
        self._cancels_wanted = count
        await self._stopping.wait()

    async def _run(self) -> None:
        timeout = aiohttp.ClientTimeout(total=None, sock_read=STUCK_S)
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session, asyncio.TaskGroup() as group:
            for number in range(self._clients):
                group.create_task(self._client(session, random.Random(f"{self._seed}/{number}")))

    async def _client(self, session: aiohttp.ClientSession, dice: random.Random) -> None:
        while not self._stopping.is_set():
            question = dice.choice(self._questions)
            tokens = dice.randint(*self._tokens)
            stream = dice.random() >= self._plain_share
            leave_after = self._leaving(dice, tokens) if dice.random() < self._cancel_share else None
            ingress = dice.randrange(len(self._urls))
            record = Record(kind=question.kind, ingress=ingress, begin=time.monotonic(), pauses=[])
            number = self._asked = self._asked + 1
            self.open[number] = record
            try:
                await self._ask(session, question, tokens, stream, leave_after, record)
            finally:
                del self.open[number]
            record.end = time.monotonic()
            if record.outcome == "refused":
                self.refused += 1
                await asyncio.sleep(REFUSED_RETRY_S)
            else:
                self.records.append(record)
                self._left += record.outcome == "cancelled"
                if self._left >= self._cancels_wanted:
                    self._stopping.set()

    def _leaving(self, dice: random.Random, tokens: int) -> float:
        """When a client leaves: seconds after it asked, from at once to a little after the end."""
        return dice.choice((dice.uniform(0, 0.01), dice.uniform(0, 0.2), dice.uniform(0, tokens * 0.022)))

    async def _ask(
        self,
        session: aiohttp.ClientSession,
        question: Question,
        tokens: int,
        stream: bool,
        leave_after: float | None,
        record: Record,
    ) -> None:
        answer = Answer(question)
        url = self._urls[record.ingress] + question.route.format(model=MODEL)
        leaving = False
        try:
            async with asyncio.timeout(leave_after) as patience:
                async with session.post(url, json=question.body(MODEL, tokens, stream)) as response:
                    record.rid = response.headers.get("x-request-id", "")
                    if stream and response.status == 200:
                        await self._read(response, answer, record)
                    else:
                        answer.whole(await response.read())
        except aiohttp.ClientConnectorError:
            record.outcome = "refused"
            return
        except TimeoutError:
            leaving = patience.expired()
            if not leaving:
                record.outcome, record.detail = "stuck", f"no byte for {STUCK_S:g} s"
                return
        except (aiohttp.ClientError, ConnectionError) as error:
            record.outcome, record.detail = "broken", repr(error)[:200]
        record.claims, record.tokens = answer.claims, answer.pieces
        self._judge(answer, tokens, stream, leaving, record)

    async def _read(self, response: aiohttp.ClientResponse, answer: Answer, record: Record) -> None:
        before, first = record.begin, True
        async for line in response.content:
            if not line.startswith(b"data: "):
                if time.monotonic() - before > STUCK_S:
                    raise TimeoutError
                continue
            if answer.add(line[6:].rstrip()):
                now = time.monotonic()
                self.tokens_read += 1
                if now - before > PAUSE_S:
                    record.pauses.append(Pause(before, now, first))
                before, first = now, False

    def _judge(self, answer: Answer, tokens: int, stream: bool, leaving: bool, record: Record) -> None:
        fault = answer.fault_so_far(tokens) if stream else None
        if fault is not None:
            record.outcome, record.detail = "wrong", fault
        elif answer.error is not None:
            record.outcome = f"failed:{answer.error}"
        elif answer.done and (fault := answer.fault(tokens)) is not None:
            record.outcome, record.detail = "wrong", fault
        elif answer.done:
            record.outcome = "completed"
        elif leaving:
            record.outcome = "cancelled"
        elif not record.outcome:
            record.outcome, record.detail = "broken", "the answer ended without its terminal"
