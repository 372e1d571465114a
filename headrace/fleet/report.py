"""What a simulation is worth: percentiles, the share of requests within the SLA, the fleet over time, money."""

from array import array
from collections import Counter, defaultdict
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct

from headrace.fleet.control import Control
from headrace.fleet.pool import GAP_BUCKETS_PER_MS, Fleet
from headrace.fleet.rollout import NEW, OLD, Caught, Rollout
from headrace.fleet.scenario import Scenario
from headrace.fleet.workload import Request
from shared.errors import HeadraceError
from shared.rollouts import Event, reason_of_rollback

TENANTS_SHOWN = 50


class Sample(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The fleet at one time."""

    at_s: float
    workers: dict[str, int]  # by state
    queued: int
    claimed: int
    versions: dict[str, int] = {}  # workers by version, where there are two


class Spread(Struct, frozen=True, kw_only=True):
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


class TenantResult(Struct, frozen=True, kw_only=True):
    requests: int
    finished: int
    ttft_ms: Spread
    service: int  # prompt tokens + 2 x output tokens, as the ledger counts
    service_per_weight: float
    served: int  # the same of whatever was computed during the measured time, whenever it came and ended
    waiting: float  # requests that no worker had taken, on average
    held: float  # those that workers had


class VersionResult(Struct, frozen=True, kw_only=True):
    """What a version has answered during the measured time."""

    finished: int
    failed: int
    late: int  # finished outside the SLA
    ttft_ms: Spread
    tpot_ms: Spread
    gpu_hours: float


class RolloutResult(Struct, frozen=True, kw_only=True):
    """Times are seconds after the warm-up."""

    state: str
    reason: str  # of its last change
    why: str  # it was rolled back; "" if it was not
    caught: Caught | None
    rehomed: int  # requests that went to the old version's queue at the rollback
    workers_max: int  # at one time
    events: list[Event]
    versions: dict[str, VersionResult]


class Result(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`tpot_ms`: of each request, the mean time from one token to the next. `gap_ms`: of all tokens, also the warm-up's."""

    scenario: str
    profile: str
    seed: int
    workers: int
    slots: int
    kv_tokens: int  # of a worker
    seconds: float
    requests: int
    finished: int
    cancelled: int
    unfinished: int
    refused: dict[str, int]
    holds: bool  # both 99th percentiles are within the SLA, and nothing was refused or left over
    attainment: float  # the share of requests that met both targets
    goodput: float  # of these, a second
    late: int  # requests whose first token came after the target, or never came
    tokens_per_s: float
    ttft_ms: Spread
    tpot_ms: Spread
    gap_ms: Spread
    queue_ms: Spread  # from arrival to the batch
    batch: float  # sequences, on average over the steps
    preemptions: int
    redelivered: int
    cached_share: float  # of prompt tokens
    gpu_hours: float
    usd: float
    usd_per_million_tokens: float
    jain: float  # of the tenants' service by weight
    starts: int
    drains: int
    tenants: dict[str, TenantResult]
    timeline: list[Sample]
    windows: list[dict[str, float]]  # by time of arrival: at_s, requests, ttft_p99_ms, tpot_p99_ms
    rollout: RolloutResult | None = None

    def encoded(self) -> bytes:
        """The same bytes for the same scenario and seed."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1)


class Records:
    """What became of the requests that came after the warm-up."""

    def __init__(self, starts: float, ends: float) -> None:
        self._starts, self.ends = starts, ends
        self._numbers = 0
        self.open = 0
        self.requests = 0
        self.cancels = 0
        self.redelivered = 0
        self.refusals: dict[str, int] = {}
        self.failures: Counter[str] = Counter()  # by version
        self.worker_s: defaultdict[str, float] = defaultdict(float)  # by version
        self.tenants: list[str] = []
        self.weights: list[float] = []
        self.served: Counter[str] = Counter()  # by tenant
        self.waiting: Counter[str] = Counter()  # by tenant: the sum over all samples
        self.held: Counter[str] = Counter()
        self._tenant_numbers: dict[str, int] = {}
        self.asked: dict[int, int] = {}
        self.version: list[str] = []
        self.tenant, self.output, self.prompt = array("l"), array("l"), array("l")
        self.at, self.admitted, self.first, self.done = array("d"), array("d"), array("d"), array("d")

    def new(self, request: Request) -> int:
        self._numbers += 1
        if self._measured(request):
            self.open += 1
            self.requests += 1
            number = self._tenant(request)
            self.asked[number] = self.asked.get(number, 0) + 1
        return self._numbers

    def finished(self, request: Request) -> None:
        if not self._measured(request) or request.given_up_at < request.done:
            return
        self.open -= 1
        self.redelivered += request.claims > 1
        self.version.append(request.version)
        self.tenant.append(self._tenant(request))
        self.prompt.append(request.prompt)
        self.output.append(request.output)
        self.at.append(request.at)
        self.admitted.append(request.admitted)
        self.first.append(request.first)
        self.done.append(request.done)

    def cancelled(self, request: Request) -> None:
        if self._measured(request):
            self.open -= 1
            self.cancels += 1

    def refused(self, request: Request, error: HeadraceError) -> None:
        if self._measured(request):
            self.open -= 1
            self.refusals[error.code] = self.refusals.get(error.code, 0) + 1
            self.failures[request.version] += 1

    def _measured(self, request: Request) -> bool:
        return self._starts <= request.at < self.ends

    def _tenant(self, request: Request) -> int:
        number = self._tenant_numbers.get(request.tenant)
        if number is None:
            number = self._tenant_numbers[request.tenant] = len(self.tenants)
            self.tenants.append(request.tenant)
            self.weights.append(request.limits.weight)
        return number


def summarise(
    scenario: Scenario,
    fleets: Mapping[str, Fleet],
    records: Records,
    samples: list[Sample],
    control: Control | None,
    rollout: Rollout | None,
) -> Result:
    fleet, gaps = fleets[OLD], Counter[int]()
    for each in fleets.values():
        gaps.update(each.gaps)
    path_ms = scenario.fleet.path_ms
    at, first, done = np.asarray(records.at), np.asarray(records.first), np.asarray(records.done)
    output = np.asarray(records.output)
    ttft = (first - at) * 1e3 + path_ms
    several = output > 1
    tpot = np.where(several, (done - first) * 1e3 / np.maximum(output - 1, 1), 0.0)
    queue = (np.asarray(records.admitted) - at) * 1e3
    sla, seconds = scenario.sla, round(records.ends - scenario.warmup_s, 6)  # a rollout may end it sooner
    good = int(((ttft <= sla.ttft_ms) & (tpot <= sla.tpot_ms)).sum())
    spreads = _spread(ttft), _spread(tpot[several])
    unfinished = records.open
    tokens = int(output.sum())
    worker_s = sum(records.worker_s.values())
    usd = sum(seconds / 3600 * fleets[name].profile.usd_per_hour for name, seconds in records.worker_s.items())
    tenants, jain = _tenants(records, ttft, max(1, len(samples)))
    cached, computed = (
        sum(getattr(each, name) for each in fleets.values()) for name in ("cached_tokens", "prompt_tokens")
    )
    return Result(
        scenario=scenario.name,
        profile=fleet.profile.name,
        seed=scenario.seed,
        workers=scenario.fleet.workers,
        slots=fleet.slots,
        kv_tokens=fleet.blocks * 16,
        seconds=seconds,
        requests=records.requests,
        finished=len(at),
        cancelled=records.cancels,
        unfinished=unfinished,
        refused=dict(sorted(records.refusals.items())),
        holds=bool(
            spreads[0].p99 <= sla.ttft_ms
            and spreads[1].p99 <= sla.tpot_ms
            and not unfinished
            and not records.refusals
            and len(at) > 0
        ),
        attainment=_rounded(good / max(1, records.requests - records.cancels)),
        goodput=_rounded(good / seconds),
        late=records.requests - records.cancels - int((ttft <= sla.ttft_ms).sum()),
        tokens_per_s=_rounded(tokens / seconds),
        ttft_ms=spreads[0],
        tpot_ms=spreads[1],
        gap_ms=_spread_of_buckets(gaps),
        queue_ms=_spread(queue),
        batch=_rounded(gaps.total() / max(1, sum(each.steps for each in fleets.values()))),
        preemptions=sum(each.preemptions for each in fleets.values()),
        redelivered=records.redelivered,
        cached_share=_rounded(cached / max(1, cached + computed)),
        gpu_hours=_rounded(worker_s / 3600),
        usd=_rounded(usd),
        usd_per_million_tokens=_rounded(usd / max(1, tokens) * 1e6),
        jain=jain,
        starts=control.starts if control else 0,
        drains=control.drains if control else 0,
        tenants=tenants,
        timeline=samples,
        windows=_windows(scenario, at - scenario.warmup_s, ttft, tpot),
        rollout=_rollout(rollout, scenario, fleets, records, samples, ttft, tpot) if rollout else None,
    )


def _rollout(
    rollout: Rollout,
    scenario: Scenario,
    fleets: Mapping[str, Fleet],
    records: Records,
    samples: list[Sample],
    ttft: Any,
    tpot: Any,
) -> RolloutResult | None:
    deployment, version = rollout.deployment, np.asarray(records.version)
    if deployment is None:
        return None
    late = (ttft > scenario.sla.ttft_ms) | (tpot > scenario.sla.tpot_ms)
    several = np.asarray(records.output) > 1
    return RolloutResult(
        state=deployment.state,
        reason=deployment.reason,
        why=reason_of_rollback(deployment),
        caught=rollout.caught,
        rehomed=fleets[NEW].broker.rehomed,
        workers_max=max((sum(sample.workers.values()) for sample in samples), default=0),
        events=[msgspec.structs.replace(each, at=_rounded(each.at - scenario.warmup_s)) for each in deployment.events],
        versions={
            name: VersionResult(
                finished=int((version == name).sum()),
                failed=records.failures[name],
                late=int((late & (version == name)).sum()),
                ttft_ms=_spread(ttft[version == name]),
                tpot_ms=_spread(tpot[several & (version == name)]),
                gpu_hours=_rounded(records.worker_s[name] / 3600),
            )
            for name in fleets
        },
    )


def _tenants(records: Records, ttft: Any, samples: int) -> tuple[dict[str, TenantResult], float]:
    tenant = np.asarray(records.tenant)
    service = np.asarray(records.prompt) + 2 * np.asarray(records.output)
    found, shares = {}, []
    for number, name in enumerate(records.tenants):
        own = tenant == number
        got = int(service[own].sum())
        shares.append(got / records.weights[number])
        if number < TENANTS_SHOWN:
            found[name] = TenantResult(
                requests=records.asked[number],
                finished=int(own.sum()),
                ttft_ms=_spread(ttft[own]),
                service=got,
                service_per_weight=_rounded(shares[-1]),
                served=records.served[name],
                waiting=_rounded(records.waiting[name] / samples),
                held=_rounded(records.held[name] / samples),
            )
    squares = sum(each * each for each in shares)
    return dict(sorted(found.items())), _rounded(sum(shares) ** 2 / (len(shares) * squares)) if squares else 1.0


def _windows(scenario: Scenario, at: Any, ttft: Any, tpot: Any) -> list[dict[str, float]]:
    edges = np.linspace(0, scenario.seconds, min(60, max(2, int(scenario.seconds / 5))) + 1)
    found = []
    for begin, end in pairwise(edges):
        own = (at >= begin) & (at < end)
        if own.any():
            found.append(
                {
                    "at_s": _rounded(float(begin)),
                    "requests": int(own.sum()),
                    "ttft_p99_ms": _spread(ttft[own]).p99,
                    "tpot_p99_ms": _spread(tpot[own]).p99,
                }
            )
    return found


def _spread(values: Any) -> Spread:
    if len(values) == 0:
        return Spread(mean=0.0, p50=0.0, p90=0.0, p99=0.0, max=0.0)
    p50, p90, p99 = (float(each) for each in np.percentile(values, [50, 90, 99]))
    return Spread(
        mean=_rounded(float(values.mean())),
        p50=_rounded(p50),
        p90=_rounded(p90),
        p99=_rounded(p99),
        max=_rounded(float(values.max())),
    )


def _spread_of_buckets(buckets: dict[int, int]) -> Spread:
    total = sum(buckets.values())
    if not total:
        return Spread(mean=0.0, p50=0.0, p90=0.0, p99=0.0, max=0.0)
    order = sorted(buckets)

    def at(share: float) -> float:
        seen = 0
        for bucket in order:
            seen += buckets[bucket]
            if seen >= share * total:
                return (bucket + 0.5) / GAP_BUCKETS_PER_MS
        return order[-1] / GAP_BUCKETS_PER_MS

    mean = sum((bucket + 0.5) * count for bucket, count in buckets.items()) / total / GAP_BUCKETS_PER_MS
    return Spread(
        mean=_rounded(mean), p50=at(0.5), p90=at(0.9), p99=at(0.99), max=(order[-1] + 0.5) / GAP_BUCKETS_PER_MS
    )


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")
