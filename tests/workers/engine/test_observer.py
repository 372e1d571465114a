"""What the engine notes after a step."""

from shared.wire import Sampling
from workers.engine.blocks import BlockPool
from workers.engine.observer import TEND_EVERY_S, StepObserver
from workers.engine.request import EngineRequest
from workers.engine.runs import Choice, Run
from workers.engine.scheduler import Scheduler
from workers.engine.sim import SimulatedText


def choice(key: str, admit_by: float | None = None) -> Choice:
    request = EngineRequest(
        key=key, tenant=key, prompt_ids=[1] * 20, sampling=Sampling(max_tokens=50), admit_by=admit_by
    )
    (found,) = Run(request, 70, SimulatedText()).choices
    return found


def test_a_run_is_late_no_more_as_soon_as_it_is_in_the_batch() -> None:
    scheduler, observer = Scheduler(BlockPool(40), 1, 64), StepObserver(None)
    first, second = choice("first"), choice("second", admit_by=0.1)
    scheduler.add(first)
    scheduler.add(second)

    def step(now: float) -> None:
        plan = scheduler.plan()
        scheduler.commit(plan, [0] * sum(part.samples for part in plan.slices))
        observer.step(scheduler, plan, now - 0.02, now)

    step(1.0)
    assert observer.late == ("second",)
    scheduler.remove(first)
    step(1.0 + TEND_EVERY_S / 10)  # it is not yet time to look at all of them again
    assert second.slot >= 0
    assert observer.late == ()
