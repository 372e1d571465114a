"""What anybody might publish to the subjects of workers and ingresses: a code or the DLQ for each, and no process ends."""

import asyncio
import random
from typing import Any

import msgspec
import pytest

from headrace.stack.servers import MAX_PAYLOAD_BYTES
from shared import subjects, wire
from shared.bus import Message

from .conftest import MODEL, Target
from .corpus import SEED, VALUES, WHOLE, RawNats, count, head, misfits, mutations, raw_json, words

TENANT = "acme"
VERSION = "v"
HEAD_BYTES_MAX = 65_535  # that JetStream stores
ODD_TOKENS = ["=FF", "=ZZ", "x" * 300, "=61", "%"]  # in the place of who speaks
FAST = subjects.request(MODEL, VERSION, subjects.LANE_FAST, TENANT)
FAIR = subjects.request(MODEL, VERSION, subjects.LANE_FAIR, TENANT)


def request(**fields: Any) -> dict[str, Any]:
    sampling = {"max_tokens": 3, "temperature": 0.0, "seed": 7, "n": 1, "stop": ["zzz"], "logprobs": 2, "top_k": 5}
    given = {"input": {"prompt": "hello there"}, "sampling": sampling} | fields
    return {"rid": wire.new_id(), "model": MODEL, "version": VERSION, **given}


VALID = [
    request(),
    request(input={"messages": [{"role": "user", "content": "hi"}]}),
    request(input={"token_ids": [1, 2, 3]}, movable=True, framing="eA=="),
    request(sampling={"logit_bias": {"5": 1.5}, "stop_token_ids": [3], "min_tokens": 1, "echo": True, "max_tokens": 2}),
]


def headers(**changed: str | None) -> dict[str, str]:
    """Of a good message whose requester is not there any more. Without an id: the same one twice is stored once."""
    given: dict[str, str | None] = {
        "Hr-Wire": "1",
        "Hr-Reply": subjects.frame_address(TENANT, wire.new_id()),
        "Hr-Queue-Deadline": "9999999999999",
        "Hr-Queue-Ms": "10000",
        "Hr-Generation-Ms": "5000",
    }
    given |= {name.replace("_", "-"): value for name, value in changed.items()}
    return {name: value for name, value in given.items() if value is not None}


def bodies() -> list[tuple[str, bytes]]:
    """(content type, body)."""
    msgpack = [msgspec.msgpack.encode(msgspec.convert(each, wire.Request, strict=False)) for each in VALID]
    json = [msgspec.json.encode(each) for each in VALID]
    found = [(kind, each) for each in WHOLE for kind in ("application/json", "")]
    found += [("application/json", each) for each in raw_json(VALID[:1])]
    found += [("", each) for each in mutations(msgpack, 500, "msgpack requests")]
    found += [("application/json", each) for each in mutations(json, 300, "JSON requests")]
    for each in misfits(VALID, 300, "requests"):
        found.append(("application/json", msgspec.json.encode(each)))
        found.append(("", msgspec.msgpack.encode(each)))
    return found


