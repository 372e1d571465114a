"""Who is served next: a virtual token counter for each tenant. Pure: no torch, no clock, no thread.

After "Fairness in Serving Large Language Models" (VTC, Sheng et al., OSDI 2024), with what its published code lacks: a tenant
is lifted also when nobody waits, and a tenant at its cap is passed over instead of stopping everybody behind it.

The counter grows by 1 for each prompt token that is not found in the cache and by 2 for each output token, divided by the
tenant's weight; never for a token that is computed again. The waiting tenant with the smallest counter comes first. A tenant
that begins to wait is lifted to where the others are, so that no idle or modest time earns a credit: to the smallest
counter of those that wait or run, and to that of whoever was admitted last.
"""

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any, Generic, Protocol, TypeVar

from workers.engine.request import Standing, TenantLimits

PROMPT_COST = 1
OUTPUT_COST = 2
NAMED_MAX = 50  # tenants that metrics tell apart: the first ones seen
ACCOUNTS_MAX = 1000  # over it the account that was idle for longest is closed: its debt is forgiven then
OTHERS = "_others"


class Entry(Protocol):
    """What waits and runs: anything that can have an account."""

    account: "Account[Any]"


E = TypeVar("E", bound=Entry)


class Account(Generic[E]):
    """What one tenant got and holds."""

    __slots__ = (
        "_base",
        "backlogged",
        "blocks",
        "limits",
        "live",
        "output",
        "preempted",
        "prompt",
        "slots",
        "tenant",
        "waiting",
    )

    def __init__(self, tenant: str) -> None:
        self.tenant = tenant
        self.limits = TenantLimits()
        self.waiting: OrderedDict[E, None] = OrderedDict()
        self.live = 0  # entries that wait or run
        self.slots = 0  # of the batch
        self.blocks = 0  # kept by the pool
        self.prompt = 0  # tokens charged
        self.output = 0  # tokens charged; whoever commits a step counts here
        self.preempted = 0  # the step in which it last was at its cap of blocks and one of its own had to leave
        self.backlogged: int | None = None  # the service at the last `judge`, if it has waited for its turn since
        self._base = 0.0

    @property
    def service(self) -> int:
        """What was charged in all, whatever the weight."""
        return PROMPT_COST * self.prompt + OUTPUT_COST * self.output

    @property
    def counter(self) -> float:
        """The virtual counter: what decides whose turn it is."""
        return self._base + (PROMPT_COST * self.prompt + OUTPUT_COST * self.output) / self.limits.weight

    def lift(self, floor: float) -> None:
        self._base += max(0.0, floor - self.counter)

    def limit(self, limits: TenantLimits) -> None:
        """New limits: a new weight counts for what comes, not for what was."""
        counter = self.counter
        self.limits = limits
        self._base += counter - self.counter

    def rank(self) -> tuple[int, float, float]:
        """The order of admission: by priority, then by counter; of two with the same, the one that holds less."""
        return -self.limits.priority, self.counter, self.slots / self.limits.weight


NOBODY: Account[Any] = Account("")  # of entries that are in no ledger


