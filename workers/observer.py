"""Turns claims and steps into the worker's metrics."""

from collections.abc import Callable

import msgspec

from workers.actions import Start
from workers.delivery import Delivery
from workers.engine.request import TokenEvent
from workers.metrics import WorkerMetrics


class _Seen(msgspec.Struct):
    begun: float  # monotonic seconds
    last: dict[int, float]  # per choice: when its last token came
    tokens: int = 0


class RunObserver:
    """Times of runs: from their start to the first token (or vector), between tokens, to the end."""

    def __init__(self, metrics: WorkerMetrics, on_first_token: Callable[[float], None]) -> None:
        self._metrics, self._on_first_token = metrics, on_first_token
        self._runs: dict[str, _Seen] = {}
        self._any_token = False

    def claimed(self, delivery: Delivery) -> None:
        self._metrics.queue.observe(delivery.queued_ms / 1000)

    def started(self, start: Start, now: float) -> None:
        self._runs[start.run] = _Seen(now, {})

    def aborted(self, run: str) -> None:
        self._runs.pop(run, None)

    def step(self, events: list[TokenEvent], now: float) -> None:
        """One step's events, `now` when they came."""
        for event in events:
            seen = self._runs.get(event.key)
            if seen is None:
                continue
            if event.error is not None:
                self._metrics.failed(event.error[0])
                del self._runs[event.key]
                continue
            if (event.ids and not event.echo) or event.vector:
                self._token(seen, event, now)
            if event.finish is not None:
                self._metrics.finished(event.finish)
            if event.usage is not None:
                self._metrics.latency.observe(now - seen.begun)
                self._metrics.generated.observe(seen.tokens)
                del self._runs[event.key]

    def _token(self, seen: _Seen, event: TokenEvent, now: float) -> None:
        before = seen.last.get(event.choice)
        if before is not None:
            self._metrics.inter_token.observe(now - before)
        elif not seen.last:
            self._metrics.ttft.observe(now - seen.begun)
            if not self._any_token:
                self._any_token = True
                self._on_first_token(now - seen.begun)
        seen.last[event.choice] = now
        seen.tokens += len(event.ids)
