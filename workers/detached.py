"""The worker's end of detached work: takes jobs with slots that nobody else needs. The rules are `workers.jobs`."""

import asyncio
import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Mapping

from shared import results, subjects, wire
from shared.background import Background
from shared.bus import Bus, Message
from shared.errors import Cancelled, HeadraceError, ObjectsUnavailable, Poisoned, TooLarge, Unavailable
from shared.records import Version
from shared.results import Result
from shared.usage import COMPLETED, UsageEvent
from shared.wire import CANCELLED, FINISHED, Malformed, Usage, WireError
from workers.billing import Biller
from workers.engine.request import Engine, EngineRequest, TenantLimits, TokenEvent
from workers.fair import FairPuller
from workers.handback import hold_max_of
from workers.inputs import StoredInputs
from workers.intake import read_job
from workers.jobs import Action, Begin, Cut, HandBack, JobLimits, JobTable, Look, Save, Settle, Store
from workers.letters import bury, keep_request
from workers.metering import Meter
from workers.metrics import WorkerMetrics
from workers.preparing import Prepared, Preparer
from workers.queues import JobQueues
from workers.turns import Turns

log = logging.getLogger(__name__)

ACK, NAK = b"+ACK", b"-NAK"
Share = Callable[[Turns, int, Mapping[str, int], bool], list[tuple[str, int]]]


