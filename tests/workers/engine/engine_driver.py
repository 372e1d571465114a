"""Driving an engine from a test, and a runner that needs no model."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from shared.records import EngineSettings
from shared.wire import Logprob, Sampling, Usage
from workers.engine.engine import BatchEngine, Drawn, Runner
from workers.engine.request import EngineInfo, EngineRequest, TokenEvent
from workers.engine.scheduler import StepPlan
from workers.engine.sim import SimulatedText

BUDGET_S = 60.0


@dataclass
class Outcome:
    """All that an engine said of one run."""

    ids: dict[int, list[int]] = field(default_factory=dict)
    text: dict[int, list[str]] = field(default_factory=dict)
    logprobs: dict[int, list[Logprob]] = field(default_factory=dict)
    finish: dict[int, str] = field(default_factory=dict)
    usage: Usage | None = None
    error: tuple[str, str] | None = None
    before: dict[int, list[str]] = field(default_factory=dict)  # text of prefixes

    def add(self, event: TokenEvent) -> None:
        assert self.error is None, f"{event} after an error"
        # An error is of the whole run, though it names its first choice.
        assert event.error is not None or event.choice not in self.finish, f"{event} after the finish"
        assert len(event.ids) == len(event.text)
        if event.before is not None:
            assert event.choice not in self.ids, "the text of a prefix comes first"
            assert not event.ids, "the text of a prefix comes in an event of its own"
            self.before[event.choice] = event.before
            return
        self.ids.setdefault(event.choice, []).extend(event.ids)
        self.text.setdefault(event.choice, []).extend(event.text)
        self.logprobs.setdefault(event.choice, []).extend(event.logprobs or [])
        if event.finish is not None:
            self.finish[event.choice] = event.finish
        assert self.usage is None, "usage came before the last finish"
        self.usage = event.usage
        self.error = event.error

    @property
    def ended(self) -> bool:
        return self.error is not None or self.usage is not None

    @property
    def whole_text(self) -> str:
        return "".join(self.text.get(0, []))


class Driver:
    """An engine on an event loop, and what became of each run."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.outcomes: dict[str, Outcome] = {}
        self.on_step: Callable[[list[TokenEvent]], None] | None = None
        self._changed = asyncio.Event()
        engine.start(asyncio.get_running_loop(), self._on_events)

    def submit(self, *requests: EngineRequest) -> None:
        for request in requests:
            self.outcomes[request.key] = Outcome()
            self.engine.submit(request)

    def _on_events(self, events: list[TokenEvent]) -> None:
        for event in events:
            if event.key in self.outcomes:
                self.outcomes[event.key].add(event)
        if self.on_step is not None:
            self.on_step(events)
        self._changed.set()

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait until `condition` holds; it is looked at after each step, and now and then."""
        async with asyncio.timeout(BUDGET_S):
            while not condition():
                self._changed.clear()
                try:
                    await asyncio.wait_for(self._changed.wait(), 0.02)
                except TimeoutError:
                    continue

    async def ended(self, *keys: str) -> None:
        await self.until(lambda: all(self.outcomes[key].ended for key in keys or self.outcomes))

    async def idle(self) -> None:
        """Wait until the engine holds nothing, and assert that it does so without a leak."""

        def nothing() -> bool:
            stats = self.engine.stats()
            return stats.running == stats.waiting == stats.blocks_used == 0

        await self.until(nothing)
        self.engine._scheduler.check()


def run_all(engine: Any, *requests: EngineRequest) -> list[Outcome]:
    """Submit all at once, wait for all ends and for the idle engine, stop it."""

    async def main() -> list[Outcome]:
        driver = Driver(engine)
        driver.submit(*requests)
        try:
            await driver.ended()
            await driver.idle()
        finally:
            engine.stop()
        return list(driver.outcomes.values())

    return asyncio.run(main())


def request(key: str, prompt_ids: list[int], **sampling: Any) -> EngineRequest:
    """A greedy request of 12 tokens, unless told otherwise; `prefix` goes to the request."""
    prefix = sampling.pop("prefix", [])
    chosen = Sampling(**({"temperature": 0.0, "max_tokens": 12} | sampling))
    return EngineRequest(key=key, tenant="t", prompt_ids=prompt_ids, sampling=chosen, prefix=prefix)


class CountingRunner(Runner):
    """Token i of a sequence is (first prompt id + i) mod 1000; `before` sees each plan and may raise."""

    def __init__(self, before: Callable[[StepPlan], None] = lambda plan: None) -> None:
        self.before = before
        self.plans: list[list[tuple[str, int, int, int]]] = []

    def forward(self, plan: StepPlan) -> None:
        self.plans.append([(part.sequence.key, part.sequence.choice, part.start, part.count) for part in plan.slices])
        self.before(plan)

    def sample(self, plan: StepPlan, computed: None) -> Drawn:
        sampled = [part.sequence for part in plan.slices if part.samples]
        return Drawn([(each.tokens[0] + each.output_index) % 1000 for each in sampled])


def counting_engine(
    runner: Runner, slots: int = 8, blocks: int = 64, prefill_chunk: int = 32, **settings: Any
) -> BatchEngine:
    info = EngineInfo(
        max_model_len=min(256, blocks * 16), slots=slots, blocks_total=blocks, device="none", dtype="none"
    )
    return BatchEngine(runner, SimulatedText(), info, EngineSettings(prefill_chunk=prefill_chunk, **settings))


def rebuilt(
    engine: BatchEngine, slots: int = 8, blocks: int = 64, prefill_chunk: int = 512, **settings: Any
) -> BatchEngine:
    """The same model behind a fresh scheduler of other sizes."""
    info = EngineInfo(
        max_model_len=min(engine.info.max_model_len, blocks * 16),
        slots=slots,
        blocks_total=blocks,
        device=engine.info.device,
        dtype=engine.info.dtype,
    )
    return BatchEngine(engine._runner, engine._text, info, EngineSettings(prefill_chunk=prefill_chunk, **settings))
