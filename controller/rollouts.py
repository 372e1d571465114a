"""The hands of the rollouts: deployments, routes and counts are watched; what `controller.rollout` decides is written.

Level-triggered: in each tick every deployment that goes on moves by one change at most, and a route that does not say what
its model's last deployment says is written. All of it by compare-and-set: a controller that led before changes nothing.
"""

import asyncio
import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from controller.autoscaler import Policy, VersionFacts
from controller.faults import point
from controller.fleet import Member
from controller.metrics import Metrics
from controller.observer import VersionKey
from controller.orphans import rehome_orphans
from controller.rollout import Facts, Work, advance, facts_of, findings, floors, waits_for
from controller.tallies import Tallies
from shared import deployments, rollouts, subjects
from shared.background import end
from shared.bus import Bus
from shared.errors import Internal, QueueFull, Unavailable
from shared.keyvalue import Watch
from shared.leadership import Leadership
from shared.records import ROUTES, Route, Version
from shared.rollouts import Deployment, Progress, VersionProgress

log = logging.getLogger(__name__)

ORPHANS_EVERY_S = 2.0
ENDED_KEPT = 50  # deployments of a model that have ended


class Rollouts:
    """Owns deployments and the routes that follow from them, together with whoever commands one."""

    def __init__(
        self, bus: Bus, leader: Leadership, policy: Policy, metrics: Metrics, on_change: Callable[[], None]
    ) -> None:
        """`on_change` is called when there is something to do."""
        self._bus, self._leader, self._policy, self._metrics = bus, leader, policy, metrics
        self._on_change = on_change
        self._deployments: dict[str, Deployment] = {}
        self._routes: dict[str, Route] = {}
        self._tallies = Tallies()
        self._crashes: dict[VersionKey, list[str]] = {}  # how workers ended by themselves
        self._floors: dict[str, tuple[int, int]] = {}  # by deployment
        self._work: dict[str, Work] = {}  # by deployment
        self._told_at: dict[str, float] = {}  # monotonic seconds: when its progress was told
        self._stuck: dict[str, str] = {}  # by deployment: the record that cannot be read, as the log was told
        self._searches: dict[str, asyncio.Task[None]] = {}  # by deployment: for requests that nobody answers for
        self._watches: list[Watch] = []

    async def start(self) -> None:
        """Watch; returns when the present deployments and routes are known. Raises Unavailable."""
        self._watches = [
            await self._bus.watch(subjects.DEPLOYMENTS_BUCKET, self._on_deployment),
            await self._bus.watch(subjects.ROUTES_BUCKET, self._on_route),
            await self._bus.watch(subjects.INGRESSES_BUCKET, self._tallies.on_lease),
        ]

    async def close(self) -> None:
        await end(*self._searches.values())
        for watch in self._watches:
            await watch.close()

    def _on_deployment(self, key: str, value: bytes | None) -> None:
        if rollouts.DEPLOYMENTS.follow(self._deployments, key, value):
            self._on_change()

    def _on_route(self, key: str, value: bytes | None) -> None:
        if ROUTES.follow(self._routes, key, value):
            self._on_change()

    def crashed(self, name: VersionKey, how: str) -> None:
        """A worker ended by itself, whatever it was at."""
        if any((each.model, each.version) == name for each in self._going()):
            self._crashes.setdefault(name, []).append(how)

    def withdrawn(self, name: VersionKey) -> bool:
        """Whether a version was rolled back."""
        route = self._routes.get(name[0])
        return route is not None and name[1] in route.withdrawn

    def route(self, model: str) -> Route | None:
        """Where a model's requests go."""
        return self._routes.get(model)

    def _going(self) -> list[Deployment]:
        return [each for each in self._deployments.values() if not each.ended]

    # -- decisions -------------------------------------------------------------------------------------------------------

    def floors(
        self,
        known: Mapping[VersionKey, VersionFacts],
        members: Mapping[VersionKey, Sequence[Member]],
        records: Mapping[VersionKey, Version],
    ) -> dict[VersionKey, int]:
        """Replicas that versions have to have because of a deployment."""
        found: defaultdict[VersionKey, int] = defaultdict(int)
        for each in self._going():
            facts = self._facts(each, known, members, records)
            new, old = self._floors[each.id] = floors(each, facts, time.time())
            for version, least in ((each.version, new), (each.stable, old)):
                found[each.model, version] = max(found[each.model, version], least)
        return found

    def _facts(
        self,
        deployment: Deployment,
        known: Mapping[VersionKey, VersionFacts],
        members: Mapping[VersionKey, Sequence[Member]],
        records: Mapping[VersionKey, Version],
    ) -> Facts:
        new, old = (deployment.model, deployment.version), (deployment.model, deployment.stable)
        now = time.monotonic()
        return facts_of(
            known.get(new),
            known.get(old),
            members.get(new, ()),
            records.get(new),
            self._crashes.get(new, []),
            self._tallies.of(deployment, deployment.version, now),
            self._tallies.of(deployment, deployment.stable, now),
            self._work.setdefault(deployment.id, Work(self._policy)),
            now,
        )

    # -- what is done ----------------------------------------------------------------------------------------------------

    async def step(
        self,
        known: Mapping[VersionKey, VersionFacts],
        members: Mapping[VersionKey, Sequence[Member]],
        records: Mapping[VersionKey, Version],
    ) -> None:
        """Move what can be moved, and write the routes that follow. While the bus is away that waits."""
        try:
            last = self._last_of_models()
            before = [each for each in self._going() if each.id != last[each.model].id]
            for each in [*before, *last.values()]:
                try:
                    await self._step(each, each in before, known, members, records)
                except Internal as error:  # a record that cannot be read: only what it is of waits for it
                    if self._stuck.get(each.id) != error.message:
                        log.error("%s cannot go on: %s", each.id, error.message)
                    self._stuck[each.id] = error.message
            await self._forget_old()
        except Unavailable as error:
            log.info("the rollouts wait: %s", error.message)

    async def _step(
        self,
        deployment: Deployment,
        is_followed: bool,
        known: Mapping[VersionKey, VersionFacts],
        members: Mapping[VersionKey, Sequence[Member]],
        records: Mapping[VersionKey, Version],
    ) -> None:
        """Raises Unavailable, and Internal for a record that cannot be read."""
        route = self._routes.get(deployment.model)
        # one that is followed by another: its rollback and the next one's creation met, and it still has to end
        if not is_followed and route is not None and rollouts.is_newer(deployment, route) and self._leader.leads:
            await deployments.apply_route(self._bus, deployment)
            point("route_written")
        elif not deployment.ended:  # what its present state says is so: it may go on
            await self._move(deployment, self._facts(deployment, known, members, records), members)

    async def _move(self, deployment: Deployment, facts: Facts, members: Mapping[VersionKey, Sequence[Member]]) -> None:
        after = advance(deployment, facts, time.time())
        if after is not deployment:
            await self._write(after)
        if after.state == "rolling_back" and after.id not in self._searches:
            self._searches[after.id] = asyncio.create_task(self._rehome_orphans(after), name=f"orphans of {after.id}")
        stable = members.get((deployment.model, deployment.stable), ())
        active = sum(member.state == "active" for member in stable)
        await self._tell(after, facts, active, after is not deployment)

    async def _rehome_orphans(self, deployment: Deployment) -> None:
        """Move what is queued and has no requester, again and again as long as it is being rolled back."""
        while self._leader.leads and self._deployments.get(deployment.id, deployment).state == "rolling_back":
            try:
                moved = await rehome_orphans(self._bus, deployment.model, deployment.version, deployment.stable)
            except (Unavailable, QueueFull) as error:
                log.info("%s: requests without a requester wait: %s", deployment.id, error.message)
            else:
                if moved:
                    log.info("%s: %d requests whose requester is gone were moved", deployment.id, moved)
            await asyncio.sleep(ORPHANS_EVERY_S)

    async def _write(self, after: Deployment) -> None:
        found = await deployments.find(self._bus, after.id)
        if found is None or found[0].serial != after.serial - 1 or not self._leader.leads:
            return  # somebody was faster: the watch will tell
        point(f"to_{after.state}")
        if not await deployments.write(self._bus, after, found[1]):
            return
        point(f"written_{after.state}")
        self._deployments[after.id] = after
        level = logging.WARNING if after.state in ("rolling_back", "failed") else logging.INFO
        share, reason = after.basis_points / 100, after.reason
        log.log(level, "%s of %s@%s: %s, %g%%: %s", after.id, after.model, after.version, after.state, share, reason)

    async def _tell(self, deployment: Deployment, facts: Facts, stable_active: int, changed: bool) -> None:
        """Say what a deployment is at, for people to look at; every second, and when it changes."""
        now = time.monotonic()
        if not changed and now - self._told_at.get(deployment.id, -math.inf) < self._bus.settings.lease_every_s:
            return
        self._told_at[deployment.id] = now
        needed, stable_needed = self._floors.get(deployment.id, (0, 0))
        progress = Progress(
            deployment=deployment.id,
            at=round(time.time(), 3),
            waits_for=waits_for(deployment, facts, time.time()),
            canary=VersionProgress(active=facts.active, needed=needed, ended=facts.canary_step.ended),
            stable=VersionProgress(active=stable_active, needed=stable_needed, ended=facts.stable_step.ended),
            findings=findings(deployment, facts),
        )
        self._metrics.rollout(deployment, progress)
        await self._bus.kv_put(subjects.ROLLOUTS_BUCKET, subjects.key(deployment.id), rollouts.encode(progress))

    def _last_of_models(self) -> dict[str, Deployment]:
        last: dict[str, Deployment] = {}
        for each in sorted(self._deployments.values(), key=lambda each: rollouts.number_of(each.id)):
            last[each.model] = each
        return last

    async def _forget_old(self) -> None:
        """Drop what is kept of deployments that have ended, and the oldest of them for good."""
        going = self._going()
        self._tallies.forget({each.id for each in going})
        names = {(each.model, each.version) for each in going}
        self._searches = {id_: task for id_, task in self._searches.items() if not task.done()}
        for kept_of in (self._floors, self._told_at, self._work, self._stuck):
            for id_ in kept_of.keys() - {each.id for each in going}:
                del kept_of[id_]
        self._crashes = {name: how for name, how in self._crashes.items() if name in names}
        ended: defaultdict[str, list[Deployment]] = defaultdict(list)
        for each in self._deployments.values():
            if each.ended:
                ended[each.model].append(each)
        for kept in ended.values():
            kept.sort(key=lambda each: rollouts.number_of(each.id))
            for each in kept[:-ENDED_KEPT]:
                if self._leader.leads:
                    await self._bus.kv_delete(subjects.DEPLOYMENTS_BUCKET, subjects.key(each.id))
