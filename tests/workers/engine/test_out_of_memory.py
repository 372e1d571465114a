"""Out of memory: refused with the sum at load, smaller steps at run time; a lost device."""

import asyncio
import json
import math
from pathlib import Path

import pytest
from engine_driver import CountingRunner, Driver, counting_engine, request, run_all

from workers.engine.blocks import blocks_for
from workers.engine.load import LoadRefused
from workers.engine.out_of_memory import is_lost, is_out_of_memory
from workers.engine.scheduler import StepPlan
from workers.engine.sizing import GIB, Room, blocks_beside, refuse_weights, weight_bytes


class OutOfMemoryError(RuntimeError):
    """As torch names it."""


def holding(tokens_max: int, sequences_max: int) -> CountingRunner:
    """A runner on a device with memory for so much."""

    def before(plan: StepPlan) -> None:
        if sum(part.count for part in plan.slices) > tokens_max or len(plan.slices) > sequences_max:
            raise OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    return CountingRunner(before)


def test_steps_get_smaller_until_they_fit_and_nobody_loses_a_token() -> None:
    runner = holding(tokens_max=9, sequences_max=3)
    engine = counting_engine(runner)
    outcomes = run_all(engine, *(request(str(index), [100 * index] * 20, max_tokens=10) for index in range(8)))
    assert [outcome.ids[0] for outcome in outcomes] == [
        [100 * index + step for step in range(10)] for index in range(8)
    ]
    held = [plan for plan in runner.plans if sum(count for *_, count in plan) <= 9 and len(plan) <= 3]
    failed = len(runner.plans) - len(held)
    assert 2 <= failed <= 8, "it learns by halving, and does not try again what failed"
    assert engine.stats().preemptions == 0 or len(held) > 0


def test_a_request_that_does_not_even_fit_alone_fails_alone() -> None:
    def before(plan: StepPlan) -> None:
        if any(part.sequence.key == "big" for part in plan.slices):
            raise MemoryError

    big, small = run_all(
        counting_engine(CountingRunner(before)), request("big", [7] * 40), request("small", [100], max_tokens=4)
    )
    assert big.error is not None
    assert small.ids == {0: [100, 101, 102, 103]}


def test_a_lost_device_looks_like_a_step_that_never_ends() -> None:
    def before(plan: StepPlan) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    async def main() -> None:
        driver = Driver(counting_engine(CountingRunner(before)))
        driver.submit(request("a", [5]))
        await driver.until(lambda: driver.engine.stats().step_started == -math.inf)
        driver.engine.stop()
        assert driver.outcomes["a"].error is None, "another worker shall have it"

    asyncio.run(main())


@pytest.mark.parametrize(
    ("error", "memory", "lost"),
    [
        (OutOfMemoryError("CUDA out of memory"), True, False),
        (MemoryError(), True, False),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate"), True, False),
        (RuntimeError("CUDA error: device-side assert triggered"), False, True),
        (RuntimeError("shape mismatch"), False, False),
        (ValueError("can't allocate memory"), False, False),
    ],
)
def test_what_an_error_says_of_the_device(error: Exception, memory: bool, lost: bool) -> None:
    assert (is_out_of_memory(error), is_lost(error)) == (memory, lost)


def test_torchs_own_error_is_known() -> None:
    import torch

    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(RuntimeError) as raised:
        torch.empty(1 << 62, dtype=torch.uint8)
    assert is_out_of_memory(raised.value)


ROOM = Room(total=80 * GIB, free=40 * GIB, step=3 * GIB, graphs=GIB)


def test_blocks_fill_what_is_left_and_no_more_than_is_of_use() -> None:
    left = int(36 * GIB - 0.03 * 80 * GIB)
    assert blocks_beside(ROOM, 1 << 20, 256, 100_000, None) == left >> 20
    assert blocks_beside(ROOM, 1 << 20, 2, 100, None) == 2 * blocks_for(100)
    assert blocks_beside(ROOM, 1 << 20, 2, 100, 1000) == 1000


@pytest.mark.parametrize(("room", "wanted"), [(ROOM, 40_000), (Room(80 * GIB, 6 * GIB, 3 * GIB, GIB), None)])
def test_too_little_is_refused_with_the_sum(room: Room, wanted: int | None) -> None:
    with pytest.raises(LoadRefused) as refused:
        blocks_beside(room, 1 << 20, 256, 100_000, wanted)
    message = str(refused.value)
    for part in (
        f"{room.free / GIB:.2f} GiB of 80.00 GiB",
        "a step takes 3.00 GiB",
        "decode graphs 1.00 GiB",
        "2.40 GiB",
    ):
        assert part in message


def test_weights_that_do_not_fit_are_refused_with_the_sum() -> None:
    refuse_weights(5 * GIB, 5 * GIB, "the device")
    with pytest.raises(LoadRefused, match=r"the weights take 5\.50 GiB, and 5\.00 GiB of the device are free"):
        refuse_weights(int(5.5 * GIB), 5 * GIB, "the device")


def test_weights_are_counted_in_the_type_they_are_served_in(tmp_path: Path) -> None:
    header = {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "BF16", "shape": [10, 4], "data_offsets": [0, 80]},
        "b": {"dtype": "I64", "shape": [3], "data_offsets": [80, 104]},
    }
    raw = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(104))
    assert weight_bytes(tmp_path, 2) == 104
    assert weight_bytes(tmp_path, 4) == 184
    (tmp_path / "broken.safetensors").write_bytes(b"\xff" * 50)
    assert weight_bytes(tmp_path, 2) == 154
