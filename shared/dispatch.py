"""The requester's side of the wire for one process: publishes requests, carries out what each `Requester` decides.

The rules are in `shared.requester`; here are the bus and the clock.
"""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import msgspec

from shared import control, leftovers, subjects, wire
from shared.background import Background, end
from shared.bus import Bus, Message
from shared.claim_check import ClaimCheck
from shared.envelope import headers_of, limits_of
from shared.errors import (
    BadRequest,
    Cancelled,
    HeadraceError,
    Internal,
    QueueDeadline,
    StreamGone,
    VersionFailed,
    VersionNotFound,
    VersionRetired,
)
from shared.lanes import LaneSwitch
from shared.locate import Located, locate, revoke
from shared.outbox import Outbox
from shared.readers import Home, Readers
from shared.records import Route, Version
from shared.requester import (
    Action,
    CheckMessage,
    DeadLetter,
    DeleteMessage,
    Deliver,
    End,
    Move,
    Nak,
    Republish,
    Requester,
    SendAttach,
    SendRelease,
    unknown_rid,
)
from shared.settings import Settings
from shared.stream import Delta, Stream
from shared.terms import Known
from shared.wakes import Hints
from shared.withdrawals import Withdrawals

__all__ = ["Delta", "Dispatcher", "Stream"]

log = logging.getLogger(__name__)

TICK_S = 0.1
OVER_MAX = 20_000  # ended requests whose usage is remembered
REFUSED_AFTER_S = 1.5  # a version out of service may have workers still: time enough to find one
MOVES_AT_ONCE = 64  # requests whose copies are published, or whose old messages are deleted
WAKE_QUIET_S = 1.0  # a version that was heard of this recently needs no wake hint


