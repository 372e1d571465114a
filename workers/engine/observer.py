"""What the engine thread notes after a step: its time, which the pacer learns from, and now and then what others ask for."""

from workers.engine.runs import Choice, Run
from workers.engine.scheduler import Scheduler
from workers.engine.sequence import StepPlan
from workers.engine.waits import steps_to_wait

STEP_MS_WEIGHT = 0.1  # of the newest in the moving mean
TEND_EVERY_S = 0.5
JUDGE_EVERY_S = 10.0


class StepObserver:
    """Keeps `step_ms`, a moving mean, and `late`, the runs that will hardly be in the batch in time."""

    def __init__(self, ttft_ms_target: float | None) -> None:
        self.step_ms = 0.0
        self.late: tuple[str, ...] = ()
        self._late_runs: list[Run] = []
        self._ttft_ms_target = ttft_ms_target
        self.tend_at = 0.0
        self._judge_at = 0.0

    def step(self, scheduler: Scheduler, plan: StepPlan, begin: float, now: float) -> None:
        """A step of `plan` was done from `begin` to `now`, monotonic seconds."""
        ms = (now - begin) * 1e3
        self.step_ms += (STEP_MS_WEIGHT if self.step_ms else 1.0) * (ms - self.step_ms)
        if plan.load is not None:
            scheduler.pacer.observe(plan.load, ms)
            scheduler.late = self._is_late(plan, now)
        if now >= self.tend_at:
            self.tend_at = now + TEND_EVERY_S
            scheduler.ledger.publish()
            self._late_runs = self._late(scheduler, now) if scheduler.ledger.waiting else []
            if now >= self._judge_at:
                self._judge_at = now + JUDGE_EVERY_S
                scheduler.ledger.judge()
        if self._late_runs or self.late:  # whoever has entered since is late no more
            self.late = tuple(run.key for run in self._late_runs if not run.entered)

    def idle(self, scheduler: Scheduler) -> None:
        """There is nothing to compute."""
        scheduler.ledger.publish()
        self.late, self._late_runs = (), []

    def _is_late(self, plan: StepPlan, now: float) -> bool:
        """Whether a prefill that goes on has used up half of its time to the first token."""
        target = self._ttft_ms_target
        if target is None:
            return False
        unfinished = (part.sequence for part in plan.slices if not part.samples)
        return any(isinstance(each, Choice) and (now - each.run.begun) * 2e3 > target for each in unfinished)

    def _late(self, scheduler: Scheduler, now: float) -> list[Run]:
        late: dict[Run, None] = {}
        for sequence, steps in steps_to_wait(scheduler):
            assert isinstance(sequence, Choice)
            run = sequence.run
            if run.admit_by is not None and now + steps * self.step_ms / 1e3 > run.admit_by and not run.entered:
                late[run] = None
        return list(late)
