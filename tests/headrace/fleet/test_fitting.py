"""A profile of an engine: the cost of its steps, from steps that were seen."""

import asyncio
import random

import pytest

from headrace.fleet.fitting import (
    Clients,
    Served,
    closed,
    error,
    fit,
    measured_steps,
    opened,
    path_ms,
    profile,
    recorded,
)
from shared.records import EngineSettings
from workers.engine.pacer import Cost
from workers.engine.sequence import Load
from workers.engine.sim import load_simulated

TRUE = Cost(step=12.0, decode=1.5, context=0.004, prefill=0.4, pair=0.0002)


def steps(noise: float, count: int = 800) -> list[tuple[Load, float]]:
    dice = random.Random(3)
    found = []
    for _ in range(count):
        decodes, prefill = dice.randrange(17), dice.choice([0, 0, 0, 64, 120])
        load = Load(decodes, decodes, decodes * dice.randrange(100, 600), prefill, prefill * prefill // 2)
        if decodes or prefill:
            found.append((load, TRUE.ms(load) * dice.uniform(1 - noise, 1 + noise)))
    return found


def test_the_cost_of_exact_steps_is_found() -> None:
    found = fit(steps(0.0))
    for name in Cost.__struct_fields__:
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=0.02), name


def test_noise_and_a_few_steps_that_took_forever_hardly_matter() -> None:
    seen = steps(0.1)
    seen[::100] = [(load, ms * 40) for load, ms in seen[::100]]
    found = fit(seen)
    for load in (Load(1, 1, 200), Load(8, 8, 2000), Load(32, 32, 9000), Load(9, 8, 2000, 120, 7200)):
        assert found.ms(load) == pytest.approx(TRUE.ms(load), rel=0.05)
    assert error(found, seen) < 0.1


def test_no_part_of_a_cost_is_negative() -> None:
    seen = [(Load(count, count, 100 * count), 30 - count) for count in range(1, 16)]
    found = fit(seen)
    assert min(getattr(found, name) for name in Cost.__struct_fields__) >= 0


def test_an_engine_is_measured_while_it_serves() -> None:
    settings = EngineSettings()
    engine = load_simulated("zero", settings)

    async def measure() -> tuple[Clients, list[tuple[Load, float]]]:
        fresh, recorder = recorded(engine, settings)
        clients = Clients(fresh, 40, 8)
        found = await measured_steps(clients, recorder, [1, 3], 0.2)
        served = await opened(clients.one, 50, 0.2) + await closed(clients.one, 2, 0.1, warmup_s=0.05)
        assert all(4 <= each.tokens <= 12 and each.last >= each.first >= each.begun for each in served)
        assert max(each.begun for each in served) - min(each.begun for each in served) > 0.15
        await asyncio.to_thread(fresh.stop)
        return clients, found

    _, seen = asyncio.run(measure())
    assert {load.decodes for load, _ in seen} >= {0, 1}
    assert {load.prefill for load, _ in seen} >= {0, 40}
    found = profile(engine, settings, "zero", seen)
    assert (found.slots, found.kv_tokens) == (256, 16_384 * 16)


def test_what_a_request_takes_beside_its_step_is_its_path() -> None:
    alone = [Served(begun=0.0, prompt=100, first=ms / 1e3) for ms in (61.0, 64.0, 99.0)]
    step = TRUE.ms(Load(1, 0, 0, 100, 5050))
    assert path_ms(TRUE.ms, alone) == pytest.approx(64.0 - step)
    assert path_ms(lambda load: 70.0, alone) == 0.0
