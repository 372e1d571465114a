"""The controller's /metrics: what it sees, what it wants, what it did. Labels are bounded by the versions that exist."""

from collections.abc import Iterable, Iterator
from threading import Thread
from typing import Literal
from wsgiref.simple_server import WSGIServer

from msgspec import Struct
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from controller.autoscaler import Decision, Lag
from controller.fleet import Member
from shared.records import Lease
from shared.rollouts import Deployment, Progress

LABELS = ("model", "version")
COLD_START_BUCKETS_S = (0.1, 0.25, 0.5, 1, 2, 3, 4, 5, 7.5, 10, 15, 30, 60, 120, 300, 600)


class VersionView(Struct, frozen=True, kw_only=True):
    """One version as of the last tick."""

    decision: Decision
    members: tuple[Member, ...]
    lag: Lag | None


class _Present(Collector):
    """Gauges of the last tick, so that a version that is gone is gone from them too."""

    def __init__(self) -> None:
        self.views: tuple[VersionView, ...] = ()

    def collect(self) -> Iterator[GaugeMetricFamily]:
        desired = GaugeMetricFamily("headrace_replicas_desired", "Replicas that a version should have", labels=LABELS)
        spares = GaugeMetricFamily("headrace_spares_desired", "Loaded spares that a version should have", labels=LABELS)
        rate = GaugeMetricFamily(
            "headrace_arrivals_per_second", "Requests that come; absent while not known", labels=LABELS
        )
        oldest = GaugeMetricFamily(
            "headrace_oldest_pending_seconds", "How long the oldest request that no worker has waits", labels=LABELS
        )
        replicas = GaugeMetricFamily("headrace_replicas", "Workers by state", labels=(*LABELS, "state"))
        lag = GaugeMetricFamily(
            "headrace_lag_messages", "Requests in the queue; absent while not known", labels=(*LABELS, "kind")
        )
        for view in self.views:
            name = (view.decision.model, view.decision.version)
            desired.add_metric(name, view.decision.desired)
            spares.add_metric(name, view.decision.spares)
            signals = view.decision.signals
            if signals.rate is not None:
                rate.add_metric(name, signals.rate)
            for state in ("starting", "loaded", "active", "draining", "failed", "lost"):
                replicas.add_metric((*name, state), sum(member.state == state for member in view.members))
            if view.lag is not None:
                lag.add_metric((*name, "pending"), view.lag.pending)
                lag.add_metric((*name, "claimed"), view.lag.claimed)
                lag.add_metric((*name, "jobs"), view.lag.jobs)
                oldest.add_metric(name, signals.oldest_s)
        yield from (desired, spares, replicas, lag, rate, oldest)


class Metrics:
    """Counts and serves. `port` is what it is served on, 0 before `serve`."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.port = 0
        self._present = _Present()
        self.registry.register(self._present)
        self._decisions = Counter(
            "headrace_scaling_decisions",
            "Changes of a version's desired replicas, by what decided",
            (*LABELS, "reason"),
            registry=self.registry,
        )
        self._start_failures = Counter(
            "headrace_start_failures",
            "Workers that ended before they were active",
            (*LABELS, "kind"),
            registry=self.registry,
        )
        self._cold_start = Histogram(
            "headrace_cold_start_seconds",
            "From the start of a worker's process: each phase, and `active` for the whole until it serves",
            (*LABELS, "phase"),
            buckets=COLD_START_BUCKETS_S,
            registry=self.registry,
        )
        self._rollout_weight = Gauge(
            "headrace_rollout_weight",
            "Share of the traffic that goes to the version of the model's last rollout",
            LABELS,
            registry=self.registry,
        )
        self._rollout_gate = Gauge(
            "headrace_rollout_gate",
            "What a gate of a rollout sees: the value of canary and stable, and the limit; shares, or milliseconds",
            (*LABELS, "gate", "window", "of"),
            registry=self.registry,
        )
        self._webhook_tries = Counter(
            "headrace_webhook_tries",
            "Tries to tell a webhook of an event that were delivered or failed, and events that were given up",
            ("outcome",),
            registry=self.registry,
        )
        self._webhooks_waiting = Gauge(
            "headrace_webhooks_waiting", "Events that webhooks are still to be told of", registry=self.registry
        )
        self._of_versions = (
            self._decisions,
            self._start_failures,
            self._cold_start,
            self._rollout_weight,
            self._rollout_gate,
        )
        self._phases_seen: dict[str, set[str]] = {}  # by worker
        self._versions_seen: set[tuple[str, str]] = set()
        self._server: tuple[WSGIServer, Thread] | None = None

    def serve(self, host: str, port: int) -> None:
        """Serve on `port` of `host`, 0 for a free one. Raises OSError when it is taken."""
        self._server = start_http_server(port, addr=host, registry=self.registry)
        self.port = self._server[0].server_port

    def close(self) -> None:
        if self._server is not None:
            server, thread = self._server
            server.shutdown()
            server.server_close()
            thread.join()

    def show(self, views: Iterable[VersionView]) -> None:
        """Replace what the gauges say."""
        self._present.views = tuple(views)

    def decided(self, decision: Decision) -> None:
        self._decisions.labels(decision.model, decision.version, decision.reasons[-1]).inc()

    def start_failed(self, model: str, version: str, kind: str) -> None:
        self._start_failures.labels(model, version, kind).inc()

    def rollout(self, deployment: Deployment, progress: Progress) -> None:
        """Show how far a rollout is, and what its gates see."""
        name = (deployment.model, deployment.version)
        self._rollout_weight.labels(*name).set(deployment.basis_points / 10_000)
        for finding in progress.findings:
            for of, value in (("canary", finding.canary), ("stable", finding.stable), ("limit", finding.limit)):
                if value is not None:
                    self._rollout_gate.labels(*name, finding.gate, finding.window, of).set(value)

    def webhook(self, outcome: Literal["delivered", "failed", "given_up"]) -> None:
        self._webhook_tries.labels(outcome).inc()

    def webhooks_waiting(self, count: int) -> None:
        self._webhooks_waiting.set(count)

    def cold_start(self, lease: Lease, active_s: float | None) -> None:
        """Observe the phases that a worker's lease tells of, each once; `active_s` since its process was started."""
        seen = self._phases_seen.setdefault(lease.worker, set())
        phases = lease.cold_start if active_s is None else {"active": active_s} | lease.cold_start
        for phase in phases.keys() - seen:
            self._cold_start.labels(lease.model, lease.version, phase).observe(phases[phase])
            seen.add(phase)

    def forget(self, workers: Iterable[str], versions: Iterable[tuple[str, str]]) -> None:
        """Drop what is kept of all workers and versions but these."""
        for worker in self._phases_seen.keys() - set(workers):
            del self._phases_seen[worker]
        present = set(versions)
        for name in self._versions_seen - present:
            for metric in self._of_versions:
                metric.remove_by_labels(dict(zip(LABELS, name, strict=True)))
        self._versions_seen = present
