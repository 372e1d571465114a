"""When a worker turns to the lane fair, and how much of its credit goes there. Pure: time is passed in, in seconds.

`fast` goes first: its credit is out already when a slot becomes free. What it has no use for within a moment is shared among
the backlogs, and after some claims of `fast` in a row one is theirs in any case, while they have less than their sure part of
the batch: of claims alone it would be most of the batch where their requests are longer than the others.

A backlog would fill every slot at once, and with long requests for long: then whoever comes by `fast` has only what others
leave. So slots that no one tenant may have are kept from all backlogs together, as many as `fast` has had claims of late.
"""

from collections import deque
from collections.abc import Callable, Container, Sequence

from workers.turns import Turns

LOOK_S = 1.0  # between two looks at what waits: for what no hint came of
LOOK_HINTED_S = 0.05  # at least, where hints tell of more than is known
QUIET_S = 0.003  # `fast` has had credit and no message for so long: it has no use for it
STUCK_S = 0.02  # between two tries to share credit among tenants that may not have more
FAST_MAX = 7  # claims from `fast` in a row while something waits in `fair`
TURN_MAX = 2  # of a turn: more follow at once, and other workers take theirs in between
SPARE_S = 10.0  # a claim from `fast` keeps a slot free for so long


class Rhythm:
    """The turns of one worker: at each, it may look at what waits, and shares the credit that there is for it."""

    def __init__(
        self,
        turns: Turns,
        spare_max: int,
        free: Callable[[], int],
        fast_quiet_s: Callable[[float], float],
        held: Callable[[], int],
    ) -> None:
        """`spare_max`: slots that may be kept from backlogs. `free`: requests that can be taken. `fast_quiet_s(now)`: for how
        long `fast` has had credit and no message. `held`: requests of the lane fair that this worker has."""
        self._turns, self._free, self._fast_quiet_s, self._held = turns, free, fast_quiet_s, held
        self._fast_at: deque[float] = deque(maxlen=spare_max)  # the last claims from `fast`
        self._fast_run = 0  # claims from `fast` since the last one from `fair`
        self._look_at = self._looked_at = 0.0
        self._stuck = -1  # what was free when nobody might have more

    def is_worth_a_turn(self, now: float) -> bool:
        """Whether there is credit to share that was not there at the last turn."""
        if not self._turns:
            return False
        free = self._free()
        return free > self._turns.pulling + self._spare(now) and free != self._stuck

    def fast_claimed(self, now: float) -> bool:
        """A request was claimed from `fast`; whether the next one is to be of `fair`."""
        self._fast_at.append(now)
        self._fast_run += 1
        return self._fast_run >= FAST_MAX and bool(self._turns)

    def fair_claimed(self) -> None:
        self._fast_run = 0

    def hinted(self, tenants: Sequence[str] | None, known: Container[str]) -> None:
        """Something waits of these tenants, or of whomever. Anybody may say anything: who is not `known` is looked for."""
        believed = [tenant for tenant in tenants or () if tenant in known]
        for tenant in believed:
            self._turns.hint(tenant)
        if tenants is None or len(believed) < len(tenants):
            self.look_by(self._looked_at + LOOK_HINTED_S)

    def look_by(self, at: float) -> None:
        """The next look is at `at`, or before."""
        self._look_at = min(self._look_at, at)

    def next_at(self, now: float) -> float:
        """When the next turn is, if nothing happens before."""
        credit = self._free() - self._turns.pulling if self._turns else 0
        if credit <= 0:
            return self._look_at
        if self._spare(now) < credit:
            return min(self._look_at, now + (QUIET_S if self._stuck < 0 else STUCK_S))
        return min(self._look_at, self._fast_at[-credit] + SPARE_S)  # then fewer are kept than are free

    def is_time_to_look(self, now: float) -> bool:
        """Whether this turn has a look: then the next one is due in a while."""
        if now < self._look_at:
            return False
        self._looked_at, self._look_at = now, now + LOOK_S
        return True

    def credit(self, now: float) -> int:
        """Requests that this turn may take from the backlogs."""
        credit = self._free() - self._turns.pulling
        if self._fast_quiet_s(now) >= QUIET_S:
            credit -= self._spare(now)
        else:
            due = credit >= 0 and self._fast_run >= FAST_MAX and self._held() < self._turns.sure
            credit = int(due)  # over what is free: `fast` gets one less for it
        return max(0, min(credit, TURN_MAX))

    def shared(self, credit: int, pulls: int) -> None:
        """So many pulls are sent of a turn's credit."""
        self._stuck = self._free() if credit and not pulls else -1

    def _spare(self, now: float) -> int:
        """Slots that are kept from backlogs."""
        return sum(at + SPARE_S > now for at in self._fast_at)
