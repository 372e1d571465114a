"""The weights and priorities of tenants, as a worker has to know them."""

from typing import TYPE_CHECKING

from shared import subjects, tenants

if TYPE_CHECKING:
    from shared.bus import Bus
    from shared.keyvalue import Watch
    from shared.tenants import Tenant


class TenantShares:
    """The bucket `tenants`, watched. A tenant that has no record has weight 1 and priority 0."""

    def __init__(self) -> None:
        self._tenants: dict[str, Tenant] = {}
        self._watch: Watch | None = None

    async def start(self, bus: "Bus") -> None:
        """Returns when what is there now is known."""
        self._watch = await bus.watch(subjects.TENANTS_BUCKET, self.on_change)

    async def close(self) -> None:
        if self._watch is not None:
            await self._watch.close()

    def on_change(self, key: str, value: bytes | None) -> None:
        tenants.TENANTS.follow(self._tenants, key, value)

    def weight(self, tenant: str) -> float:
        found = self._tenants.get(tenant)
        return 1.0 if found is None else found.weight

    def priority(self, tenant: str) -> int:
        found = self._tenants.get(tenant)
        return 0 if found is None else found.priority
