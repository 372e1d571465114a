"""A profile of a real engine: its steps under load, the cost that describes them best, and what its clients see."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from headrace.fleet.profiles import Measured
from shared.records import EngineSettings
from shared.wire import Sampling
from workers.engine.blocks import BLOCK_TOKENS
from workers.engine.engine import BatchEngine, Drawn, Runner
from workers.engine.pacer import Cost
from workers.engine.request import EngineRequest, TokenEvent
from workers.engine.sequence import Load, StepPlan, load_of

IDLE_MS = 20.0  # between two steps: more is waiting for work, not work
STEADY_ROUNDS_MAX = 8  # of a warm-up: a runner may get faster meanwhile, when its own kernels are compiled
STEADY = 0.05  # of the time of a round: so much less is the same

Step = tuple[Load, float]  # what it computed, and from its begin to that of the next, in milliseconds


@dataclass(slots=True)
class Served:
    """One request, as its client saw it. Seconds."""

    begun: float
    prompt: int  # tokens
    first: float = 0.0
    last: float = 0.0
    tokens: int = 0

    @property
    def ttft_ms(self) -> float:
        return (self.first - self.begun) * 1e3

    @property
    def tpot_ms(self) -> float:
        return (self.last - self.first) * 1e3 / max(1, self.tokens - 1)


Send = Callable[[], Awaitable[Served]]  # one request


class Recorder(Runner):
    """A runner that keeps the time of each step of another one, without drafts."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._times: list[tuple[Load, float, float]] = []  # begin and end

    def forward(self, plan: StepPlan) -> Any:
        self._times.append((load_of(plan.slices), time.perf_counter(), 0.0))
        return self._runner.forward(plan)

    def sample(self, plan: StepPlan, computed: Any) -> Drawn:
        drawn = self._runner.sample(plan, computed)
        load, begin, _ = self._times[-1]
        self._times[-1] = load, begin, time.perf_counter()
        return drawn

    def steps(self) -> list[Step]:
        """The steps since the last call. What lies between two steps belongs to the first, as far as it is no idle time."""
        times, self._times = self._times, []
        if not times:
            return []
        between = [(after[1] - before[2]) * 1e3 for before, after in pairwise(times)]
        busy = [each for each in between if each < IDLE_MS]
        usual = float(np.median(busy)) if busy else 0.0
        pauses = [each if each < IDLE_MS else usual for each in between] + [usual]
        return [
            (load, (end - begin) * 1e3 + pause) for (load, begin, end), pause in zip(times, pauses, strict=True) if end
        ]


@dataclass(eq=False)
class Clients:
    """Requests against an engine of this process, half as long or half as long again as said at most."""

    engine: BatchEngine
    prompt: int
    output: int
    dice: random.Random = field(default_factory=lambda: random.Random(1))
    _open: dict[str, tuple[Served, asyncio.Future[None]]] = field(default_factory=dict)
    _number: int = 0

    def start(self) -> None:
        self.engine.start(asyncio.get_running_loop(), self._on_events)

    async def one(self) -> Served:
        self._number += 1
        key, done = str(self._number), asyncio.get_running_loop().create_future()
        prompt = [self.dice.randrange(50, 4000) for _ in range(round(self.prompt * self.dice.uniform(0.5, 1.5)))]
        output = max(2, round(self.output * self.dice.uniform(0.5, 1.5)))
        sampling = Sampling(max_tokens=output, temperature=0.0, ignore_eos=True)
        served = Served(time.perf_counter(), len(prompt))
        self._open[key] = served, done
        self.engine.submit(EngineRequest(key=key, tenant=f"t{self._number % 10}", prompt_ids=prompt, sampling=sampling))
        await done
        return served

    def _on_events(self, events: list[TokenEvent]) -> None:
        now = time.perf_counter()
        for event in events:
            served, done = self._open[event.key]
            if event.ids:
                served.first = served.first or now
                served.last = now
                served.tokens += len(event.ids)
            if event.error is not None:
                done.set_exception(RuntimeError(f"the engine failed: {event.error}"))
            elif event.finish is not None:
                done.set_result(None)
                del self._open[event.key]


async def closed(send: Send, streams: int, seconds: float, warmup_s: float = 0.0) -> list[Served]:
    """So many streams, each with one request at a time; those that began in `seconds` after the warm-up."""
    starts = time.perf_counter() + warmup_s
    found: list[Served] = []

    async def stream() -> None:
        while time.perf_counter() < starts + seconds:
            served = await send()
            if served.begun >= starts:
                found.append(served)

    await asyncio.gather(*(stream() for _ in range(streams)))
    return found


