"""The whole engine loop in a seeded order of requests, cancels and faults at every edge. A failure names its seed."""

import os
import random
from collections.abc import Sequence
from typing import Any

import pytest
from engine_driver import Outcome
from paged_memory import VOCABULARY, PagedMemory, expected_output

from shared.records import EngineSettings
from shared.wire import Input, Sampling
from workers.engine.engine import BatchEngine, Drawn
from workers.engine.pacer import Cost
from workers.engine.request import EngineInfo, EngineRequest, TenantLimits, TokenEvent
from workers.engine.sequence import StepPlan
from workers.engine.text import TextStream

SEEDS = int(os.environ.get("HEADRACE_TEST_FAULT_SEEDS", "20"))
TURNS = 200
TURNS_MAX = 20_000  # within which everything must have ended
FAULT_SHARE = 0.02  # of the chances that a fault has
COST = Cost(step=1.0, decode=1.0, context=0.01, prefill=0.1, pair=0.001)


class Broken(Exception):
    """A fault that was made on purpose."""


class Words:
    """Text of a fake model: a token is its number. `fault` may raise."""

    vocabulary_size = VOCABULARY
    end_ids: frozenset[int] = frozenset()
    special_ids: frozenset[int] = frozenset()

    def __init__(self, world: "World") -> None:
        self._world = world

    def encode(self, prompt: Input) -> list[int]:
        return list(prompt.token_ids or [])

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))

    def token_bytes(self, token: int) -> bytes:
        return str(token).encode()

    def matcher(self, grammar: Any) -> Any:
        raise AssertionError("no grammar here")

    def stream(self, prompt_ids: Sequence[int], shown: Sequence[str] = ()) -> TextStream:
        return self

    def step(self, token: int) -> str:
        self._world.fault("text")
        return f" {token}"

    def flush(self) -> str:
        return ""


class Memory(PagedMemory):
    """A runner that guesses, and fails at every edge that a step has."""

    def __init__(self, world: "World") -> None:
        super().__init__()
        self._world = world

    def forward(self, plan: StepPlan) -> Any:
        world = self._world
        world.fault("forward", lambda: self.spoil(plan))
        if any(part.sequence.key in world.deadly for part in plan.slices):
            self.spoil(plan)
            raise Broken("this request always fails")
        return super().forward(plan)

    def sample(self, plan: StepPlan, computed: Any) -> Drawn:
        world = self._world
        world.fault("sample")
        drawn = super().sample(plan, computed)
        if world.happens("row"):
            part = world.random.choice(plan.slices)
            if part.samples:
                world.failed.add(part.sequence.key)
                drawn.failed = [(part.sequence, Broken("no number"))]
        if world.happens("draw") and drawn.tokens:
            world.failed |= world.alive  # the engine starts over
            drawn.tokens.pop()
        for part in plan.slices:
            right = part.sequence.tokens[-3:] if world.random.random() < 0.5 else [-1] * 2
            part.sequence.draft = tuple(right) if world.random.random() < 0.2 else ()
        return drawn


