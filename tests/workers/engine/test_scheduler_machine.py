"""The scheduler under any order of events: nothing leaks, nothing starves, nothing is computed twice or skipped."""

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shared.wire import Sampling
from workers.engine.blocks import BlockPool
from workers.engine.scheduler import Fifo, Scheduler, Sequence, StepPlan


class SchedulerMachine(RuleBasedStateMachine):
    """A fake runner whose k-th output of a sequence is k; sequences end at their maximum or when they are removed."""

    @initialize(blocks=st.integers(2, 12), slots=st.integers(1, 5), chunk=st.integers(1, 40))
    def begin(self, blocks: int, slots: int, chunk: int) -> None:
        self.chunk = chunk
        self.capacity = blocks * 16
        self.scheduler = Scheduler(BlockPool(blocks), slots, chunk, Fifo())
        self.alive: list[Sequence] = []
        self.quiet_steps = 0
        self.count = 0

    @rule(prompt=st.integers(1, 60), output=st.integers(1, 40))
    def submit(self, prompt: int, output: int) -> None:
        prompt = min(prompt, self.capacity - 1)
        length_max = min(prompt + output, self.capacity)
        self.count += 1
        sequence = Sequence(str(self.count), "t", 0, Sampling(), [-1] * prompt, prompt, length_max)
        self.alive.append(sequence)
        self.scheduler.add(sequence)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def cancel(self, data: Any) -> None:
        sequence = data.draw(st.sampled_from(self.alive))
        self.alive.remove(sequence)
        self.scheduler.remove(sequence)

    @precondition(lambda self: self.alive)
    @rule(budget=st.integers(1, 100))
    def step(self, budget: int) -> None:
        plan = self.planned(budget)
        self.scheduler.commit(plan, [part.sequence.output_index for part in plan.slices if part.samples])
        for part in plan.slices:
            sequence = part.sequence
            assert sequence.tokens[sequence.prompt_length :] == list(range(sequence.output_index)), "emitted twice"
            if part.samples and len(sequence.tokens) == sequence.length_max:
                self.alive.remove(sequence)
                self.scheduler.remove(sequence)

    @precondition(lambda self: self.alive)
    @rule(budget=st.integers(1, 100))
    def step_that_raises(self, budget: int) -> None:
        for part in self.planned(budget).slices:
            if part.sequence.alone:
                self.alive.remove(part.sequence)
                self.scheduler.remove(part.sequence)
            else:
                self.scheduler.suspect(part.sequence)

    def planned(self, budget: int) -> StepPlan:
        plan = self.scheduler.plan(budget)
        assert plan.slices, "a plan is empty while sequences are here"
        assert len({part.sequence.key for part in plan.slices}) == len(plan.slices)
        assert len(plan.slices) <= self.scheduler.slots
        assert sum(part.count for part in plan.slices if part.count > 1) <= self.chunk
        for part in plan.slices:
            sequence = part.sequence
            assert part.start == sequence.computed
            assert 1 <= part.count <= len(sequence.tokens) - part.start
            assert part.samples == (part.start + part.count == len(sequence.tokens))
            assert len(sequence.blocks) * 16 >= part.start + part.count
        if any(part.sequence.alone for part in plan.slices):
            assert len(plan.slices) == 1
        return plan

    @invariant()
    def nothing_leaks(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.check()
            assert self.scheduler.idle == (not self.alive)
            assert len(self.scheduler.running) + self.scheduler.waiting == len(self.alive)
            if not self.alive:
                assert self.scheduler.pool.used == 0

    def teardown(self) -> None:
        """From any state, stepping alone brings every sequence to its end."""
        if not hasattr(self, "scheduler"):
            return
        work = sum(2 * sequence.length_max for sequence in self.alive)
        for _ in range(20 * work + 20):
            if not self.alive:
                break
            self.step(50)
        assert not self.alive, "a sequence starves"
        self.nothing_leaks()


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
