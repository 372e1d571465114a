"""The hands of the controller: what plans and placements say is done to workers, by whoever leads, and told again."""

import logging
import time
from collections.abc import Callable, Iterable

from controller.faults import point
from controller.fleet import Kill, Plan, Told
from controller.observer import Observer, VersionKey
from controller.placement import NO_VERSION, Drain, Give, Start
from controller.scalers.base import Scaler
from controller.starts import Failure
from shared import subjects, wire
from shared.bus import Bus
from shared.leadership import Leadership
from shared.settings import Settings
from shared.wire import Assign

log = logging.getLogger(__name__)

AGAIN_LEASES = 2  # a worker that does not do what it was told within so many leases is told again


class Hands:
    """Acts on workers. `told` is what each was told last, until its lease says so."""

    def __init__(
        self,
        bus: Bus,
        settings: Settings,
        scaler: Scaler,
        observer: Observer,
        leader: Leadership,
        start_failed: Callable[[VersionKey, Failure], None],
    ) -> None:
        self.told: dict[str, Told] = {}  # by worker
        self._bus, self._settings, self._scaler = bus, settings, scaler
        self._observer, self._leader, self._start_failed = observer, leader, start_failed

    async def act(self, name: VersionKey, plan: Plan) -> None:
        """Do what the plan says to the workers that are there."""
        self.kill(name, plan.kills)
        for worker in plan.claims:
            await self._assign(worker, name, True)
        for worker in plan.rests:
            await self._assign(worker, name, False)
        for worker in plan.drains:
            await self._drain(name, worker)

    def kill(self, name: VersionKey, kills: Iterable[Kill]) -> None:
        for kill in kills:
            if self._leader.leads and not self._scaler.workers[kill.worker].killed_because:
                log.warning("%s@%s: killing %s: %s", *name, kill.worker, kill.reason)
                self._scaler.kill(kill.worker, kill.reason)
                point("killed")

    async def _drain(self, name: VersionKey, worker: str) -> None:
        if not self._leader.leads:
            return
        log.info("%s@%s: draining %s", *name, worker)
        point("to_drain")
        if worker in self._scaler.workers:
            self._scaler.drain(worker)
        else:
            await self._bus.publish(subjects.worker_drain(worker), b"")
        point("drained")

    async def _assign(self, worker: str, name: VersionKey, claim: bool) -> None:
        """Tell a worker what it is for."""
        if not self._leader.leads:
            return
        log.info("%s@%s: %s is to %s", *name, worker, "claim" if claim else "be loaded")
        process = self._scaler.workers.get(worker)
        if process is not None and not process.model:
            process.model, process.version = name
            process.assigned_at = time.monotonic()
        self.told[worker] = Told(Assign(*name, claim, self._leader.term), time.monotonic())
        point("to_assign")
        await self._bus.publish(subjects.worker_assign(worker), wire.encode(self.told[worker].assign))
        point("assigned")

    async def tell_again(self, now: float) -> None:
        """Repeat to each worker what it was told, until its lease says so."""
        for worker, process in self._scaler.workers.items():
            seen = self._observer.leases.get(worker)
            if process.assigned_at is None or worker in self.told or seen is None or seen.silent or seen.lease.model:
                continue  # else it is not known any more what it was told, and whether it heard it
            assign = Assign(process.model, process.version, True, self._leader.term)
            self.told[worker] = Told(assign, process.assigned_at)
        for worker, told in list(self.told.items()):
            seen = self._observer.leases.get(worker)
            if seen is None or seen.silent:
                del self.told[worker]
                continue
            lease, assign = seen.lease, told.assign
            of_another = (lease.model, lease.version) != (assign.model, assign.version)  # whose leader was faster
            settled = lease.state in ("draining", "failed", "active" if assign.claim else "loaded")
            if lease.model and (of_another or settled):
                del self.told[worker]
            elif now - told.at > self._settings.lease_every_s * AGAIN_LEASES:
                self.told[worker] = Told(assign, now)
                await self._bus.publish(subjects.worker_assign(worker), wire.encode(assign))

    async def place(self, action: Give | Start | Drain) -> None:
        match action:
            case Give():
                await self._assign(action.worker, action.name, action.claim)
            case Drain():
                await self._drain(NO_VERSION, action.worker)
            case Start():
                self._start(action)

    def _start(self, start: Start) -> None:
        if not self._leader.leads:
            return
        point("to_start")
        try:
            worker = self._scaler.start(*start.name, start.device)
        except OSError as error:
            failure = Failure(kind="transient", reason=f"no process can be made: {error}")
            self._start_failed(start.name, failure)
            return
        point("started")
        log.info("%s@%s: started %s", *start.name, worker)
