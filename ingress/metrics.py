"""What the ingress counts. Labels are bounded: only models and versions that exist, route templates and stable codes."""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from shared.wire import Usage

TTFT_BUCKETS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
)
TPOT_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
E2E_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 60, 120, 240, 480, 960)

OK, DETACHED = "ok", "detached"


class Served:
    """What one request came to; times are seconds since its start."""

    __slots__ = ("claims", "first_token_s", "last_token_s", "model", "usage", "version")

    def __init__(self) -> None:
        self.model = self.version = ""  # "": not resolved
        self.first_token_s: float | None = None
        self.last_token_s = 0.0
        self.usage: Usage | None = None
        self.claims = 0

    def gained(self, now_s: float) -> None:
        """Tokens came."""
        self.last_token_s = now_s
        if self.first_token_s is None:
            self.first_token_s = now_s

    @property
    def per_token_s(self) -> float | None:
        """The mean time between its tokens; None: there are not two, or it did not end with its usage."""
        if self.usage is None or self.first_token_s is None or self.usage.completion_tokens < 2:
            return None
        return (self.last_token_s - self.first_token_s) / (self.usage.completion_tokens - 1)


class VersionMetrics:
    """The children of one model and version: looking them up by label costs more than counting."""

    def __init__(self, metrics: "Metrics", model: str, version: str) -> None:
        self.ttft = metrics.ttft.labels(model, version)
        self.tpot = metrics.tpot.labels(model, version)
        self.e2e = metrics.e2e.labels(model, version)
        self.prompt_tokens = metrics.prompt_tokens.labels(model, version)
        self.output_tokens = metrics.output_tokens.labels(model, version)
        self.claims = metrics.claims.labels(model, version)


class _Totals(Collector):
    """What became of the requests that this process stored in the queue: published = completed + failed + cancelled + open."""

    def __init__(self, totals: Mapping[str, int]) -> None:
        self._totals = totals

    def collect(self) -> Iterator[Metric]:
        totals = self._totals
        yield CounterMetricFamily("headrace_published", "Requests stored in the queue", totals["published"])
        ended = CounterMetricFamily("headrace_ended", "Of these, those that have ended, by outcome", labels=["outcome"])
        for outcome in ("completed", "failed", "cancelled"):
            ended.add_metric([outcome], totals[outcome])
        yield ended
        yield CounterMetricFamily(
            "headrace_withdrawn", "Of the cancelled ones, those that no worker had taken", totals["withdrawn"]
        )


class Metrics:
    """The registry of one ingress process."""

    def __init__(
        self,
        queued: Callable[[], float],
        streams_open: Callable[[], float],
        totals: Mapping[str, int],
        limits_alone: Callable[[], float],
    ) -> None:
        self._registry = registry = CollectorRegistry()
        registry.register(_Totals(totals))
        ProcessCollector(registry=registry)
        labels = ("model", "version")
        self._requests = Counter(
            "headrace_requests",
            "Inference requests by outcome; code is `ok`, an error's stable code, or `detached`: left, and may be resumed",
            (*labels, "route", "code"),
            registry=registry,
        )
        self.ttft = Histogram(
            "headrace_time_to_first_token_seconds",
            "From the request's arrival to its first token",
            labels,
            buckets=TTFT_BUCKETS,
            registry=registry,
        )
        self.tpot = Histogram(
            "headrace_time_per_output_token_seconds",
            "Mean time between a request's tokens, one observation a request",
            labels,
            buckets=TPOT_BUCKETS,
            registry=registry,
        )
        self.e2e = Histogram(
            "headrace_request_seconds",
            "From the request's arrival to its last byte",
            labels,
            buckets=E2E_BUCKETS,
            registry=registry,
        )
        self.prompt_tokens = Counter("headrace_prompt_tokens", "Prompt tokens served", labels, registry=registry)
        self.output_tokens = Counter("headrace_output_tokens", "Output tokens served", labels, registry=registry)
        self.claims = Counter(
            "headrace_claims",
            "Claims of workers that served requests; more than requests: resumed",
            labels,
            registry=registry,
        )
        self._by_outcome: dict[tuple[str, str, str, str], Counter] = {}
        self._by_version: dict[tuple[str, str], VersionMetrics] = {}
        Gauge("headrace_queued", "Requests published and not yet accepted", registry=registry).set_function(queued)
        Gauge(
            "headrace_limits_alone",
            "1: this ingress counts its part of the limits, Redis does not answer",
            registry=registry,
        ).set_function(limits_alone)
        Gauge("headrace_streams_open", "Inference requests in progress", registry=registry).set_function(streams_open)

    def finished(self, served: Served, route: str, code: str, seconds: float) -> None:
        """Count a request that ended with `code` after `seconds`."""
        outcome = (served.model, served.version, route, code)
        counter = self._by_outcome.get(outcome)
        if counter is None:
            counter = self._by_outcome[outcome] = self._requests.labels(*outcome)
        counter.inc()
        if not served.model:
            return
        children = self._by_version.get(outcome[:2])
        if children is None:
            children = self._by_version[outcome[:2]] = VersionMetrics(self, *outcome[:2])
        children.e2e.observe(seconds)
        first_s, usage = served.first_token_s, served.usage
        if first_s is not None:
            children.ttft.observe(first_s)
        if usage is not None:
            children.prompt_tokens.inc(usage.prompt_tokens)
            children.output_tokens.inc(usage.completion_tokens)
        per_token_s = served.per_token_s
        if per_token_s is not None:
            children.tpot.observe(per_token_s)
        children.claims.inc(served.claims)

    def exposition(self) -> bytes:
        """The registry in Prometheus's text format."""
        return generate_latest(self._registry)
