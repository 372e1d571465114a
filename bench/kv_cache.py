"""What keys and values, or weights, in 8 bits cost: accuracy against the model's own type, and time a step.

    python bench/kv_cache.py DIRECTORY [--dtype bfloat16] [--set kv_dtype=int8] [--kernels auto] [--batches 1,8,32]

Both engines are in one process and take turns; one has the setting. Accuracy: each prompt is continued greedily by the engine
that has all in the model's type; both then score that text, token by token. The noise floor is that engine again, computing
the text in small chunks: in plain torch that alone changes logits in bf16.
"""

import argparse
import asyncio
import math
import statistics
import time
from pathlib import Path

from shared.records import EngineSettings
from shared.wire import ChatMessage, Input, Logprob, Sampling
from workers.engine.load import load_engine
from workers.engine.request import Engine, EngineRequest, TokenEvent

PROMPTS = [
    "Describe how a water mill grinds grain.",
    "What is the capital of France, and what is it known for?",
    "Write a short story about a lighthouse keeper who finds a letter.",
    "Explain to a child why the sky is blue.",
    "List five tips for writing clear documentation.",
    "Write a Python function that reverses a string, and explain it.",
]
OUTPUT = 200
TOP = 5


class Driver:
    """One engine on this event loop; one batch of requests at a time."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._ids: dict[str, list[int]] = {}
        self._logprobs: dict[str, list[Logprob]] = {}
        self._steps: list[tuple[float, int]] = []
        self._open = 0
        self._done = asyncio.Event()
        engine.start(asyncio.get_running_loop(), self._on_events)

    def _on_events(self, events: list[TokenEvent]) -> None:
        self._steps.append((time.perf_counter(), sum(len(event.ids) for event in events)))
        for event in events:
            if event.error is not None:
                raise SystemExit(f"the engine failed: {event.error}")
            self._ids[event.key] += event.ids
            self._logprobs[event.key] += event.logprobs or []
            self._open -= event.finish is not None
        if not self._open:
            self._done.set()

    async def run(self, prompts: list[list[int]], **sampling: object) -> list[str]:
        """Serve all at once; their keys."""
        keys = [f"{time.perf_counter()} {index}" for index in range(len(prompts))]
        self._open, self._steps = len(keys), []
        self._done.clear()
        self._ids, self._logprobs = {key: [] for key in keys}, {key: [] for key in keys}
        chosen = Sampling(**{"temperature": 0.0} | sampling)  # type: ignore[arg-type]
        for key, prompt in zip(keys, prompts, strict=True):
            self.engine.submit(EngineRequest(key=key, tenant="bench", prompt_ids=prompt, sampling=chosen))
        await self._done.wait()
        return keys

    async def generated(self, prompts: list[list[int]]) -> list[list[int]]:
        return [self._ids[key] for key in await self.run(prompts, max_tokens=OUTPUT)]

    async def scores(self, texts: list[list[int]]) -> list[list[Logprob]]:
        """Of each token of each text but the first."""
        keys = await self.run(texts, echo=True, logprobs=TOP, max_tokens=0)
        return [self._logprobs[key][1:] for key in keys]

    async def times_ms(self, batch: int, context: int) -> dict[str, float]:
        """Of the prefill of a full batch, and the median of its decode steps."""
        prompts = [[(7919 * place + 31 * index) % 4000 + 50 for place in range(context)] for index in range(batch)]
        begin = time.perf_counter()
        await self.run(prompts, max_tokens=40, ignore_eos=True)
        full = [index for index, (_, tokens) in enumerate(self._steps) if tokens == batch]
        times = [self._steps[index][0] - self._steps[index - 1][0] for index in full[1:]]
        return {"prefill": (self._steps[full[0]][0] - begin) * 1e3, "step": statistics.median(times) * 1e3}


def compare(name: str, reference: list[list[Logprob]], other: list[list[Logprob]], starts: list[int]) -> None:
    """Print how far `other` is from `reference`, over the tokens that were generated."""
    pairs = [
        (one, two)
        for texts, start in zip(zip(reference, other, strict=True), starts, strict=True)
        for one, two in list(zip(*texts, strict=True))[start - 1 :]
    ]
    differences = [abs((one.logprob or 0) - (two.logprob or 0)) for one, two in pairs]
    agreeing = sum(one.top[0].id == two.top[0].id for one, two in pairs)
    perplexities = [math.exp(-statistics.mean(pair[side].logprob or 0 for pair in pairs)) for side in (0, 1)]
    print(
        f"{name}: {len(pairs)} tokens; log probability off by {statistics.mean(differences):.4f} in the mean,"
        f" {sorted(differences)[int(len(differences) * 0.99)]:.3f} at the 99th percentile; the likeliest token is the"
        f" same for {agreeing / len(pairs):.2%}; perplexity {perplexities[0]:.4f} -> {perplexities[1]:.4f}"
    )


async def run(arguments: argparse.Namespace) -> None:
    def engine(**settings: object) -> Engine:
        base = {"dtype": arguments.dtype, "kernels": arguments.kernels, "max_model_len": 2048, "prefix_cache": "off"}
        return load_engine("s3", Path(arguments.directory), EngineSettings(**base | settings), arguments.threads)  # type: ignore[arg-type]

    name, _, value = arguments.set.partition("=")
    own, small, noisy = (Driver(engine(**more)) for more in ({}, {name: value}, {"prefill_chunk": 7}))
    for driver in (own, small):
        info = driver.engine.info
        print(f"{info.device} {info.dtype}: {info.blocks_total} blocks")
    inputs = [Input(messages=[ChatMessage("user", prompt)]) for prompt in PROMPTS]
    prompts = [own.engine.prepare(each, Sampling()) for each in inputs]
    outputs = await own.generated(prompts)
    texts = [prompt + output for prompt, output in zip(prompts, outputs, strict=True)]
    starts = [len(prompt) for prompt in prompts]
    reference = await own.scores(texts)
    compare("noise", reference, await noisy.scores(texts), starts)
    compare(arguments.set, reference, await small.scores(texts), starts)
    others = await small.generated(prompts)
    same = [
        next(
            (place for place, pair in enumerate(zip(one, two, strict=False)) if pair[0] != pair[1]),
            min(len(one), len(two)),
        )
        for one, two in zip(outputs, others, strict=True)
    ]
    print(f"greedy outputs are equal for {same} of {[len(output) for output in outputs]} tokens")
    for batch in map(int, arguments.batches.split(",")):
        found: list[list[dict[str, float]]] = [[], []]
        for _ in range(arguments.repeat):
            for driver, times in zip((own, small), found, strict=True):
                times.append(await driver.times_ms(batch, arguments.context))
        for what in ("prefill", "step"):
            one, two = (statistics.median(each[what] for each in times) for times in found)
            print(
                f"B={batch:<3} context {arguments.context}: {what} {one:.1f} ms -> {two:.1f} ms, {two / one:.2f} times"
            )
    for driver in (own, small, noisy):
        driver.engine.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", help="of a model")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--set", metavar="NAME=VALUE", default="kv_dtype=int8")
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--context", type=int, default=500, help="tokens")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0)
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
