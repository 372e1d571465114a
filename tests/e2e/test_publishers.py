"""Callers over NATS, each as a tenant in an account of its own: the Python client, Node.js, the service; while things die."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from faults.corpus import CHAT, Question, make

from headrace import Client, HeadraceError
from shared import records, subjects, wire
from shared.bus import Bus
from shared.records import Lease

from .conftest import Stack, until

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples" / "node"
MODEL, WORKERS, KILLS = "mill", 3, 5
TENANT, OTHER = "acme", "other"  # of Python and of Node
TOKENS = 120


class Guarded:
    """A stack on a server with accounts, and what its tenants need."""

    def __init__(self, stack: Stack, server: Any) -> None:
        self.stack, self.server = stack, server

    def nats(self, tenant: str = TENANT) -> Client:
        return Client(self.server.url, nkey=self.server.key(tenant))

    def http(self) -> Client:
        return Client(self.stack.http)

    def kill_ingress(self) -> None:
        os.kill(self.stack.state["processes"]["ingress"]["pid"], signal.SIGKILL)

    @asynccontextmanager
    async def leases(self) -> AsyncIterator[dict[str, Lease]]:
        """What the workers say of themselves, kept up to date."""
        found: dict[str, Lease] = {}

        def on_lease(key: str, value: bytes | None) -> None:
            if (change := records.LEASES.change(key, value)) is not None:
                [worker] = change.names
                found.pop(worker, None)
                if change.record is not None and change.record.state == "active":
                    found[worker] = change.record

        bus = await Bus.connect(self.server.settings(), "test")
        await bus.watch(subjects.WORKERS_BUCKET, on_lease)
        try:
            yield found
        finally:
            await bus.close()


@pytest.fixture(scope="module")
def guarded(guarded_nats: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    server = type(guarded_nats)(tmp_path_factory.mktemp("publishers-nats"))
    own = server.settings()
    env = {"HEADRACE_NATS_URL": own.nats_url, "HEADRACE_NATS_NKEY": own.nats_nkey}
    env |= {
        "HEADRACE_ACK_WAIT_S": "1",
        "HEADRACE_IN_PROGRESS_EVERY_S": "0.3",
    }  # a tenant waits so long for a redelivery
    stack = Stack(tmp_path_factory.mktemp("publishers") / "data", env)
    stack.up()
    replicas = ("--min-replicas", str(WORKERS), "--max-replicas", str(WORKERS))
    stack.push("sim:fixed-20ms", MODEL, *replicas)
    yield Guarded(stack, server)
    stack.down()
    server.kill()


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Node.js examples with what they need installed, outside the repository."""
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        pytest.skip("there is no Node.js on this machine")
    place = tmp_path_factory.mktemp("node")
    for path in EXAMPLES.iterdir():
        if path.is_file():
            shutil.copy(path, place)
    ran = subprocess.run(
        [npm, "ci", "--no-audit", "--no-fund"], cwd=place, capture_output=True, text=True, timeout=180, check=False
    )
    if ran.returncode != 0:
        pytest.skip(f"the npm package nats cannot be installed: {ran.stderr[-300:]}")
    return place


async def questions(seed: int, *kinds: str) -> list[Question]:
    return [each for each in await make(seed, 40) if each.kind in kinds and (each.route != CHAT or "scored" in kinds)]


def asked(question: Question) -> Any:
    given = question.input()
    return given.prompt or [{"role": each.role, "content": each.content} for each in given.messages or []]


async def ask(client: Client, question: Question, heard: dict[int, int], tokens: int = TOKENS) -> int:
    """Ask and compare, token by token; how many claims served it. `heard`: tokens so far, while it runs."""
    sampling = question.sampling
    more: dict[str, Any] = {} if sampling.logprobs is None else {"logprobs": sampling.logprobs}
    stream = client.stream(
        MODEL, asked(question), max_tokens=tokens, temperature=sampling.temperature, seed=sampling.seed, **more
    )
    told = []
    key = id(stream)
    heard[key] = 0
    async for token in stream:
        told.append(token)
        heard[key] = len(told)
    del heard[key]
    truth = question.truths[0]
    assert [token.text for token in told] == truth.tokens[:tokens]
    assert [token.index for token in told] == list(range(tokens))
    if truth.logprobs is not None:
        assert [token.logprob for token in told] == [each.logprob for each in truth.logprobs[:tokens]]
    assert (stream.result.finish_reason, stream.result.usage.completion_tokens) == ("length", tokens)
    return stream.result.claims


async def ask_in_node(place: Path, server: Any, asked: list[Question]) -> list[dict[str, Any]]:
    """Ask all at once by the example's program; its answers."""
    env = os.environ | {"NATS_URL": server.url, "NATS_SEED": str(server.key(OTHER))}
    env["SAMPLING"] = json.dumps({"max_tokens": TOKENS, "temperature": 0})
    process = await asyncio.create_subprocess_exec(
        "node",
        "ask.js",
        MODEL,
        *(each.prompt for each in asked),
        cwd=place,
        env=env,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), 150)
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0, (out, err)
    return [json.loads(line) for line in out.splitlines()]


