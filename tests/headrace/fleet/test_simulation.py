"""The simulation as a whole: it runs the production's code, it repeats itself to the byte, it loses nothing."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from controller import autoscaler
from headrace.fleet import control
from headrace.fleet.report import Result
from headrace.fleet.scenario import Burst, Fault, FleetSpec, Length, Scenario, Traffic
from headrace.fleet.simulation import Simulation, simulate
from ingress.admission import Admission
from shared.errors import NoCapacity, QueueFull
from shared.pull import Credit
from shared.records import EngineSettings
from shared.router import Router
from shared.settings import Settings
from workers.engine.blocks import BlockPool
from workers.engine.fairness import TenantLedger
from workers.engine.pacer import Pacer
from workers.engine.scheduler import Scheduler
from workers.handback import HandBack

MIXED = Traffic(
    rate=24,
    tenants=5,
    prompt=Length(mean=300, spread=0.6, max=1500),
    output=Length(kind="exponential", mean=60, max=400),
    prefix=64,
    prefixes=2,
    cancelled=0.1,
    cancelled_after_s=1.0,
)
TIGHT = EngineSettings(slots=12, kv_blocks=260, tpot_ms_target=30.0, ttft_ms_target=300.0)


def scenario(traffic: list[Traffic], **changes: Any) -> Scenario:
    values: dict[str, Any] = {
        "name": "test",
        "seconds": 20.0,
        "warmup_s": 3.0,
        "fleet": FleetSpec(workers=3, kv_dtype="8-bit"),
    }
    return Scenario(traffic=traffic, **(values | changes))


TROUBLE = scenario(
    [MIXED, Traffic(kind="flood", name="flooder", count=60, at_s=5, output=200)],
    engine=TIGHT,
    fleet=FleetSpec(workers=5),
    faults=[
        Fault(kind="gpu_loss", at_s=6.0, count=1),
        Fault(kind="slow_gpu", at_s=8.0, seconds=4.0, count=1, times=3.0),
        Fault(kind="broker_pause", at_s=12.0, seconds=1.0),
    ],
)


def accounted(result: Result) -> int:
    return result.finished + result.cancelled + sum(result.refused.values())


def test_the_same_seed_gives_the_same_bytes_and_another_one_does_not() -> None:
    found = simulate(TROUBLE).encoded()
    assert simulate(TROUBLE).encoded() == found
    assert simulate(msgspec.structs.replace(TROUBLE, seed=2)).encoded() != found


@pytest.mark.parametrize("seed", range(1, 13))
def test_steps_taken_at_once_change_nothing(seed: int) -> None:
    changes = {"prefix_cache": ["tenant", "off"][seed % 2], "kv_blocks": [180, 260, 300][seed % 3]}
    wanted = msgspec.structs.replace(TROUBLE, seed=seed).with_engine(**changes)
    at_once, single = Simulation(wanted).run(), Simulation(wanted, skips=False).run()
    assert at_once.encoded() == single.encoded()
    assert at_once.preemptions > 0


def test_nothing_is_lost_whatever_happens() -> None:
    result = simulate(TROUBLE)
    assert result.unfinished == 0
    assert accounted(result) == result.requests > 450
    assert result.redelivered > 0
    assert result.cached_share > 0.02


# -- nothing is written twice -------------------------------------------------------------------------------------------

Counted = Callable[[type, str], list[int]]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    def count(owner: type, name: str) -> list[int]:
        original, calls = getattr(owner, name), [0]

        def counting(*arguments: Any, **named: Any) -> Any:
            calls[0] += 1
            return original(*arguments, **named)

        monkeypatch.setattr(owner, name, counting)
        return calls

    return count


def test_every_policy_is_the_production_s(counted: Counted) -> None:
    calls = {
        f"{owner.__name__}.{name}": counted(owner, name)
        for owner, name in [
            (Scheduler, "plan"),
            (Scheduler, "commit"),
            (BlockPool, "take"),
            (TenantLedger, "order"),
            (Pacer, "admits"),
            (Pacer, "room"),
            (Pacer, "observe"),
            (Credit, "next"),
            (HandBack, "look"),
            (Router, "resolve"),
            (Admission, "check_queue"),
        ]
    }
    simulate(TROUBLE)
    assert {name for name, count in calls.items() if count[0] == 0} == set()


def fails(error: Exception) -> Callable[..., Any]:
    def failing(*arguments: Any) -> None:
        raise error

    return failing


@pytest.mark.parametrize(
    ("owner", "name", "instead", "what"),
    [
        (Pacer, "admits", lambda *arguments: False, lambda result: result.batch < 1.5),
        (Credit, "next", lambda *arguments: 0, lambda result: result.finished == 0),
        (Router, "resolve", fails(NoCapacity("none")), lambda result: set(result.refused) == {"no_capacity"}),
        (Admission, "check_queue", fails(QueueFull("full")), lambda result: set(result.refused) == {"queue_full"}),
        (TenantLedger, "order", lambda self: [], lambda result: result.finished == 0),
    ],
)
def test_what_production_does_is_what_is_simulated(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, instead: Any, what: Callable[[Result], bool]
) -> None:
    wanted = scenario([Traffic(rate=10)], seconds=5.0, engine=EngineSettings(tpot_ms_target=30.0, slots=20))
    before = simulate(wanted)
    assert before.holds
    monkeypatch.setattr(owner, name, instead)
    if owner is TenantLedger:
        with pytest.raises(AssertionError):
            simulate(wanted)
        return
    after = simulate(wanted)
    assert what(after)
    assert after.encoded() != before.encoded()


def test_the_fleet_is_as_large_as_the_production_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = scenario([Traffic(rate=30)], fleet=FleetSpec(workers=2, autoscale=True, min_workers=1), seconds=40.0)
    assert simulate(wanted).starts > 2

    def four(snapshot: autoscaler.Snapshot, now: float, policy: object) -> list[autoscaler.Decision]:
        return [autoscaler.Decision(model="model", version="v1", desired=4, reasons=())]

    monkeypatch.setattr(control, "decide", four)
    result = simulate(wanted)
    assert (result.starts, result.drains) == (2, 0)
    assert result.timeline[-1].workers == {"active": 4}


# -- what happens ------------------------------------------------------------------------------------------------------


def test_a_calm_fleet_answers_at_once() -> None:
    result = simulate(scenario([Traffic(rate=10)]))
    assert result.holds
    assert 20 < result.ttft_ms.p50 < 60  # half a step until the next one begins, a step, and the path
    assert 18 < result.tpot_ms.p50 < 21
    assert result.gpu_hours == pytest.approx(3 * 20 / 3600, rel=1e-4)


def test_a_closed_loop_keeps_its_streams_busy() -> None:
    result = simulate(scenario([Traffic(kind="closed", streams=30, output=100)], fleet=FleetSpec(kv_dtype="8-bit")))
    assert result.batch == pytest.approx(26, abs=5)
    rate = 30 / (result.ttft_ms.mean + 99 * result.tpot_ms.mean) * 1e3
    assert result.finished / 20 == pytest.approx(rate, rel=0.1)


def test_lost_gpus_take_no_request_with_them() -> None:
    wanted = scenario([Traffic(rate=20)], faults=[Fault(kind="gpu_loss", at_s=10.0, share=0.34)])
    result = simulate(wanted)
    assert (result.unfinished, result.finished) == (0, result.requests)
    assert result.redelivered > 10
    assert result.timeline[-1].workers == {"active": 2}
    assert result.gpu_hours == pytest.approx((2 * 20 + 10) / 3600, rel=0.01)


def test_an_autoscaler_replaces_them_once_a_new_one_is_loaded() -> None:
    fleet = FleetSpec(workers=3, autoscale=True, min_workers=3, max_workers=3)
    lost = [Fault(kind="gpu_loss", at_s=2.0, count=1), Fault(kind="dead_controller", at_s=1.0, seconds=5.0)]
    result = simulate(scenario([Traffic(rate=20)], fleet=fleet, faults=lost, seconds=60.0))
    states = {round(sample.at_s): sample.workers for sample in result.timeline}
    assert states[5] == {"active": 2}  # the controller is dead
    assert states[10] == {"active": 2, "starting": 1}
    assert states[59] == {"active": 3}
    assert result.starts == 1


def test_a_slow_gpu_slows_only_its_own() -> None:
    wanted = scenario([Traffic(rate=20)])
    slow = [Fault(kind="slow_gpu", at_s=0.0, count=1, times=2.0)]
    calm, slowed = simulate(wanted), simulate(msgspec.structs.replace(wanted, faults=slow))
    assert slowed.tpot_ms.max > 1.8 * calm.tpot_ms.max
    assert slowed.tpot_ms.p50 < 1.2 * calm.tpot_ms.p50


def test_while_the_broker_pauses_requests_wait() -> None:
    pause = [Fault(kind="broker_pause", at_s=5.0, seconds=2.0)]
    result = simulate(scenario([Traffic(rate=20)], faults=pause))
    assert 1500 < result.ttft_ms.max < 3000
    assert result.unfinished == 0


def test_a_tenant_with_too_many_waiting_is_refused() -> None:
    flood = Traffic(kind="flood", name="flooder", count=200, at_s=2.0)
    result = simulate(scenario([Traffic(rate=5), flood], settings=Settings(tenant_queue_max=50), seconds=10.0))
    assert result.refused["queue_full"] == 150  # of those that come in one moment
    assert result.tenants["tenant"].finished == result.tenants["tenant"].requests


def test_what_can_never_fit_is_refused() -> None:
    result = simulate(scenario([Traffic(rate=5, prompt=8000, output=4000)], seconds=4.0))
    assert result.refused == {"context_length_exceeded": result.requests}


def test_weights_share_a_full_fleet() -> None:
    tenants = [
        Traffic(kind="closed", streams=6, name=name, weight=weight) for name, weight in (("large", 3.0), ("small", 1.0))
    ]
    result = simulate(scenario(tenants, fleet=FleetSpec(workers=1), engine=TIGHT, seconds=60.0))
    large, small = result.tenants["large"], result.tenants["small"]
    print(large, small)
    assert small.ttft_ms.p50 > 1.5 * large.ttft_ms.p50


def test_a_burst_is_followed_by_the_autoscaler() -> None:
    bursty = Traffic(rate=20, bursts=[Burst(at_s=20, seconds=40, times=3)])
    fleet = FleetSpec(workers=3, autoscale=True, min_workers=3)
    result = simulate(scenario([bursty], fleet=fleet, seconds=150.0, settings=Settings(scale_down_window_s=20.0)))
    counts = [sum(sample.workers.values()) for sample in result.timeline]
    assert max(counts) >= 6
    assert counts[-1] < max(counts) - 1
    assert result.drains > 0
    assert result.unfinished == 0
