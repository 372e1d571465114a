"""Measures what the steps of a runner cost, before it serves: a handful of steps over an empty cache."""

import time
from collections.abc import Callable
from typing import Any, Protocol

from shared.wire import Sampling
from workers.engine.blocks import BLOCK_TOKENS, blocks_for
from workers.engine.pacer import Cost
from workers.engine.request import EngineInfo
from workers.engine.sequence import Sequence, Slice, StepPlan

DECODES = 8
CONTEXTS = (16, 512)  # tokens that each of them attends to
CHUNK = 512  # prompt tokens: of fewer, a GPU may read its weights for longer than it computes, and they seem to be free
START = 2048  # where the second chunk goes on
TIMES = 3  # each step: the first one warms, of the others the fastest counts


class Steps(Protocol):
    """The part of a runner that is measured."""

    def forward(self, plan: StepPlan) -> Any: ...

    def sample(self, plan: StepPlan, computed: Any) -> Any: ...


def measure(
    runner: Steps, info: EngineInfo, prefill_chunk: int, clock: Callable[[], float] = time.perf_counter
) -> Cost:
    """The cost of `runner`'s steps. It writes to blocks that must be free; about a second for a small model on a CPU.

    Five steps give five coefficients, each from a difference in which little else differs.
    """
    tokens_max = min(info.max_model_len, info.blocks_total * BLOCK_TOKENS)
    decodes = max(1, min(DECODES, info.slots, info.blocks_total))
    each = info.blocks_total // decodes * BLOCK_TOKENS
    short, long = (min(context, info.max_model_len, each) for context in CONTEXTS)
    chunk = max(1, min(CHUNK, prefill_chunk, tokens_max // 2))
    start = min(START, tokens_max - chunk)

    def ms(shapes: list[tuple[int, int]]) -> float:
        times = []
        for _ in range(TIMES):
            plan = _plan(shapes)
            begin = clock()
            runner.sample(plan, runner.forward(plan))
            times.append((clock() - begin) * 1e3)
        return min(times[1:])

    one = ms([(short - 1, 1)])
    some = ms([(short - 1, 1)] * decodes)
    far = ms([(long - 1, 1)] * decodes)
    first = ms([(0, chunk)])
    later = ms([(start, chunk)])

    decode = max(0.0, some - one) / max(1, decodes - 1)
    step = max(0.0, one - decode)
    context = max(0.0, far - some) / max(1, decodes * (long - short))
    pair = max(0.0, later - first) / max(1, chunk * start)
    prefill = max(0.0, first - step - pair * chunk * chunk / 2) / chunk
    return Cost(step=step, decode=decode, context=context, prefill=prefill, pair=pair)


def _plan(shapes: list[tuple[int, int]]) -> StepPlan:
    """A step with a slice for each (start, count); every one samples, from blocks of its own."""
    slices = []
    block = 0
    for slot, (start, count) in enumerate(shapes):
        length = start + count
        blocks = list(range(block, block + blocks_for(length)))
        block += len(blocks)
        tokens = [position % 7 for position in range(length)]
        sampling = Sampling(temperature=0.0)
        sequence = Sequence("probe", "", 0, sampling, tokens, length, length + 1, start, blocks, slot)
        slices.append(Slice(sequence, start, count, True))
    return StepPlan(slices)
