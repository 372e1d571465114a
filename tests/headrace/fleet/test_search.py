"""The smallest fleet, and what arithmetic says of it."""

import msgspec
import pytest

from headrace.fleet.report import Result
from headrace.fleet.scenario import FleetSpec, Scenario, Traffic
from headrace.fleet.search import estimate, smallest
from shared.errors import BadRequest
from shared.records import EngineSettings

SMALL = Scenario(
    name="small",
    traffic=[Traffic(rate=60, tenants=10)],
    seconds=20.0,
    warmup_s=8.0,
    fleet=FleetSpec(kv_dtype="8-bit"),
    engine=EngineSettings(slots=45, tpot_ms_target=30.0, ttft_ms_target=500.0, prefix_cache="off"),
)


def reference(kv_dtype: str, slots: int) -> Scenario:
    return Scenario(
        name="reference",
        traffic=[Traffic(rate=1000)],
        fleet=FleetSpec(kv_dtype=kv_dtype),
        engine=EngineSettings(slots=slots),
    )


@pytest.mark.parametrize(
    ("kv_dtype", "slots", "batch", "bound", "saturated", "utilised"),
    [("8-bit", 45, 45, "slots", 98, 140), ("fp16", 45, 26, "memory", 158, 226), ("8-bit", 20, 20, "slots", 200, 286)],
)
def test_the_closed_form_of_the_reference_scenario(
    kv_dtype: str, slots: int, batch: int, bound: str, saturated: int, utilised: int
) -> None:
    found = estimate(reference(kv_dtype, slots))
    assert found is not None
    assert (found.batch, found.bound, found.saturated, found.utilised) == (batch, bound, saturated, utilised)
    assert saturated < found.queueing < saturated + 4


def test_a_batch_is_no_larger_than_the_target_for_a_token_allows() -> None:
    found = estimate(reference("8-bit", 80).with_fleet(profile="a100-80g-13b"))
    assert found is not None
    assert (found.batch, found.bound) == (57, "tpot")
    assert found.step_ms <= 30


def test_the_smallest_fleet_holds_and_a_smaller_one_does_not() -> None:
    runs: list[Result] = []
    found = smallest(SMALL, runs.append)
    assert found.workers is not None
    assert 6 <= found.workers <= 9
    assert found.result.holds
    assert any(not run.holds and run.workers < found.workers for run in runs)
    assert found.estimate is not None
    assert found.reason


def test_where_no_fleet_holds_it_says_so() -> None:
    slow = msgspec.structs.replace(SMALL, traffic=[Traffic(rate=1)])  # 26 GB at 864 GB/s are 30 ms
    found = smallest(slow.with_engine(slots=4, tpot_ms_target=None).with_fleet(profile="roofline", gpu="l40s"))
    assert found.workers is None
    assert "however many" in found.reason
    with pytest.raises(BadRequest):
        smallest(SMALL.with_fleet(autoscale=True))


def test_without_a_rate_there_is_no_closed_form() -> None:
    assert estimate(Scenario(name="closed", traffic=[Traffic(kind="closed", streams=8)])) is None
