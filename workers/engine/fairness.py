"""Who is served next: a virtual token counter for each tenant. Pure: no torch, no clock, no thread.

After "Fairness in Serving Large Language Models" (VTC, Sheng et al., OSDI 2024), with what its published code lacks: a tenant
is lifted also when nobody waits, and a tenant at its cap is passed over instead of stopping everybody behind it.

The counter grows by 1 for each prompt token that is not found in the cache and by 2 for each output token, divided by the
tenant's weight; never for a token that is computed again. The waiting tenant with the smallest counter comes first. A tenant
that begins to wait is lifted to where the others are, so that no idle or modest time earns a credit: to the smallest
counter of those that wait or run, and to that of whoever was admitted last.

Detached entries are charged to the same counters and wait in a class of their own, which is served when nothing of the first
one can be. A tenant that begins to wait in it is lifted to where the others are in that class.
"""

from collections import Counter, OrderedDict
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

    @property
    def detached(self) -> bool: ...


E = TypeVar("E", bound=Entry)


class Account(Generic[E]):
    """What one tenant got and holds."""

    __slots__ = (
        "_base",
        "backlogged",
        "blocks",
        "detached",
        "detached_slots",
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
        self.waiting: OrderedDict[E, None] = OrderedDict()  # but for what is detached,
        self.detached: OrderedDict[E, None] = OrderedDict()  # which waits here
        self.live = 0  # entries that wait or run
        self.slots = 0  # of the batch
        self.detached_slots = 0  # of these, those that detached entries have
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

    def queue(self, detached: bool) -> OrderedDict[E, None]:
        return self.detached if detached else self.waiting

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


class _Class(Generic[E]):
    """What waits: of those that somebody waits for, or of the detached ones."""

    __slots__ = ("outside", "queues", "reached", "waiting")

    def __init__(self) -> None:
        self.waiting = 0  # entries
        self.queues: dict[Account[E], None] = {}  # those with entries that wait
        self.outside: set[Account[E]] = set()  # those that have something waiting before it comes to `add`
        self.reached = 0.0  # the counter up to which everybody has been served who waited


class TenantLedger(Generic[E]):
    """All tenants of an engine, who of them waits, and what each was charged."""

    def __init__(self, slots_max: int) -> None:
        """`slots_max`: of the batch, for any one tenant."""
        self.service: dict[str, int] = {}  # as of the last `publish`: at most NAMED_MAX tenants and OTHERS
        self.jain = 1.0  # Jain's index, 1 is fair, of service in the time between the last two `judge`
        self._slots_max = slots_max
        self._accounts: OrderedDict[str, Account[E]] = OrderedDict()
        self.active: dict[Account[E], None] = {}  # those with entries that wait or run
        self._first: _Class[E] = _Class()
        self._detached: _Class[E] = _Class()
        self._named: set[str] = set()
        self._closed_service = 0

    @property
    def waiting(self) -> int:
        """Entries that wait, but for the detached ones."""
        return self._first.waiting

    @property
    def detached(self) -> int:
        """Detached entries that wait."""
        return self._detached.waiting

    def add(self, entry: E, tenant: str, limits: TenantLimits) -> None:
        """`entry` begins to wait."""
        account = self._limited(tenant, limits)
        if not account.queue(entry.detached) and account not in self._class(entry.detached).outside:
            self._lift(account, entry.detached)
        account.live += 1
        self.active[account] = None
        entry.account = account
        self._wait(entry, account)

    def expect(self, outside: dict[str, TenantLimits], detached: bool = False) -> None:
        """These tenants, and no others, have something of the class waiting that is to come to `add` when it is their turn."""
        expected = {self._limited(tenant, limits) for tenant, limits in outside.items()}
        which = self._class(detached)
        for account in expected - which.outside:
            if not account.queue(detached):
                self._lift(account, detached)
        which.outside = expected

    def standing(self, tenant: str, detached: bool = False) -> Standing:
        """May be called on another thread, and then is as of a moment ago."""
        account = self._accounts.get(tenant)
        if account is None:
            return Standing(self._class(detached).reached, 0)
        return Standing(account.counter, len(account.queue(detached)))

    def put_back(self, entry: E) -> None:
        """`entry` has left the batch and must wait again, before what its tenant has waiting."""
        account = entry.account
        self._wait(entry, account)
        account.queue(entry.detached).move_to_end(entry, last=False)

    def order(self, detached: bool = False) -> list[Account[E]]:
        """The tenants that have something of the class waiting, in the order in which they are to be served."""
        queues = list(self._class(detached).queues)
        if len(queues) > 1:
            queues.sort(key=Account.rank)
        return queues

    def head(self, detached: bool = False) -> E | None:
        """What of the class is to enter the batch next: of the first tenant in order that is not at its cap."""
        for account in self.order(detached):
            if not self.at_cap(account, detached):
                return next(iter(account.queue(detached)))
        return None

    def at_cap(self, account: Account[E], detached: bool = False) -> bool:
        """Whether a tenant has all the slots that it may have. It is passed over, and blocks nobody.

        What detached entries have is at hand for the others: only more of the former is refused for it.
        """
        own = account.limits.slots_max
        slots = account.slots if detached else account.slots - account.detached_slots
        return slots >= max(1, self._slots_max if own is None else min(own, self._slots_max))

    def admit(self, entry: E, uncached: int, in_turn: bool = True) -> None:
        """`entry` enters the batch; `uncached` tokens of its prompt are charged. `in_turn`: it was its tenant's turn."""
        account = entry.account
        if in_turn:
            which = self._class(entry.detached)
            which.reached = max(which.reached, account.counter)
        if entry in account.queue(entry.detached):
            self._unwait(entry, account)
        account.slots += 1
        account.detached_slots += entry.detached
        account.prompt += uncached

    def leave(self, entry: E) -> None:
        """`entry` left the batch; it may have ended or not."""
        entry.account.slots -= 1
        entry.account.detached_slots -= entry.detached

    def remove(self, entry: E) -> None:
        """`entry` ended. If it was in the batch, it has left it."""
        account = entry.account
        if entry in account.queue(entry.detached):
            self._unwait(entry, account)
        account.live -= 1
        if account.live == 0:
            del self.active[account]
            if not self.active:
                for which in (self._first, self._detached):
                    which.reached = max(which.reached, account.counter)
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
            for account in self._first.queues
            if account.backlogged is not None
        ]
        squares = sum(each * each for each in got)
        self.jain = sum(got) ** 2 / (len(got) * squares) if squares else 1.0
        for account in self._first.queues:
            account.backlogged = account.service

    def check(self, running: Iterable[E]) -> None:
        """Assert that the counts are those of the entries that wait and of `running`."""
        slots, detached_slots = Counter[Account[E]](), Counter[Account[E]]()
        for entry in running:
            slots[entry.account] += 1
            detached_slots[entry.account] += entry.detached
        for account in self._accounts.values():
            held = (account.slots, account.detached_slots)
            assert held == (slots[account], detached_slots[account]), f"{account.tenant}: {held} slots"
            for detached in (False, True):
                waits = account in self._class(detached).queues
                assert waits == bool(account.queue(detached)), f"{account.tenant}: waits and does not"
            assert (account in self.active) == (account.live > 0), f"{account.tenant}: {account.live} live"
            entries = account.slots + len(account.waiting) + len(account.detached)
            assert account.live >= entries, f"{account.tenant}: {account.live} live"
        for detached in (False, True):
            which = self._class(detached)
            waiting = sum(len(account.queue(detached)) for account in which.queues)
            assert which.waiting == waiting, f"{which.waiting} waiting"

    def _class(self, detached: bool) -> _Class[E]:
        return self._detached if detached else self._first

    def _lift(self, account: Account[E], detached: bool) -> None:
        which = self._class(detached)
        others = (
            each.counter
            for each in {*self.active, *which.outside}
            if each is not account and (not detached or each.detached or each.detached_slots or each in which.outside)
        )
        account.lift(max(which.reached, min(others, default=0.0)))

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
        which = self._class(entry.detached)
        account.queue(entry.detached)[entry] = None
        which.queues[account] = None
        which.waiting += 1

    def _unwait(self, entry: E, account: Account[E]) -> None:
        which, queue = self._class(entry.detached), account.queue(entry.detached)
        del queue[entry]
        which.waiting -= 1
        if not queue:
            if not entry.detached:
                account.backlogged = None
            del which.queues[account]

    def _close_idle(self) -> None:
        """The accounts are in the order in which they became idle, or were opened: few need to be looked at."""
        if len(self._accounts) <= ACCOUNTS_MAX:
            return
        for account in self._accounts.values():
            idle = account.live == 0 and account.blocks == 0
            expected = account in self._first.outside or account in self._detached.outside
            if idle and not expected and account.tenant not in self._named:
                self._closed_service += account.service
                del self._accounts[account.tenant]
                return
