"""What the controller knows: version records, leases, lag. Facts in, no decisions.

Records and leases are watched, lag is polled. While the bus is away nothing expires and lag is unknown: what cannot be
heard has not gone.
"""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Iterable

from msgspec.structs import replace

from controller.autoscaler import Lag, VersionFacts, policy_of
from controller.backlogs import FAIR, JOBS, Backlogs
from controller.fleet import Member, SeenLease
from controller.history import VersionHistory
from shared import schedules, subjects
from shared.bus import Bus, Message
from shared.errors import Unavailable
from shared.keyvalue import Watch
from shared.records import LEASES, VERSIONS, EngineSettings, Lease, Version, VersionLimits
from shared.settings import Settings
from shared.streams import ConsumerInfo, Delivered
from shared.wire import Malformed

log = logging.getLogger(__name__)

VersionKey = tuple[str, str]  # model, version
POLL_TIMEOUT_S = 1.0
HINT_S = 0.25  # a hint can overtake its message: for so long the lag is looked at again and again
FORGET_TTLS = 20


class Observer:
    """`changed` is set when something happened that a decision may hang on."""

    def __init__(self, bus: Bus, settings: Settings) -> None:
        self._bus = bus
        self._settings = settings
        self.changed = asyncio.Event()
        self.records: dict[VersionKey, Version] = {}
        self.removed: set[VersionKey] = set()  # deleted while this controller watched
        self.state_since: dict[VersionKey, float] = {}
        self.leases: dict[str, SeenLease] = {}
        self.lag: dict[VersionKey, Lag] = {}
        self.without_consumer: set[VersionKey] = set()
        self.hinted_at = -HINT_S
        self._backlogs, self._jobs = Backlogs(bus, FAIR), Backlogs(bus, JOBS)
        self._watches: list[Watch] = []
        self._busy_at: dict[VersionKey, float] = {}
        self._policy = policy_of(settings)
        self._history: dict[VersionKey, VersionHistory] = {}
        self._live: defaultdict[VersionKey, list[Lease]] = defaultdict(list)  # as of the last poll
        self._starting: dict[str, float] = {}  # when a worker was first seen with its version, until it is loaded
        self._listened_at = self._heard_since = time.monotonic()

    async def start(self) -> None:
        """Watch; returns when the present records and leases are known. Raises Unavailable."""
        self._watches.append(await self._bus.watch(subjects.MODELS_BUCKET, self._on_record))
        self._watches.append(await self._bus.watch(subjects.WORKERS_BUCKET, self._on_lease))
        await self._bus.subscribe(subjects.WAKE_ALL, self._on_wake)
        self._bus.on_reconnect(self.changed.set)

    async def close(self) -> None:
        for watch in self._watches:
            await watch.close()

    def _on_record(self, key: str, value: bytes | None) -> None:
        change = VERSIONS.change(key, value)
        if change is None:
            return
        (model, version), record = change
        name = (model, version)
        before = self.records.get(name)
        if record is not None:
            self.records[name] = record
            self.removed.discard(name)
        elif self.records.pop(name, None) is not None:
            self.removed.add(name)
        after = self.records.get(name)
        if (before and before.state) != (after and after.state):
            self.state_since[name] = time.monotonic()
        self.changed.set()

    def _on_lease(self, key: str, value: bytes | None) -> None:
        now = time.monotonic()
        change = LEASES.change(key, value)
        if change is None:
            return
        [worker], lease = change
        seen = self.leases.get(worker)
        if lease is None:
            if seen is not None:
                seen.deleted = seen.silent = True
                self.changed.set()
            return
        self._note_busy(lease, seen.lease if seen else None, now)
        self._note_start(lease, seen.lease if seen else None, now)
        if seen is None or seen.lease.state != lease.state or seen.silent:
            self.changed.set()
        self.leases[worker] = SeenLease(
            lease=lease,
            heard_at=now,
            state_since=seen.state_since if seen and seen.lease.state == lease.state else now,
            was_active=lease.state in ("warm", "loaded", "active", "draining")
            or (seen is not None and seen.was_active and seen.lease.model == lease.model),
        )

    def _note_busy(self, lease: Lease, before: Lease | None, now: float) -> None:
        """Only changes of `busy_at` count, not its value: the worker's clock is not ours. At first sight it has to do."""
        name = (lease.model, lease.version)
        if (
            lease.claims
            or lease.jobs
            or lease.running
            or lease.waiting
            or (before is not None and lease.busy_at > before.busy_at)
        ):
            self._busy_at[name] = now
        elif before is None:
            ago_s = max(0.0, time.time() - max(lease.busy_at, lease.started))
            self._busy_at[name] = max(self._busy_at.get(name, now - ago_s), now - ago_s)

    def _note_start(self, lease: Lease, before: Lease | None, now: float) -> None:
        """Measure how long a worker took to load: as it was seen to, or else by the phases that it tells of."""
        if lease.state == "starting":
            if before is None or before.state != "starting":
                born_s = lease.cold_start.get("process", 0.0) if before is None else 0.0  # else it was up, and warm
                self._starting[lease.worker] = now - born_s
            return
        since = self._starting.pop(lease.worker, None)
        if lease.state not in ("active", "loaded") or (before is not None and before.state in ("active", "loaded")):
            return
        phases = lease.cold_start
        told_s = phases.get("load", 0.0) + max(phases.get("imports", 0.0), phases.get("fetch", 0.0))
        cold_start_s = now - since if since is not None else phases.get("process", 0.0) + told_s
        self._of(lease.model, lease.version).loaded(cold_start_s)

    def _of(self, model: str, version: str) -> VersionHistory:
        return self._history.setdefault((model, version), VersionHistory(self._policy, self._settings))

    def _on_wake(self, message: Message) -> None:
        try:
            name = subjects.version_of_wake(message.subject)
        except ValueError as error:
            raise Malformed(str(error)) from None
        served = any(
            (seen.lease.model, seen.lease.version) == name and seen.lease.state in ("starting", "active")
            for seen in self.leases.values()
            if not seen.silent
        )
        if name in self.records and not served:
            self.hinted_at = time.monotonic()
            self.changed.set()

    async def poll(self, now: float) -> None:
        """Read the lag of every version that can have one, and see which leases have run out."""
        self._expire(now)
        self._live.clear()
        for lease in self.live_leases():
            self._live[lease.model, lease.version].append(lease)
        names = [name for name, record in self.records.items() if record.state in ("available", "failed")]
        backlogs, jobs = await self._poll_backlogs(self._backlogs), await self._poll_backlogs(self._jobs)
        async with asyncio.TaskGroup() as tasks:
            for name in names:
                tasks.create_task(self._poll_lag(name, backlogs, jobs, now))
        self.lag = {name: lag for name, lag in self.lag.items() if name in names}
        self.without_consumer &= set(names)
        for known in (self._busy_at, self._history, self.state_since):
            for name in [name for name in known if name not in self.records and name not in self.removed]:
                del known[name]
                self._backlogs.forget(name)
                self._jobs.forget(name)
        self._starting = {worker: since for worker, since in self._starting.items() if worker in self.leases}

    async def _poll_backlogs(self, backlogs: Backlogs) -> dict[VersionKey, ConsumerInfo] | None:
        """Of each version; None: not known."""
        if not self._bus.connected:
            return None
        try:
            async with asyncio.timeout(POLL_TIMEOUT_S):
                return await backlogs.read()
        except (Unavailable, TimeoutError) as error:
            log.info("what waits by tenant cannot be looked at: %s", error)
            return None

    async def _poll_lag(
        self,
        name: VersionKey,
        backlogs: dict[VersionKey, ConsumerInfo] | None,
        jobs: dict[VersionKey, ConsumerInfo] | None,
        now: float,
    ) -> None:
        self.without_consumer.discard(name)
        info = None
        if backlogs is not None and self._bus.connected:
            consumer = subjects.consumer(subjects.LANE_FAST, subjects.requests_of_lane(*name, subjects.LANE_FAST))
            try:
                async with asyncio.timeout(POLL_TIMEOUT_S):
                    info = await self._bus.consumer_info(subjects.REQ_STREAM, consumer)
            except (Unavailable, TimeoutError) as error:
                log.info("the lag of %s@%s is not known: %s", *name, error)
            else:
                if info is None:
                    self.without_consumer.add(name)
        if info is None or backlogs is None or jobs is None:
            self.lag.pop(name, None)
            return
        info = _sum(info, backlogs.get(name, ConsumerInfo()))
        detached = jobs.get(name, ConsumerInfo())
        waiting = detached.num_pending + detached.num_ack_pending
        self.lag[name] = lag = Lag(pending=info.num_pending, claimed=info.num_ack_pending, jobs=waiting)
        if lag.total:
            self._busy_at[name] = now
        self._of(*name).read(now, info, self._live.get(name, ()), detached)

    def _expire(self, now: float) -> None:
        """Mark what has not been heard for a TTL of listening. Time in which we could not hear does not count."""
        ttl_s = self._settings.lease_ttl_s
        hearing = self._bus.connected and all(watch.live for watch in self._watches)
        if not hearing or now - self._listened_at > ttl_s / 2:
            self._heard_since = now
        self._listened_at = now
        for worker, seen in list(self.leases.items()):
            unheard_s = now - max(seen.heard_at, self._heard_since)
            seen.silent = seen.deleted or unheard_s > ttl_s
            if unheard_s > FORGET_TTLS * ttl_s:
                del self.leases[worker]

    def live_leases(self) -> Iterable[Lease]:
        return (seen.lease for seen in self.leases.values() if not seen.silent)

    async def take_lease(self, worker: str) -> SeenLease | None:
        """Take away the last lease of a worker whose process has ended; the watch may not have told it yet.

        `deleted` of it: by the worker, which ended in good order. Raises Unavailable.
        """
        key = subjects.key(worker)
        found = await self._bus.kv_get(subjects.WORKERS_BUCKET, key)
        if found is not None:
            self._on_lease(key, found[0])
        seen = self.leases.get(worker)
        by_itself = seen is not None and seen.deleted
        if found is not None:
            await self._bus.kv_delete(subjects.WORKERS_BUCKET, key)
        self.leases.pop(worker, None)
        return replace(seen, deleted=by_itself) if seen is not None else None

    def limits(self, name: VersionKey) -> VersionLimits:
        """Of a version; the defaults for one that has no record."""
        record = self.records.get(name)
        return record.limits if record else VersionLimits()

    def facts(self, name: VersionKey, members: Iterable[Member], replicas_max: int, now: float) -> VersionFacts:
        """What `decide` needs to know of one version; its load is remembered as of `now`."""
        record = self.records.get(name)
        limits = self.limits(name)
        engine = record.engine if record else EngineSettings()
        history = self._of(*name)
        soon_s = history.cold_start_s or self._policy.cold_start_s  # what is to serve then has to be started now
        clock = time.time()
        present = [member for member in members if member.is_replica]
        known = VersionFacts(
            model=name[0],
            version=name[1],
            state=record.state if record else "deleted",
            min_replicas=limits.min_replicas,
            max_replicas=replicas_max if limits.max_replicas is None else limits.max_replicas,
            idle_seconds=self._settings.idle_seconds if limits.idle_seconds is None else limits.idle_seconds,
            lag=self.lag.get(name),
            busy_at=self._busy_at.setdefault(name, now),
            replicas=tuple(member.as_replica() for member in present if member.claim),
            spares=sum(member.state == "loaded" and not member.claim for member in present),
            scheduled_min=max(schedules.min_replicas(limits.schedule, at) for at in (clock, clock + soon_s)),
            warm=limits.warm,
            ttft_s=engine.ttft_ms_target / 1e3 if engine.ttft_ms_target is not None else None,
            slots=engine.slots or 0,
        )
        return history.complete(known, self._live.get(name, ()), now)


def _sum(fast: ConsumerInfo, fair: ConsumerInfo) -> ConsumerInfo:
    return ConsumerInfo(
        num_pending=fast.num_pending + fair.num_pending,
        num_ack_pending=fast.num_ack_pending + fair.num_ack_pending,
        num_waiting=fast.num_waiting,
        delivered=Delivered(fast.delivered.consumer_seq + fair.delivered.consumer_seq),
    )