class Dispatcher:
    """All requests of one process. `owner` is `ingress`, or the tenant of a client that publishes for itself.

    A tenant's has no rights to streams: it cannot look whether a message is stored, delete one or write to the DLQ.
    """

    def __init__(self, bus: Bus, settings: Settings, owner: str = subjects.INGRESS_OWNER) -> None:
        self._bus, self._settings, self._owner = bus, settings, owner
        self._trusted = owner == subjects.INGRESS_OWNER
        self._claim_check = ClaimCheck(bus, may_store=self._trusted)
        self.unread_tokens_max = settings.unread_tokens_max
        self._over: dict[str, wire.Usage] = {}  # what requests came to that ended of late, by rid
        self.on_end: Callable[[Stream], None] | None = None  # told of each request that is over here
        self._readers = Readers(bus, owner, self._on_batch)
        self.address = self._readers.address
        self._outbox = Outbox(bus, owner, self._on_worker_gone)
        # of requests that were published here; withdrawn: of the cancelled ones, those deleted before any worker spoke
        self.totals = {"published": 0, "completed": 0, "failed": 0, "cancelled": 0, "withdrawn": 0}
        self.lanes = LaneSwitch(settings.tenant_burst if self._trusted else 0)
        self._hints = Hints(self._publish)
        self._heard: dict[tuple[str, str], float] = {}
        self._refused: dict[tuple[str, str], HeadraceError] = {}  # versions out of service
        self._obstacles: dict[tuple[str, str], str] = {}  # versions whose workers do not start, for now
        self._withdrawals = Withdrawals()
        self._moving = asyncio.Semaphore(MOVES_AT_ONCE)
        self._background = Background()
        self._ticker: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self._readers.start()
        await self._outbox.start()
        if self._trusted:
            await self._bus.subscribe(subjects.find(None), self._on_find)
            await self._bus.subscribe(subjects.cancel(None), self._on_cancel)
        self._bus.on_disconnect(self._on_disconnect)
        self._bus.on_reconnect(self._on_reconnect)
        self._ticker = asyncio.create_task(self._tick())

    async def close(self) -> None:
        """Cancel what is still running, tell the workers, stop. What somebody may still come for is only let go of."""
        for stream in list(self._readers):
            if not (stream.requester.resumable or stream.requester.keyed):
                stream.cancel()
        await self._outbox.close()
        await end(self._ticker)
        await self._background.close()
        self._claim_check.close()

    @property
    def open_streams(self) -> int:
        return len(self._readers)

    def queued(self, tenant: str) -> int:
        """Requests of a tenant that are published and that no worker has accepted yet."""
        return self.lanes.queued(tenant)

    def streams(self) -> Iterator[Stream]:
        """Those that have not ended."""
        return iter(self._readers)

    def queued_of_all(self) -> int:
        """The same of all tenants."""
        return self.lanes.queued_of_all

    async def submit(self, request: wire.Request, tenant: str, keyed: bool = False, resumable: bool = False) -> Stream:
        """Store the request; its stream, once the publish is acknowledged.

        `keyed`: others may publish it too, under the same rid. `resumable` or keyed: it outlives its reader for the grace.
        Raises TooLarge, QueueFull or Unavailable; then it was not accepted as far as can be known.
        """
        try:
            body = wire.encode_request(request)
        except wire.Malformed as error:
            raise BadRequest(f"the request cannot be stored: {error}") from None
        home = await self._readers.home_for(request.rid)
        now = time.monotonic()
        requester = Requester(
            request.rid,
            home.address,
            request.sampling.n,
            now,
            limits_of(self._settings, now),
            publisher=True,
            has_body=True,
            keyed=keyed,
            resumable=resumable,
            version=request.version,
            movable=request.movable,
        )
        stream = Stream(self, request, tenant, requester, body)
        home.streams[stream.rid] = stream
        stream.place = self.lanes.enter(tenant, request.model, request.version)
        stream.lane = stream.place.lane
        subject = subjects.request(request.model, request.version, stream.lane, tenant)
        try:
            ack = await self._claim_check.publish(
                subject, stream.body, headers_of(self._settings, requester, request.rid, False)
            )
        except HeadraceError as error:
            self.act(stream, requester.publish_failed(error, time.monotonic()))
            if stream.ended:
                raise
            self._count_published(stream)
            return stream  # the ack was lost, and a worker has it all the same
        except asyncio.CancelledError:
            stream.cancel()
            raise
        shared = keyed and ack.duplicate
        if not shared:
            self._count_published(stream)
        self.act(stream, requester.published(ack.seq, time.monotonic(), shared=shared))
        self._withdraw(stream, time.monotonic())  # the route may have changed meanwhile
        await self._wake(stream)
        return stream

    async def _wake(self, stream: Stream) -> None:
        if stream.lane == subjects.LANE_FAIR:
            self._hints.hint(stream.model, stream.version, stream.tenant)
        elif time.monotonic() - self._heard.get((stream.model, stream.version), -math.inf) > WAKE_QUIET_S:
            await self._bus.publish(subjects.wake(stream.model, stream.version))

    async def attach(
        self,
        request: wire.Request,
        tenant: str,
        seq: int,
        body: bytes,
        queue_left_s: float,
        known: Known | None = None,
        keyed: bool = False,
        resumable: bool = False,
    ) -> Stream:
        """Go on with a request that was published before, by whomever: its stream, from the first token on.

        `body` is that of its message `seq`; b"": not known, so that it can not be published again. A `known` position and
        digest must be met, else the stream ends as diverged. Raises QueueFull when too many read it in this process.
        """
        home = await self._readers.home_for(request.rid)
        now = time.monotonic()
        requester = Requester(
            request.rid,
            home.address,
            request.sampling.n,
            now,
            limits_of(self._settings, now, queue_left_s),
            publisher=False,
            has_body=bool(body),
            keyed=keyed,
            resumable=resumable,
            seq=seq,
            known=known,
            version=request.version,
            movable=request.movable,
        )
        stream = Stream(self, request, tenant, requester, body)
        stream.accepted = True  # whoever published it counts it in its queue
        stream.lane = self.lanes.lane(tenant, stream.model, stream.version)
        home.streams[stream.rid] = stream
        self.act(stream, requester.tick(now))
        return stream

    async def locate(self, rid: str, tenant: str, seq: int) -> Located | None:
        """A request that somebody published, to `attach` to. Raises Unavailable."""
        return await locate(self._bus, self._claim_check, rid, tenant, seq, self._owner)

    async def revoke(self, rid: str, tenant: str, seq: int) -> bytes:
        """End a request for everybody, wherever it is. Raises Unavailable."""
        return await revoke(self._bus, self._claim_check, rid, tenant, seq, self._owner)

    def version_changed(self, version: Version) -> None:
        """A version that is out of service takes no more requests: those that wait for it end with the reason."""
        name = f"{version.model}@{version.version}"
        self._obstacles.pop((version.model, version.version), None)
        if version.state == "failed":
            self._refuse(version.model, version.version, VersionFailed(f"{name} cannot be served: {version.reason}"))
        elif version.state == "retired":
            self._refuse(version.model, version.version, VersionRetired(f"{name} was taken out of service"))
        else:
            self._refused.pop((version.model, version.version), None)
            if version.reason:
                self._obstacles[version.model, version.version] = version.reason

    def version_removed(self, model: str, version: str) -> None:
        """There is no such version any more."""
        self._obstacles.pop((model, version), None)
        self._refuse(model, version, VersionNotFound(f"{model}@{version} was removed"))

    def _refuse(self, model: str, version: str, error: HeadraceError) -> None:
        self._refused[model, version] = error
        for stream in list(self._readers):
            if (stream.model, stream.version) == (model, version) and not self._may_go_elsewhere(stream):
                self.act(stream, stream.requester.unavailable(error, time.monotonic()))

    def route_changed(self, route: Route) -> None:
        """A model's traffic goes another way. Requests of a version that was rolled back move, or end, or go on."""
        self._withdrawals.put_route(route)
        now = time.monotonic()
        for stream in list(self._readers):
            if stream.model == route.model:
                try:
                    self._withdraw(stream, now)
                except Exception:
                    self._break(stream)

    def route_removed(self, model: str) -> None:
        """The model has no route any more."""
        self._withdrawals.drop_route(model)

    def _withdraw(self, stream: Stream, now: float) -> None:
        error = self._withdrawals.error(stream.model, stream.version)
        if error is not None:
            target = self._withdrawals.destination(stream.model, stream.rid)
            self.act(stream, stream.requester.withdrawn(error, target, now))

    def may_have_moved(self, request: wire.Request) -> bool:
        """Whether the request may be one for another version by now."""
        return request.movable and self._withdrawals.error(request.model, request.version) is not None

    def _may_go_elsewhere(self, stream: Stream) -> bool:
        """Whether a rollback moves the request, or soon may: a version that failed is taken back by its deployment."""
        rolled_back = self._withdrawals.error(stream.model, stream.version) is not None
        return (rolled_back or self._withdrawals.rolling(stream.model)) and stream.requester.may_move

    # -- what arrives --------------------------------------------------------------------------------------------------

    def _on_batch(self, home: Home, message: Message) -> None:
        batch = wire.decode_from_worker(message.data)
        worker, now = batch.worker, time.monotonic()
        for item in batch.items:
            stream = home.streams.get(item.rid)
            if stream is None:
                for action in unknown_rid(worker, item, home.address):
                    if isinstance(action, SendRelease):
                        action.release.usage = self._over.get(item.rid)
                        self._outbox.put(action.worker, action.release)
                continue
            requester = stream.requester
            try:
                if isinstance(item, wire.Frame):
                    if not wire.is_even(item):
                        self._bus.note_malformed(message.subject, wire.Malformed("a frame's lists differ in length"))
                        continue
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
            except Exception:
                self._break(stream)

    def _break(self, stream: Stream) -> None:
        """A defect of ours ends the request that it met, and no other."""
        log.exception("request %s cannot go on", stream.rid)
        stream.requester.ended = True
        self._forget(stream)
        stream.end(Internal(f"a defect of ours; the logs say more about request {stream.rid}"))
        self._count_end(stream)

    def _on_worker_gone(self, worker: str) -> None:
        now = time.monotonic()
        for stream in list(self._readers):
            self.act(stream, stream.requester.no_responders(worker, now))

    def _on_disconnect(self) -> None:
        for stream in self._readers:
            stream.requester.disconnected()

    def _on_reconnect(self) -> None:
        now = time.monotonic()
        for stream in self._readers:
            stream.requester.reconnected(now)

    def _meant(self, message: Message) -> list[Stream]:
        about = control.about_of(message.subject, message.data)
        return [stream for stream in self._readers.of(about.rid) if stream.tenant == about.tenant]

    def _on_find(self, message: Message) -> None:
        for stream in self._meant(message)[:1]:
            request = msgspec.structs.replace(stream.request, input=wire.Input())
            found = wire.Found(stream.sequence, request)
            self._do(self._publish(message.reply, wire.answer_to(message.data, found)))

    def _on_cancel(self, message: Message) -> None:
        streams = self._meant(message)
        for stream in streams:
            stream.revoked = True
            self.act(stream, stream.requester.cancel(time.monotonic(), everybody=True))
        if streams:
            self._do(self._publish(message.reply, wire.CANCELLED))

    # -- what is done --------------------------------------------------------------------------------------------------

    def act(self, stream: Stream, actions: list[Action]) -> None:
        """Carry out what the requester of `stream` decided."""
        if not stream.accepted and stream.requester.claims:
            self._dequeue(stream)
        for action in actions:
            match action:
                case Deliver():
                    stream.deliver(action)
                case SendAttach():
                    if action.worker is not None:
                        self._outbox.put(action.worker, action.attach)
                    else:
                        data = wire.encode(wire.ToWorker([action.attach]))
                        subject = subjects.attach_broadcast(stream.model, stream.version, self._owner)
                        self._do(self._publish(subject, data))
                case SendRelease():
                    self._outbox.put(action.worker, action.release)
                case End():
                    stream.end(self._explained(stream, action.error))
                    self._count_end(stream)
                    self._forget(stream)
                case Nak():
                    self._do(self._nak(stream, action.ack_subject))
                case CheckMessage() if self._trusted:
                    self._do(self._check(stream, action.seq))
                case CheckMessage():
                    self._guess(stream, action.seq)
                case Move():
                    self._move(stream, action.version)
                case Republish():
                    self._do(self._republish(stream, action.k))
                case DeleteMessage() | DeadLetter() if not self._trusted:
                    pass  # a worker that takes the message is told to let go
                case DeleteMessage(insist=True):
                    self._do(leftovers.delete(self._claim_check, stream.body, action.seq, self._moving))
                case DeleteMessage():
                    self.totals["withdrawn"] += 1
                    self._do(self._claim_check.delete(subjects.REQ_STREAM, action.seq, stream.body))
                case DeadLetter():
                    self._do(leftovers.bury(self._claim_check, stream, action.reason))

    def _explained(self, stream: Stream, error: HeadraceError | None) -> HeadraceError | None:
        """Why no worker came, where that is known."""
        obstacle = self._obstacles.get((stream.model, stream.version))
        if obstacle is None or not isinstance(error, QueueDeadline):
            return error
        return QueueDeadline(f"{error.message}; the last one that was started failed: {obstacle}")

    def _count_published(self, stream: Stream) -> None:
        stream.counted = True
        self.totals["published"] += 1
        if stream.ended:  # a worker was faster than the ack
            self._count_end(stream)

    def _count_end(self, stream: Stream) -> None:
        if stream.counted:
            error = stream.error
            self.totals[
                "completed" if error is None else "cancelled" if error.code == Cancelled.code else "failed"
            ] += 1

    def _forget(self, stream: Stream) -> None:
        self._readers.forget(stream)
        self._dequeue(stream)
        if stream.usage is not None:
            self._over[stream.rid] = stream.usage
            if len(self._over) > OVER_MAX:
                del self._over[next(iter(self._over))]
        if self.on_end is not None:
            self.on_end(stream)

    def _dequeue(self, stream: Stream) -> None:
        stream.accepted = True
        if stream.place is not None:
            self.lanes.leave(stream.place)
            stream.place = None

    def _move(self, stream: Stream, version: str) -> None:
        """The request is to wait for another version, behind what its tenant has waiting for that one."""
        queue = (stream.tenant, stream.model, version)
        if stream.place is not None:
            self.lanes.leave(stream.place)
            stream.place = self.lanes.enter(*queue)
        stream.lane = self.lanes.lane(*queue) if stream.place is None else stream.place.lane
        stream.move(version)

    async def _nak(self, stream: Stream, ack_subject: str) -> None:
        await self._bus.publish(ack_subject, b"-NAK")
        if subjects.is_fair(ack_subject):
            self._hints.hint(stream.model, stream.version, stream.tenant)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            for stream in list(self._readers):
                try:
                    self._tick_one(stream, now)
                except Exception:
                    self._break(stream)

    def _tick_one(self, stream: Stream, now: float) -> None:
        requester = stream.requester
        self._withdraw(stream, now)
        refused = self._refused.get((stream.model, stream.version))
        if refused and requester.unserved_s(now) > REFUSED_AFTER_S and not self._may_go_elsewhere(stream):
            self.act(stream, requester.unavailable(refused, now))
        due = requester.next_tick()
        if due is not None and due <= now:
            self.act(stream, requester.tick(now))

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        self._background.do(self._guard(work))

    async def _guard(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except HeadraceError as error:  # the requester's timers try again
            log.warning("the bus refused: %s", error.message)
        except wire.Malformed as error:
            log.error("what is stored is not a request: %s", error)

    async def _publish(self, subject: str, data: bytes) -> None:
        await self._bus.publish(subject, data)

    async def _check(self, stream: Stream, sequence: int) -> None:
        stored = await self._bus.get_message(subjects.REQ_STREAM, sequence)
        if stored is not None and not stream.body:
            request = wire.decode_request(stored.data, stored.headers, subjects.version_of_request(stored.subject))
            stream.body = wire.encode(await self._claim_check.open(request, stream.tenant))
        self.act(stream, stream.requester.message_state(sequence, stored is not None, time.monotonic()))

    def _guess(self, stream: Stream, sequence: int) -> None:
        """Whether a message is stored that may not be looked at: not one that a worker had, for longer than a redelivery takes.

        A copy of one that is stored after all does no harm but that two workers may have the request by turns.
        """
        requester, now = stream.requester, time.monotonic()
        if stream.body:
            unserved_s = requester.unserved_s(now)
            gone = sequence == requester.held and unserved_s > requester.limits.unserved_max_s
            self.act(stream, requester.message_state(sequence, not gone, now))

    async def _republish(self, stream: Stream, k: int) -> None:
        if stream.guard is not None and not await stream.guard():
            stream.answered = True
            error = StreamGone("the request was answered before, and no worker has its tokens any more")
            self.act(stream, stream.requester.unavailable(error, time.monotonic()))
            return
        subject = subjects.request(stream.model, stream.version, stream.lane, stream.tenant)
        message_id = wire.copy_id(stream.rid, stream.version, k)
        try:
            async with self._moving if k == 0 else contextlib.nullcontext():
                headers = headers_of(self._settings, stream.requester, message_id, True)
                ack = await self._claim_check.publish(subject, stream.body, headers)
        except HeadraceError as error:
            self.act(stream, stream.requester.publish_failed(error, time.monotonic()))
            return
        # of a request that moves, anybody may have published the copy; of another one, only who speaks to the same workers
        self.act(stream, stream.requester.published(ack.seq, time.monotonic(), shared=k == 0 and ack.duplicate))
        self._withdraw(stream, time.monotonic())
        if k == 0 or stream.lane == subjects.LANE_FAIR:
            await self._wake(stream)