def test_python_and_node_stream_while_workers_die(guarded: Guarded, node: Path) -> None:
    """Every stream of both is the reference text, each token once; workers are killed until streams of both outlived one."""

    async def main() -> None:
        over = asyncio.Event()
        claims: dict[str, list[int]] = {"python": [0], "node": [0]}
        heard: dict[int, int] = {}
        async with guarded.leases() as leases, guarded.nats() as client, asyncio.TaskGroup() as group:

            async def in_python() -> None:
                found = await questions(1, "greedy", "seeded", "scored")
                while not over.is_set():
                    claims["python"] += await asyncio.gather(*(ask(client, each, heard) for each in found[:8]))

            async def in_node() -> None:
                found = (await questions(2, "greedy"))[:4]
                truths = {each.prompt: each.truths[0].tokens[:TOKENS] for each in found}
                while not over.is_set():
                    answers = await ask_in_node(node, guarded.server, found)
                    assert {each["prompt"]: each["tokens"] for each in answers} == truths
                    assert {each["completionTokens"] for each in answers} == {TOKENS}
                    claims["node"] += [each["claims"] for each in answers]

            async def kill() -> None:
                killed: set[str] = set()
                async with asyncio.timeout(240):
                    while len(killed) < KILLS or min(max(each) for each in claims.values()) < 2:
                        await asyncio.sleep(0.5)
                        before = heard.copy()  # who ends four workers before its next token is given up
                        await until(lambda before=before: not heard.items() & before.items())
                        living = [each for name, each in leases.items() if name not in killed]
                        busy = max(living, key=lambda lease: lease.running, default=None)
                        if len(living) > 1 and busy is not None and busy.running:
                            killed.add(busy.worker)
                            os.kill(busy.pid, signal.SIGKILL)
                over.set()

            for work in (in_python(), in_node(), kill()):
                group.create_task(work)

    asyncio.run(main())
    guarded.stack.idle()


@pytest.mark.parametrize("way", ["nats", "http"])
def test_a_stream_outlives_an_ingress(guarded: Guarded, way: str) -> None:
    async def main() -> None:
        [question] = (await questions(3, "scored"))[:1]
        async with guarded.nats() if way == "nats" else guarded.http() as client:
            stream = client.stream(MODEL, asked(question), max_tokens=TOKENS, temperature=0, logprobs=2)
            told = []
            async for token in stream:
                told.append(token)
                if token.index == 20:
                    guarded.kill_ingress()
            assert [token.text for token in told] == question.truths[0].tokens[:TOKENS]
            assert [token.logprob for token in told] == [each.logprob for each in question.truths[0].logprobs or []][
                :TOKENS
            ]
            assert await client.generate(MODEL, "again", max_tokens=3)  # as soon as there is an ingress again

    asyncio.run(main())


def test_what_one_began_another_goes_on_with(guarded: Guarded) -> None:
    """A position is good at both front doors, as long as it is the same tenant's."""

    async def main() -> None:
        [question] = (await questions(4, "seeded"))[:1]
        sampling = {"temperature": question.sampling.temperature, "seed": question.sampling.seed}
        async with guarded.nats() as first, guarded.nats() as second, guarded.nats(OTHER) as other:
            told = []
            stream = first.stream(MODEL, asked(question), max_tokens=TOKENS, **sampling)
            async for token in stream:
                told.append(token)
                if token.index == 30:
                    position = stream.detach()
                    break
            with pytest.raises(HeadraceError) as refused:
                await other.resume(position).complete()
            assert refused.value.code == "stream_not_found"
            rest = second.resume(position)
            told += [token async for token in rest]
            assert [token.text for token in told] == question.truths[0].tokens[:TOKENS]
            assert rest.result.usage.completion_tokens == TOKENS
            endless = second.stream(MODEL, "endless", max_tokens=8000)
            tokens = aiter(endless)
            await anext(tokens)
            assert await first.cancel(endless.id) == "cancelled"
            with pytest.raises(HeadraceError) as ended:
                [token async for token in tokens]
            assert ended.value.code == "cancelled"
            async for _ in second.stream(MODEL, "endless", max_tokens=8000):
                break  # whoever leaves the loop needs it no more

    asyncio.run(main())
    guarded.stack.idle()


