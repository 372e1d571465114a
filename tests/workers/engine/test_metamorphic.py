"""What a request is given does not depend on neighbours, chunking, preemption, cache or resumption: float32, a real model."""

import random
from pathlib import Path
from typing import Any

import pytest
from engine_driver import rebuilt, request, run_all
from tiny_models import save_tiny_model

from shared.records import EngineSettings
from workers.engine.engine import BatchEngine
from workers.engine.load import load_engine
from workers.engine.request import EngineRequest

OUTPUT = 24
STEM = [(37 * place + 11) % 250 for place in range(48)]  # prompts begin alike


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory: Path = save_tiny_model("llama", tmp_path_factory.mktemp("llama"))
    return load_engine("s3", directory, EngineSettings(dtype="float32"), 1)


@pytest.fixture(scope="module")
def alone(engine: BatchEngine) -> dict[str, list[list[int]]]:
    """The output of each request by itself, without a cache."""
    outputs = {}
    for each in requests():
        (outcome,) = run_all(rebuilt(engine, prefix_cache="off"), each)
        outputs[each.key] = [outcome.ids[choice] for choice in range(each.sampling.n)]
    assert len({str(ids) for ids in outputs.values()}) == len(outputs), "the requests must differ"
    return outputs


def requests() -> list[EngineRequest]:
    """Greedy and sampled, alike and not, some of several choices."""
    found = []
    for index in range(8):
        prompt = STEM[: (0, 16, 33, 48)[index % 4]] + [(13 * place + index) % 250 for place in range(3 + 5 * index)]
        sampling: dict[str, Any] = {"max_tokens": OUTPUT, "ignore_eos": True}
        if index % 2:
            sampling |= {"temperature": 1.5, "seed": index, "n": 1 + index % 3}
        if index == 6:
            sampling |= {"repetition_penalty": 1.3, "frequency_penalty": 0.5}
        found.append(request(f"r{index}", prompt, **sampling))
    return found


@pytest.mark.parametrize("seed", range(10))
def test_what_a_request_is_given_depends_on_nothing_else(
    engine: BatchEngine, alone: dict[str, list[list[int]]], seed: int
) -> None:
    rng = random.Random(seed)
    batch = rng.sample(requests(), rng.randint(2, 8))
    done = {}
    for each in batch:
        done[each.key] = [rng.choice([0, 0, 1, OUTPUT // 2]) for _ in range(each.sampling.n)]
        each.prefix = [ids[:count] for ids, count in zip(alone[each.key], done[each.key], strict=True)]
        each.tenant = rng.choice("ab")
    again = [
        EngineRequest(
            key=each.key + " again",
            tenant=each.tenant,
            prompt_ids=each.prompt_ids,
            sampling=each.sampling,
            prefix=each.prefix,
        )
        for each in batch  # what these find in the cache was computed by the first ones
    ]
    it = rebuilt(
        engine,
        slots=rng.choice([1, 3, 8]),
        blocks=rng.choice([9, 12, 64]),
        prefill_chunk=rng.choice([1, 7, 16, 512]),
        prefix_cache=rng.choice(["tenant", "tenant", "shared", "off"]),
    )
    outcomes = run_all(it, *batch, *again)
    for each, outcome in zip([*batch, *again], outcomes, strict=True):
        key = each.key.split()[0]
        for choice, count in enumerate(done[key]):
            assert outcome.ids[choice] == alone[key][choice][count:], f"seed {seed}: {each.key}, choice {choice}"


def test_memory_for_one_at_a_time_and_a_cache_change_nothing(
    engine: BatchEngine, alone: dict[str, list[list[int]]]
) -> None:
    it = rebuilt(engine, slots=8, blocks=9, prefill_chunk=16)
    outcomes = run_all(it, *requests())
    assert it.stats().preemptions > 0
    assert it.stats().cache_hits > 0
    for each, outcome in zip(requests(), outcomes, strict=True):
        assert [outcome.ids[choice] for choice in range(each.sampling.n)] == alone[each.key]
