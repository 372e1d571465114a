"""The control loop: observe, decide, act on the difference, from scratch in every tick. Events only make a tick sooner."""

import asyncio
import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import Mapping

from msgspec.structs import replace

from controller import fleet, placement
from controller.allocation import Turn, allocate, demand_of
from controller.autoscaler import Decision, Snapshot, VersionFacts, decide, policy_of
from controller.decisions import Decisions
from controller.expiries import Expiries
from controller.faults import point
from controller.fleet import Member, Plan
from controller.hands import Hands
from controller.leftover_inputs import LeftoverInputs
from controller.metrics import Metrics, VersionView
from controller.observer import HINT_S, Observer, VersionKey
from controller.placement import NO_VERSION
from controller.rollouts import Rollouts
from controller.scalers.base import Scaler
from controller.starts import Exit, Failure, Starts, judge
from controller.strays import Strays
from controller.versions import Verify, Versions
from controller.webhook_deployments import DeploymentEvents
from controller.webhook_jobs import JobEvents
from controller.webhook_sender import Sender
from controller.webhooks import Webhooks
from shared.bus import Bus
from shared.config import engine_digest
from shared.errors import Unavailable
from shared.leadership import CONTROLLER, Leadership
from shared.records import Route
from shared.settings import Settings

log = logging.getLogger(__name__)

HINTED_TICK_S = 0.02  # between looks at the lag after a wake hint
TICK_MIN_S = 0.005  # events cannot make it spin