class TenantLedger(Generic[E]):
    """All tenants of an engine, who of them waits, and what each was charged."""

    def __init__(self, slots_max: int) -> None:
        """`slots_max`: of the batch, for any one tenant."""
        self.waiting = 0  # entries
        self.service: dict[str, int] = {}  # as of the last `publish`: at most NAMED_MAX tenants and OTHERS
        self.jain = 1.0  # Jain's index, 1 is fair, of service in the time between the last two `judge`
        self._slots_max = slots_max
        self._accounts: OrderedDict[str, Account[E]] = OrderedDict()
        self.active: dict[Account[E], None] = {}  # those with entries that wait or run
        self._queues: dict[Account[E], None] = {}  # those with entries that wait
        self._outside: set[Account[E]] = set()  # those that have something waiting before it comes to `add`
        self._named: set[str] = set()
        self._closed_service = 0
        self._reached = 0.0  # the counter up to which everybody has been served who waited

    def add(self, entry: E, tenant: str, limits: TenantLimits) -> None:
        """`entry` begins to wait."""
        account = self._limited(tenant, limits)
        if not account.waiting and account not in self._outside:
            self._lift(account)
        account.live += 1
        self.active[account] = None
        entry.account = account
        self._wait(entry, account)

    def expect(self, outside: dict[str, TenantLimits]) -> None:
        """These tenants, and no others, have something waiting that is to come to `add` when it is their turn."""
        expected = {self._limited(tenant, limits) for tenant, limits in outside.items()}
        for account in expected - self._outside:
            if not account.waiting:
                self._lift(account)
        self._outside = expected

    def standing(self, tenant: str) -> Standing:
        """May be called on another thread, and then is as of a moment ago."""
        account = self._accounts.get(tenant)
        if account is None:
            return Standing(self._reached, 0)
        return Standing(account.counter, len(account.waiting))

    def put_back(self, entry: E) -> None:
        """`entry` has left the batch and must wait again, before what its tenant has waiting."""
        account = entry.account
        self._wait(entry, account)
        account.waiting.move_to_end(entry, last=False)

    def order(self) -> list[Account[E]]:
        """The tenants that have something waiting, in the order in which they are to be served."""
        queues = list(self._queues)
        if len(queues) > 1:
            queues.sort(key=Account.rank)
        return queues

    def head(self) -> E | None:
        """What is to enter the batch next: of the first tenant in order that is not at its cap."""
        return next((next(iter(account.waiting)) for account in self.order() if not self.at_cap(account)), None)

    def at_cap(self, account: Account[E]) -> bool:
        """Whether a tenant has all the slots that it may have. It is passed over, and blocks nobody."""
        own = account.limits.slots_max
        return account.slots >= max(1, self._slots_max if own is None else min(own, self._slots_max))

    def admit(self, entry: E, uncached: int, in_turn: bool = True) -> None:
        """`entry` enters the batch; `uncached` tokens of its prompt are charged. `in_turn`: it was its tenant's turn."""
        account = entry.account
        if in_turn:
            self._reached = max(self._reached, account.counter)
        if entry in account.waiting:
            self._unwait(entry, account)
        account.slots += 1
        account.prompt += uncached

    def leave(self, entry: E) -> None:
        """`entry` left the batch; it may have ended or not."""
        entry.account.slots -= 1

    def remove(self, entry: E) -> None:
        """`entry` ended. If it was in the batch, it has left it."""
        account = entry.account
        if entry in account.waiting:
            self._unwait(entry, account)
        account.live -= 1
        if account.live == 0:
            del self.active[account]
            if not self.active:
                self._reached = max(self._reached, account.counter)
            self._accounts.move_to_end(account.tenant)
            self._close_idle()

    def victim(self, running: Iterable[E]) -> E:
        """Who leaves the batch when memory runs out: of the tenant furthest over its share, the newest.

        `running` is in the order of admission and not empty.
        """
        newest = {entry.account: (place, entry) for place, entry in enumerate(running)}
        worst = max(newest, key=lambda account: (account.blocks / account.limits.weight, newest[account][0]))
        return newest[worst][1]

    def publish(self) -> None:
        """Take stock of `service`."""
        total = self._closed_service
        service = {}
        for account in self._accounts.values():
            total += account.service
            if account.tenant in self._named:
                service[account.tenant] = account.service
        if len(self._named) == NAMED_MAX:
            service[OTHERS] = total - sum(service.values())
        self.service = service

    def judge(self) -> None:
        """Take stock of `jain`: over those that have waited since the last time and were at no cap of their own."""
        got = [
            (account.service - account.backlogged) / account.limits.weight
            for account in self._queues
            if account.backlogged is not None
        ]
        squares = sum(each * each for each in got)
        self.jain = sum(got) ** 2 / (len(got) * squares) if squares else 1.0
        for account in self._queues:
            account.backlogged = account.service

    def check(self, running: Iterable[E]) -> None:
        """Assert that the counts are those of the entries that wait and of `running`."""
        slots: dict[Account[E], int] = {}
        for entry in running:
            slots[entry.account] = slots.get(entry.account, 0) + 1
        for account in self._accounts.values():
            assert account.slots == slots.get(account, 0), f"{account.tenant}: {account.slots} slots"
            assert (account in self._queues) == bool(account.waiting), f"{account.tenant}: waits and does not"
            assert (account in self.active) == (account.live > 0), f"{account.tenant}: {account.live} live"
            assert account.live >= account.slots + len(account.waiting), f"{account.tenant}: {account.live} live"
        assert self.waiting == sum(len(account.waiting) for account in self._queues), f"{self.waiting} waiting"

    def _lift(self, account: Account[E]) -> None:
        others = (each.counter for each in {*self.active, *self._outside} if each is not account)
        account.lift(max(self._reached, min(others, default=0.0)))

    def _limited(self, tenant: str, limits: TenantLimits) -> Account[E]:
        account = self._account(tenant)
        if limits != account.limits:
            account.limit(limits)
        return account

    def _account(self, tenant: str) -> Account[E]:
        account = self._accounts.get(tenant)
        if account is None:
            account = self._accounts[tenant] = Account(tenant)
            if len(self._named) < NAMED_MAX:
                self._named.add(tenant)
        return account

    def _wait(self, entry: E, account: Account[E]) -> None:
        account.waiting[entry] = None
        self._queues[account] = None
        self.waiting += 1

    def _unwait(self, entry: E, account: Account[E]) -> None:
        del account.waiting[entry]
        self.waiting -= 1
        if not account.waiting:
            account.backlogged = None
            del self._queues[account]

    def _close_idle(self) -> None:
        """The accounts are in the order in which they became idle, or were opened: few need to be looked at."""
        if len(self._accounts) <= ACCOUNTS_MAX:
            return
        for account in self._accounts.values():
            idle = account.live == 0 and account.blocks == 0 and account not in self._outside
            if idle and account.tenant not in self._named:
                self._closed_service += account.service
                del self._accounts[account.tenant]
                return
