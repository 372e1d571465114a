"""A simulated worker's end of the lane fair: the production's turns and rhythm over the simulated broker.

What `workers.fair` does with messages and tasks is here one call each: the broker answers at once.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from headrace.fleet.broker import Broker
from headrace.fleet.clock import Clock
from headrace.fleet.workload import Request
from shared.settings import Settings
from workers.fair import RETRY_S
from workers.rhythm import Rhythm
from workers.turns import Turns

ROUNDING_S = 1e-9  # so much less is the same time


class FairSide:
    """From `start` to `stop`."""

    def __init__(
        self,
        clock: Clock,
        broker: Broker,
        settings: Settings,
        turns: Turns,
        spare_max: int,
        free: Callable[[], int],
        fast_quiet_s: Callable[[float], float],
        share: Callable[[int], list[tuple[str, int]]],
        on_message: Callable[[Request], None],
    ) -> None:
        """As of the production's `FairPuller`."""
        self._clock, self._broker, self._settings = clock, broker, settings
        self._turns, self._free, self._share, self._on_pulled = turns, free, share, on_message
        self.held: Counter[str] = Counter()  # messages of the lane that this worker has, by tenant
        self._rhythm = Rhythm(turns, spare_max, free, lambda now: fast_quiet_s(now) + ROUNDING_S, self.held.total)
        self._used: dict[str, float] = {}  # consumers that are there, and when they were last pulled from
        self._free_then = -1  # when it was last asked
        self._next_at = 0.0
        self._epoch = 0  # of the turn that is to come

    def start(self) -> None:
        self._broker.pullers[self] = None
        self._turn_at(self._clock.now)

    def stop(self) -> None:
        self._broker.pullers.pop(self, None)
        self._epoch += 1

    def pump(self) -> None:
        """Credit may have grown. Asked for at any step edge, it does the same as at those where something changed."""
        if self._turns and (free := self._free()) != self._free_then:
            self._free_then = free
            if self._rhythm.is_worth_a_turn(self._clock.now):
                self._wake()

    def fast_claimed(self) -> None:
        """A request was claimed from `fast`."""
        if self._rhythm.fast_claimed(self._clock.now):
            self._wake()

    def hinted(self, tenants: Sequence[str] | None) -> None:
        before = len(self._turns.tenants)
        self._rhythm.hinted(tenants, self._used)
        if self._rhythm.is_worth_a_turn(self._clock.now) or len(self._turns.tenants) != before:
            self._wake()
        elif (at := self._rhythm.next_at(self._clock.now)) < self._next_at:
            self._turn_at(max(at, self._clock.now))

    def message(self, request: Request, left: int) -> None:
        """The broker delivers."""
        self._rhythm.fair_claimed()
        self._turns.message(request.tenant, left)
        self.held[request.tenant] += 1
        self._on_pulled(request)

    def released(self, tenant: str) -> None:
        """A message of the lane is acknowledged or handed back."""
        self.held[tenant] -= 1

    def _wake(self) -> None:
        if self in self._broker.pullers and self._next_at > self._clock.now:
            self._turn_at(self._clock.now)

    def _turn_at(self, when: float) -> None:
        self._epoch += 1
        self._next_at = when
        self._clock.at(when, self._turn, self._epoch)

    def _turn(self, epoch: int) -> None:
        if epoch != self._epoch:
            return
        now, rhythm = self._clock.now, self._rhythm
        if self._broker.paused:
            self._turn_at(now + RETRY_S)
            return
        if rhythm.is_time_to_look(now):
            self._look(now)
        credit = rhythm.credit(now)
        pulls = self._share(credit)
        rhythm.shared(credit, len(pulls))
        for tenant, count in pulls:
            self._used[tenant] = now
            self._turns.pulled(tenant, count)
            self._broker.take(self, tenant, count)
            if self._turns.pulling:
                self._turns.ended(tenant)
        if self in self._broker.pullers:
            self._free_then = self._free()
            self._turn_at(now if pulls else rhythm.next_at(now))  # the end of a pull is news

    def _look(self, now: float) -> None:
        stored: Mapping[str, int] = self._broker.stored()
        self._turns.look({tenant: count - self.held[tenant] for tenant, count in stored.items()})
        forgotten = now - self._settings.fair_consumer_idle_s
        if any(used <= forgotten for used in self._used.values()):
            self._used = {tenant: used for tenant, used in self._used.items() if used > forgotten}
