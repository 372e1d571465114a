"""The engine of vectors over a model that the test controls: ends, faults, cancels, refusals."""

import asyncio
import gc
import itertools
import math
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from shared.encoders import SIMULATED, Encoder, simulated
from shared.errors import BadRequest, ContextLength, EngineFailed, Unsupported, WrongTask
from shared.records import EngineSettings
from shared.wire import Embedding, Input, Sampling, Usage
from workers.engine.encoder_engine import EncoderEngine
from workers.engine.engine_thread import LOST
from workers.engine.load import LoadRefused, load_engine
from workers.engine.request import EngineInfo, EngineRequest, TokenEvent
from workers.engine.rounds import EncoderInput, RoundLimits

ENCODER = Encoder(dimensions=2, length=32, positions=64, pooling="mean_tokens", normalized=False, shorter=(1,))
INFO = EngineInfo(max_model_len=32, slots=4, blocks_total=0, device="test", dtype="none")
LIMITS = RoundLimits(batch=64, round=128)
BUDGET_S = 30.0


class Sums:
    """The vector of an input is (its sum, its length). `before` sees each batch and may raise."""

    vocabulary_size = 100

    def __init__(self, before: Callable[[list[list[int]]], None] = lambda inputs: None) -> None:
        self.before = before
        self.batches: list[list[list[int]]] = []

    def tokenise(self, texts: list[str]) -> list[list[int]]:
        return [[1, *(len(word) for word in text.split()), 2] for text in texts]

    def embed(self, inputs: list[list[int]], dimensions: list[int]) -> list[bytes]:
        self.batches.append(inputs)
        self.before(inputs)
        vectors = [
            [float(sum(ids)), float(len(ids))][: count or None] for ids, count in zip(inputs, dimensions, strict=True)
        ]
        return [b"" if 99 in ids else struct.pack(f"<{len(v)}f", *v) for ids, v in zip(inputs, vectors, strict=True)]


def asked(key: str, inputs: list[list[int]], tenant: str = "t", dimensions: int = 0) -> EngineRequest:
    sampling = Sampling(n=len(inputs))
    return EngineRequest(key=key, tenant=tenant, prompt_ids=[], sampling=sampling, inputs=inputs, dimensions=dimensions)


def run(model: Sums, work: Callable[[EncoderEngine, list[TokenEvent]], Any]) -> list[TokenEvent]:
    """All events of an engine over `model`, from its start until `work(engine, events)` is done."""
    events: list[TokenEvent] = []

    async def main() -> None:
        engine = EncoderEngine(model, ENCODER, INFO, LIMITS)
        engine.start(asyncio.get_running_loop(), events.extend)
        try:
            await work(engine, events)
        finally:
            engine.stop()

    asyncio.run(main())
    return events


async def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + BUDGET_S
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        await asyncio.sleep(0.002)


async def idle(engine: EncoderEngine) -> None:
    def nothing() -> bool:
        stats = engine.stats()
        return stats.running == stats.waiting == stats.detached_waiting == 0

    await until(nothing)
    engine._rounds.check()


def numbers(event: TokenEvent) -> list[float]:
    return list(struct.unpack(f"<{len(event.vector) // 4}f", event.vector))


def test_every_input_has_its_vector_once_and_usage_comes_with_the_last() -> None:
    inputs = [[number % 90] * (1 + number * 7 % 32) for number in range(50)]

    async def work(engine: EncoderEngine, events: list[TokenEvent]) -> None:
        engine.submit(asked("a", inputs))
        engine.submit(asked("b", [[3, 4]], "other", dimensions=1))
        await until(lambda: sum(event.usage is not None for event in events) == 2)
        await idle(engine)
        stats = engine.stats()
        assert (stats.prompt_tokens, stats.generated_tokens) == (sum(map(len, inputs)) + 2, 0)
        # published by the engine's thread, once it has found nothing more to do
        await until(lambda: engine.stats().service == {"t": sum(map(len, inputs)), "other": 2})

    events = run(Sums(), work)
    mine = [event for event in events if event.key == "a"]
    assert sorted(event.choice for event in mine) == list(range(50))
    for event in mine:
        ids = inputs[event.choice]
        assert (event.ids, event.finish, numbers(event)) == ([], "stop", [sum(ids), len(ids)])
    assert [event.usage for event in mine if event.usage] == [Usage(sum(map(len, inputs)), 0)]
    assert mine[-1].usage is not None
    assert [numbers(event) for event in events if event.key == "b"] == [[7.0]]


def test_a_batch_that_raises_costs_only_the_request_that_raises_alone() -> None:
    def before(inputs: list[list[int]]) -> None:
        if [13] in inputs:
            raise ValueError("a kernel's own words")

    async def work(engine: EncoderEngine, events: list[TokenEvent]) -> None:
        engine.submit(asked("good", [[number] for number in range(1, 6)]))
        engine.submit(asked("bad", [[5], [13], [6]]))
        await until(lambda: {"good", "bad"} <= {each.key for each in events if each.usage or each.error})
        await idle(engine)
        engine.submit(asked("later", [[9]]))
        await until(lambda: any(each.key == "later" for each in events))

    events = run(Sums(before), work)
    errors = [event for event in events if event.error is not None]
    assert [event.key for event in errors] == ["bad"]
    assert errors[0].error is not None
    assert errors[0].error[0] == EngineFailed.code
    assert "a kernel's own words" in errors[0].error[1]
    assert sorted(event.choice for event in events if event.key == "good") == list(range(5))


