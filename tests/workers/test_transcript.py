"""The worked transcript of docs/protocol.md is what really goes over the wire: played anew here, and compared."""

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shared import subjects, wire
from shared.bus import Bus, Message

from .conftest import Fleet

DOCUMENT = Path(__file__).parents[2] / "docs" / "protocol.md"
TENANT, CLIENT = "acme", "json-1"
ADDRESS = subjects.frame_address(TENANT, CLIENT)
TOKENS, SEEN = 5, 3  # of the answer, and how many of them the requester has when the worker dies


class Requester:
    """Plays the requester's table by hand, in JSON, and writes down what is said."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.lines: list[str] = []
        self.items: asyncio.Queue[tuple[str, list[Any]]] = asyncio.Queue()
        self.gone = asyncio.Event()
        self.names: dict[str, str] = {}  # random ids, by how the transcript calls them

    async def listen(self) -> None:
        def on_frames(message: Message) -> None:
            worker, items = json.loads(message.data)
            for item in items:
                self.items.put_nowait((worker, item))

        await self.bus.subscribe(ADDRESS, on_frames)
        await self.bus.subscribe("_INBOX.1.*", lambda message: self.gone.set() if message.status == "503" else None)
        self.note("SUB", ADDRESS)

    def note(self, verb: str, subject: str, said: Any = None, headers: dict[str, str] | None = None) -> None:
        self.lines.append(f"{verb} {subject}")
        for name, value in (headers or {}).items():
            self.lines.append(f"    {name}: {self.names.get(value, value)}")
        if said is not None:
            text = said if isinstance(said, str) else json.dumps(said, separators=(",", ":"))
            for random, name in self.names.items():
                text = text.replace(random, name)
            self.lines.append("    " + text)

    def called(self, random: str, name: str) -> str:
        self.names[random] = name
        return random

    async def send(self, subject: str, said: Any, reply: str = "") -> None:
        self.note("PUB", f"{subject}, reply {reply}" if reply else subject, said)
        await self.bus.publish(subject, json.dumps(said).encode(), reply)

    async def tell(self, worker: str, item: list[Any]) -> None:
        await self.send(subjects.worker_control(worker, TENANT), [[item]], f"_INBOX.1.{worker}")

    async def heard(self, kind: str, sid: str = "") -> tuple[str, list[Any]]:
        """The next item of a kind (and of a sid); others are what a requester ignores."""
        async with asyncio.timeout(30):
            while True:
                worker, item = await self.items.get()
                if item[0] == kind and (not sid or item[3] == sid):
                    return worker, item

    async def accepted(self, claim: str) -> str:
        worker, item = await self.heard("a")
        self.called(item[2], claim)
        item[5] = 0  # the milliseconds in the queue
        self.note("MSG", ADDRESS, [worker, [item]])
        return worker

    async def attach(self, worker: str, rid: str, ids: list[int], name: str) -> str:
        sid = self.called(wire.new_id(), name)
        await self.tell(worker, ["t", rid, sid, ADDRESS, [ids]])
        return sid

    async def granted(self, sid: str) -> None:
        worker, item = await self.heard("o", sid)
        item[6] = 600000  # the milliseconds that are left
        self.note("MSG", ADDRESS, [worker, [item]])

    async def frames(self, sid: str, ids: list[int], until: int) -> None:
        """Take tokens until there are so many; each is written as a frame of its own, however they were gathered."""
        while len(ids) < until:
            worker, item = await self.heard("f", sid)
            assert item[5] == len(ids), "a gap, or something told again"
            for at, (token, text) in enumerate(zip(item[6], item[7], strict=True)):
                last = at == len(item[6]) - 1
                if len(ids) < until:
                    ids.append(token)
                    rest = item[8:] if last else [None] * 4
                    self.note("MSG", ADDRESS, [worker, [[*item[:5], len(ids) - 1, [token], [text], *rest]]])


async def play(fleet: Fleet) -> list[str]:
    first = fleet.spawn()
    await fleet.active(first)
    me = Requester(fleet.bus)
    await me.listen()
    rid = me.called(wire.new_id(), "RID")
    request = {
        "rid": rid,
        "model": "m",
        "version": "v",
        "input": {"prompt": "hello there"},
        "sampling": {"max_tokens": TOKENS, "temperature": 0, "seed": 7},
    }
    headers = {
        wire.HEADER_MSG_ID: rid,
        wire.HEADER_TTL: "975",
        "Content-Type": "application/json",
        wire.HEADER_WIRE: wire.WIRE_VERSION,
        wire.HEADER_REPLY: ADDRESS,
        wire.HEADER_GENERATION_MS: "600000",
    }
    subject = subjects.request("m", "v", subjects.LANE_FAIR, TENANT)
    me.note("PUB", subject, request, headers)
    ack = await fleet.bus.publish_once(subject, json.dumps(request).encode(), headers)
    me.note("MSG", "the publish's reply subject", {"stream": ack.stream, "seq": ack.seq})
    await me.send(subjects.wake("m", "v"), [TENANT])

    ids: list[int] = []
    worker = await me.accepted("CLAIM-1")
    sid = await me.attach(worker, rid, ids, "SID-1")
    await me.granted(sid)
    await me.frames(sid, ids, SEEN)

    fleet.workers[first].kill()
    fleet.workers[first].wait()
    me.lines.append("")
    await me.attach(worker, rid, ids, "SID-2")
    async with asyncio.timeout(10):
        await me.gone.wait()
    me.note("MSG", f"_INBOX.1.{worker}", headers={"Status": "503"})
    fleet.spawn()
    worker = await me.accepted("CLAIM-2")
    sid = await me.attach(worker, rid, ids, "SID-3")
    await me.granted(sid)
    await me.frames(sid, ids, TOKENS)
    await me.tell(worker, ["r", rid, sid, ADDRESS, True])
    await fleet.idle()
    return me.lines


def test_the_documented_transcript_is_what_happens(run_fleet: Callable[..., None]) -> None:
    played: list[str] = []

    async def work(fleet: Fleet) -> None:
        played.extend(await play(fleet))

    run_fleet(work, source="sim:fixed-200ms", ack_wait_s=1.0, in_progress_every_s=0.3)
    text = DOCUMENT.read_text()
    found = re.search(r"<!-- transcript -->\n\n(.*?)\n\n<!-- end -->", text, re.DOTALL)
    assert found is not None
    documented = [line.removeprefix("    ") for line in found[1].splitlines()]
    assert documented == played, "\n".join("    " + line if line else "" for line in played)
