"""The wire's rules hold in random schedules, and each of them is needed.

`python tests/model/model.py --replay SEED` tells a schedule that failed here step by step.
"""

import model
import pytest
from wire_schedule import Killer
from wire_world import DEATHS_MAX

SCHEDULES = 3000
SCHEDULES_OF_ONE_FAULT = 150
SEEDS_TO_CATCH = 6000  # within which the model must notice that a rule is missing
KILLERS = 300


def test_no_schedule_breaks_a_promise() -> None:
    found, stats = model.campaign(1, SCHEDULES)
    assert not found, f"seeds by kind of violation: {found}"
    assert stats["end complete"] > SCHEDULES / 2
    assert stats["published again"] > SCHEDULES / 50
    assert stats["acked under a live requester"] > SCHEDULES / 50


@pytest.mark.parametrize("fault", model.FAULTS)
def test_no_single_fault_breaks_a_promise(fault: str) -> None:
    found, _ = model.campaign(1, SCHEDULES_OF_ONE_FAULT, [fault])
    assert not found, f"seeds by kind of violation, --faults {fault}: {found}"


@pytest.mark.parametrize("rule", model.RULES)
def test_without_a_rule_the_model_finds_fault(rule: str) -> None:
    faults = model.MUTANT_FAULTS.get(rule, model.FAULTS)
    for seed in range(1, SEEDS_TO_CATCH + 1):
        if model.check(*model.schedule(seed, faults), rule)[0]:
            return
    pytest.fail(f"nothing was found without {rule}: {model.RULES[rule]}")


def test_a_request_that_kills_its_workers_ends_as_poisoned() -> None:
    for seed in range(1, KILLERS + 1):
        world = Killer(model.schedule(seed, [])[0], ["loss", "ackwait"])
        stats = world.run()
        assert stats["end request_poisoned"] == 1, f"seed {seed}: {stats}"
        assert stats["dead letters"] == 1, f"seed {seed}"
        assert stats["workers gone"] <= 6 * DEATHS_MAX, f"seed {seed}: {stats}"
