"""A scheduler on a virtual clock: what happens when, without waiting for it."""

import random
from dataclasses import dataclass, field
from typing import Any

from shared.wire import Sampling
from workers.engine.blocks import BlockPool
from workers.engine.pacer import Cost
from workers.engine.request import TenantLimits
from workers.engine.scheduler import Scheduler
from workers.engine.sequence import Sequence, StepPlan, load_of


@dataclass
class Life:
    """When things happened to a sequence: virtual ms, and counts of steps and admissions of others so far."""

    sequence: Sequence
    arrived: float
    arrived_step: int
    admissions_before: int
    admitted_step: int | None = None
    admissions_between: int = 0
    token_times: list[float] = field(default_factory=list)


class VirtualEngine:
    """Runs a scheduler with steps that take what `cost` says."""

    def __init__(self, cost: Cost, blocks: int, slots: int, chunk: int = 512, **options: Any) -> None:
        self.scheduler = Scheduler(BlockPool(blocks), slots, chunk, **options)
        self.now = 0.0
        self.steps = 0
        self.admissions = 0
        self.output_tokens = 0
        self.lives: dict[Sequence, Life] = {}
        self.noise: random.Random | None = None  # set: a step takes up to a tenth more or less
        self._cost = cost
        self._count = 0

    def submit(self, tenant: str, prompt: int, output: int, limits: TenantLimits | None = None, stem: int = 0) -> Life:
        """A request whose prompt has `prompt` tokens; the first `stem` of them are the same for all."""
        self._count += 1
        tokens = list(range(stem)) + [-self._count] * (prompt - stem)
        sequence = Sequence(str(self._count), tenant, 0, Sampling(), tokens, prompt, prompt + output)
        self.scheduler.add(sequence, limits or TenantLimits())
        life = self.lives[sequence] = Life(sequence, self.now, self.steps, self.admissions)
        return life

    def step(self) -> StepPlan:
        plan = self.scheduler.plan()
        self.steps += 1
        for part in plan.slices:
            life = self.lives[part.sequence]
            if life.admitted_step is None:
                life.admitted_step = self.steps
                life.admissions_between = self.admissions - life.admissions_before
                self.admissions += 1
        ms = self._cost.ms(load_of(plan.slices)) * (self.noise.uniform(0.9, 1.1) if self.noise is not None else 1.0)
        self.now += ms
        self.scheduler.commit(plan, [7 for part in plan.slices if part.samples])
        if plan.load is not None:
            self.scheduler.pacer.observe(plan.load, ms)
        for part in plan.slices:
            if part.samples:
                self.output_tokens += 1
                self.lives[part.sequence].token_times.append(self.now)
                if len(part.sequence.tokens) == part.sequence.length_max:
                    self.scheduler.remove(part.sequence)
        return plan

    def run_until(self, time: float) -> None:
        while self.now < time and not self.scheduler.idle:
            self.step()
        self.now = max(self.now, time)

    def run(self) -> None:
        while not self.scheduler.idle:
            self.step()
