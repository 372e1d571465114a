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
RETRY_S = 0.05
COME_BACK_CODES = {"draining", "bus_unavailable"}  # answers to a client that comes back: it tries again


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
    resumes: int = 0  # times that its client came back


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
        come_back: bool = False,
    ) -> None:
        """`come_back`: clients whose connection breaks go on, by Last-Event-ID or by their idempotency key."""
        self.records: list[Record] = []
        self.open: dict[int, Record] = {}
        self.refused = 0  # connections that were not taken: no request
        self._seed, self._questions, self._urls = seed, questions, urls
        self._clients, self._cancel_share, self._plain_share, self._tokens = clients, cancel_share, plain_share, tokens
        self._come_back = come_back
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
            tokens = question.length or dice.randint(*self._tokens)
            stream = dice.random() >= self._plain_share
            leave_after = self._leaving(dice, tokens) if dice.random() < self._cancel_share else None
            record = Record(
                kind=question.kind, ingress=dice.randrange(len(self._urls)), begin=time.monotonic(), pauses=[]
            )
            key = f"{dice.getrandbits(128):032x}" if self._come_back else ""
            number = self._asked = self._asked + 1
            self.open[number] = record
            try:
                await Exchange(session, self._urls, question, tokens, stream, key, record).run(leave_after)
            finally:
                del self.open[number]
            record.end = time.monotonic()
            if record.outcome == "refused":
                self.refused += 1
                await asyncio.sleep(RETRY_S)
            else:
                self.records.append(record)
                self._left += record.outcome == "cancelled"
                if self._left >= self._cancels_wanted:
                    self._stopping.set()

    def _leaving(self, dice: random.Random, tokens: int) -> float:
        """When a client leaves: seconds after it asked, from at once to a little after the end."""
        return dice.choice((dice.uniform(0, 0.01), dice.uniform(0, 0.2), dice.uniform(0, tokens * 0.022)))


class Exchange:
    """One request and its answer, over as many connections as it takes."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        urls: list[str],
        question: Question,
        tokens: int,
        stream: bool,
        key: str,
        record: Record,
    ) -> None:
        """`key`: an idempotency key, of a client that comes back when its connection breaks; "": it does not."""
        self._session, self._urls, self._question, self._tokens = session, urls, question, tokens
        self._stream, self._key, self._record = stream, key, record
        self._answer = Answer(question)
        self._event_id = ""  # of the last event
        self._heard, self._first = record.begin, True

    async def run(self, leave_after: float | None) -> None:
        """Ask, read to the end or until it is time to leave, and judge."""
        record = self._record
        left = False
        try:
            async with asyncio.timeout(leave_after) as patience:
                while not await self._connect():
                    record.resumes += 1
                    record.ingress = (record.ingress + 1) % len(self._urls)
                    await asyncio.sleep(RETRY_S)
        except TimeoutError:
            left = patience.expired()
            if not left:
                record.outcome, record.detail = "stuck", f"no token for {STUCK_S:g} s"
        if record.outcome not in ("refused", "stuck"):
            self._judge(left)
        record.claims, record.tokens = self._answer.claims, self._answer.pieces

    async def _connect(self) -> bool:
        """One connection; whether the exchange is over."""
        record, answer = self._record, self._answer
        try:
            async with self._request() as response:
                record.rid = response.headers.get("x-request-id", record.rid)
                if self._stream and response.status == 200:
                    await self._read(response)
                else:
                    answer.whole(await response.read())
        except aiohttp.ClientConnectorError as error:
            if not record.resumes and not self._key:
                record.outcome = "refused"
                return True
            record.detail = repr(error)[:200]
        except (aiohttp.ClientError, ConnectionError) as error:
            record.detail = repr(error)[:200]
        if answer.done:
            return True
        if answer.error in COME_BACK_CODES and record.resumes:
            answer.error = None
        if not self._key or answer.error is not None:
            return True
        if time.monotonic() - self._heard > STUCK_S:
            raise TimeoutError
        return False

    def _request(self) -> "aiohttp.client._RequestContextManager":
        url = self._urls[self._record.ingress]
        if self._event_id:
            rid = self._event_id.partition(".")[0]
            return self._session.get(f"{url}/v1/streams/{rid}", headers={"last-event-id": self._event_id})
        headers = {"idempotency-key": self._key, "x-resumable": "true"} if self._key else {}
        body = self._question.body(MODEL, self._tokens, self._stream)
        return self._session.post(url + self._question.route.format(model=MODEL), json=body, headers=headers)

    async def _read(self, response: aiohttp.ClientResponse) -> None:
        event_id = ""
        async for line in response.content:
            if line.startswith(b"id: "):
                event_id = line[4:].rstrip().decode()
                continue
            if not line.startswith(b"data: "):
                if time.monotonic() - self._heard > STUCK_S:
                    raise TimeoutError
                continue
            fresh = self._answer.add(line[6:].rstrip())
            if self._key:
                self._event_id = event_id
            if fresh:
                now = time.monotonic()
                if now - self._heard > PAUSE_S:
                    self._record.pauses.append(Pause(self._heard, now, self._first))
                self._heard, self._first = now, False

    def _judge(self, left: bool) -> None:
        answer, record = self._answer, self._record
        fault = answer.fault_so_far(self._tokens) if self._stream else None
        if fault is not None:
            record.outcome, record.detail = "wrong", fault
        elif answer.error is not None:
            record.outcome = f"failed:{answer.error}"
        elif answer.done and (fault := answer.fault(self._tokens)) is not None:
            record.outcome, record.detail = "wrong", fault
        elif answer.done:
            record.outcome = "completed"
        elif left:
            record.outcome = "cancelled"
        else:
            record.outcome = "broken"
            record.detail = record.detail or "the answer ended without its terminal"
