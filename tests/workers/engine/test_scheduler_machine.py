"""Blocks, prefix cache, scheduler, fairness under any order of events: nothing leaks, starves, is read wrong or said twice."""

import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from paged_memory import PagedMemory, expected_output

from shared.wire import Sampling
from workers.engine.blocks import BLOCK_TOKENS, BlockPool, blocks_for
from workers.engine.pacer import Cost, Pacer
from workers.engine.request import TenantLimits
from workers.engine.scheduler import Scheduler
from workers.engine.sequence import Sequence, StepPlan

TENANTS = "ABC"
LIMITS = [
    TenantLimits(),
    TenantLimits(weight=3.0),
    TenantLimits(slots_max=1),
    TenantLimits(weight=0.5, slots_max=2, blocks_max=4),
]
LEFT_ALIVE = 8  # after an example, to be brought to their ends
STEPS_STARVED = 20_000


class SchedulerMachine(RuleBasedStateMachine):
    """Sequences end at their maximum or when they are removed."""

    @initialize(
        blocks=st.sampled_from([12, 2, 5, 8, 18, 26]),
        slots=st.sampled_from([5, 1, 2, 3, 6]),
        chunk=st.sampled_from([32, 1, 7, 16, 40]),
        reserved=st.sampled_from([0.0, 0.0, 0.25]),
        cache=st.sampled_from(["tenant", "tenant", "shared", "off"]),
        tpot=st.sampled_from([None, None, 4.0, 9.0]),
        limits=st.none() | st.fixed_dictionaries({tenant: st.sampled_from(LIMITS) for tenant in TENANTS}),
    )
    def begin(
        self,
        blocks: int,
        slots: int,
        chunk: int,
        reserved: float,
        cache: str,
        tpot: float | None,
        limits: dict[str, TenantLimits] | None,
    ) -> None:
        self.chunk = chunk
        self.limits = limits  # None: they change from request to request
        self.pool = BlockPool(blocks)
        pacer = Pacer(tpot, Cost(step=1.0, decode=1.0, context=0.01, prefill=0.1, pair=0.001))
        self.scheduler = Scheduler(self.pool, slots, chunk, reserved, 40, pacer, cache)
        self.memory = PagedMemory(by_tenant=cache != "shared")
        self.alive: list[Sequence] = []
        self.random = random.Random(blocks * 1000 + slots * 100 + chunk)
        self.count = 0

    @rule(
        tenant=st.sampled_from(TENANTS),
        limits=st.sampled_from(range(len(LIMITS))),
        stem=st.integers(0, 2),
        shared=st.sampled_from([33, 0, 15, 16, 48, 60]),
        own=st.integers(1, 20),
        output=st.sampled_from([60, 1, 5, 30, 100]),
        choices=st.sampled_from([1, 1, 2, 3]),
        detached=st.sampled_from([False, False, True]),
    )
    def submit(
        self, tenant: str, limits: int, stem: int, shared: int, own: int, output: int, choices: int, detached: bool
    ) -> None:
        own_limits = LIMITS[limits] if self.limits is None else self.limits[tenant]
        capacity = self.scheduler.capacity(own_limits)
        self.count += 1
        prompt = ([1000 * stem + place for place in range(shared)] + [-self.count] * own)[: capacity - 1]
        length_max = min(len(prompt) + output, capacity)
        for choice in range(choices):
            key = f"{self.count}.{choice}"
            sequence = Sequence(key, tenant, choice, Sampling(seed=self.count), list(prompt), len(prompt), length_max)
            sequence.detached = detached
            self.alive.append(sequence)
            self.scheduler.add(sequence, own_limits)

    @rule(which=st.integers(0, 99))
    def cancel(self, which: int) -> None:
        if self.alive:
            self.end(self.alive[which % len(self.alive)])

    @rule(which=st.integers(0, 99), right=st.integers(0, 4), wrong=st.integers(0, 2))
    def guess(self, which: int, right: int, wrong: int) -> None:
        if self.alive:
            sequence = self.alive[which % len(self.alive)]
            rest = self.expected(sequence)[sequence.output_index :]
            sequence.draft = (*rest[:right], *([-5] * wrong))

    @rule(steps=st.sampled_from([4, 1, 12, 30]))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            if self.alive:
                self.one_step()

    @rule()
    def step_that_raises(self) -> None:
        if not self.alive:
            return
        plan = self.planned()
        self.memory.spoil(plan)
        for part in plan.slices:
            if part.sequence.alone:
                self.end(part.sequence)
            else:
                self.scheduler.suspect(part.sequence)

    def one_step(self) -> None:
        plan = self.planned()
        drawn = self.memory.sample(plan, self.memory.forward(plan))
        self.scheduler.commit(plan, drawn.tokens, drawn.counts)
        for part in plan.slices:
            sequence = part.sequence
            assert sequence.tokens[sequence.prompt_length :] == self.expected(sequence)[: sequence.output_index]
            if len(sequence.tokens) == sequence.length_max:
                self.end(sequence)
        if plan.load is not None:
            self.scheduler.pacer.observe(plan.load, plan.load.sequences * self.random.uniform(0.5, 3))
        self.nothing_leaks()

    def planned(self) -> StepPlan:
        plan = self.scheduler.plan()
        assert plan.slices, "a plan is empty while sequences are here"
        assert len({part.sequence for part in plan.slices}) == len(plan.slices)
        assert len(plan.slices) <= self.scheduler.slots
        if self.scheduler.short and not plan.preempted:
            assert not self.scheduler.detached, "somebody waits for room that a detached sequence has"
        beyond = sum(part.count for part in plan.slices) - len(plan.slices)
        assert beyond <= self.chunk, "more than a step may carry beside one token of each"
        for part in plan.slices:
            sequence = part.sequence
            assert part.start == sequence.computed
            assert 1 <= part.count - len(part.draft) <= len(sequence.tokens) - part.start
            assert part.samples == (part.start + part.count - len(part.draft) == len(sequence.tokens))
            for block in range(part.start // BLOCK_TOKENS, blocks_for(part.start + part.count)):
                assert self.pool.writable(sequence.blocks[block]), "a step writes to what others may read"
        if any(part.sequence.alone for part in plan.slices):
            assert len(plan.slices) == 1
        return plan

    def expected(self, sequence: Sequence) -> list[int]:
        owner = sequence.tenant if self.memory._by_tenant else ""
        prompt = sequence.tokens[: sequence.prompt_length]
        return expected_output(owner, prompt, sequence.length_max, sequence.choice, sequence.sampling.seed)

    def end(self, sequence: Sequence) -> None:
        self.alive.remove(sequence)
        self.scheduler.remove(sequence)

    @invariant()
    def nothing_leaks(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        scheduler = self.scheduler
        scheduler.check()
        self.pool.check_each()
        assert scheduler.idle == (not self.alive)
        assert len(scheduler.running) + scheduler.waiting + scheduler.ledger.detached == len(self.alive)
        for sequence in scheduler.running:
            account = sequence.account
            assert account.slots <= scheduler.ledger._slots_max
            if self.limits is not None and self.memory._by_tenant:
                assert account.blocks <= scheduler._blocks_cap(account.limits), f"{account.tenant}: {account.blocks}"
                assert account.slots <= (account.limits.slots_max or 99), f"{account.tenant}: {account.slots}"
        if not self.alive:
            assert self.pool.used == 0

    def teardown(self) -> None:
        """From any state, stepping alone brings every sequence to its end: nothing starves."""
        if not hasattr(self, "scheduler"):
            return
        for sequence in self.alive[LEFT_ALIVE:]:
            self.end(sequence)
        for _ in range(STEPS_STARVED):
            if not self.alive:
                break
            self.one_step()
        assert not self.alive, "a sequence starves"
        self.nothing_leaks()


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=160, stateful_step_count=100, deadline=None, report_multiple_bugs=False)
