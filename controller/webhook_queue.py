"""Which notices are to be tried now. Pure: time is passed in, in unix seconds.

Tenants take turns, and the hosts of a tenant; nobody has more attempts under way than its limit. So a receiver that is slow or
dead holds up what is for itself, and whoever has much to be told holds up itself.
"""

import heapq
import itertools
from collections import Counter, deque

from msgspec import Struct


class Limits(Struct, frozen=True, kw_only=True):
    """Attempts at the same time."""

    overall: int
    per_tenant: int
    per_host: int


class Entry(Struct, frozen=True):
    """A notice, by its key, and what decides on its turn."""

    key: str
    tenant: str
    host: str
    due: float


class WebhookQueue:
    """Notices that wait, and those that are being tried."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._waiting: dict[str, Entry] = {}  # an entry that is not here is left over where it is
        self._later: list[tuple[float, int, Entry]] = []  # a heap
        self._numbers = itertools.count()
        self._ready: dict[str, dict[str, deque[Entry]]] = {}  # by tenant and host, whose turn is next first
        self._running: dict[str, Entry] = {}
        self._by_tenant: Counter[str] = Counter()  # running
        self._by_host: Counter[str] = Counter()  # running
        self._known: Counter[str] = Counter()  # by tenant

    def __len__(self) -> int:
        """Those that wait or are being tried."""
        return len(self._waiting) + len(self._running)

    def known(self, tenant: str) -> int:
        """How many of a tenant wait or are being tried."""
        return self._known[tenant]

    def is_running(self, key: str) -> bool:
        return key in self._running

    def put(self, entry: Entry) -> None:
        """It waits until it is due, whatever was said of it before. Not for one that is being tried."""
        assert entry.key not in self._running
        self.drop(entry.key)
        self._waiting[entry.key] = entry
        self._known[entry.tenant] += 1
        heapq.heappush(self._later, (entry.due, next(self._numbers), entry))

    def drop(self, key: str) -> None:
        """Forget one that waits, if it does."""
        entry = self._waiting.pop(key, None)
        if entry is not None:
            _less(self._known, entry.tenant)

    def take(self, now: float) -> list[str]:
        """Those whose turn it is, by their keys: they are being tried from now on, until `done`."""
        while (due := self.next_due()) is not None and due <= now:
            ripe = heapq.heappop(self._later)[2]
            self._ready.setdefault(ripe.tenant, {}).setdefault(ripe.host, deque()).append(ripe)
        taken: list[str] = []
        while True:
            turn = [entry for tenant in list(self._ready) if (entry := self._next_of(tenant)) is not None]
            if not turn:
                return taken
            taken += [entry.key for entry in turn]

    def done(self, key: str) -> None:
        """An attempt is over."""
        entry = self._running.pop(key)
        _less(self._by_tenant, entry.tenant)
        _less(self._by_host, entry.host)
        _less(self._known, entry.tenant)

    def next_due(self) -> float | None:
        """When the next one will be that is not due yet."""
        while self._later and not self._waits(self._later[0][2]):
            heapq.heappop(self._later)
        return self._later[0][0] if self._later else None

    def _waits(self, entry: Entry) -> bool:
        return self._waiting.get(entry.key) is entry

    def _next_of(self, tenant: str) -> Entry | None:
        """One of a tenant's, if the limits let it: the tenant, and the host, go to the end of their rows then."""
        if len(self._running) >= self._limits.overall or self._by_tenant[tenant] >= self._limits.per_tenant:
            return None
        hosts = self._ready[tenant]
        for host in [each for each in hosts if self._by_host[each] < self._limits.per_host]:
            entries = hosts.pop(host)
            while entries:
                if not self._waits(entry := entries.popleft()):
                    continue
                if entries:
                    hosts[host] = entries
                del self._ready[tenant]
                if hosts:
                    self._ready[tenant] = hosts
                self._start(entry)
                return entry
        if not hosts:
            del self._ready[tenant]
        return None

    def _start(self, entry: Entry) -> None:
        del self._waiting[entry.key]
        self._running[entry.key] = entry
        self._by_tenant[entry.tenant] += 1
        self._by_host[entry.host] += 1


def _less(counts: Counter[str], name: str) -> None:
    counts[name] -= 1
    if not counts[name]:
        del counts[name]
