"""What a loaded worker does: claims by free slots, runs the engine, speaks with requesters. The rules are `workers.claims`."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping

from shared import control, subjects, wire
from shared.background import Background, end
from shared.bus import Bus, Message
from shared.errors import Unavailable
from shared.pull import Puller
from shared.records import Lease, Version
from shared.settings import Settings
from shared.shares import TenantShares
from shared.usage import UsageEvent
from shared.wire import Malformed
from workers.actions import Abort, Ack, Action, Bill, DeadLetter, Nak, Send, Start
from workers.billing import Biller
from workers.claims import ClaimLimits, ClaimTable
from workers.detached import Detached
from workers.engine.request import Engine, EngineRequest, TenantLimits, TokenEvent
from workers.fair import FairPuller
from workers.handback import HandBack, free_slots, hold_max_of
from workers.inputs import StoredInputs
from workers.intake import read_delivery
from workers.letters import bury, dead_letter
from workers.metering import Meter
from workers.metrics import WorkerMetrics
from workers.observer import RunObserver
from workers.preparing import Prepared, Preparer
from workers.queues import FairQueues
from workers.replier import Replier
from workers.turns import Turns, mean_service

log = logging.getLogger(__name__)

TICK_S = 0.1
HAND_BACK_S = 1.0  # of the drain budget: for handing back what does not fit into it
ACK, NAK, TERM, IN_PROGRESS = b"+ACK", b"-NAK", b"+TERM", b"+WPI"


class WorkerServer:
    """One model version on one engine, from the first claim to the last."""

    def __init__(
        self,
        bus: Bus,
        settings: Settings,
        version: Version,
        worker: str,
        engine: Engine,
        metrics: WorkerMetrics,
        on_first_token: Callable[[float], None],
        shares: TenantShares | None = None,
    ) -> None:
        self._bus, self._settings, self._version, self._worker = bus, settings, version, worker
        self._engine, self._metrics, self._shares = engine, metrics, shares or TenantShares()
        self._observer = RunObserver(metrics, on_first_token)
        self._table = ClaimTable(
            worker,
            ClaimLimits(
                resend_s=settings.resend_s,
                orphan_grace_s=settings.orphan_grace_s,
                history_kept_s=settings.history_kept_s,
                deliveries_max=settings.deliveries_max,
            ),
        )
        self._replier = Replier(bus, worker, self._on_gone)
        self._meter = Meter()
        self._biller = Biller(bus, lambda handle: self._out(handle, ACK))
        consumer = subjects.consumer(
            subjects.LANE_FAST, subjects.requests_of_lane(version.model, version.version, subjects.LANE_FAST)
        )
        self._puller = Puller(bus, subjects.REQ_STREAM, consumer, self._free, self._on_fast)
        self._hold_max = hold_max_of(engine.info.slots, version.engine.slots_reserved_fraction)
        self._turns = Turns(self._hold_max)
        self._fair = FairPuller(
            bus,
            version,
            FairQueues(bus, version),
            self._turns,
            engine.info.slots - self._hold_max,
            self._free,
            self._puller.quiet_s,
            self._table.of_lane_fair,
            self._share,
            self._on_message,
        )
        self._submitted = 0  # runs
        self._handback = HandBack(
            lambda: bus.consumer_info(subjects.REQ_STREAM, consumer),
            lambda: self._puller.open,
            lambda run: self._act(self._table.hand_back(run)),
        )
        self._inputs = StoredInputs(bus)
        self._preparer = Preparer(engine, self._inputs)
        self._jobs = Detached(
            bus,
            version,
            engine,
            self._inputs,
            self._preparer,
            self._biller,
            self._meter,
            metrics,
            self._slots_left,
            lambda now: 0.0 if self._turns else self._puller.quiet_s(now),
            self._ledger_share,
            self._limits,
            self._out,
        )
        self._outgoing: list[tuple[str, bytes]] = []  # acks and the like, in order
        self._outgoing_wake = asyncio.Event()
        self._background = Background()
        self._loops: list[asyncio.Task[None]] = []
        self._acted = asyncio.Event()
        self._silent = False  # the engine hangs: nothing is kept alive any more
        self._busy_at = time.time()

    async def start(self) -> None:
        """Start the engine, and answer who asks. Nothing is claimed before `claim`."""
        self._engine.start(asyncio.get_running_loop(), self._on_events)
        await self._replier.start()
        self._biller.start()
        await self._bus.subscribe(subjects.worker_control(self._worker, None), self._on_control)
        broadcast = subjects.attach_broadcast(self._version.model, self._version.version, None)
        await self._bus.subscribe(broadcast, self._on_broadcast)
        await self._bus.subscribe(subjects.find(None), self._on_find)
        await self._bus.subscribe(subjects.cancel(None), self._on_cancel)
        await self._jobs.start()
        self._loops = [asyncio.create_task(loop) for loop in (self._send(), self._keep_alive(), self._tick())]

    async def claim(self) -> None:
        """Take requests from now on."""
        await self._puller.start()
        await self._fair.start()
        await self._jobs.claim()

    async def rest(self) -> None:
        """Take no more requests until the next `claim`; those that are held go on."""
        await self._stop_claiming()

    async def _stop_claiming(self) -> None:
        await asyncio.gather(self._puller.stop(), self._fair.stop(), self._jobs.rest())

    async def drain(self) -> None:
        """Claim no more; let what is claimed finish within the drain budget; hand back the rest."""
        self._table.drain()
        self._jobs.drain()
        await self._stop_claiming()
        budget_s = self._settings.drain_budget_s
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(budget_s - min(HAND_BACK_S, budget_s / 10)):
                await self._empty()
        log.info("drained; %d requests are handed back", len(self._table))
        self._act(self._table.stop())
        await self._jobs.settled(min(HAND_BACK_S, budget_s / 10))

    async def _empty(self) -> None:
        while len(self._table):
            self._acted.clear()
            await self._acted.wait()

    async def stop(self) -> None:
        """Send what is pending and end the engine."""
        await end(*self._loops)
        await self._background.finish()
        await self._stop_claiming()
        await self._jobs.close()
        await self._preparer.close()
        await self._replier.stop()
        await self._biller.stop()
        await self._flush()
        await self._inputs.close()
        await asyncio.to_thread(self._engine.stop)

    async def watch(self) -> str:
        """Returns why this worker is of no use any more: the engine hangs, or one of the loops has ended by a defect."""
        limit_s = self._settings.step_ms_max / 1000
        while True:
            await asyncio.sleep(min(0.5, limit_s / 4))
            started = self._engine.stats().step_started
            if started and time.monotonic() - started > limit_s:
                return f"the engine finished no step for {limit_s:.0f} s"
            for loop in self._loops:
                if loop.done() and not loop.cancelled():
                    log.critical("a loop of the worker has ended", exc_info=loop.exception())
                    return "a loop of the worker has ended"

    async def abandon(self) -> None:
        """The engine hangs: hand every message back and fall silent."""
        self._silent = True
        for task in self._loops:
            task.cancel()
        await self._stop_claiming()
        self._act(self._table.abandon())
        self._jobs.abandon()
        await self._flush()

    def fill(self, lease: Lease) -> None:
        """The load, as of now."""
        stats, info = self._engine.stats(), self._engine.info
        if len(self._table) or len(self._jobs):
            self._busy_at = time.time()
        lease.slots, lease.running, lease.waiting = info.slots, stats.running, stats.waiting
        lease.claims, lease.jobs, lease.busy_at = len(self._table), len(self._jobs), self._busy_at
        lease.blocks_used, lease.blocks_total = stats.blocks_used, info.blocks_total

    # -- what arrives --------------------------------------------------------------------------------------------------

    def _free(self) -> int:
        table, engine = self._table, self._engine
        full = engine.blocked or table.draining
        return free_slots(engine.info.slots, self._hold_max, table.holding_of, full)

    def _share(self, credit: int) -> list[tuple[str, int]]:
        """Whose backlog to take so many requests from."""
        return self._ledger_share(self._turns, credit, self._table.holding_of, False)

    def _slots_left(self) -> int:
        """Slots that no claimed request has, or could have."""
        return self._engine.info.slots - self._table.holding

    def _ledger_share(
        self, turns: Turns, credit: int, holding: Mapping[str, int], detached: bool
    ) -> list[tuple[str, int]]:
        """Of whose queue to take how many. The engine is told who has one."""
        limits = {tenant: self._limits(tenant) for tenant in turns.tenants}
        standings = self._engine.standings(limits, detached)
        if not credit or not limits:
            return []
        stats, runs = self._engine.stats(), self._submitted + self._jobs.submitted
        service = mean_service(stats.prompt_tokens, stats.generated_tokens, runs)
        return turns.share(credit, holding, standings, limits, service)

    def _limits(self, tenant: str) -> TenantLimits:
        return TenantLimits(weight=self._shares.weight(tenant), priority=self._shares.priority(tenant))

    def _on_fast(self, message: Message) -> None:
        self._fair.fast_claimed()
        self._on_message(message)

    def _on_message(self, message: Message) -> None:
        if "Nats-Marker-Reason" in message.headers:  # a marker that a message expired is not a request
            self._out(message.reply, ACK)
            return
        try:
            delivery = read_delivery(message, self._version)
        except Malformed as error:
            log.error("a message on %s is not a request: %s", message.subject, error)
            subject = subjects.dead_letter_of(message.subject)
            self._background.do(
                bury(self._bus, subject, message.data, message.headers, message.reply, str(error), self._out)
            )
            return
        self._busy_at = time.time()
        self._inputs.hold(delivery.handle, delivery.request, delivery.tenant)
        self._observer.claimed(delivery)
        self._act(self._table.message(delivery, time.monotonic()))

    def _on_control(self, message: Message) -> None:
        now = time.monotonic()
        for item in control.items_of(message.subject, message.data):
            if isinstance(item, wire.Attach):
                self._act(self._table.attach(item, False, now))
            else:
                self._act(self._table.release(item, now))

    def _on_broadcast(self, message: Message) -> None:
        now = time.monotonic()
        for item in control.items_of(message.subject, message.data):
            if isinstance(item, wire.Attach):
                self._act(self._table.attach(item, True, now))

    def _on_find(self, message: Message) -> None:
        found = self._table.find(control.about_of(message.subject, message.data))
        if found is not None and not self._silent:
            self._out(message.reply, wire.answer_to(message.data, found))

    def _on_cancel(self, message: Message) -> None:
        status, actions = self._table.cancel(control.about_of(message.subject, message.data), time.monotonic())
        if status and not self._silent:
            self._out(message.reply, status)
        self._act(actions)

    def _on_gone(self, address: str) -> None:
        self._act(self._table.no_responders(address, time.monotonic()))

    def _on_events(self, events: list[TokenEvent]) -> None:
        now = time.monotonic()
        self._observer.step(events, now)
        self._meter.step(events, now)
        self._act(self._table.tokens(events, now))
        self._jobs.tokens(events, now)

    # -- what is done --------------------------------------------------------------------------------------------------

    def _act(self, actions: list[Action]) -> None:
        if self._silent:
            actions = [action for action in actions if isinstance(action, Nak)]
        billed: list[str] | None = None  # the messages of a request that is accounted for first
        handed_back = False
        for action in actions:
            match action:
                case Send():
                    self._replier.send(action.reply, action.item)
                case Start():
                    self._prepare(action)
                case Abort():
                    self._preparer.cancel(action.run)
                    self._engine.cancel(action.run)
                    self._observer.aborted(action.run)
                    self._meter.ended(action.run)
                case Bill():
                    billed = []
                    self._biller.add(action.delivery.tenant, self._came_to(action), billed)
                case Ack():
                    if billed is None:
                        self._out(action.handle, ACK)
                    else:
                        billed.append(action.handle)
                case Nak():
                    self._out(action.handle, NAK)
                    handed_back = handed_back or subjects.is_fair(action.handle)
                case DeadLetter():
                    self._background.do(
                        dead_letter(self._inputs.claim_check, action.delivery, action.reason, self._out)
                    )
        if handed_back:
            self._out(subjects.wake(self._version.model, self._version.version), b"")
        self._acted.set()
        self._puller.pump()
        self._fair.pump()
        self._jobs.pump()

    def _came_to(self, bill: Bill) -> UsageEvent:
        request, usage = bill.delivery.request, bill.usage
        metered = self._meter.take(request.rid)
        if usage is None:
            echoed = request.sampling.n * metered.prompt_tokens if request.sampling.echo else 0
            usage = wire.Usage(metered.prompt_tokens, max(0, bill.output_tokens - echoed))
        return UsageEvent(
            bill.id,
            time.time(),
            request.model,
            request.version,
            bill.outcome,
            usage.prompt_tokens,
            usage.cached_tokens,
            usage.completion_tokens,
            bill.delivery.queued_ms / 1000,
            round(metered.gpu_s, 6),
        )

    def _prepare(self, start: Start) -> None:
        request = start.request

        def ready(prepared: Prepared) -> None:
            now = time.monotonic()
            self._observer.started(start, now)
            self._meter.submitted(start.run, request.rid, prepared.tokens, now)
            self._submitted += 1
            self._engine.submit(
                EngineRequest(
                    key=start.run,
                    tenant=start.tenant,
                    prompt_ids=prepared.prompt_ids,
                    sampling=prepared.sampling,
                    inputs=prepared.inputs,
                    dimensions=prepared.dimensions,
                    prefix=start.prefix,
                    limits=self._limits(start.tenant),
                    admit_by=self._admit_by(start),
                )
            )

        def refused(error: wire.WireError) -> None:
            self._metrics.failed(error.code)
            self._act(self._table.failed(start.run, error, time.monotonic()))

        self._preparer.begin(start.run, request, start.tenant, ready, refused)

    def _admit_by(self, start: Start) -> float | None:
        """When the run should have begun: by its queue deadline, and in time for its first token."""
        ttft_ms = self._version.engine.ttft_ms_target
        times = [start.queue_deadline, None if ttft_ms is None else time.monotonic() + ttft_ms / 1e3]
        return min((each for each in times if each is not None), default=None)

    def _out(self, subject: str, data: bytes) -> None:
        self._outgoing.append((subject, data))
        self._outgoing_wake.set()

    async def _send(self) -> None:
        while True:
            await self._outgoing_wake.wait()
            self._outgoing_wake.clear()
            await self._flush()

    async def _flush(self) -> None:
        outgoing, self._outgoing = self._outgoing, []
        for subject, data in outgoing:
            await self._bus.publish(subject, data)
            if data in (ACK, TERM, NAK):
                self._inputs.let_go(subject, ended=data != NAK)

    async def _keep_alive(self) -> None:
        while True:
            await asyncio.sleep(self._settings.in_progress_every_s)
            for handle in self._table.handles() + self._jobs.handles():
                await self._bus.publish(handle, IN_PROGRESS)

    async def _tick(self) -> None:
        expected = time.monotonic()
        while True:
            now = time.monotonic()
            self._metrics.observe_stall(now - expected)
            self._act(self._table.tick(now))
            self._jobs.tick(now)
            self._metrics.claims.set(len(self._table))
            self._metrics.count_table(self._table.redeliveries, self._table.orphans, self._table.outcomes)
            late = self._engine.stats().late
            if not self._table.draining and self._handback.is_due(late, now):
                self._background.do(self._look_for_others(late))
            expected = now + TICK_S
            await asyncio.sleep(TICK_S)

    async def _look_for_others(self, late: tuple[str, ...]) -> None:
        try:
            await self._handback.look(late)
        except Unavailable as error:
            log.warning("nobody can be asked to take %d late requests: %s", len(late), error.message)