class World:
    """An engine without its thread, and what it said of each run."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.faults = {"forward", "sample", "text", "row", "draw"} if seed % 4 else set()
        self.deadly: set[str] = set()
        self.failed: set[str] = set()  # runs that an injected fault may have ended
        self.cancelled: set[str] = set()
        self.outcomes: dict[str, Outcome] = {}
        self.requests: dict[str, EngineRequest] = {}
        rng = self.random
        info = EngineInfo(
            max_model_len=200,
            slots=rng.choice([1, 4, 8]),
            blocks_total=rng.choice([13, 16, 24]),
            device="none",
            dtype="none",
        )
        settings = EngineSettings(
            prefill_chunk=rng.choice([1, 16, 40]),
            slots_reserved_fraction=rng.choice([0.0, 0.25]),
            prefix_cache=rng.choice(["tenant", "tenant", "off"]),
            tpot_ms_target=rng.choice([None, 8.0]),
        )
        self.memory = Memory(self)
        self.engine = BatchEngine(self.memory, Words(self), info, settings, cost=COST)

    def happens(self, kind: str) -> bool:
        return kind in self.faults and self.random.random() < FAULT_SHARE

    def fault(self, kind: str, first: Any = lambda: None) -> None:
        if self.happens(kind):
            first()
            self.failed |= self.alive
            raise Broken(kind)

    @property
    def alive(self) -> set[str]:
        return {key for key, outcome in self.outcomes.items() if not outcome.ended and key not in self.cancelled}

    def submit(self) -> None:
        rng = self.random
        key = f"r{len(self.requests)}"
        stem = [100 * rng.randrange(3) + place for place in range(rng.choice([0, 16, 33, 60]))]
        prompt = stem + [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 30))]
        tenant, choices, seed = rng.choice("ABC"), rng.choice([1, 1, 1, 3]), rng.randrange(100)
        count = rng.choice([1, 5, 30, 90])
        prefix: list[list[int]] = []
        if rng.random() < 0.2:
            done = rng.randrange(count)
            prefix = [expected_output(tenant, prompt, done, choice, seed) for choice in range(choices)]
        sampling = Sampling(max_tokens=count, seed=seed, n=choices)
        limits = rng.choice([TenantLimits(), TenantLimits(weight=2.0, slots_max=2)])
        request = EngineRequest(
            key=key, tenant=tenant, prompt_ids=prompt, sampling=sampling, prefix=prefix, limits=limits, admit_by=0.0
        )
        if rng.random() < 0.05 and self.faults:
            self.deadly.add(key)
        self.requests[key] = request
        self.outcomes[key] = Outcome()
        self.engine.submit(request)

    def refuse(self) -> None:
        """What can never run is told so at once."""
        wrong = self.random.choice([[], [VOCABULARY], [1] * 200])
        key = f"x{len(self.outcomes)}"
        self.outcomes[key] = Outcome()
        self.engine.submit(EngineRequest(key=key, tenant="A", prompt_ids=wrong, sampling=Sampling()))

    def cancel(self) -> None:
        key = self.random.choice([*self.outcomes, "unknown"])
        if key in self.alive:
            self.cancelled.add(key)
        self.engine.cancel(key)

    def turn(self) -> None:
        """One turn of the loop; an engine with nothing to do would wait for ever."""
        if self.engine._scheduler.idle and self.engine._inbox.empty():
            return
        self.take(self.engine._turn())
        self.engine._scheduler.check()
        self.engine._scheduler.pool.check_each()

    def take(self, events: list[TokenEvent]) -> None:
        for event in events:
            if event.key not in self.cancelled:
                self.outcomes[event.key].add(event)
                self.check(event.key)

    def check(self, key: str) -> None:
        request, outcome = self.requests.get(key), self.outcomes[key]
        if request is None:
            assert outcome.error is not None
            return
        for choice, ids in outcome.ids.items():
            prefix = request.prefix[choice] if request.prefix else []
            owner, prompt, sampling = request.tenant, request.prompt_ids, request.sampling
            whole = expected_output(owner, prompt, sampling.max_tokens or 0, choice, sampling.seed)
            assert prefix + ids == whole[: len(prefix) + len(ids)], f"{key}.{choice} said what its model does not"
            if choice in outcome.finish:
                assert prefix + ids == whole, f"{key}.{choice} finished too early"
        if outcome.error is not None:
            assert key in self.failed | self.deadly, f"{key} failed and nobody had failed it: {outcome.error}"


def live(seed: int) -> World:
    """A world that ran until everything in it had ended."""
    world = World(seed)
    rng = world.random
    for _ in range(TURNS):
        if rng.random() < 0.25 and len(world.alive) < 20:
            world.submit()
        if rng.random() < 0.03:
            world.refuse()
        if rng.random() < 0.05 and world.outcomes:
            world.cancel()
        world.turn()
    world.faults = set()
    for _ in range(TURNS_MAX):
        if not world.alive:
            break
        world.turn()
    assert not world.alive, f"{sorted(world.alive)} never ended"
    while not world.engine._inbox.empty() or not world.engine._scheduler.idle:
        world.turn()
    assert world.engine._scheduler.pool.used == 0
    assert not world.engine._runs
    return world


@pytest.mark.parametrize("seed", range(SEEDS))
def test_every_request_ends_once_with_the_tokens_of_its_model(seed: int) -> None:
    try:
        world = live(seed)
    except AssertionError as error:
        raise AssertionError(f"seed {seed}: {error}") from error
    assert len(world.outcomes) > 20
    if seed % 4 == 0:  # without faults
        finished = sum(outcome.usage is not None for outcome in world.outcomes.values())
        assert finished > 10, f"seed {seed}: {finished} of {len(world.outcomes)} finished"


def test_the_seeds_meet_what_they_are_meant_to() -> None:
    worlds = [live(seed) for seed in (0, 1, 12)]
    assert sum(world.engine.stats().preemptions for world in worlds) > 0
    assert sum(world.engine.stats().cache_hits for world in worlds) > 0
    assert any(world.failed for world in worlds)
    assert any(world.cancelled for world in worlds)
