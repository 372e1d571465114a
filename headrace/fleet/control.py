"""The controller of a simulated fleet: the production's decision and its plan, over what the simulation shows of it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from controller import fleet
from controller.autoscaler import Decision, Lag, Policy, Snapshot, VersionFacts, decide, policy_of
from controller.fleet import Member
from controller.history import VersionHistory
from controller.starts import Failure, Starts
from headrace.fleet.broker import Broker
from headrace.fleet.clock import Clock
from headrace.fleet.scenario import Scenario
from headrace.fleet.worker import Worker
from shared.records import Lease
from shared.settings import Settings

MODEL = "model"
UNLOADABLE = Failure(kind="crash", reason="the worker exited with code 1")

Decide = Callable[[Snapshot, float, Policy], list[Decision]]


class Hands(Protocol):
    workers: dict[str, Worker]  # those that are there

    def start_worker(self, version: str) -> None: ...


class Guide(Protocol):
    """A rollout."""

    def guided(
        self, versions: "Mapping[str, Controlled]", facts: Mapping[str, VersionFacts]
    ) -> dict[str, VersionFacts]:
        """The facts, with how many replicas each version has to have."""

    def step(self, versions: "Mapping[str, Controlled]", facts: Mapping[str, VersionFacts]) -> None:
        """Move on, if it can."""


class Controlled:
    """What the controller knows of a version."""

    def __init__(self, broker: Broker, bounds: tuple[int, int], policy: Policy, settings: Settings) -> None:
        self.broker = broker
        self.bounds = bounds  # replicas, at least and at most
        self.record = Starts()
        self.crashes: list[str] = []  # how workers ended by themselves
        self.members: list[Member] = []
        self.history = VersionHistory(policy, settings)
        self.leases: list[Lease] = []
        self.busy_at = 0.0


class Control:
    """Ticks as the controller does, over leases that are as old as they are in production."""

    def __init__(
        self,
        clock: Clock,
        brokers: Sequence[Broker],
        hands: Hands,
        scenario: Scenario,
        bounds: Sequence[tuple[int, int]],
        other: Decide | None = None,
        guide: Guide | None = None,
    ) -> None:
        """`bounds`: of each version's replicas, at least and at most."""
        self.starts = 0
        self.drains = 0
        self._clock, self._hands, self._settings = clock, hands, scenario.settings
        self._ttft_ms = scenario.engine.ttft_ms_target
        self._policy = policy_of(scenario.settings)
        self._other, self._guide = other, guide
        self._until = {"dead_controller": 0.0, "dead_metrics": 0.0}
        self._versions = {
            broker.version: Controlled(broker, least_and_most, self._policy, scenario.settings)
            for broker, least_and_most in zip(brokers, bounds, strict=True)
        }
        self._leases_at = -1e9
        self._loaded: set[str] = set()
        self._tick(None)

    def suffer(self, fault: str, until: float) -> None:
        """Nobody leads (dead_controller), or the queue is not known (dead_metrics), until then."""
        self._until[fault] = until

    def ended(self, worker: Worker) -> None:
        """A worker is not there any more."""
        known = self._versions[worker.version]
        if worker.state == "failed":
            served = any(each.state == "active" for each in self._of(worker.version))
            known.record.failed(UNLOADABLE, served, self._clock.now, self._settings)
            known.crashes.append(UNLOADABLE.reason)
        elif worker.state == "lost":
            known.crashes.append("the worker died")

    def _of(self, version: str) -> list[Worker]:
        return [each for each in self._hands.workers.values() if each.version == version]

    def _tick(self, _: object) -> None:
        now = self._clock.now
        self._clock.at(now + self._settings.tick_s, self._tick)
        if now < self._until["dead_controller"]:
            return
        self._look(now)
        facts = {name: self._facts(name, known, now) for name, known in self._versions.items()}
        if self._guide is not None:
            facts = self._guide.guided(self._versions, facts)
        decider = self._other or decide
        for decision in decider(Snapshot(tuple(facts.values())), now, self._policy):
            self._act(decision, now)
        if self._guide is not None:
            self._guide.step(self._versions, facts)

    def _act(self, decision: Decision, now: float) -> None:
        known = self._versions[decision.version]
        plan = fleet.plan(decision, known.members, known.record, now, self._settings)
        for _ in range(plan.starts):
            self._hands.start_worker(decision.version)
        for worker in plan.drains:
            self._hands.workers[worker].drain()
        self.starts += plan.starts
        self.drains += len(plan.drains)

    def _look(self, now: float) -> None:
        """Take in the leases, which each worker renews, and who has loaded since."""
        renewed = now - self._leases_at >= self._settings.lease_every_s
        if renewed:
            self._leases_at = now
        for name, known in self._versions.items():
            workers = self._of(name)
            if renewed:
                known.leases = [_lease(each) for each in workers]
            for each in workers:
                if each.state == "active" and each.name not in self._loaded:
                    self._loaded.add(each.name)
                    known.record.succeeded()
                    if each.since > each.started:
                        known.history.loaded(each.since - each.started)
            known.members = [_member(each) for each in workers]

    def _facts(self, name: str, known: Controlled, now: float) -> VersionFacts:
        lag = None
        if now >= self._until["dead_metrics"]:
            lag = Lag(pending=known.broker.pending, claimed=known.broker.claimed)
            if lag.total:
                known.busy_at = now
            known.history.read(now, known.broker.info(), known.leases)
        facts = VersionFacts(
            model=MODEL,
            version=name,
            state="failed" if known.record.hopeless else "available",
            min_replicas=known.bounds[0],
            max_replicas=known.bounds[1],
            idle_seconds=self._settings.idle_seconds,
            lag=lag,
            busy_at=known.busy_at,
            replicas=tuple(each.as_replica() for each in known.members if each.is_replica),
            ttft_s=self._ttft_ms / 1e3 if self._ttft_ms is not None else None,
        )
        return known.history.complete(facts, known.leases, now)


def _member(worker: Worker) -> Member:
    return Member(
        worker=worker.name,
        model=MODEL,
        version=worker.version,
        state=worker.state,
        since=worker.since,
        slots=worker.slots,
        claims=worker.claims,
        local=True,
    )


def _lease(worker: Worker) -> Lease:
    return Lease(
        worker=worker.name,
        model=MODEL,
        version=worker.version,
        state=worker.state,
        pid=0,
        host="",
        started=worker.started,
        slots=worker.slots,
        claims=worker.claims,
        waiting=worker.unbatched,
    )