def heads() -> list[bytes]:
    """Heads of messages whose bodies are good: missing, garbled, oversized, negative, and what looks like the server's own."""
    rng = random.Random(f"{SEED} heads")
    odd = [
        "",
        "-1",
        "0",
        "1e9",
        "9" * 11,
        "9" * 30,
        "x",
        "NaN",
        "1.5",
        " 5 ",
        "5;",
        "\u0661",
        "x" * 70_000,
        "\x00",
        "\x7f",
    ]
    names = ["Hr-Wire", "Hr-Queue-Deadline", "Hr-Queue-Ms", "Hr-Generation-Ms", "Hr-Resume", "Content-Type", "Hr-Reply"]
    found = [head(headers(**{name: value})) for name in names for value in [*odd, None]]
    addresses = ["tok", "tok.a", "tok.a.b.c", "tok.>", "tok.*.x", "q.m.v.fast.acme", FAST, "$JS.API.INFO", "tok.a b.c"]
    addresses += ["tok.ingress." + "x" * 65, "tok." + "y" * 385 + ".z", "_INBOX.x", "ctl.worker.x.drain", "tok.é.x"]
    addresses += [subjects.frame_address("other", "x"), subjects.frame_address("ingress", wire.new_id())]
    found += [head(headers(Hr_Reply=address)) for address in addresses]
    good = headers()
    for line in (
        "Status: 503",
        "Status: 100",
        "Status: 408\r\nNats-Pending-Messages: 5",
        "Description: x",
        "",
        ":",
        "x",
    ):
        found.append(head(good)[:-2] + line.encode() + b"\r\n\r\n")
    for first in (
        b"NATS/1.0 503",
        b"NATS/1.0 100 Idle Heartbeat",
        b"NATS/1.0 404 No Messages",
        b"NATS/1.0 ",
        b"NATS/1.0 xyz",
    ):
        found.append(first + head(headers())[8:])
        found.append(first + b"\r\n\r\n")
    found += [b"NATS/1.0\r\n\r\n", b"NATS/1.0\r\nHr-Wire: 1\r\n\r\n", head(headers())[:-2] + b"X: \xff\xfe\r\n\r\n"]
    found += [head(headers() | {words(rng): words(rng, most=2000) for _ in range(200)})]
    found += [head(headers() | {"Nats-Msg-Id": value}) for value in ("", "x" * 60_000, "é", "a.b c")]
    whole = [each for each in found if len(each) < 2000]
    return found + [
        b"NATS/1.0\r\n" + each[10:] for each in mutations(whole, 300, "heads") if each.startswith(b"NATS/1.0\r\n")
    ]


@pytest.mark.parametrize("lane", [FAST, FAIR], ids=["fast", "fair"])
def test_no_message_in_a_lane_stays_or_stops_a_worker(target: Target, lane: str) -> None:
    async def scenario() -> None:
        before = (await target.bus.stream_info(subjects.DLQ_STREAM)).messages
        raw = RawNats(target.settings.nats_url)
        for kind, body in bodies():
            given = headers() | ({"Content-Type": kind} if kind else {})
            raw.publish(lane, body, head(given))
        for data in WHOLE[:8]:
            raw.publish(lane, data)
        largest = b"\xc1" * (MAX_PAYLOAD_BYTES - 1000)
        raw.publish(lane, largest, head(headers()))
        bare = {"Hr-Wire": "1", "Hr-Reply": ""}
        raw.publish(lane, b"", head(bare | {"Hr-Reply": "x" * (HEAD_BYTES_MAX - len(head(bare)))}))
        raw.publish(lane, largest[:-70_000], head(headers(Hr_Reply="x" * 60_000)))
        for each in heads():
            raw.publish(lane, msgspec.msgpack.encode(request()), each)
            raw.publish(lane, b"", each)
        raw.flush()
        raw.close()
        await target.bus.publish(subjects.wake(MODEL, VERSION), b"")
        await target.answers()  # while it is at it
        await target.settled()
        await target.answers()
        assert (await target.bus.stream_info(subjects.DLQ_STREAM)).messages > before + 500

    target.run(scenario())
    assert target.tracebacks() == ""


def test_subjects_that_are_nobodys_stop_nobody(target: Target) -> None:
    async def scenario() -> None:
        raw = RawNats(target.settings.nats_url)
        tenants = ["=FF", "=ZZ", "=61", "x" * 129, "x" * 300, "é", "=C3", "==", "%", "=2E=2E", "{}", "a=00b", "ingress"]
        for lane in ("fast", "fair"):
            for tenant in tenants:
                raw.publish(f"q.{MODEL}.{VERSION}.{lane}.{tenant}", msgspec.msgpack.encode(request()), head(headers()))
        for tail in ("", ".x", ".fast", ".fast.a.b", ".slow.acme", ".fair"):
            raw.publish(f"q.{MODEL}.{VERSION}{tail}", msgspec.msgpack.encode(request()), head(headers()))
        for token in ("=FF", "x" * 300, "é", "=", "m"):
            raw.publish(f"wake.{token}.{VERSION}", b"")
            raw.publish(f"q.{token}.=FF.fair.x", b"", head(headers()))
        raw.flush()
        raw.close()
        await target.answers()
        await target.registered("after-subjects")

        async def taken() -> bool:
            return not await target.bus.subject_counts(subjects.REQ_STREAM, f"q.{MODEL}.{VERSION}.fast.*")

        await target.until(taken, target.one)
        await target.bus.purge(subjects.REQ_STREAM, "q.>")  # what no consumer takes stays until it is too old
        await target.settled()

    target.run(scenario())
    assert target.tracebacks() == ""