class Detached:
    """All jobs of one worker, driven beside its claims."""

    def __init__(
        self,
        bus: Bus,
        version: Version,
        engine: Engine,
        inputs: StoredInputs,
        preparer: Preparer,
        biller: Biller,
        meter: Meter,
        metrics: WorkerMetrics,
        slots_left: Callable[[], int],
        quiet_s: Callable[[float], float],
        share: Share,
        limits: Callable[[str], TenantLimits],
        out: Callable[[str, bytes], None],
    ) -> None:
        """`slots_left`: by claimed requests. `quiet_s(now)`: for how long these have had no use for credit."""
        self._bus, self._version, self._engine = bus, version, engine
        self._inputs, self._preparer = inputs, preparer
        self._biller, self._meter, self._metrics = biller, meter, metrics
        self._slots_left, self._limits, self._out = slots_left, limits, out
        settings = bus.settings
        self._table = JobTable(
            JobLimits(
                checkpoint_every_s=settings.checkpoint_every_s,
                patience_s=settings.job_patience_s,
                deaths_max=settings.deaths_max,
            )
        )
        self._turns = Turns(hold_max_of(engine.info.slots, version.engine.slots_reserved_fraction))
        self._puller = FairPuller(
            bus,
            version,
            JobQueues(bus, version),
            self._turns,
            0,  # they leave at once for whoever comes: no slot is kept from them
            self._free,
            quiet_s,
            self._table.held_of,
            lambda credit: share(self._turns, credit, self._table.holding_of, True),
            self._on_message,
        )
        self.submitted = 0  # runs
        self._cancels: defaultdict[str, list[str]] = defaultdict(list)  # by rid: who waits for it to be settled
        self._background = Background()
        self._settled = asyncio.Event()

    def __len__(self) -> int:
        """Jobs whose messages are held."""
        return len(self._table)

    # -- what the worker tells -----------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Answer who asks."""
        await self._bus.subscribe(subjects.FIND_JOB, self._on_find)
        await self._bus.subscribe(subjects.CANCEL_JOB, self._on_cancel)

    async def claim(self) -> None:
        """Take jobs from now on."""
        await self._puller.start()

    async def rest(self) -> None:
        """Take no more; those that are held go on."""
        await self._puller.stop()

    def pump(self) -> None:
        """Credit may have grown."""
        self._puller.pump()

    def drain(self) -> None:
        """Hand back what is held, with how far it has come."""
        self._act(self._table.drain())

    async def settled(self, budget_s: float) -> None:
        """Wait until nothing is held, for so long at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(budget_s):
                while len(self._table):
                    self._settled.clear()
                    await self._settled.wait()

    def abandon(self) -> None:
        """The engine hangs: hand every message back."""
        for handle in self._table.handles():
            self._out(handle, NAK)

    async def close(self) -> None:
        await self._background.close()

    def handles(self) -> list[str]:
        """The ack subjects to be kept alive."""
        return self._table.handles()

    def tokens(self, events: list[TokenEvent], now: float) -> None:
        """One step's events."""
        self._act(self._table.tokens(events, now))

    def tick(self, now: float) -> None:
        self._act(self._table.tick(now, self._slots_left()))
        for rid in [rid for rid in self._cancels if rid not in self._table]:
            del self._cancels[rid]  # another claim has it: whoever asks finds out
        self._metrics.count_jobs(len(self._table), self._table.outcomes)

    # -- what arrives --------------------------------------------------------------------------------------------------

    def _free(self) -> int:
        """Jobs that can be taken: by slots that nobody else has or waits for."""
        stats = self._engine.stats()
        held_up = stats.blocked or stats.waiting or stats.detached_waiting or self._table.draining
        if held_up or self._table.ended > self._engine.info.slots:
            return 0
        return max(0, self._slots_left() - self._table.holding_of.total())

    def _on_find(self, message: Message) -> None:
        found = self._table.find(wire.decode_about(message.data))
        if found is not None and message.reply:
            self._out(message.reply, wire.encode(found))

    def _on_cancel(self, message: Message) -> None:
        """Whoever asks is answered once the end is stored, if the job is here."""
        about = wire.decode_about(message.data)
        here, actions = self._table.cancel(about)
        if here and message.reply:
            self._cancels[about.rid].append(message.reply)
        self._act(actions)

    def _on_message(self, message: Message) -> None:
        if "Nats-Marker-Reason" in message.headers:
            self._out(message.reply, ACK)
            return
        try:
            delivery = read_job(message, self._version, self._bus.settings.job_deadline_s)
        except Malformed as error:
            log.error("a message on %s is not a job: %s", message.subject, error)
            subject = subjects.dead_letter_of(message.subject)
            self._background.do(
                bury(self._bus, subject, message.data, message.headers, message.reply, str(error), self._out)
            )
            return
        self._inputs.hold(delivery.handle, delivery.request, delivery.tenant)
        self._act(self._table.message(delivery, time.monotonic()))

    # -- what is done --------------------------------------------------------------------------------------------------

    def _act(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Look():
                    self._background.do(self._look(action))
                case Begin():
                    self._begin(action)
                case Cut():
                    self._preparer.cancel(action.run)
                    self._engine.cancel(action.run)
                    self._meter.ended(action.run)
                case Save():
                    self._background.do(self._save(action))
                case Store():
                    self._background.do(self._store(action))
                case Settle():
                    self._settle(action)
                case HandBack():
                    for handle in action.handles:
                        self._out(handle, NAK)
                    self._out(subjects.wake(self._version.model, self._version.version), b"")
        if actions:
            self._settled.set()
            self._puller.pump()

    def _begin(self, begin: Begin) -> None:
        request = begin.request

        def ready(prepared: Prepared) -> None:
            self._meter.submitted(begin.run, request.rid, prepared.tokens, time.monotonic())
            self.submitted += 1
            self._engine.submit(
                EngineRequest(
                    key=begin.run,
                    tenant=begin.tenant,
                    prompt_ids=prepared.prompt_ids,
                    sampling=prepared.sampling,
                    inputs=prepared.inputs,
                    dimensions=prepared.dimensions,
                    prefix=begin.prefix,
                    limits=self._limits(begin.tenant),
                    detached=True,
                )
            )

        def refused(error: WireError) -> None:
            if error.code == ObjectsUnavailable.code:  # it has time until its deadline
                self._act(self._table.put_off(begin.run))
                return
            self._metrics.failed(error.code)
            self._act(self._table.failed(begin.run, error))

        self._preparer.begin(begin.run, request, begin.tenant, ready, refused)

    async def _look(self, look: Look) -> None:
        rid = look.delivery.request.rid
        try:
            kept = await results.read(self._bus, look.delivery.tenant, rid)
        except Unavailable as error:
            log.warning("what is kept of job %s cannot be read: %s", rid, error.message)
            self._act(self._table.unfound(rid, look.claim))
            return
        self._act(self._table.found(rid, look.claim, kept, time.monotonic()))

    async def _save(self, save: Save) -> None:
        rid, tenant = save.delivery.request.rid, save.delivery.tenant
        if not save.checkpoint.held:
            save.checkpoint.gpu_s += self._meter.take(rid).gpu_s
        try:
            sequence = await results.save(self._bus, tenant, rid, save.checkpoint, save.last)
        except HeadraceError as error:
            log.warning("no checkpoint of job %s: %s", rid, error.message)
            self._act(self._table.unsaved(rid, save.claim, time.monotonic()))
            return
        if sequence is None:
            self._act(self._table.lost(rid, save.claim))
        else:
            self._act(self._table.saved(rid, save.claim, sequence, time.monotonic()))

    async def _store(self, store: Store) -> None:
        delivery, result = store.delivery, store.result
        rid, tenant = delivery.request.rid, delivery.tenant
        self._complete(rid, result)
        try:
            if result.error is not None and result.error.code == Poisoned.code:
                headers = {wire.HEADER_WIRE: wire.WIRE_VERSION}
                request, reason = delivery.request, result.error.message
                await keep_request(self._inputs.claim_check, request, tenant, headers, reason)
            try:
                result = await results.store(self._bus, tenant, rid, result, delivery.keep_s)
            except TooLarge as error:
                result.parts, result.error = [], WireError(error.code, error.message)
                result = await results.store(self._bus, tenant, rid, result, delivery.keep_s)
        except HeadraceError as error:
            log.warning("the result of job %s is not stored yet: %s", rid, error.message)
            self._act(self._table.unstored(rid, store.claim, time.monotonic()))
            return
        self._act(self._table.stored(rid, store.claim, result))

    def _complete(self, rid: str, result: Result) -> None:
        """What the job took here. A second try to store it finds nothing to add."""
        metered = self._meter.take(rid)
        result.ended_at = result.ended_at or time.time()
        result.gpu_s = round(result.gpu_s + metered.gpu_s, 6)
        tokens = sum(len(part.ids) for part in result.parts)
        if result.usage is None and (metered.prompt_tokens or tokens):
            result.usage = Usage(metered.prompt_tokens, tokens)

    def _settle(self, settle: Settle) -> None:
        delivery, result = settle.delivery, settle.result
        request = delivery.request
        for reply in self._cancels.pop(request.rid, ()):
            cancelled = result.error is not None and result.error.code == Cancelled.code
            self._out(reply, CANCELLED if cancelled else FINISHED)
        if result.usage is None:
            for handle in settle.handles:
                self._out(handle, ACK)
            return
        event = UsageEvent(
            request.rid,
            result.ended_at,
            request.model,
            result.version,
            COMPLETED if result.error is None else result.error.code,
            result.usage.prompt_tokens,
            result.usage.cached_tokens,
            result.usage.completion_tokens,
            result.queue_s,
            result.gpu_s,
        )
        self._biller.add(delivery.tenant, event, settle.handles)
