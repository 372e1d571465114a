"""The controller of a simulated fleet: the production's decision and its plan, over what the simulation shows of it."""

from collections import deque
from typing import Protocol

from controller import fleet
from controller.autoscaler import Lag, Policy, Sample, Snapshot, VersionFacts, decide, remember
from controller.fleet import Member
from controller.starts import Starts
from headrace.fleet.broker import Broker
from headrace.fleet.clock import Clock
from headrace.fleet.worker import Worker
from shared.settings import Settings


class Hands(Protocol):
    workers: dict[str, Worker]  # those that are there

    def start_worker(self) -> None: ...


class Control:
    """Ticks as the controller does. `dead`: nobody leads, and nothing is decided."""

    def __init__(
        self, clock: Clock, broker: Broker, hands: Hands, settings: Settings, min_workers: int, max_workers: int
    ) -> None:
        self.dead = False
        self.starts = 0
        self.drains = 0
        self._clock, self._broker, self._hands, self._settings = clock, broker, hands, settings
        self._bounds = min_workers, max_workers
        self._policy = Policy(
            target_utilisation=settings.target_utilisation, down_window_s=settings.scale_down_window_s
        )
        self._record = Starts()
        self._history: deque[Sample] = deque()
        self._busy_at = 0.0
        self._tick(None)

    def _tick(self, _: object) -> None:
        now = self._clock.now
        self._clock.at(now + self._settings.tick_s, self._tick)
        if self.dead:
            return
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
        lag = Lag(pending=self._broker.pending, claimed=self._broker.claimed)
        if lag.total:
            self._busy_at = now
        remember(self._history, Sample(now, lag.total), self._settings.scale_down_window_s)
        facts = VersionFacts(
            model="model",
            version="v1",
            state="available",
            min_replicas=self._bounds[0],
            max_replicas=self._bounds[1],
            idle_seconds=self._settings.idle_seconds,
            lag=lag,
            busy_at=self._busy_at,
            history=tuple(self._history),
            replicas=tuple(each.as_replica() for each in members if each.is_replica),
        )
        (decision,) = decide(Snapshot((facts,)), now, self._policy)
        plan = fleet.plan(decision, members, self._record, now, self._settings)
        for _ in range(plan.starts):
            self._hands.start_worker()
        for worker in plan.drains:
            workers[worker].drain()
        self.starts += plan.starts
        self.drains += len(plan.drains)
