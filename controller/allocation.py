"""Which version has how many devices where there are too few: priority, then equal shares of what is needed, and turns.

Pure. Devices are given out in this order, each only while some are left:

1. To a version in its turn, one: it came to its device less than `turn_min_s` of service ago, and has work.
2. To a version whose turn it is, one, the longest wait first: it has work and no device, and has waited `turn_s`, or
   `starved_s` if no version of its priority has a device.
3. To versions with work, what they got less than `turn_min_s` ago.
4. To versions with work, by priority, the higher first. Within one, each device to the version with the least of what it
   needs; who has devices goes before who has none, and of these who waits longest; of those with one, the newest keeps it.
5. What is wanted without work: minimums, what is not idle for long enough. By priority.
6. Spares. By priority.

So a version with work has a device again after a bounded time, and no device goes to and fro faster than `turn_min_s`.
"""

from collections.abc import Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from controller.autoscaler import Decision, Policy, VersionFacts

VersionKey = tuple[str, str]  # model, version
DETACHED_BELOW = 1 << 20  # levels: a version that has nothing but detached work comes after all that somebody waits for


class Demand(Struct, frozen=True, kw_only=True):
    """What an allocation has to know of a version beside its decision."""

    priority: int = 0  # the higher goes first
    has_work: bool  # now, or less than the grace ago
    held: int = 0  # devices with a worker of it that does not drain
    active: bool = False  # one of them serves


class Turn(Struct, frozen=True, kw_only=True):
    """How a version stands. Times are seconds on the clock of `now`."""

    granted: int  # devices, for replicas
    since: float  # when it came to have devices, or to want some in vain
    served_since: float | None = None  # when it was first seen to serve with them
    gained_at: float  # when it last got one more


Turns = Mapping[VersionKey, Turn]


def demand_of(facts: VersionFacts, priority: int, backs_off: bool, now: float, policy: Policy) -> Demand:
    """The demand of a version as the facts have it.

    One that has no worker and `backs_off`, since the last could not start, has no use for a device: others go before.
    """
    requests = facts.lag.requests if facts.lag else sum(replica.claims for replica in facts.replicas)
    jobs = facts.lag.jobs if facts.lag else 0
    held = len(facts.replicas) + facts.spares
    return Demand(
        priority=priority - DETACHED_BELOW if jobs and not requests else priority,
        has_work=(requests + jobs > 0 or now - facts.busy_at < policy.grace_s) and (held > 0 or not backs_off),
        held=held,
        active=any(replica.active for replica in facts.replicas),
    )


def allocate(
    decisions: Sequence[Decision],
    demands: Mapping[VersionKey, Demand],
    devices: int,
    now: float,
    policy: Policy,
    turns: Turns,
) -> tuple[list[Decision], dict[VersionKey, Turn]]:
    """The decisions cut down to what `devices` have room for, in their order, and the turns to come back with next time.

    Reasons that it adds: `devices_short`, `gave_way` (it had more until now), `turn` (it got its device by waiting).
    """
    standing = {
        (each.model, each.version): _Standing(each, demands[each.model, each.version], turns, now, policy)
        for each in decisions
    }
    _Fill(devices, sorted(standing.values(), key=lambda each: each.name), policy).run()
    found = [each.decided() for each in standing.values()]
    return found, {name: each.turn(now) for name, each in standing.items() if each.wants}


class _Standing:
    """One version while devices are given out."""

    def __init__(self, decision: Decision, demand: Demand, turns: Turns, now: float, policy: Policy) -> None:
        self.decision, self.demand = decision, demand
        self.name = (decision.model, decision.version)
        self.before = turns.get(self.name)
        self.had = min(self.before.granted if self.before else demand.held, decision.desired)
        self.since = self.before.since if self.before and (self.before.granted > 0) == (self.had > 0) else now
        self.served_since = self.before.served_since if self.before else None
        if self.had and demand.active and self.served_since is None:
            self.served_since = now
        self.gained_at = self.before.gained_at if self.before else now
        self.works = decision.desired > 0 and demand.has_work
        self.in_turn = self.works and self.had > 0 and self._serves_its_turn(now, policy)
        self.keeps = self.works and now - self.gained_at < policy.turn_min_s
        self.waited_s = now - self.since if self.works and not self.had else 0.0
        self.got = self.spares = 0
        self.by_turn = False

    def _serves_its_turn(self, now: float, policy: Policy) -> bool:
        if self.served_since is not None:
            return now - self.served_since < policy.turn_min_s
        return now - self.since < policy.start_s_max

    @property
    def wants(self) -> bool:
        return self.decision.desired > 0

    def decided(self) -> Decision:
        decision, reasons = self.decision, self.decision.reasons
        if self.got < decision.desired:
            reasons = (*reasons, "gave_way" if self.got < self.had else "devices_short")
        elif self.spares < decision.spares:
            reasons = (*reasons, "spares_short")
        if self.by_turn:
            reasons = (*reasons, "turn")
        return replace(decision, desired=self.got, spares=self.spares, reasons=reasons)

    def turn(self, now: float) -> Turn:
        turned = (self.got > 0) != (self.had > 0)
        waits_for_nothing = self.got == 0 and not self.works
        return Turn(
            granted=self.got,
            since=now if turned or waits_for_nothing else self.since,
            served_since=None if turned else self.served_since,
            gained_at=now if self.got > self.had else self.gained_at,
        )


class _Fill:
    """Gives devices out, in the order of the module's docstring."""

    def __init__(self, devices: int, versions: list[_Standing], policy: Policy) -> None:
        self.free, self._versions, self._policy = devices, versions, policy

    def run(self) -> None:
        versions = self._versions
        working = [each for each in versions if each.works]
        for each in sorted((each for each in working if each.in_turn), key=lambda each: -each.since):
            self._give(each, 1)
        self._owed(working)
        for each in working:
            if each.keeps:
                self._give(each, each.had)
        self._by_level(working)
        self._by_level([each for each in versions if each.wants and not each.works])
        for each in sorted(versions, key=lambda each: -each.demand.priority):
            each.spares = min(each.decision.spares, self.free)
            self.free -= each.spares

    def _give(self, each: _Standing, count: int) -> None:
        """Give it devices until it has `count`."""
        more = min(self.free, count - each.got)
        if more > 0:
            each.got += more
            self.free -= more

    def _owed(self, working: list[_Standing]) -> None:
        staffed = {each.demand.priority for each in working if each.had}
        for each in sorted(working, key=lambda each: -each.waited_s):
            patience_s = self._policy.turn_s if each.demand.priority in staffed else self._policy.starved_s
            if each.had == 0 and each.waited_s >= patience_s:
                self._give(each, 1)
                each.by_turn = each.got > 0

    def _by_level(self, versions: list[_Standing]) -> None:
        for level in sorted({each.demand.priority for each in versions}, reverse=True):
            self._share([each for each in versions if each.demand.priority == level])

    def _share(self, versions: list[_Standing]) -> None:
        """One by one to who has the least of what it needs."""
        while self.free:
            hungry = [each for each in versions if each.got < each.decision.desired]
            if not hungry:
                return
            neediest = min(hungry, key=_order)
            self._give(neediest, neediest.got + 1)


def _order(each: _Standing) -> tuple[float, bool, float, VersionKey]:
    """Who gets the next device: ends in the name, so that it never hangs on the order of versions."""
    share = each.got / each.decision.desired
    return share, each.got >= each.had, -each.since if each.had else each.since, each.name
