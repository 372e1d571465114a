"""The requester's side of the wire for one process: publishes requests, carries out what each `Requester` decides.

The rules are in `shared.requester`; here are the bus, the clock and the readers. One frame address serves every request of
the process; what goes to a worker is gathered per wake-up and sent as one message.
"""

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Coroutine
from typing import Any

import msgspec

from shared import subjects, wire
from shared.bus import NO_RESPONDERS, Bus, Message
from shared.errors import HeadraceError, Unavailable, VersionFailed
from shared.records import Version
from shared.requester import (
    Action,
    CheckMessage,
    DeadLetter,
    DeleteMessage,
    Deliver,
    End,
    Nak,
    Republish,
    Requester,
    RequesterLimits,
    SendAttach,
    SendRelease,
    unknown_rid,
)
from shared.settings import Settings

log = logging.getLogger(__name__)

TICK_S = 0.1
RELEASE_DELAY_S = 0.005  # a release waits this long for company; an attach takes along what waits
TTL_MARGIN_S = 60
WAKE_QUIET_S = 1.0  # a version that was heard of this recently needs no wake hint


class Delta(msgspec.Struct, gc=False):
    """What a stream gained: at most one token of one choice, the text that it released, or only the choice's finish."""

    choice: int
    ids: list[int]
    text: str
    logprobs: list[wire.Logprob] | None
    finish: str | None


