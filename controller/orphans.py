"""Requests of a version that was rolled back whose requester is gone: nobody but the leader moves them.

A live requester moves its own (docs/protocol.md, "Requester"). Both publish the same copy under the same Msg-Id, so that
JetStream stores one, whoever is first and however often it is tried.
"""

import asyncio
import re
import time

from shared import subjects, wire
from shared.bus import NO_RESPONDERS, Bus, Message
from shared.claim_check import ClaimCheck
from shared.errors import Unavailable
from shared.streams import StoredMessage

SCANNED_MAX = 1000  # messages that one call looks at
PROBE_S = 0.5  # within which the server says that nobody listens on an address
FIND_S = 0.5  # within which whoever has a request says so
FINDS_AT_ONCE = 64

_is_address = re.compile(wire.ADDRESS).match


async def rehome_orphans(bus: Bus, model: str, old: str, new: str) -> int:
    """Move what waits for `old` and is nobody's to `new`; how many there were. Call it until the rollback is over.

    Left alone: what was named, what somebody listens for, has claimed or reads. Raises QueueFull and Unavailable; what was
    moved until then stays moved.
    """
    waiting = await _waiting(bus, model, old)
    deaf = await _deaf(bus, {message.headers.get(wire.HEADER_REPLY, "") for message, _ in waiting})
    orphans = [each for each in waiting if each[0].headers.get(wire.HEADER_REPLY, "") in deaf]
    limit = asyncio.Semaphore(FINDS_AT_ONCE)

    async def is_had(message: StoredMessage, request: wire.Request) -> bool:
        about = wire.About(request.rid, subjects.tenant_of_request(message.subject))
        async with limit:
            try:
                await bus.request(subjects.find(subjects.INGRESS_OWNER), wire.encode(about), FIND_S)
            except Unavailable:
                return False
        return True

    had = await asyncio.gather(*(is_had(*each) for each in orphans))
    moved = 0
    for (message, request), is_somebodys in zip(orphans, had, strict=True):
        if not is_somebodys:
            await _move(bus, message, request, new)
            moved += 1
    if moved:
        await bus.publish(subjects.wake(model, new))
    return moved


async def _waiting(bus: Bus, model: str, version: str) -> list[tuple[StoredMessage, wire.Request]]:
    """The stored messages of a version that may be of another one."""
    found: list[tuple[StoredMessage, wire.Request]] = []
    sequence = 1
    for _ in range(SCANNED_MAX):
        message = await bus.next_message(subjects.REQ_STREAM, subjects.requests_of_version(model, version), sequence)
        if message is None:
            break
        sequence = message.seq + 1
        try:
            subjects.place_of_request(message.subject)
            request = wire.decode_request(message.data, message.headers)
        except ValueError:
            continue  # a worker puts it into the DLQ
        if request.model != model or request.version not in ("", version):
            continue  # this, too
        if request.movable or not request.version:  # without one it is the server's mapping that chose it
            found.append((message, request))
    return found


async def _deaf(bus: Bus, addresses: set[str]) -> set[str]:
    """Those of the frame addresses that nobody listens on, and what is none."""
    gone = {address for address in addresses if not _is_address(address)}
    asked = dict(enumerate(addresses - gone))
    told = asyncio.Event()

    def on_status(message: Message) -> None:
        if message.status == NO_RESPONDERS:
            gone.add(asked[int(message.subject.rsplit(".", 1)[1])])
            if gone == addresses:
                told.set()

    inbox = f"{bus.inbox}_deaf"
    subscription = await bus.subscribe(f"{inbox}.*", on_status)
    try:
        for number, address in asked.items():
            nothing = wire.encode(wire.FromWorker("controller", []))
            await bus.publish(address, nothing, f"{inbox}.{number}")
        if asked:
            await asyncio.wait([asyncio.create_task(told.wait())], timeout=PROBE_S)
    finally:
        told.set()
        await subscription.unsubscribe()
    return gone


async def _move(bus: Bus, message: StoredMessage, request: wire.Request, version: str) -> None:
    """Publish the copy, then delete what it was made of."""
    _, _, _, lane, _ = message.subject.split(".")
    tenant = subjects.tenant_of_request(message.subject)
    headers = {name: value for name, value in message.headers.items() if name.startswith("Hr-")}
    deadline_ms = headers.get(wire.HEADER_QUEUE_DEADLINE, "")
    if deadline_ms.isdigit():
        headers[wire.HEADER_QUEUE_MS] = str(max(0, int(deadline_ms) - int(time.time() * 1000)))
    if wire.HEADER_TTL in message.headers:
        headers[wire.HEADER_TTL] = message.headers[wire.HEADER_TTL]
    headers[wire.HEADER_MSG_ID] = wire.copy_id(request.rid, version, 0)
    headers[wire.HEADER_RESUME] = "1"
    request.version = version
    subject = subjects.request(request.model, version, lane, tenant)
    await ClaimCheck(bus).move(subjects.REQ_STREAM, message, request, subject, headers)
