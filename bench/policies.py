"""What the engine's policies are worth, measured on one engine by engine.py.

pacing: a prompt of 4,000 tokens comes among 8 running streams, without and with a target of 80 ms for a token. The gaps are
those between two tokens of a stream, as the event loop sees them, from the prompt's arrival to its first token.
prefix: requests of 1,000 equal tokens and 32 of their own, one after the other, without and with the cache.
fairness: a tenant with 500 requests waiting, and another that asks once a second for half a minute.
"""

import asyncio
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import msgspec

from shared.records import EngineSettings
from shared.wire import Sampling
from workers.engine.engine import BatchEngine
from workers.engine.request import EngineRequest, TokenEvent

STREAMS, STREAM_PROMPT, LONG_PROMPT, TPOT_MS = 8, 60, 4000, 80.0
SHARED_PROMPT, OWN_PROMPT, PREFIX_REQUESTS = 1000, 32, 8
FLOOD, FLOOD_PROMPT, FLOOD_OUTPUT, SECONDS = 500, 120, 200, 30

Row = tuple[str, str]  # what, and the figure


class Times:
    """When each token of each request came."""

    def __init__(self, engine: BatchEngine) -> None:
        self.engine = engine
        self.tokens: dict[str, list[float]] = {}
        self.cached: dict[str, int] = {}
        self._sent: dict[str, float] = {}
        self._changed = asyncio.Event()
        engine.start(asyncio.get_running_loop(), self._on_events)

    def submit(self, key: str, prompt: list[int], output: int, tenant: str = "bench") -> None:
        sampling = Sampling(max_tokens=output, temperature=0.0, ignore_eos=True)
        self.tokens[key], self._sent[key] = [], time.perf_counter()
        self.engine.submit(EngineRequest(key=key, tenant=tenant, prompt_ids=prompt, sampling=sampling))

    def ttft_ms(self, key: str) -> float:
        return (self.tokens[key][0] - self._sent[key]) * 1e3

    async def until(self, condition: Callable[[], object]) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    def _on_events(self, events: list[TokenEvent]) -> None:
        now = time.perf_counter()
        for event in events:
            if event.error is not None:
                raise SystemExit(f"the engine failed: {event.error}")
            if event.key in self.tokens:
                self.tokens[event.key] += [now] * len(event.ids)
            if event.usage is not None:
                self.cached[event.key] = event.usage.cached_tokens
        self._changed.set()


class Bench:
    """The same model behind fresh schedulers of different settings."""

    def __init__(self, engine: BatchEngine, settings: EngineSettings) -> None:
        self._engine, self._settings = engine, settings

    def fresh(self, **changes: object) -> BatchEngine:
        engine = self._engine
        settings = msgspec.structs.replace(self._settings, **changes)
        cost = engine._pacer.cost
        return BatchEngine(engine._runner, engine._text, engine.info, settings, engine._max_tokens_default, cost)


def prompt(length: int, kind: int) -> list[int]:
    """Tokens like no other kind's."""
    return [(7919 * place + 31 * kind + 13 * (kind * place % 97)) % 3900 + 50 for place in range(length)]


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def pacing(bench: Bench, runs: int) -> Iterator[Row]:
    yield asyncio.run(_pacing(bench, None, 0))
    for run in range(runs):
        yield asyncio.run(_pacing(bench, TPOT_MS, run))


async def _pacing(bench: Bench, target: float | None, run: int) -> Row:
    times = Times(bench.fresh(tpot_ms_target=target, prefix_cache="off"))
    streams = [f"s{index}" for index in range(STREAMS)]
    for index, key in enumerate(streams):
        times.submit(key, prompt(STREAM_PROMPT, 100 * run + index), 2000)
    await times.until(lambda: all(len(times.tokens[key]) > 20 for key in streams))
    begin = time.perf_counter()
    times.submit("long", prompt(LONG_PROMPT, 7 + run), 2)
    await times.until(lambda: times.tokens["long"])
    end = time.perf_counter()
    for key in streams:
        times.engine.cancel(key)
    times.engine.stop()
    gaps = [
        (later - earlier) * 1e3
        for key in streams
        for earlier, later in zip(times.tokens[key], times.tokens[key][1:], strict=False)
        if later > begin and earlier < end
    ]
    return (
        f"pacing, {'no target' if target is None else f'target {target:.0f} ms'}, run {run + 1}",
        f"gap p50 {percentile(gaps, 0.5):.0f}, p99 {percentile(gaps, 0.99):.1f}, worst {max(gaps):.1f} ms;"
        f" first token of the long prompt after {times.ttft_ms('long') / 1e3:.1f} s",
    )


def prefix(bench: Bench) -> Iterator[Row]:
    without, row = asyncio.run(_prefix(bench, "off", PREFIX_REQUESTS))
    yield row
    cached, (what, figure) = asyncio.run(_prefix(bench, "tenant", PREFIX_REQUESTS))
    yield what, f"{figure}: **{without / cached:.1f}** times sooner"


async def _prefix(bench: Bench, mode: str, requests: int) -> tuple[float, Row]:
    times = Times(bench.fresh(prefix_cache=mode))
    shared = prompt(SHARED_PROMPT, 3)
    keys = [f"r{index}" for index in range(requests + 1)]
    for index, key in enumerate(keys):
        times.submit(key, shared + prompt(OWN_PROMPT, 50 + index), 2)
        await times.until(lambda key=key: key in times.cached)
    times.submit("other", shared + prompt(OWN_PROMPT, 99), 2, tenant="another")
    await times.until(lambda: "other" in times.cached)
    times.engine.stop()
    assert times.cached["other"] == 0, "a hit across tenants"
    ttft = statistics.median(times.ttft_ms(key) for key in keys[1:])
    found = f"{times.cached[keys[-1]]} of {SHARED_PROMPT + OWN_PROMPT} tokens found; another tenant: 0"
    return ttft, (f"prefix cache {mode}", f"median time to the first token {ttft:.1f} ms ({found})")


def fairness(bench: Bench) -> Iterator[Row]:
    for flood in (0, FLOOD):
        yield asyncio.run(_fairness(bench, flood))


async def _fairness(bench: Bench, flood: int) -> Row:
    times = Times(bench.fresh(prefix_cache="off"))
    for index in range(flood):
        times.submit(f"f{index}", prompt(FLOOD_PROMPT, index), FLOOD_OUTPUT, tenant="flood")
    keys = []
    if flood:
        await times.until(lambda: times.engine.stats().running > 1 and times.tokens["f0"])
    for second in range(SECONDS):
        keys.append(f"l{second}")
        times.submit(keys[-1], prompt(FLOOD_PROMPT, 1000 + second), 16, tenant="light")
        await asyncio.sleep(1.0)
    await times.until(lambda: all(times.tokens[key] for key in keys))
    ttft = [times.ttft_ms(key) for key in keys]
    for key in times.tokens:
        times.engine.cancel(key)
    stats = times.engine.stats()
    times.engine.stop()
    return (
        f"fairness, {flood} waiting",
        f"time to the first token of the light tenant p50 {percentile(ttft, 0.5):.0f}, worst {max(ttft):.0f} ms;"
        f" a step {stats.step_ms:.0f} ms",
    )
