"""Token-exact against `model.generate(do_sample=False)`, whatever the chunks, the memory, the neighbours and the resume."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_driver import Driver, rebuilt, request, run_all
from tiny_models import FAMILIES, build_tiny_model, save_byte_tokenizer

from shared.records import EngineSettings
from workers.engine.engine import BatchEngine
from workers.engine.load import load_engine
from workers.engine.request import TokenEvent

OUTPUT = 32
PROMPTS = [
    [(31 * position + 7 * index) % 250 for position in range(length)] for index, length in enumerate((37, 5, 18, 1))
]


class Family:
    """A family's files, an engine of them in float32, and what the model itself generates for each of the prompts."""

    def __init__(self, directory: Path, expected: list[list[int]]) -> None:
        self.directory = directory
        self.engine = load_engine("s3", directory, EngineSettings(dtype="float32"), 1)
        self.expected = expected


@pytest.fixture(scope="module", params=list(FAMILIES))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    model = build_tiny_model(request.param)
    expected = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        out = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=OUTPUT, pad_token_id=0)
        expected.append(out[0, len(prompt) :].tolist())
    assert len({tuple(each) for each in expected}) == len(expected), "the prompts must make a difference"
    directory = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(directory)
    save_byte_tokenizer(directory)
    return Family(directory, expected)


def requests() -> list[Any]:
    return [request(str(index), prompt, max_tokens=OUTPUT) for index, prompt in enumerate(PROMPTS)]


@pytest.mark.parametrize("chunk", [1, 7, 16, 512])
def test_any_chunking_gives_the_models_own_tokens(family: Family, chunk: int) -> None:
    outcomes = run_all(rebuilt(family.engine, prefill_chunk=chunk), *requests())
    assert [outcome.ids[0] for outcome in outcomes] == family.expected


def test_forced_preemption_changes_nothing(family: Family) -> None:
    engine = rebuilt(family.engine, blocks=8)
    outcomes = run_all(
        engine, *requests(), *(request(f"again {each.key}", each.prompt_ids, max_tokens=OUTPUT) for each in requests())
    )
    assert engine.stats().preemptions > 0
    assert [outcome.ids[0] for outcome in outcomes] == family.expected * 2


def test_cancelled_neighbours_change_nothing(family: Family) -> None:
    def cancel_neighbours(engine: BatchEngine, events: list[TokenEvent]) -> None:
        for event in events:
            if event.key.startswith("n"):
                engine.cancel(event.key)

    async def main() -> None:
        driver = Driver(rebuilt(family.engine, prefill_chunk=8))
        neighbours = [request(f"n{index}", [index + 1] * 30, max_tokens=OUTPUT) for index in range(3)]
        driver.submit(neighbours[0], requests()[0], neighbours[1], requests()[2], neighbours[2])
        driver.on_step = lambda events: cancel_neighbours(driver.engine, events)
        await driver.ended("0", "2")
        await driver.idle()
        driver.engine.stop()
        assert [driver.outcomes[key].ids[0] for key in "02"] == [family.expected[0], family.expected[2]]
        assert not any(outcome.ended for key, outcome in driver.outcomes.items() if key[0] == "n")

    asyncio.run(main())


def test_a_resumed_prefix_goes_on_as_if_nothing_had_happened(family: Family) -> None:
    resumed = {
        f"{index} after {done}": (index, done)
        for index in range(len(PROMPTS))
        for done in (1, 17, OUTPUT - 1)
        if done < len(family.expected[index])
    }
    outcomes = run_all(
        rebuilt(family.engine, prefill_chunk=7),
        *(
            request(key, PROMPTS[index], max_tokens=OUTPUT, prefix=[family.expected[index][:done]])
            for key, (index, done) in resumed.items()
        ),
    )
    assert len(outcomes) >= 8
    assert [outcome.ids[0] for outcome in outcomes] == [
        family.expected[index][done:] for index, done in resumed.values()
    ]


def test_the_family_passes_the_gate_in_bfloat16_with_packed_products(family: Family) -> None:
    assert load_engine("s3", family.directory, EngineSettings(dtype="bfloat16"), 1).info.dtype == "bfloat16"