class Controller:
    """Owns desired replicas and version states. What it remembers between ticks only slows it down or explains it.

    One that does not lead watches, and does nothing.
    """

    def __init__(self, bus: Bus, settings: Settings, scaler: Scaler, metrics: Metrics, verify: Verify) -> None:
        self._bus = bus
        self._settings = settings
        self._scaler = scaler
        self._metrics = metrics
        self._policy = policy_of(settings)
        self.observer = Observer(bus, settings)
        self.leader = Leadership(bus, CONTROLLER, settings.leader_ttl_s, self.wake)
        self._versions = Versions(bus, self.observer, settings, verify)
        self._rollouts = Rollouts(bus, self.leader, self._policy, metrics, self.wake)
        self._starts: defaultdict[VersionKey, Starts] = defaultdict(Starts)
        self._exits: list[Exit] = []  # not judged yet
        self._ready: set[tuple[str, VersionKey]] = set()  # workers that have been, as what
        self._decisions = Decisions(bus)
        self._strays = Strays(bus)
        self._expiries = Expiries(bus)
        self._webhooks = Webhooks(bus, self.leader, settings, metrics, Sender(settings))
        self._deployment_events = DeploymentEvents(bus, self.leader, settings, self._webhooks)
        self._job_events = JobEvents(bus, self.leader, self._webhooks)
        self._leftovers = LeftoverInputs(settings)
        self._hands = Hands(bus, settings, scaler, self.observer, self.leader, self._start_failed)
        self._turns: dict[VersionKey, Turn] = {}  # where devices are short
        self._term = 0  # of the lead that the decisions are of
        self._should_exit = False

    def wake(self) -> None:
        """Tick now: a worker's process has ended, for instance."""
        self.observer.changed.set()

    def stop(self) -> None:
        self._should_exit = True
        self.wake()

    async def run(self) -> None:
        """Run until `stop()`. The workers live on. Raises Unavailable when the bus is away at the start."""
        await self._bus.ensure()
        try:
            await self.observer.start()
            await self._rollouts.start()
            await self._expiries.start()
            await self._scaler.open()
            await self._decisions.start()
            await self._webhooks.start()
            await self._deployment_events.start()
            await self._job_events.start()
            await self.leader.start()
            while not self._should_exit:
                self.observer.changed.clear()
                await self._tick()
                await self._pause()
        finally:
            await self._versions.close()
            await self._strays.close()
            await self._expiries.close()
            await self._job_events.close()
            await self._deployment_events.close()
            await self._webhooks.close()
            await self._leftovers.close()
            await self._decisions.close()
            await self.leader.close()
            await self._scaler.close()
            await self._rollouts.close()
            await self.observer.close()

    async def _pause(self) -> None:
        await asyncio.sleep(TICK_MIN_S)
        hinted = time.monotonic() - self.observer.hinted_at < HINT_S
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HINTED_TICK_S if hinted else self._settings.tick_s):
                await self.observer.changed.wait()

    async def _tick(self) -> None:
        scaler, observer = self._scaler, self.observer
        await observer.poll(time.monotonic())
        self._adopt()
        self._exits += scaler.reap()
        if not self.leader.leads:
            self._exits.clear()  # whoever leads judges them
            self._hands.told.clear()
            return
        if self._term != self.leader.term:
            await self._recall()
        point("observed")
        await self._judge_exits()
        now = time.monotonic()
        await self._hands.tell_again(now)
        members = fleet.members(scaler.workers, observer.leases, self._hands.told, scaler.owns)
        by_version: defaultdict[VersionKey, list[Member]] = defaultdict(list)
        for member in members:
            by_version[member.model, member.version].append(member)
        self._note_cold_starts(now)
        names = sorted((observer.records.keys() | by_version.keys()) - {NO_VERSION})
        views, wanted = [], []
        facts = self._facts(names, by_version, now)
        for name, decision in zip(names, self._decide(facts, now), strict=True):
            view = VersionView(decision=decision, members=tuple(by_version[name]), lag=observer.lag.get(name))
            self._tell(view)
            plan = self._plan(name, view, now)
            await self._hands.act(name, plan)
            if not any((ended.model, ended.version) == name for ended in self._exits):  # why is not known yet
                wanted.append((name, plan))
            views.append(view)
        self._hands.kill(NO_VERSION, fleet.overdue(by_version[NO_VERSION], now, self._settings))
        makes_warm, warm_workers = now >= self._starts[NO_VERSION].retry_at, self._settings.warm_workers
        for action in placement.place(wanted, members, scaler.devices, warm_workers, scaler.makes_workers, makes_warm):
            await self._hands.place(action)
        await self._rollouts.step(facts, by_version, observer.records)
        self._strays.step(self._withdrawn_with_jobs(facts), now)
        self._expiries.step(time.time())
        self._leftovers.step(now)
        self._versions.step(self._starts, {name for name in names if by_version[name]}, now)
        self._metrics.show(views)
        self._forget(set(names))

    async def _recall(self) -> None:
        """The lead is new: go on from what was decided last, so that only changes are recorded."""
        term = self.leader.term
        try:
            await self._decisions.recall()
        except Unavailable as error:
            log.info("what was decided last is not known yet: %s", error)
        else:
            self._term = term

    def _facts(
        self, names: list[VersionKey], members: Mapping[VersionKey, list[Member]], now: float
    ) -> dict[VersionKey, VersionFacts]:
        observer = self.observer
        facts = {name: observer.facts(name, members[name], self._scaler.replicas_max, now) for name in names}
        floors = self._rollouts.floors(facts, members, observer.records)
        return {
            name: replace(each, rollout_min=floors.get(name, 0), withdrawn=self._rollouts.withdrawn(name))
            for name, each in facts.items()
        }

    def _withdrawn_with_jobs(self, facts: Mapping[VersionKey, VersionFacts]) -> dict[VersionKey, Route]:
        return {
            name: route
            for name, each in facts.items()
            if each.withdrawn and each.lag is not None and each.lag.jobs
            if (route := self._rollouts.route(name[0])) is not None
        }

    def _decide(self, facts: Mapping[VersionKey, VersionFacts], now: float) -> list[Decision]:
        """What each version should have; within what there is of devices."""
        scaler, observer = self._scaler, self.observer
        decisions = decide(Snapshot(tuple(facts.values())), now, self._policy)
        if scaler.devices is None:
            return decisions
        demands = {
            name: demand_of(
                facts[name], observer.limits(name).priority, now < self._starts[name].retry_at, now, self._policy
            )
            for name in facts
        }
        decisions, self._turns = allocate(decisions, demands, len(scaler.devices), now, self._policy, self._turns)
        return decisions

    def _plan(self, name: VersionKey, view: VersionView, now: float) -> Plan:
        record = self.observer.records.get(name)
        return fleet.plan(
            view.decision,
            view.members,
            self._starts[name],
            now,
            self._settings,
            config=engine_digest(record.engine) if record else "",
            surge=self._scaler.devices is None,
        )

    def _adopt(self) -> None:
        """Take over workers that another controller started, and learn what it assigned them."""
        self._scaler.adopt(self.observer.live_leases())
        for lease in self.observer.live_leases():
            process = self._scaler.workers.get(lease.worker)
            if process is not None and lease.model:  # not what we told it, if another controller was faster
                process.model, process.version = lease.model, lease.version

    async def _judge_exits(self) -> None:
        """Learn from each worker that ended why it did; while the bus is away that waits."""
        while self._exits and self._bus.connected:
            ended = self._exits[0]
            try:
                seen = await self.observer.take_lease(ended.worker)
            except Unavailable as error:
                log.info("why worker %s ended is not known yet: %s", ended.worker, error)
                return
            del self._exits[0]
            name = (ended.model, ended.version)
            failure = judge(ended, seen.lease if seen else None, seen is not None and seen.was_active)
            in_order = ended.asked or ended.code == 0 or ended.outside or (seen is not None and seen.deleted)
            if not in_order and (failure is None or failure.kind in ("crash", "timeout")):
                self._rollouts.crashed(name, ended.description())
            if failure is None:
                level = logging.INFO if ended.asked or ended.code == 0 else logging.WARNING
                log.log(level, "%s@%s: %s is gone: %s", *name, ended.worker, ended.description())
                continue
            served = any(
                (lease.model, lease.version) == name and lease.state in ("active", "loaded")
                for lease in self.observer.live_leases()
            )
            self._start_failed(name, failure, served)

    def _start_failed(self, name: VersionKey, failure: Failure, served: bool = False) -> None:
        now = time.monotonic()
        starts = self._starts[name]
        starts.failed(failure, served, now, self._settings)
        self._metrics.start_failed(*name, failure.kind)
        then = (
            "no use to try again"
            if starts.hopeless and name != NO_VERSION
            else f"next try in {starts.retry_at - now:.0f} s at the earliest"
        )
        log.error("%s@%s: start %d failed (%s): %s; %s", *name, starts.failures, failure.kind, failure.reason, then)

    def _note_cold_starts(self, now: float) -> None:
        """Take in which workers got ready; the phases of those that this controller started are measured."""
        for worker, seen in self.observer.leases.items():
            process = self._scaler.workers.get(worker)
            if not seen.was_active or (process is None and self._scaler.owns(seen.lease)):  # or of a dead one
                continue
            name, active_s = (seen.lease.model, seen.lease.version), None
            if (worker, name) not in self._ready:
                self._ready.add((worker, name))
                self._starts[name].succeeded()
                if process is not None and process.own:
                    active_s = now - (process.assigned_at or process.started)
                    phases = ", ".join(f"{phase} {seconds:.2f} s" for phase, seconds in seen.lease.cold_start.items())
                    log.info("%s@%s: %s ready after %.2f s (%s)", *name, worker, active_s, phases)
            if process is not None and process.own and name != NO_VERSION:
                self._metrics.cold_start(seen.lease, active_s)

    def _tell(self, view: VersionView) -> None:
        decision = view.decision
        if not self._decisions.note(decision):
            return
        self._metrics.decided(decision)
        name = (decision.model, decision.version)
        lag = f"{view.lag.pending} pending, {view.lag.claimed} claimed" if view.lag else "lag not known"
        spares = f" and {decision.spares} spares" if decision.spares else ""
        reasons = ", ".join(decision.reasons)
        log.info("%s@%s: %d replicas%s are wanted (%s; %s)", *name, decision.desired, spares, reasons, lag)

    def _forget(self, names: set[VersionKey]) -> None:
        """Drop what is kept of versions that are not in service and of workers that are gone."""
        records = self.observer.records
        for name in self._starts.keys() - {NO_VERSION}:
            if name not in records or records[name].state != "available":
                del self._starts[name]
        self._decisions.forget(names)
        self._ready = {(worker, name) for worker, name in self._ready if worker in self.observer.leases}
        self._metrics.forget(self._scaler.workers, {*names, NO_VERSION})
