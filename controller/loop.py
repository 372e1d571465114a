"""The control loop: observe, decide, act on the difference, from scratch in every tick. Events only make a tick sooner."""

import asyncio
import contextlib
import logging
import time
from collections import defaultdict

from controller import fleet
from controller.autoscaler import Policy, Snapshot, decide
from controller.fleet import Member
from controller.metrics import Metrics, VersionView
from controller.observer import HINT_S, Observer, VersionKey
from controller.scalers.process import ProcessScaler
from controller.starts import Exit, Failure, Starts, judge
from controller.versions import Verify, Versions
from shared.bus import Bus
from shared.errors import Unavailable
from shared.settings import Settings

log = logging.getLogger(__name__)

HINTED_TICK_S = 0.02  # between looks at the lag after a wake hint
TICK_MIN_S = 0.005  # events cannot make it spin


class Controller:
    """Owns desired replicas and version states. What it remembers between ticks only slows it down or explains it."""

    def __init__(self, bus: Bus, settings: Settings, scaler: ProcessScaler, metrics: Metrics, verify: Verify) -> None:
        self._bus = bus
        self._settings = settings
        self._scaler = scaler
        self._metrics = metrics
        self._policy = Policy(
            target_utilisation=settings.target_utilisation, down_window_s=settings.scale_down_window_s
        )
        self.observer = Observer(bus, settings)
        self._versions = Versions(bus, self.observer, settings, verify)
        self._starts: defaultdict[VersionKey, Starts] = defaultdict(Starts)
        self._exits: list[Exit] = []  # not judged yet
        self._active: set[str] = set()  # workers of this host that have been
        self._decided: dict[VersionKey, int] = {}
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
            while not self._should_exit:
                self.observer.changed.clear()
                await self._tick()
                await self._pause()
        finally:
            await self._versions.close()
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
        scaler.adopt(observer.live_leases())
        self._exits += scaler.reap()
        await self._judge_exits()
        now = time.monotonic()
        by_version: defaultdict[VersionKey, list[Member]] = defaultdict(list)
        for member in fleet.members(scaler.workers, observer.leases, scaler.host):
            by_version[member.model, member.version].append(member)
        self._note_cold_starts(now)
        names = sorted(observer.records.keys() | by_version.keys())
        snapshot = Snapshot(tuple(observer.facts(name, by_version[name], scaler.replicas_max, now) for name in names))
        views = []
        for name, decision in zip(names, decide(snapshot, now, self._policy), strict=True):
            view = VersionView(decision=decision, members=tuple(by_version[name]), lag=observer.lag.get(name))
            self._tell(view)
            self._act(view, now)
            views.append(view)
        self._versions.step(self._starts, {name for name in names if by_version[name]}, now)
        self._metrics.show(views)
        self._forget(set(names))

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
            if failure is None:
                level = logging.INFO if ended.asked or ended.code == 0 else logging.WARNING
                log.log(level, "%s@%s: %s is gone: %s", *name, ended.worker, ended.description())
                continue
            served = any(
                (lease.model, lease.version) == name and lease.state == "active"
                for lease in self.observer.live_leases()
            )
            self._start_failed(name, failure, served)

    def _start_failed(self, name: VersionKey, failure: Failure, served: bool) -> None:
        now = time.monotonic()
        starts = self._starts[name]
        starts.failed(failure, served, now, self._settings)
        self._metrics.start_failed(*name, failure.kind)
        then = (
            "no use to try again" if starts.hopeless else f"next try in {starts.retry_at - now:.0f} s at the earliest"
        )
        log.error("%s@%s: start %d failed (%s): %s; %s", *name, starts.failures, failure.kind, failure.reason, then)

    def _note_cold_starts(self, now: float) -> None:
        """Take in which workers became active; the phases of those that this controller started are measured."""
        for worker, process in self._scaler.workers.items():
            seen = self.observer.leases.get(worker)
            if seen is None or not seen.was_active:
                continue
            active_s = None
            if worker not in self._active:
                self._active.add(worker)
                self._starts[process.model, process.version].succeeded()
                if process.child is not None:
                    active_s = now - process.started
                    phases = ", ".join(f"{phase} {seconds:.2f} s" for phase, seconds in seen.lease.cold_start.items())
                    log.info(
                        "%s@%s: %s active after %.2f s (%s)", process.model, process.version, worker, active_s, phases
                    )
            if process.child is not None:
                self._metrics.cold_start(seen.lease, active_s)

    def _tell(self, view: VersionView) -> None:
        decision = view.decision
        name = (decision.model, decision.version)
        before = self._decided.get(name, 0)
        self._decided[name] = decision.desired
        if decision.desired == before:
            return
        self._metrics.decided(decision)
        lag = f"{view.lag.pending} pending, {view.lag.claimed} claimed" if view.lag else "lag not known"
        log.info("%s@%s: %d -> %d replicas (%s; %s)", *name, before, decision.desired, ", ".join(decision.reasons), lag)

    def _act(self, view: VersionView, now: float) -> None:
        """Do what the plan says. A version whose worker ended for a reason not known yet starts no other."""
        name = (view.decision.model, view.decision.version)
        todo = fleet.plan(view.decision, view.members, self._starts[name], now, self._settings)
        for kill in todo.kills:
            log.warning("%s@%s: killing %s: %s", *name, kill.worker, kill.reason)
            self._scaler.kill(kill.worker, kill.reason)
        for worker in todo.drains:
            log.info("%s@%s: draining %s", *name, worker)
            self._scaler.drain(worker)
        if any((ended.model, ended.version) == name for ended in self._exits):
            return
        for _ in range(todo.starts):
            try:
                worker = self._scaler.start(*name)
            except OSError as error:
                self._start_failed(name, Failure(kind="transient", reason=f"no process can be made: {error}"), False)
                return
            log.info("%s@%s: started %s", *name, worker)

    def _forget(self, names: set[VersionKey]) -> None:
        """Drop what is kept of versions that are not in service and of workers that are gone."""
        records = self.observer.records
        for name in list(self._starts):
            if name not in records or records[name].state != "available":
                del self._starts[name]
        for name in self._decided.keys() - names:
            del self._decided[name]
        self._active &= self._scaler.workers.keys()
        self._metrics.forget(self._scaler.workers)
