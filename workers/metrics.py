"""A worker's /metrics: vLLM's names, so that dashboards and autoscalers made for it work, and Headrace's own."""

import threading
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from itertools import accumulate
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from workers.engine.request import Engine

LABELS = ["model_name", "version"]
SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000)


class _EngineCollector(Collector):
    """Reads the engine's own counters when somebody scrapes, so that no gauge can be stale."""

    def __init__(self, engine: Engine, labels: list[str]) -> None:
        self._engine, self._values = engine, labels

    def collect(self) -> Iterator[Metric]:
        stats, info = self._engine.stats(), self._engine.info
        for name, text, value in (
            ("vllm:num_requests_running", "Sequences in the batch", stats.running),
            ("vllm:num_requests_waiting", "Requests claimed and not in the batch", stats.waiting),
            (
                "vllm:kv_cache_usage_perc",
                "Share of KV blocks in use, 0 to 1",
                stats.blocks_used / max(1, info.blocks_total),
            ),
            ("headrace_kv_blocks_cached", "Free KV blocks whose contents can still be matched", stats.blocks_cached),
            ("headrace_step_milliseconds", "Time of an engine step, a moving mean", stats.step_ms),
            ("headrace_engine_blocked", "1 while a request waits for room in the batch", int(stats.blocked)),
            ("headrace_requests_late", "Requests that will hardly begin in time", len(stats.late)),
            ("headrace_fairness_jain_index", "Fairness among tenants that wait: 1 is fair", stats.jain),
        ):
            gauge = GaugeMetricFamily(name, text, labels=LABELS)
            gauge.add_metric(self._values, value)
            yield gauge
        for name, text, total in (
            ("vllm:prompt_tokens", "Prompt tokens computed", stats.prompt_tokens),
            ("vllm:generation_tokens", "Tokens generated", stats.generated_tokens),
            ("vllm:num_preemptions", "Sequences preempted and recomputed", stats.preemptions),
            ("headrace_engine_steps", "Engine steps", stats.steps),
            ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache", stats.cache_queries),
            ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache", stats.cache_hits),
            ("vllm:spec_decode_num_draft_tokens", "Tokens guessed and verified", stats.drafted),
            ("vllm:spec_decode_num_accepted_tokens", "Tokens guessed right", stats.accepted),
        ):
            counter = CounterMetricFamily(name, text, labels=LABELS)
            counter.add_metric(self._values, total)
            yield counter
        text = "Service of a tenant: prompt tokens computed and twice the tokens generated; the first tenants by name"
        service = CounterMetricFamily("headrace_tenant_service", text, labels=[*LABELS, "tenant"])
        for tenant, units in stats.service.items():
            service.add_metric([*self._values, tenant], units)
        yield service


class TokenHistogram(Collector):
    """A histogram for one set of labels. A value costs one bisection: it is taken for every token."""

    def __init__(self, name: str, text: str, bounds: tuple[float, ...], labels: list[str]) -> None:
        self._name, self._text, self._bounds, self._values = name, text, bounds, labels
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[Metric]:
        names = [*(floatToGoString(bound) for bound in self._bounds), "+Inf"]
        family = HistogramMetricFamily(self._name, self._text, labels=LABELS)
        family.add_metric(self._values, list(zip(names, accumulate(self._counts), strict=True)), self._sum)
        yield family


class WorkerMetrics:
    """The worker's registry and the HTTP server that shows it."""

    def __init__(self, model: str, version: str) -> None:
        self.registry = CollectorRegistry()
        self._values = [model, version]
        self._worst_stall = 0.0
        self._counted = (0, 0)
        self._server: WSGIServer | None = None
        self._thread: threading.Thread | None = None
        self.ttft = self._histogram("vllm:time_to_first_token_seconds", "From accepted to the first token", SECONDS)
        self.inter_token = self._histogram(
            "vllm:inter_token_latency_seconds", "Between two tokens of a choice", SECONDS
        )
        self.queue = self._histogram("vllm:request_queue_time_seconds", "From stored to accepted", SECONDS)
        self.latency = self._histogram("vllm:e2e_request_latency_seconds", "From accepted to the last token", SECONDS)
        self.generated = self._histogram("vllm:request_generation_tokens", "Tokens generated for a request", TOKENS)
        self.success = Counter(
            "vllm:request_success", "Finished choices", [*LABELS, "finished_reason"], registry=self.registry
        )
        self.errors = Counter(
            "headrace_worker_errors", "Requests that ended in an error", [*LABELS, "code"], registry=self.registry
        )
        self._redelivered = self._counter("headrace_redeliveries", "Messages that had been delivered before")
        self._orphans = self._counter("headrace_orphans", "Requests that ended because nobody listened any more")
        self._ended = Counter(
            "headrace_claims_ended",
            "Claims by how they ended; moved: another worker has the request",
            [*LABELS, "outcome"],
            registry=self.registry,
        )
        self._counted_ended: dict[str, int] = {}
        self._jobs_ended = Counter(
            "headrace_jobs_ended", "Jobs that are over here, by outcome", [*LABELS, "outcome"], registry=self.registry
        )
        self._counted_jobs: dict[str, int] = {}
        self.claims = self._gauge("headrace_claims", "Messages held that are not acked")
        self.jobs = self._gauge("headrace_jobs", "Messages of detached work held that are not acked")
        self._stall = self._gauge("headrace_event_loop_stall_seconds", "Worst stall of the event loop so far")
        self._cold = Gauge(
            "headrace_cold_start_seconds", "Cold start by phase", [*LABELS, "phase"], registry=self.registry
        )

    def observe_stall(self, seconds: float) -> None:
        """A stretch in which the event loop did not turn."""
        if seconds > self._worst_stall:
            self._worst_stall = seconds
            self._stall.set(seconds)

    def count_table(self, redeliveries: int, orphans: int, outcomes: Mapping[str, int]) -> None:
        """Totals of the claim table."""
        for outcome, count in outcomes.items():
            self._ended.labels(*self._values, outcome).inc(count - self._counted_ended.get(outcome, 0))
        self._counted_ended = dict(outcomes)
        self._redelivered.inc(redeliveries - self._counted[0])
        self._orphans.inc(orphans - self._counted[1])
        self._counted = redeliveries, orphans

    def finished(self, reason: str) -> None:
        self.success.labels(*self._values, reason).inc()

    def count_jobs(self, held: int, outcomes: Mapping[str, int]) -> None:
        """What is held, and totals of the table of jobs."""
        self.jobs.set(held)
        for outcome, count in outcomes.items():
            self._jobs_ended.labels(*self._values, outcome).inc(count - self._counted_jobs.get(outcome, 0))
        self._counted_jobs = dict(outcomes)

    def failed(self, code: str) -> None:
        self.errors.labels(*self._values, code).inc()

    def cold_start(self, phase: str, seconds: float) -> None:
        self._cold.labels(*self._values, phase).set(seconds)

    def watch(self, engine: Engine) -> None:
        self.registry.register(_EngineCollector(engine, self._values))

    def serve(self, host: str, port: int) -> int:
        """Serve /metrics; the port (a free one when `port` is 0)."""
        self._server, self._thread = start_http_server(port, host, registry=self.registry)
        return self._server.server_port

    def close(self) -> None:
        if self._server is not None and self._thread is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()

    def _histogram(self, name: str, text: str, bounds: tuple[float, ...]) -> TokenHistogram:
        histogram = TokenHistogram(name, text, bounds, self._values)
        self.registry.register(histogram)
        return histogram

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, LABELS, registry=self.registry).labels(*self._values)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, LABELS, registry=self.registry).labels(*self._values)