def test_numbers_that_are_none_are_an_error_and_not_a_vector() -> None:
    async def work(engine: EncoderEngine, events: list[TokenEvent]) -> None:
        engine.submit(asked("bad", [[99]]))
        engine.submit(asked("good", [[98]]))
        await until(lambda: len(events) == 2)

    by_key = {event.key: event for event in run(Sums(), work)}
    assert by_key["bad"].error is not None
    assert "not finite" in by_key["bad"].error[1]
    assert numbers(by_key["good"]) == [98, 1]


def test_a_cancelled_request_says_nothing_more_and_leaves_nothing() -> None:
    rounds, cancelled = itertools.count(), threading.Event()

    def before(inputs: list[list[int]]) -> None:
        assert next(rounds) == 0 or cancelled.wait(10)

    async def work(engine: EncoderEngine, events: list[TokenEvent]) -> None:
        engine.submit(asked("gone", [[1] * 32] * 100))
        await until(lambda: events)
        engine.cancel("gone")
        engine.cancel("never there")
        engine.submit(asked("next", [[2]]))
        cancelled.set()
        await until(lambda: any(event.key == "next" for event in events))
        seen = len(events)
        await idle(engine)
        assert len(events) == seen

    events = run(Sums(before), work)
    assert sum(event.key == "gone" for event in events) < 100


def test_a_device_that_is_lost_is_told_by_a_step_that_takes_forever() -> None:
    def before(inputs: list[list[int]]) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    async def work(engine: EncoderEngine, events: list[TokenEvent]) -> None:
        engine.submit(asked("a", [[1]]))
        await until(lambda: engine.stats().step_started == LOST)

    assert run(Sums(before), work) == []


def test_more_work_than_two_rounds_blocks_so_that_another_worker_may_have_the_rest() -> None:
    engine = EncoderEngine(Sums(), ENCODER, INFO, LIMITS)
    assert not engine.blocked
    engine._begin(asked("a", [[1] * 32] * 8), [])
    assert not engine.blocked
    engine._begin(asked("b", [[1]]), [])
    assert engine.blocked


def test_inputs_are_checked_before_they_are_computed() -> None:
    engine = EncoderEngine(Sums(), ENCODER, INFO, LIMITS)
    assert engine.prepare_inputs(Embedding(["one three", [5, 6], "two"])) == [[1, 3, 5, 2], [5, 6], [1, 3, 2]]
    engine.prepare_inputs(Embedding(["a " * 30], dimensions=1))  # 32 tokens: the longest
    with pytest.raises(ContextLength, match=r"maximum input length is 32 tokens.*input\[130\] has 33 tokens") as caught:
        engine.prepare_inputs(Embedding([[1], [1], "a " * 31], first=128))
    assert caught.value.param == "input[130]"
    with pytest.raises(BadRequest, match=r"100 is not a token id"):
        engine.prepare_inputs(Embedding([[100]]))
    with pytest.raises(BadRequest, match=r"input\[1\]: it has no tokens"):
        engine.prepare_inputs(Embedding([[1], []]))
    with pytest.raises(BadRequest, match="have 2, not 3"):
        engine.prepare_inputs(Embedding([[1]], dimensions=3))
    with pytest.raises(WrongTask):
        engine.prepare(Input(prompt="Hi"), Sampling())
    with pytest.raises(WrongTask):
        load_engine("sim:zero", None, EngineSettings(), 1).prepare_inputs(Embedding(["Hi"]))


def test_simulated_vectors_are_of_length_one_and_depend_on_nothing_but_the_text() -> None:
    encoder = simulated(SIMULATED)
    assert encoder is not None
    engine = load_engine(SIMULATED, None, EngineSettings(), 1, encoder)
    assert isinstance(engine, EncoderEngine)
    inputs = engine.prepare_inputs(Embedding(["one two", "two one", "one two"]))
    first, second, third = engine._model.embed(inputs, [0, 0, 8])
    assert first != second
    whole, cut = struct.unpack("<64f", first), struct.unpack("<8f", third)
    assert math.isclose(sum(each * each for each in whole), 1, abs_tol=1e-5)
    assert math.isclose(sum(each * each for each in cut), 1, abs_tol=1e-5)
    ratio = whole[0] / cut[0]
    assert [each * ratio for each in cut] == pytest.approx(whole[:8], abs=1e-6)
    with pytest.raises(BadRequest):
        engine.prepare_inputs(Embedding(["  "]))
    with pytest.raises(LoadRefused, match="max_model_len"):
        load_engine(SIMULATED, None, EngineSettings(max_model_len=10_000), 1, encoder)


def test_a_model_that_was_not_trained_for_it_is_not_cut() -> None:
    whole = Encoder(dimensions=2, length=32, positions=64, pooling="mean_tokens", normalized=False)
    engine = EncoderEngine(Sums(), whole, INFO, LIMITS)
    engine.prepare_inputs(Embedding([[1]], dimensions=2))
    with pytest.raises(Unsupported, match="not trained"):
        engine.prepare_inputs(Embedding([[1]], dimensions=1))


def test_what_has_ended_is_freed_without_a_collection_of_garbage() -> None:
    async def work(engine: EncoderEngine, events: list[TokenEvent]) -> None:
        engine.submit(asked("a", [[1], [2]]))
        engine.submit(asked("failed", [[99]]))  # its vector is not finite
        await until(lambda: sum(event.usage is not None or event.error is not None for event in events) == 2)
        await idle(engine)
        await until(lambda: not any(type(each) is EncoderInput for each in gc.get_objects()))

    gc.collect()
    gc.disable()
    try:
        run(Sums(), work)
    finally:
        gc.enable()