class FakeWorker:
    """Listens as a worker and as a requester would, and says what it is told to."""

    def __init__(self, target: Target, name: str) -> None:
        self.target, self.name = target, name
        self.heard: list[Message] = []

    async def start(self, subject: str) -> None:
        await self.target.bus.subscribe(subject, self.heard.append)

    async def attach_of(self, rid: str) -> wire.Attach:
        """The last attach that came for a request, once there is one."""

        def found() -> list[wire.Attach]:
            items = [item for each in self.heard for item in wire.decode_to_worker(each.data).items]
            return [item for item in items if isinstance(item, wire.Attach) and item.rid == rid]

        async def there() -> bool:
            return bool(found())

        await self.target.until(there)
        return found()[-1]


def to_worker(rid: str, sid: str, reply: str) -> list[Any]:
    """Valid batches of attach and release, as trees."""
    attach = ["t", rid, sid, reply, [[]], None, None, 0]
    known = ["t", rid, sid, reply, None, [1], ["0011223344556677"], 1]
    release = ["r", rid, sid, reply, True, [1, 2, 0]]
    return [[[attach]], [[known]], [[release, attach]], [[["t", rid, sid, reply, [[1, 2], [3]], None, None, 0]]]]


def test_no_attach_or_release_stops_a_worker(target: Target) -> None:
    """Of requests that it has, by somebody who listens and never lets go, and of others."""

    async def scenario() -> None:
        mine = FakeWorker(target, "me")
        address = subjects.frame_address(TENANT, wire.new_id())
        await mine.start(address)
        own = [subjects.worker_control(target.one.name, TENANT), subjects.attach_broadcast(MODEL, VERSION, TENANT)]
        others = [subjects.worker_control(target.one.name, owner) for owner in ("ingress", "other")]
        others += [f"ctl.worker.{target.one.name}.items.{token}" for token in ODD_TOKENS]
        rids = []
        for number in range(20):
            asked = request(sampling={"max_tokens": 30, "n": 1 + number % 2})
            rids.append(asked["rid"])
            given = headers(Hr_Reply=address, Hr_Generation_Ms="500")
            await target.bus.publish(FAST, msgspec.msgpack.encode(asked), headers=given)
        valid = [tree for rid in [*rids, wire.new_id()] for tree in to_worker(rid, wire.new_id(), address)]
        sent = [msgspec.msgpack.encode(each) for each in misfits(valid, 800, "attach trees")]
        sent += mutations([msgspec.msgpack.encode(each) for each in valid], 800, "attaches")
        sent += [msgspec.json.encode(each) for each in valid] + WHOLE
        for number, data in enumerate(sent):
            places = others if number % 4 == 0 else own
            await target.bus.publish(places[number // 4 % len(places)], data, reply="nobody.listens")
            if number % 100 == 0:
                await target.answers()
        await target.answers()
        await target.settled()  # those that nobody let go of end with their time

    target.run(scenario())
    assert target.tracebacks() == ""


def test_no_word_about_a_request_stops_anybody(target: Target) -> None:
    """Find, cancel, assign and wake."""

    async def scenario() -> None:
        about = [msgspec.msgpack.encode([wire.new_id(), TENANT]), msgspec.msgpack.encode(["\u202e", ""])]
        assign = [msgspec.msgpack.encode(["x", VERSION, False, 2**63]), msgspec.msgpack.encode(["x", "", True, 0])]
        wake = [b"", b'["acme"]', b'["a","b"]']
        for subject, valid in (
            *((what(owner), about) for what in (subjects.find, subjects.cancel) for owner in (TENANT, "ingress")),
            *((f"ctl.requests.{what}.{token}", about) for what in ("find", "cancel") for token in ODD_TOKENS[:2]),
            (subjects.worker_assign(target.one.name), assign),
            (subjects.wake(MODEL, VERSION), wake),
        ):
            for data in [*WHOLE, *mutations(valid, 150, subject)]:
                for reply in ("", "nobody.listens", "not a subject\u00e9"[:20].replace(" ", "_")):
                    await target.bus.publish(subject, data, reply=reply)
        await target.answers()
        await target.registered("after-words")
        await target.settled()

    target.run(scenario())
    assert target.tracebacks() == ""


def from_worker(worker: str, rid: str, claim: str, sid: str) -> list[Any]:
    """Valid batches of everything that a worker says, as trees."""
    score = [5, -0.5, b" ba", [[5, -0.5, b" ba"]], False]
    frame = ["f", rid, claim, sid, 0, 0, [5], [" ba"], [score], None, None, None]
    finish = ["f", rid, claim, sid, 0, 1, [6], [" be"], None, "stop", [2, 2, 0], None]
    error = ["f", rid, claim, sid, 0, 0, [], [], None, None, None, ["no_such_code", "text", None]]
    ok, wait, no = ["o", rid, claim, sid, 5, "", 60_000], ["w", rid, claim, sid], ["n", rid, sid]
    return [[worker, [each]] for each in (["a", rid, claim, 5, "", 1, VERSION], frame, finish, error, ok, wait, no)]


def test_no_frame_stops_an_ingress(target: Target) -> None:
    """By a worker that has the request, knows its stream and says what it likes: each client has one end, and others go on."""

    async def one(number: int, rng: random.Random, worker: FakeWorker) -> None:
        client = asyncio.create_task(target.begin(target.first, ("/v1/chat/completions", parked), events_max=400))
        message = None

        async def stored() -> bool:
            nonlocal message
            message = await target.bus.next_message(subjects.REQ_STREAM, "q.parked.v.>", 1)
            return message is not None

        await target.until(stored)
        assert message is not None
        address, rid, claim = (
            message.headers["Hr-Reply"],
            wire.decode_request(message.data, message.headers).rid,
            wire.new_id(),
        )
        accepted = from_worker(worker.name, rid, claim, "")[0]
        await target.bus.publish(address, msgspec.msgpack.encode(accepted))
        sid = (await worker.attach_of(rid)).sid
        valid = from_worker(worker.name, rid, claim, sid)
        packed = [msgspec.msgpack.encode(each) for each in valid]
        sent = [msgspec.msgpack.encode(each) for each in misfits(valid, 60, f"frame trees {number}")]
        sent += mutations(packed, 60, f"frames {number}")
        if number == 0:
            sent += WHOLE + [msgspec.msgpack.encode([worker.name, [value] * 3]) for value in VALUES]
        for data in sent:
            await target.bus.publish(address, data)
        await target.bus.delete_message(subjects.REQ_STREAM, message.seq)
        await target.bus.publish(address, packed[3])  # a word that ends it, if nothing did
        if not client.done():
            found = await target.http.delete(f"{target.first.url}/v1/streams/{rid}")
            assert found.status_code in (200, 404), found.text
        stream = await client
        assert stream.done or stream.error is not None or stream.status == 200, vars(stream)

    parked = {"model": "parked", "messages": [{"role": "user", "content": "x"}], "max_tokens": 9, "stream": True}

    async def scenario() -> None:
        await target.parked()
        rng = random.Random(SEED)
        worker = FakeWorker(target, "hostile-worker")
        await worker.start(subjects.worker_control(worker.name, None))
        for number in range(count(12)):
            await one(number, rng, worker)
        await target.answers()
        await target.settled()

    target.run(scenario())
    assert target.tracebacks() == ""
