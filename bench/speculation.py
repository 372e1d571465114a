"""What drafts from the text itself bring, and what they cost where text repeats nothing: tokens/s with and without them.

    python bench/speculation.py DIRECTORY [--streams 1,4] [--rounds 3] [--kernels auto]

Both engines are in one process and take turns. `words`: continue random words (bench/load.py's prompts), 64 tokens. `chat`:
short questions, 200 tokens. `repeat`: copy or change a text that is in the prompt. These are greedy; `sampled` is `chat` at
temperature 1, where little repeats. The first round warms, and from then on the prompts are in the prefix cache, so that it is
decoding that is compared. The two must say the same.
"""

import argparse
import asyncio
import random
import statistics
import time
from pathlib import Path

from kv_cache import PROMPTS, Driver
from load import WORDS

from shared.records import EngineSettings
from shared.wire import ChatMessage, Input, Sampling
from workers.engine.load import load_engine

PROSE = """The mill stands where the river bends. Every morning the miller opens the gate, and the water turns the wheel.
The wheel turns the stone, and the stone grinds the grain. In the evening the miller closes the gate, sweeps the floor, and
carries the sacks to the cart. On Saturdays the cart goes to the market, where the baker buys the flour."""
CODE = """def total_price(items, discount):
    total = 0
    for item in items:
        total += item.price * item.count
    if total > discount.least:
        total -= total * discount.share
    print("total", total)
    return total"""
EDITS = [
    f"Repeat this text word for word:\n\n{PROSE}",
    f"Correct the spelling of this text and give all of it:\n\n{PROSE}",
    f"Add a docstring to this Python function and give all of it:\n\n```python\n{CODE}\n```",
    f"Rename the variable total to amount and give the whole function:\n\n```python\n{CODE}\n```",
]


def workloads(number: int) -> dict[str, tuple[list[Input], dict[str, object]]]:
    """By name: inputs, and what is asked of each."""
    words = [random.Random(seed) for seed in range(number)]
    texts = [" ".join(each.choice(WORDS) for _ in range(90)) for each in words]
    chats = [Input(messages=[ChatMessage("user", text)]) for text in PROMPTS]
    return {
        "words": ([Input(prompt=text) for text in texts], {"max_tokens": 64, "ignore_eos": True}),
        "chat": (chats, {"max_tokens": 200}),
        "sampled": (chats, {"max_tokens": 200, "temperature": 1.0, "seed": 1}),
        "repeat": ([Input(messages=[ChatMessage("user", text)]) for text in EDITS], {"max_tokens": 200}),
    }


async def seconds(driver: Driver, prompts: list[list[int]], asked: dict[str, object]) -> tuple[float, list[list[int]]]:
    """How long it takes to serve all at once, and what was said."""
    begin = time.perf_counter()
    keys = await driver.run(prompts, **asked)
    return time.perf_counter() - begin, [driver._ids[key] for key in keys]


async def compare(off: Driver, on: Driver, name: str, streams: int, rounds: int) -> None:
    """Print one line for a workload."""
    inputs, asked = workloads(8)[name]
    prompts = [off.engine.prepare(each, Sampling()) for each in inputs]
    groups = [prompts[first : first + streams] for first in range(0, len(prompts), streams)]
    totals: list[tuple[float, float]] = []
    before = on.engine.stats()
    tokens = different = 0
    for turn in range(rounds + 1):
        spent = {off: 0.0, on: 0.0}
        tokens = 0
        for place, group in enumerate(groups):
            said = {}
            for driver in (off, on) if (turn + place) % 2 else (on, off):
                elapsed, said[driver] = await seconds(driver, group, asked)
                spent[driver] += elapsed
            different += said[off] != said[on]
            tokens += sum(map(len, said[off]))
        if turn:
            totals.append((spent[off], spent[on]))
    after = on.engine.stats()
    drafted, accepted = after.drafted - before.drafted, after.accepted - before.accepted
    ratios = [without / drafting for without, drafting in totals]
    print(
        f"{name:7} {streams} streams: {tokens / statistics.median(each[0] for each in totals):5.0f} tok/s ->"
        f" {tokens / statistics.median(each[1] for each in totals):5.0f}, {statistics.median(ratios):.3f} times"
        f" ({min(ratios):.3f} to {max(ratios):.3f}); {drafted / (rounds + 1) / tokens:.2f} guesses a token,"
        f" {accepted / max(1, drafted):.0%} right; {different} groups differ",
        flush=True,
    )


async def run(arguments: argparse.Namespace) -> None:
    def driver(speculation: str) -> Driver:
        settings = EngineSettings(
            dtype=arguments.dtype, kernels=arguments.kernels, max_model_len=2048, speculation=speculation
        )
        return Driver(load_engine("s3", Path(arguments.directory), settings, arguments.threads))

    off, on = driver("off"), driver("ngram")
    for name in arguments.workloads.split(","):
        for streams in map(int, arguments.streams.split(",")):
            await compare(off, on, name, streams, arguments.rounds)
    off.engine.stop()
    on.engine.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", help="of a model")
    parser.add_argument("--workloads", default="words,chat,repeat,sampled")
    parser.add_argument("--streams", default="1,4")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--threads", type=int, default=0)
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
