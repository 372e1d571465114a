"""The engine alone, without queue or HTTP: decode step time and tokens/s at several batch sizes, prefill tokens/s.

    python bench/engine.py DIRECTORY|sim:PROFILE [--prompt 120] [--output 64] [--batches 1,8,32] [--dtype auto]

Each batch size is one burst of equal requests. The first step that samples for all of them ends the prefill; the time per
decode step is the median of the steps after it.
"""

import argparse
import asyncio
import statistics
import time
from pathlib import Path

from shared.records import EngineSettings
from shared.wire import Input, Sampling
from workers.engine.load import SIMULATED, load_engine
from workers.engine.request import Engine, EngineRequest, TokenEvent


async def burst(engine: "Collector", batch: int, prompt_tokens: int, output_tokens: int) -> None:
    """Run `batch` requests at once and print one line."""
    sampling = Sampling(max_tokens=output_tokens, temperature=0.0, ignore_eos=True)
    begin = time.perf_counter()
    for index in range(batch):
        prompt = [(7919 * position + 31 * index) % 4000 + 50 for position in range(prompt_tokens)]
        engine.submit(EngineRequest(key=f"{begin}-{index}", tenant="bench", prompt_ids=prompt, sampling=sampling))
    steps = await engine.finished(batch)
    full = [index for index, (_, tokens) in enumerate(steps) if tokens == batch]
    prefill = steps[full[0]][0] - begin
    decodes = [steps[index][0] - steps[index - 1][0] for index in full[1:]]
    total = steps[-1][0] - begin
    print(
        f"B={batch:<3} decode step {statistics.median(decodes) * 1e3:6.1f} ms (least {min(decodes) * 1e3:.1f})"
        f"  {batch / statistics.median(decodes):7.0f} tok/s"
        f"   prefill {batch * prompt_tokens / prefill:6.0f} tok/s"
        f"   whole burst {batch * output_tokens / total:6.0f} tok/s"
    )


class Collector:
    """Counts the tokens of each step."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.submit = engine.submit
        self._steps: list[tuple[float, int]] = []
        self._finished = 0
        self._changed = asyncio.Event()
        engine.start(asyncio.get_running_loop(), self._on_events)

    def _on_events(self, events: list[TokenEvent]) -> None:
        self._steps.append((time.perf_counter(), sum(len(event.ids) for event in events)))
        failed = [event.error for event in events if event.error is not None]
        if failed:
            raise SystemExit(f"the engine failed: {failed[0]}")
        self._finished += sum(event.finish is not None for event in events)
        self._changed.set()

    async def finished(self, count: int) -> list[tuple[float, int]]:
        """(time, tokens) of each step until `count` requests are finished."""
        while self._finished < count:
            self._changed.clear()
            await self._changed.wait()
        steps, self._steps, self._finished = self._steps, [], 0
        return steps


async def run(engine: Engine, arguments: argparse.Namespace) -> None:
    collector = Collector(engine)
    engine.prepare(Input(prompt="warm up"), Sampling())
    print(
        f"{engine.info.device} {engine.info.dtype}, {engine.info.blocks_total} blocks; load {engine.info.load_seconds}"
    )
    for batch in map(int, arguments.batches.split(",")):
        for _ in range(arguments.repeat):
            await burst(collector, batch, arguments.prompt, arguments.output)
    engine.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="a model's directory, or sim:PROFILE")
    parser.add_argument("--prompt", type=int, default=120, help="tokens")
    parser.add_argument("--output", type=int, default=64, help="tokens")
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=0)
    arguments = parser.parse_args()
    settings = EngineSettings(dtype=arguments.dtype)
    directory = None if arguments.source.startswith(SIMULATED) else Path(arguments.source)
    engine = load_engine(arguments.source, directory, settings, arguments.threads)
    asyncio.run(run(engine, arguments))


if __name__ == "__main__":
    main()
