"""Where a tenant's work of a version waits: in the lane fair, or as detached work. Each tenant has a consumer of its own."""

from typing import Protocol

from shared import subjects
from shared.bus import Bus
from shared.records import Version


class TenantQueues(Protocol):
    """The queues of one kind, of one version."""

    stream: str
    filter: str  # every subject of theirs

    def subject(self, tenant: str) -> str: ...

    def consumer(self, tenant: str) -> str: ...

    async def ensure(self, tenant: str) -> None:
        """Make the consumer, unless it is there. Raises Unavailable."""

    def hinted(self, tenants: list[str] | None) -> list[str] | None:
        """Of the tenants that a hint names, those that it says something of; None: it does not say which."""


class FairQueues:
    """The lane fair."""

    stream = subjects.REQ_STREAM

    def __init__(self, bus: Bus, version: Version) -> None:
        self._bus, self._name = bus, (version.model, version.version)
        self.filter = subjects.requests_of_lane(*self._name, subjects.LANE_FAIR)

    def subject(self, tenant: str) -> str:
        return subjects.request(*self._name, subjects.LANE_FAIR, tenant)

    def consumer(self, tenant: str) -> str:
        return subjects.fair_consumer(*self._name, tenant)

    async def ensure(self, tenant: str) -> None:
        await self._bus.ensure_fair_consumer(*self._name, tenant)

    def hinted(self, tenants: list[str] | None) -> list[str] | None:
        return tenants


class JobQueues:
    """Detached work. Hints that name tenants are about the lane fair."""

    stream = subjects.JOB_STREAM

    def __init__(self, bus: Bus, version: Version) -> None:
        self._bus, self._name = bus, (version.model, version.version)
        self.filter = subjects.jobs_of_version(*self._name)

    def subject(self, tenant: str) -> str:
        return subjects.job(*self._name, tenant)

    def consumer(self, tenant: str) -> str:
        return subjects.job_consumer(*self._name, tenant)

    async def ensure(self, tenant: str) -> None:
        await self._bus.ensure_job_consumer(*self._name, tenant)

    def hinted(self, tenants: list[str] | None) -> list[str] | None:
        return None if tenants is None else []
