"""A rollout in the simulated fleet: the production's machine, gates, counts and route, over what the simulation shows."""

from collections.abc import Callable, Mapping

from msgspec import Struct
from msgspec.structs import replace

from controller.autoscaler import VersionFacts, policy_of
from controller.rollout import Facts, Work, advance, facts_of, floors
from controller.tallies import Tallies
from headrace.fleet.clock import Clock
from headrace.fleet.control import MODEL, Controlled
from headrace.fleet.scenario import Scenario
from shared import subjects
from shared.records import Route, Version
from shared.rollouts import Deployment, NewDeployment, id_of, plan_of, route_of
from shared.tally import IngressLease, Tally, VersionTally, encode

OLD, NEW = "v1", "v2"
INGRESS = "ingress"


class Caught(Struct, frozen=True, kw_only=True):
    """What it took until a rollback was decided."""

    after_s: float  # since the rollout began
    step: int  # which one it was at; -1: none yet
    requests: int  # of the new version, that had ended


class Rollout:
    """From `at_s` on. What callers met is known as of the last second, as the leases of ingresses tell it."""

    def __init__(
        self, scenario: Scenario, clock: Clock, route: Route, on_route: Callable[[Route, Deployment], None]
    ) -> None:
        """`on_route` is told each route that follows. Raises BadRequest for a plan that is none."""
        assert scenario.rollout is not None
        self._spec, self._settings, self._clock = scenario.rollout, scenario.settings, clock
        self._starts = scenario.warmup_s + self._spec.at_s
        self._on_route = on_route
        self.route = route
        self.deployment: Deployment | None = None
        self.caught: Caught | None = None
        self.answered = {OLD: Tally(), NEW: Tally()}  # since the rollout began
        self._tallies = Tallies()
        self._told_at = -1e9
        self._work = Work(policy_of(scenario.settings))
        self._plan(self._starts)

    def note(self, version: str, status: int, ttft_s: float | None, tpot_s: float | None) -> None:
        """A request has ended."""
        if self.deployment is not None and not self.deployment.ended:
            self.answered[version].note(status, ttft_s, tpot_s)

    def guided(self, versions: Mapping[str, Controlled], facts: Mapping[str, VersionFacts]) -> dict[str, VersionFacts]:
        """The facts, with how many replicas each version has to have."""
        now, deployment, new, old = self._clock.now, self.deployment, 0, 0
        if deployment is not None and not deployment.ended:
            new, old = floors(deployment, self._facts(deployment, versions[NEW], facts), now)
        return {
            OLD: replace(facts[OLD], rollout_min=old),
            NEW: replace(facts[NEW], rollout_min=new, withdrawn=NEW in self.route.withdrawn),
        }

    def step(self, versions: Mapping[str, Controlled], facts: Mapping[str, VersionFacts]) -> None:
        """As the controller does at the end of a tick."""
        now = self._clock.now
        if now < self._starts or (self.deployment is not None and self.deployment.ended):
            return
        if self.deployment is None:
            self._moved(self._plan(now), -1)
            return
        if now - self._told_at >= self._settings.lease_every_s:
            self._told_at = now
            self._tallies.on_lease(subjects.key(INGRESS), self._lease(self.deployment))
        moved = advance(self.deployment, self._facts(self.deployment, versions[NEW], facts), now)
        if moved is not self.deployment:
            self._moved(moved, self.deployment.step)

    def _plan(self, now: float) -> Deployment:
        spec = self._spec
        asked = NewDeployment(
            model=MODEL,
            version=NEW,
            strategy=spec.strategy,
            steps=spec.steps,
            gates=spec.gates,
            bake_seconds=spec.bake_seconds,
        )
        return plan_of(asked, id_of(1), OLD, now)

    def _moved(self, deployment: Deployment, step_before: int) -> None:
        self.deployment = deployment
        if deployment.state == "rolling_back":
            after_s, requests = self._clock.now - self._starts, self.answered[NEW].ended
            self.caught = Caught(after_s=after_s, step=step_before, requests=requests)
        self.route = route_of(deployment, self.route)
        self._on_route(self.route, deployment)

    def _lease(self, deployment: Deployment) -> bytes:
        tallies = [
            VersionTally(model=MODEL, version=version, deployment=deployment.id, tally=tally)
            for version, tally in self.answered.items()
        ]
        return encode(IngressLease(ingress=INGRESS, pid=0, host="", started=0.0, tallies=tallies))

    def _facts(self, deployment: Deployment, new: Controlled, facts: Mapping[str, VersionFacts]) -> Facts:
        now = self._clock.now
        return facts_of(
            facts[NEW],
            facts[OLD],
            new.members,
            Version(model=MODEL, version=NEW, state=facts[NEW].state, source="sim", reason=new.record.reason),
            new.crashes,
            self._tallies.of(deployment, NEW, now),
            self._tallies.of(deployment, OLD, now),
            self._work,
            now,
        )