async def opened(send: Send, rate: float, seconds: float, seed: int = 2) -> list[Served]:
    """Requests at random times, `rate` a second on average."""
    dice, begin = random.Random(seed), time.perf_counter()
    at, tasks = 0.0, []
    while (at := at + dice.expovariate(rate)) < seconds:
        await asyncio.sleep(max(0.0, begin + at - time.perf_counter()))
        tasks.append(asyncio.ensure_future(send()))
    return list(await asyncio.gather(*tasks))


def recorded(engine: BatchEngine, settings: EngineSettings) -> tuple[BatchEngine, Recorder]:
    """The same model in a fresh engine whose steps are recorded."""
    recorder = Recorder(engine._runner)
    fresh = BatchEngine(recorder, engine._text, engine.info, settings, engine._max_tokens_default, engine._pacer.cost)
    return fresh, recorder


async def settle(send: Send, streams: int) -> None:
    """Serve until it goes no faster."""
    before = float("inf")
    for _ in range(STEADY_ROUNDS_MAX):
        begin = time.perf_counter()
        await asyncio.gather(*(send() for _ in range(streams)))
        took = time.perf_counter() - begin
        if took > before * (1 - STEADY):
            return
        before = min(before, took)


async def measured_steps(clients: Clients, recorder: Recorder, streams: Sequence[int], seconds: float) -> list[Step]:
    """Steps of closed loops of so many streams, after a warm-up. The engine is started and left running."""
    clients.start()
    await settle(clients.one, max(streams))
    recorder.steps()
    steps: list[Step] = []
    for count in streams:
        await closed(clients.one, count, seconds)
        steps += recorder.steps()
    return steps


def fit(steps: Sequence[Step]) -> Cost:
    """The cost whose relative errors are least, without negative parts and with less regard for the slowest in a hundred.

    Least squares; a coefficient that would be negative is left out, the most negative one first.
    """
    if not steps:
        raise ValueError("no steps to fit")
    names = ["step", "decode", "context", "prefill", "pair"]
    rows = np.array([[1.0, load.decodes, load.context, load.prefill, load.pairs] for load, _ in steps])
    ms = np.array([each for _, each in steps])
    kept = ms <= _outlier(rows, ms)
    rows, ms = rows[kept] / ms[kept, None], ms[kept] / ms[kept]
    scale = np.abs(rows).max(axis=0)
    used = [column for column in range(len(names)) if scale[column] > 0]
    while True:
        found, *_ = np.linalg.lstsq(rows[:, used] / scale[used], ms, rcond=None)
        least = int(found.argmin())
        if found[least] >= 0 or len(used) == 1:
            break
        del used[least]
    values = dict.fromkeys(names, 0.0)
    for column, value in zip(used, found / scale[used], strict=True):
        values[names[column]] = float(f"{value:.5g}")
    return Cost(**values)


def path_ms(step_ms: Callable[[Load], float], alone: Sequence[Served]) -> float:
    """The time to the first token beside the step, of requests that had the engine to themselves: the median."""
    steps = [step_ms(Load(1, 0, 0, each.prompt, each.prompt * (each.prompt + 1) // 2)) for each in alone]
    return max(0.0, float(np.median([each.ttft_ms - ms for each, ms in zip(alone, steps, strict=True)])))


def error(cost: Cost, steps: Sequence[Step]) -> float:
    """The median relative error of what a cost says of these steps."""
    return float(np.median([abs(cost.ms(load) - ms) / ms for load, ms in steps]))


def profile(engine: BatchEngine, settings: EngineSettings, name: str, steps: Sequence[Step]) -> Measured:
    """What the simulator needs to know of this engine."""
    info = engine.info
    return Measured(
        name=name,
        cost=fit(steps),
        slots=info.slots,
        kv_tokens=info.blocks_total * BLOCK_TOKENS,
        cold_start_s={phase: round(seconds, 3) for phase, seconds in info.load_seconds.items()},
    )


def _outlier(rows: Any, ms: Any) -> Any:
    """For each step, five times the median of those with as many decodes and prompt tokens: the machine did other things."""
    kinds: dict[tuple[float, float], list[float]] = {}
    for row, each in zip(rows, ms, strict=True):
        kinds.setdefault((row[1], row[3]), []).append(each)
    return np.array([5 * float(np.median(kinds[row[1], row[3]])) for row in rows])
