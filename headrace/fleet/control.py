"""The controller of a simulated fleet: the production's decision and its plan, over what the simulation shows of it."""

from collections.abc import Callable
from typing import Protocol

from controller import fleet
from controller.autoscaler import Decision, Lag, Policy, Snapshot, VersionFacts, decide, policy_of
from controller.fleet import Member
from controller.history import VersionHistory
from controller.starts import Starts
from headrace.fleet.broker import Broker
from headrace.fleet.clock import Clock
from headrace.fleet.scenario import Scenario
from headrace.fleet.worker import Worker
from shared.records import Lease

Decide = Callable[[Snapshot, float, Policy], list[Decision]]


class Hands(Protocol):
    workers: dict[str, Worker]  # those that are there

    def start_worker(self) -> None: ...


class Control:
    """Ticks as the controller does, over leases that are as old as they are in production."""

    def __init__(
        self,
        clock: Clock,
        broker: Broker,
        hands: Hands,
        scenario: Scenario,
        min_workers: int,
        max_workers: int,
        other: Decide | None = None,
    ) -> None:
        self.starts = 0
        self.drains = 0
        self._clock, self._broker, self._hands, self._settings = clock, broker, hands, scenario.settings
        self._ttft_ms = scenario.engine.ttft_ms_target
        self._bounds = min_workers, max_workers
        self._policy = policy_of(scenario.settings)
        self._other = other
        self._until = {"dead_controller": 0.0, "dead_metrics": 0.0}
        self._record = Starts()
        self._history = VersionHistory(self._policy, scenario.settings)
        self._leases: list[Lease] = []
        self._leases_at = -1e9
        self._loaded: set[str] = set()
        self._busy_at = 0.0
        self._tick(None)

    def suffer(self, fault: str, until: float) -> None:
        """Nobody leads (dead_controller), or the queue is not known (dead_metrics), until then."""
        self._until[fault] = until

    def _tick(self, _: object) -> None:
        now = self._clock.now
        self._clock.at(now + self._settings.tick_s, self._tick)
        if now < self._until["dead_controller"]:
            return
        self._look(now)
        workers = self._hands.workers
        members = [
            Member(
                worker=each.name,
                model="model",
                version="v1",
                state=each.state,
                since=each.since,
                slots=each.slots,
                claims=each.claims,
                local=True,
            )
            for each in workers.values()
        ]
        decider = self._other or decide
        (decision,) = decider(Snapshot((self._facts(members, now),)), now, self._policy)
        plan = fleet.plan(decision, members, self._record, now, self._settings)
        for _ in range(plan.starts):
            self._hands.start_worker()
        for worker in plan.drains:
            workers[worker].drain()
        self.starts += plan.starts
        self.drains += len(plan.drains)

    def _look(self, now: float) -> None:
        """Take in the leases, which each worker renews, and who has loaded since."""
        if now - self._leases_at >= self._settings.lease_every_s:
            self._leases_at = now
            self._leases = [_lease(each) for each in self._hands.workers.values()]
        for each in self._hands.workers.values():
            if each.state == "active" and each.name not in self._loaded:
                self._loaded.add(each.name)
                if each.since > each.started:
                    self._history.loaded(each.since - each.started)

    def _facts(self, members: list[Member], now: float) -> VersionFacts:
        lag = None
        if now >= self._until["dead_metrics"]:
            lag = Lag(pending=self._broker.pending, claimed=self._broker.claimed)
            if lag.total:
                self._busy_at = now
            self._history.read(now, self._broker.info(), self._leases)
        facts = VersionFacts(
            model="model",
            version="v1",
            state="available",
            min_replicas=self._bounds[0],
            max_replicas=self._bounds[1],
            idle_seconds=self._settings.idle_seconds,
            lag=lag,
            busy_at=self._busy_at,
            replicas=tuple(each.as_replica() for each in members if each.is_replica),
            ttft_s=self._ttft_ms / 1e3 if self._ttft_ms is not None else None,
        )
        return self._history.complete(facts, self._leases, now)


def _lease(worker: Worker) -> Lease:
    return Lease(
        worker=worker.name,
        model="model",
        version="v1",
        state=worker.state,
        pid=0,
        host="",
        started=worker.started,
        slots=worker.slots,
        claims=worker.claims,
        waiting=worker.unbatched,
    )