def test_a_job_is_its_tenants(guarded: Guarded) -> None:
    async def main() -> None:
        [question] = (await questions(5, "greedy"))[:1]
        async with guarded.nats() as client, guarded.nats(OTHER) as other:
            job = await client.submit(MODEL, asked(question), max_tokens=TOKENS, temperature=0, metadata={"a": "b"})
            told = [token async for token in job.events()]
            assert [token.text for token in told] == question.truths[0].tokens[:TOKENS]
            result = await client.job(job.id).result(timeout=60)
            assert (result.text, result.usage.completion_tokens) == ("".join(token.text for token in told), TOKENS)
            status = await job.status()
            assert (status.status, status.metadata, status.progress.tokens) == ("completed", {"a": "b"}, TOKENS)
            for refused in (other.job(job.id).status(), other.job(job.id).result(), other.job(job.id).cancel()):
                with pytest.raises(HeadraceError) as found:
                    await refused
                assert found.value.code == "job_not_found"
            assert [each.id async for each in client.jobs()] == [job.id]
            assert [each.id async for each in other.jobs()] == []
            endless = await client.submit(MODEL, "endless", max_tokens=8000)
            assert (await endless.cancel()).status == "cancelled"
            with pytest.raises(HeadraceError) as found:
                await endless.result(timeout=60)
            assert found.value.code == "cancelled"

    asyncio.run(main())
    guarded.stack.idle()


class Caller:
    """Asks the service by the plain library."""

    def __init__(self, client: Any, address: str) -> None:
        self.client, self.address = client, address
        self.replies: asyncio.Queue[Any] = asyncio.Queue()

    async def ask(self, subject: str, body: bytes, **headers: str) -> None:
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        await self.client.publish(subject, body, reply=self.address, headers=given or None)

    async def reply(self) -> Any:
        async with asyncio.timeout(20):
            return await self.replies.get()

    async def all_replies(self) -> list[Any]:
        found = [await self.reply()]
        while "Hr-End" not in found[-1].headers:
            found.append(await self.reply())
        return found


@asynccontextmanager
async def caller(server: Any) -> AsyncIterator[Caller]:
    import nats

    client = await nats.connect(server.url, nkeys_seed=str(server.key(TENANT)))
    found = Caller(client, f"tok.{TENANT}.{wire.new_id()}")

    async def on_reply(message: Any) -> None:
        if message.headers.get("Hr-Keepalive") is None:
            found.replies.put_nowait(message)

    subscription = await client.subscribe(found.address, cb=on_reply)
    try:
        yield found
        await subscription.unsubscribe()
    finally:
        await client.close()


def test_the_service_streams_numbered_replies(guarded: Guarded) -> None:
    import msgspec

    async def main() -> None:
        subject = subjects.service_infer(MODEL)
        body = {"input": "hello", "max_tokens": 5, "temperature": 0, "stream": True}
        async with caller(guarded.server) as one:
            await one.ask(subject, json.dumps(body).encode(), X_Resumable="true")
            replies = await one.all_replies()
            assert [reply.headers["Hr-Event"] for reply in replies] == ["0", "1", "2", "3", "4", "5"]
            assert replies[0].headers["Hr-Status"] == "200"
            assert replies[0].headers["X-Headrace-Version"] == "v1"
            events = [json.loads(reply.data) for reply in replies]
            assert [event["index"] for event in events[:-1]] == [0, 1, 2, 3, 4]
            assert events[-1]["finish_reason"] == "length"
            assert replies[-1].headers["Hr-End"] == "complete"

            await one.ask(
                "headrace.resume",
                json.dumps({"id": events[-1]["id"]}).encode(),
                Last_Event_ID=replies[1].headers["Hr-Event-Id"],
            )
            assert [json.loads(reply.data) for reply in await one.all_replies()] == events[2:]

            plain = msgspec.msgpack.encode(body | {"stream": False})
            await one.ask(subject, plain, Content_Type="application/msgpack")
            [reply] = await one.all_replies()
            assert json.loads(reply.data)["text"] == "".join(event["token"] for event in events[:-1])

            await one.ask(subjects.service_infer("nothing"), b'{"input": "x"}')
            [reply] = await one.all_replies()
            assert json.loads(reply.data)["error"]["code"] == reply.headers["Nats-Service-Error"] == "model_not_found"
            assert (reply.headers["Hr-End"], reply.headers["Nats-Service-Error-Code"]) == ("error", "404")

            await one.ask(subject, json.dumps(body | {"max_tokens": 8000}).encode(), Hr_Reply=one.address)
            await one.reply()
        await asyncio.to_thread(guarded.stack.idle)  # whoever is gone is noticed

    asyncio.run(main())


def test_the_service_in_node(guarded: Guarded, node: Path) -> None:
    env = os.environ | {"NATS_URL": guarded.server.url, "NATS_SEED": str(guarded.server.key(OTHER))}
    ran = subprocess.run(
        ["node", "service.js", MODEL, "hello there"],
        cwd=node,
        env=env,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.endswith("\nlength: 64 tokens\n")
    assert len(ran.stdout.splitlines()[0].split()) == 64
