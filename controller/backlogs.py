"""What waits and is claimed of what has a consumer for each tenant: of the lane fair, and of detached work."""

import asyncio
from collections import defaultdict
from collections.abc import Callable

from msgspec import Struct

from shared import subjects
from shared.bus import Bus
from shared.streams import ConsumerInfo, Delivered

VersionKey = tuple[str, str]  # model, version
CALLS_MAX = 32  # at the same time


class Queues(Struct, frozen=True):
    """Queues of one kind."""

    stream: str
    filter: str
    place: Callable[[str], tuple[str, str, str]]  # (model, version, tenant) of a subject. Raises ValueError
    consumer: Callable[[str, str, str], str]


def _place_of_request(subject: str) -> tuple[str, str, str]:
    model, version, _, tenant = subjects.place_of_request(subject)
    return model, version, tenant


FAIR = Queues(subjects.REQ_STREAM, subjects.BACKLOGGED, _place_of_request, subjects.fair_consumer)
JOBS = Queues(subjects.JOB_STREAM, subjects.JOB_SUBJECTS, subjects.place_of_job, subjects.job_consumer)


class _Version(Struct):
    delivered: int = 0  # in all, as far as was seen: it only rises, while tenants' consumers come and go
    last: dict[str, int] = {}  # of each tenant's consumer
    backlogged: set[str] = set()  # at the last reading


class Backlogs:
    """All versions. Without a backlog a reading is one call, with one it is another call for each tenant that has one."""

    def __init__(self, bus: Bus, queues: Queues) -> None:
        self._bus, self._queues = bus, queues
        self._versions: dict[VersionKey, _Version] = {}

    async def read(self) -> dict[VersionKey, ConsumerInfo]:
        """The sums of each version that has a backlog or has had one. Raises Unavailable."""
        stored = await self._stored()
        for name in stored.keys() - self._versions.keys():
            self._versions[name] = _Version()
        limit = asyncio.Semaphore(CALLS_MAX)

        async def info_of(name: VersionKey, tenant: str) -> ConsumerInfo | None:
            async with limit:
                return await self._bus.consumer_info(self._queues.stream, self._queues.consumer(*name, tenant))

        names = [
            (name, tenant)
            for name, version in self._versions.items()
            for tenant in version.backlogged | stored[name].keys()  # also those that have just lost theirs
        ]
        infos = await asyncio.gather(*(info_of(*each) for each in names))
        sums = {name: ConsumerInfo() for name in self._versions}
        for (name, tenant), info in zip(names, infos, strict=True):
            if info is None:  # no worker has asked for it yet
                sums[name].num_pending += stored[name].get(tenant, 0)
                continue
            sums[name].num_pending += info.num_pending
            sums[name].num_ack_pending += info.num_ack_pending
            _count(self._versions[name], tenant, info)
        for name, version in self._versions.items():
            version.backlogged = set(stored[name])
            sums[name].delivered = Delivered(version.delivered)
        return sums

    def forget(self, name: VersionKey) -> None:
        """The version is gone."""
        self._versions.pop(name, None)

    async def _stored(self) -> defaultdict[VersionKey, dict[str, int]]:
        found: defaultdict[VersionKey, dict[str, int]] = defaultdict(dict)
        counts = await self._bus.subject_counts(self._queues.stream, self._queues.filter)
        for subject, count in counts.items():
            try:
                model, version, tenant = self._queues.place(subject)
            except ValueError:
                continue  # nobody's name: no worker takes it
            found[model, version][tenant] = count
        return found


def _count(version: _Version, tenant: str, info: ConsumerInfo) -> None:
    delivered = info.delivered.consumer_seq
    before = version.last.get(tenant)
    if before is None:  # it may have been there for long: what it has in flight is new
        version.delivered += min(delivered, info.num_ack_pending)
    else:
        version.delivered += delivered - before if delivered >= before else delivered
    version.last[tenant] = delivered
