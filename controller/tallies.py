"""The counts of all ingresses together, for each version of a deployment: in all, and since its step began. No I/O."""

from msgspec import Struct

from shared.rollouts import Deployment
from shared.tally import INGRESS_LEASES, IngressLease, Tally, total

SLICE_S = 2.0  # the first slices of time: every ingress has told something new in each
SLICES_MAX = 32  # then they are made twice as long


class Counted(Struct, frozen=True, kw_only=True):
    """What callers met of a version of a deployment."""

    step: Tally  # since the present step began, as far as it was seen to
    all: Tally
    slices: tuple[Tally, ...] = ()  # of all, by time


class Slices:
    """Counts by time, in slices that get longer as they get many."""

    def __init__(self, now: float) -> None:
        self._width_s, self._cut_at, self._cut = SLICE_S, now, Tally()
        self.slices: list[Tally] = []

    def take(self, counted: Tally, now: float) -> None:
        """What has been counted in all by `now`."""
        if now - self._cut_at < self._width_s:
            return
        self.slices.append(counted - self._cut)
        self._cut_at, self._cut = now, counted
        if len(self.slices) >= SLICES_MAX:
            self.slices = [one + other for one, other in zip(self.slices[::2], self.slices[1::2], strict=True)]
            self._width_s *= 2


class Tallies:
    """Takes in leases. What an ingress counted still counts when it is gone."""

    def __init__(self) -> None:
        self._leases: dict[str, IngressLease] = {}
        # by deployment and version:
        self._began: dict[tuple[str, str], tuple[object, Tally]] = {}  # at a step's beginning
        self._slices: dict[tuple[str, str], Slices] = {}

    def on_lease(self, key: str, value: bytes | None) -> None:
        """A lease is new or changed, or (None) gone."""
        change = INGRESS_LEASES.change(key, value)
        if change is not None and change.record is not None:
            self._leases[change.record.ingress] = change.record

    def of(self, deployment: Deployment, version: str, now: float) -> Counted:
        """What was counted of a version; `now` in seconds of any clock that does not jump."""
        counted = total(
            each.tally
            for lease in self._leases.values()
            for each in lease.tallies
            if (each.deployment, each.version) == (deployment.id, version)
        )
        place, step = (deployment.id, version), (deployment.phase, deployment.step)
        before = self._began.get(place)
        if before is None or before[0] != step:
            self._began[place] = before = (step, counted)
        slices = self._slices.setdefault(place, Slices(now))
        slices.take(counted, now)
        return Counted(step=counted - before[1], all=counted, slices=tuple(slices.slices))

    def forget(self, going: set[str]) -> None:
        """Drop what is kept of all deployments but these."""
        for place in [place for place in self._began if place[0] not in going]:
            del self._began[place], self._slices[place]
        for ingress, lease in list(self._leases.items()):
            if not any(each.deployment in going for each in lease.tallies):
                del self._leases[ingress]