class Stream:
    """The reader's end of one request. One reader; `cancel` when it loses interest."""

    def __init__(self, dispatcher: "Dispatcher", request: wire.Request, tenant: str, requester: Requester) -> None:
        self.rid = request.rid
        self.model, self.version, self.tenant = request.model, request.version, tenant
        self.body = b""
        self.usage: wire.Usage | None = None
        self.requester = requester
        self.accepted = False
        self.ended = False
        self._dispatcher = dispatcher
        self._deltas: deque[Delta] = deque()
        self._error: HeadraceError | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def claims(self) -> int:
        """How many claims of workers have served it."""
        return self.requester.claims

    async def next(self, timeout: float | None = None) -> list[Delta]:
        """All deltas there are, waiting for at least one; [] when `timeout` (seconds) passed first.

        Raises StopAsyncIteration once the stream is complete, or the HeadraceError that ended it.
        """
        if not self._deltas and not self.ended:
            loop = asyncio.get_running_loop()
            self._waiter = loop.create_future()
            timer = None if timeout is None else loop.call_later(timeout, self._wake)
            try:
                await self._waiter
            finally:
                self._waiter = None
                if timer is not None:
                    timer.cancel()
            if not self._deltas and not self.ended:
                return []
        if self._deltas:
            deltas = list(self._deltas)
            self._deltas.clear()
            return deltas
        if self._error is not None:
            raise self._error
        raise StopAsyncIteration

    def cancel(self) -> None:
        """End the request: its slot is free within a step. Does nothing once the stream has ended."""
        if not self.ended:
            self._dispatcher.act(self, self.requester.cancel(time.monotonic()))

    def deliver(self, part: Deliver) -> None:
        if part.usage is not None:
            self.usage = part.usage
        if len(part.ids) == 1:
            self._deltas.append(Delta(part.choice, part.ids, part.text[0], part.logprobs, part.finish))
            self._wake()
            return
        last = len(part.ids) - 1
        for index, token in enumerate(part.ids):
            logprobs = part.logprobs[index : index + 1] if part.logprobs is not None else None
            finish = part.finish if index == last else None
            self._deltas.append(Delta(part.choice, [token], part.text[index], logprobs, finish))
        if last < 0:
            self._deltas.append(Delta(part.choice, [], "".join(part.text), None, part.finish))
        self._wake()

    def end(self, error: HeadraceError | None) -> None:
        self.ended, self._error = True, error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Dispatcher:
    """All requests of one process. `owner` is `ingress`, or the tenant of a client that publishes for itself."""

    def __init__(self, bus: Bus, settings: Settings, owner: str = subjects.INGRESS_OWNER) -> None:
        self._bus, self._settings = bus, settings
        self.address = subjects.frame_address(owner, wire.new_id())
        self._control = f"{bus.inbox}_ctl"
        self._streams: dict[str, Stream] = {}
        self._queued: dict[str, int] = {}
        self._outgoing: dict[str, list[wire.Attach | wire.Release]] = {}
        self._outgoing_wake = asyncio.Event()
        self._heard: dict[tuple[str, str], float] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._loops: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        self._address_subscription = await self._bus.subscribe(self.address, self._on_batch)
        await self._bus.subscribe(self._control + ".*", self._on_control)
        self._bus.on_reconnect(self._on_reconnect)
        self._loops = [asyncio.create_task(self._send()), asyncio.create_task(self._tick())]

    async def close(self) -> None:
        """Cancel what is still running, tell the workers, stop."""
        for stream in list(self._streams.values()):
            stream.cancel()
        await self._flush()
        for task in [*self._loops, *self._background]:
            task.cancel()
        await asyncio.gather(*self._loops, *self._background, return_exceptions=True)

    @property
    def open_streams(self) -> int:
        return len(self._streams)

    def queued(self, tenant: str) -> int:
        """Requests of a tenant that are published and that no worker has accepted yet."""
        return self._queued.get(tenant, 0)

    async def submit(self, request: wire.Request, tenant: str) -> Stream:
        """Store the request; its stream, once the publish is acknowledged.

        Raises TooLarge, QueueFull or Unavailable; then nothing was accepted.
        """
        now = time.monotonic()
        requester = Requester(
            request.rid, self.address, request.sampling.n, now, self._limits(now), publisher=True, has_body=True
        )
        stream = Stream(self, request, tenant, requester)
        stream.body = wire.encode(request)
        self._streams[stream.rid] = stream
        self._queued[tenant] = self._queued.get(tenant, 0) + 1
        subject = subjects.request(request.model, request.version, subjects.LANE_FAST, tenant)
        try:
            sequence = await self._bus.publish_durable(
                subject, stream.body, self._headers(requester, request.rid, False)
            )
        except HeadraceError:
            self._forget(stream)
            raise
        except asyncio.CancelledError:
            stream.cancel()
            raise
        self.act(stream, requester.published(sequence, time.monotonic()))
        if time.monotonic() - self._heard.get((request.model, request.version), -math.inf) > WAKE_QUIET_S:
            await self._bus.publish(subjects.wake(request.model, request.version))
        return stream

    def version_changed(self, version: Version) -> None:
        """A version that failed takes no more requests: those that wait for it end with its reason."""
        if version.state == "failed":
            error = VersionFailed(f"{version.model}@{version.version} cannot be served: {version.reason}")
            for stream in list(self._streams.values()):
                if (stream.model, stream.version) == (version.model, version.version):
                    self.act(stream, stream.requester.unavailable(error, time.monotonic()))

    # -- what arrives --------------------------------------------------------------------------------------------------

    def _on_batch(self, message: Message) -> None:
        batch = wire.decode_from_worker(message.data)
        worker, now = batch.worker, time.monotonic()
        for item in batch.items:
            stream = self._streams.get(item.rid)
            if stream is None:
                for action in unknown_rid(worker, item, self.address):
                    self._release(action)
                continue
            requester = stream.requester
            if isinstance(item, wire.Frame):
                actions = requester.frame(worker, item, now)
            elif isinstance(item, wire.Accepted):
                actions = requester.accepted(worker, item, now)
                self._heard[stream.model, stream.version] = now
            elif isinstance(item, wire.Ok):
                actions = requester.ok(worker, item, now)
            elif isinstance(item, wire.Wait):
                actions = requester.wait(worker, item, now)
            else:
                actions = requester.no(worker, item, now)
            self.act(stream, actions)

    def _on_control(self, message: Message) -> None:
        if message.status == NO_RESPONDERS:
            worker, now = message.subject.rsplit(".", 1)[1], time.monotonic()
            for stream in list(self._streams.values()):
                self.act(stream, stream.requester.no_responders(worker, now))

    def _on_reconnect(self) -> None:
        now = time.monotonic()
        for stream in list(self._streams.values()):
            stream.requester.reconnected(now)

    # -- what is done --------------------------------------------------------------------------------------------------

    def act(self, stream: Stream, actions: list[Action]) -> None:
        """Carry out what the requester of `stream` decided."""
        if not stream.accepted and stream.requester.claims:
            stream.accepted = True
            self._dequeue(stream)
        for action in actions:
            match action:
                case Deliver():
                    stream.deliver(action)
                case SendAttach():
                    if action.worker is not None:
                        self._queue(action.worker, action.attach)
                        self._outgoing_wake.set()
                    else:
                        data = wire.encode(wire.ToWorker([action.attach]))
                        self._do(self._publish(subjects.attach_broadcast(stream.model, stream.version), data))
                case SendRelease():
                    self._release(action)
                case End():
                    stream.end(action.error)
                    self._forget(stream)
                case Nak():
                    self._do(self._publish(action.ack_subject, b"-NAK"))
                case CheckMessage():
                    self._do(self._check(stream, action.seq))
                case Republish():
                    self._do(self._republish(stream, action.k))
                case DeleteMessage():
                    self._do(self._bus.delete_message(subjects.REQ_STREAM, action.seq))
                case DeadLetter():
                    self._do(self._dead_letter(stream, action.reason))

    def _release(self, action: Action) -> None:
        if isinstance(action, SendRelease):
            self._queue(action.worker, action.release)

    def _queue(self, worker: str, item: wire.Attach | wire.Release) -> None:
        if not self._outgoing:
            asyncio.get_running_loop().call_later(RELEASE_DELAY_S, self._outgoing_wake.set)
        self._outgoing.setdefault(worker, []).append(item)

    def _forget(self, stream: Stream) -> None:
        self._streams.pop(stream.rid, None)
        if not stream.accepted:
            stream.accepted = True
            self._dequeue(stream)

    def _dequeue(self, stream: Stream) -> None:
        self._queued[stream.tenant] -= 1
        if not self._queued[stream.tenant]:
            del self._queued[stream.tenant]

    async def _send(self) -> None:
        while True:
            await self._outgoing_wake.wait()
            self._outgoing_wake.clear()
            await self._flush()

    async def _flush(self) -> None:
        outgoing, self._outgoing = self._outgoing, {}
        for worker, items in outgoing.items():
            data = wire.encode(wire.ToWorker(items))
            await self._bus.publish(subjects.worker_control(worker), data, reply=f"{self._control}.{worker}")

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            for stream in list(self._streams.values()):
                due = stream.requester.next_tick()
                if due is not None and due <= now:
                    self.act(stream, stream.requester.tick(now))

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(self._guard(work))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _guard(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Unavailable as error:  # the requester's timers try again
            log.warning("the bus refused: %s", error.message)

    async def _publish(self, subject: str, data: bytes) -> None:
        await self._bus.publish(subject, data)

    async def _check(self, stream: Stream, sequence: int) -> None:
        stored = await self._bus.get_message(subjects.REQ_STREAM, sequence) is not None
        self.act(stream, stream.requester.message_state(sequence, stored, time.monotonic()))

    async def _republish(self, stream: Stream, k: int) -> None:
        subject = subjects.request(stream.model, stream.version, subjects.LANE_FAST, stream.tenant)
        headers = self._headers(stream.requester, f"{stream.rid}.{k}", True)
        try:
            sequence = await self._bus.publish_durable(subject, stream.body, headers)
        except HeadraceError as error:
            self.act(stream, stream.requester.publish_failed(error, time.monotonic()))
            return
        self.act(stream, stream.requester.published(sequence, time.monotonic()))

    async def _dead_letter(self, stream: Stream, reason: str) -> None:
        subject = subjects.dead_letter(stream.model, stream.version, stream.tenant)
        headers = {wire.HEADER_MSG_ID: f"{stream.rid}.dlq", wire.HEADER_REASON: reason}
        await self._bus.publish_durable(subject, stream.body, headers)

    def _limits(self, now: float) -> RequesterLimits:
        settings = self._settings
        return RequesterLimits(
            silence_s=settings.silence_s,
            attach_timeout_s=settings.attach_timeout_s,
            seek_every_s=settings.seek_every_s,
            seek_every_max_s=settings.seek_every_max_s,
            ack_wait_s=settings.ack_wait_s,
            orphan_grace_s=settings.orphan_grace_s,
            nak_hold_s=settings.nak_hold_s,
            deaths_max=settings.deaths_max,
            queue_deadline=now + settings.queue_deadline_s,
            generation_s=settings.generation_deadline_s,
        )

    def _headers(self, requester: Requester, message_id: str, resume: bool) -> dict[str, str]:
        settings, now = self._settings, time.monotonic()
        queue_ms = max(0, int((requester.limits.queue_deadline - now) * 1000))
        deadlines_s = settings.queue_deadline_s + settings.generation_deadline_s + settings.orphan_grace_s
        headers = {
            wire.HEADER_MSG_ID: message_id,
            wire.HEADER_TTL: str(math.ceil(deadlines_s) + TTL_MARGIN_S),
            wire.HEADER_WIRE: wire.WIRE_VERSION,
            wire.HEADER_REPLY: self.address,
            wire.HEADER_QUEUE_DEADLINE: str(int(time.time() * 1000) + queue_ms),
            wire.HEADER_QUEUE_MS: str(queue_ms),
            wire.HEADER_GENERATION_MS: str(int(requester.generation_left_s(now) * 1000)),
        }
        if resume:
            headers[wire.HEADER_RESUME] = "1"
        return headers
