"""What is remembered of one version between looks at it: its queue's flow, its load, its cold starts. Pure."""

from collections import deque
from collections.abc import Sequence
from statistics import median_high

from msgspec.structs import replace

from controller.autoscaler import Policy, Sample, VersionFacts, load, remember
from controller.flow import Flow, Reading
from shared.records import Lease
from shared.settings import Settings
from shared.streams import ConsumerInfo

COLD_STARTS_KEPT = 8
LEASE_PERIODS = 2.5  # after so many, what a lease does not tell of is not so
NO_JOBS = ConsumerInfo()
LOAD_KEPT_S = 600.0  # a cold start that takes longer is taken for one of this length


class VersionHistory:
    """Only what slows down or sharpens a decision: without it, the present decides."""

    def __init__(self, policy: Policy, settings: Settings) -> None:
        self._policy = policy
        self._flow = Flow(LEASE_PERIODS * settings.lease_every_s)
        self._jobs = Flow(LEASE_PERIODS * settings.lease_every_s)
        self._loads: deque[Sample] = deque()
        self._cold_starts: deque[float] = deque(maxlen=COLD_STARTS_KEPT)
        self._slots = 0
        self._known_since: float | None = None

    @property
    def cold_start_s(self) -> float | None:
        """From the start of a worker until it is loaded, the median of the last ones."""
        return median_high(self._cold_starts) if self._cold_starts else None

    def loaded(self, cold_start_s: float) -> None:
        """A worker is loaded, so long after its start."""
        self._cold_starts.append(max(0.0, cold_start_s))

    def read(self, now: float, consumer: ConsumerInfo, leases: Sequence[Lease], jobs: ConsumerInfo = NO_JOBS) -> None:
        """Take in a look at the queue, and at that of `jobs`. `leases` are the live ones of the version, whatever they do."""
        self._flow.read(_reading(now, consumer, sum(lease.claims for lease in leases)))
        self._jobs.read(_reading(now, jobs, sum(lease.jobs for lease in leases)))

    def complete(self, facts: VersionFacts, leases: Sequence[Lease], now: float) -> VersionFacts:
        """`facts` with everything that is derived over time. The load that comes of it is remembered as of `now`."""
        slots = [lease.slots for lease in leases if lease.state in ("active", "loaded") and lease.slots]
        self._slots = max(slots, default=self._slots)
        known = replace(
            facts,
            unbatched=sum(lease.waiting for lease in leases),
            slots=self._slots or facts.slots,
            cold_start_s=self.cold_start_s,
        )
        if facts.lag is None:
            self._known_since = None
        else:
            self._known_since = now if self._known_since is None else self._known_since
            known = replace(
                known,
                known_since=self._known_since,
                stranded=self._flow.stranded,
                oldest_s=self._flow.oldest_s(now),
                rate=self._flow.rate(),
                service_s=self._flow.service_s,
                job_service_s=self._jobs.service_s,
            )
            window_s = min(LOAD_KEPT_S, max(self._policy.down_window_s, self.cold_start_s or 0.0))
            remember(self._loads, Sample(now, load(known, self._policy)[0]), window_s)
        return replace(known, history=tuple(self._loads))


def _reading(now: float, consumer: ConsumerInfo, in_flight: int) -> Reading:
    return Reading(
        at=now,
        pending=consumer.num_pending,
        claimed=consumer.num_ack_pending,
        delivered=consumer.delivered.consumer_seq,
        in_flight=in_flight,
    )
