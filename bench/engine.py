"""The engine as one table: what its steps cost, what its policies are worth, and how it serves beside its peers.

    python bench/engine.py DIRECTORY|sim:PROFILE [--only steps,pacing,prefix,fairness]
    python bench/engine.py DIRECTORY --only serving --server headrace=http://127.0.0.1:8000 --server peer=http://127.0.0.1:8100

serving: streams over HTTP through whole servers that run already, in turn, with the prompts of load.py.
steps: the engine alone. Each batch size is one burst of equal requests. The first step that samples for all of them ends the
prefill; the time of a decode step is the median of the steps after it.
pacing, prefix, fairness: see policies.py.
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec
from load import Load, Measured, percentile_ms
from policies import Bench, Row, fairness, pacing, prefix

from shared.records import EngineSettings
from shared.wire import Input, Sampling
from workers.engine.engine import BatchEngine
from workers.engine.load import SIMULATED, load_engine
from workers.engine.request import Engine, EngineRequest, TokenEvent

SECTIONS = ("serving", "steps", "pacing", "prefix", "fairness")


async def burst(engine: "Collector", batch: int, prompt_tokens: int, output_tokens: int) -> Row:
    """Run `batch` requests at once."""
    sampling = Sampling(max_tokens=output_tokens, temperature=0.0, ignore_eos=True)
    begin = time.perf_counter()
    for index in range(batch):
        prompt = [(7919 * position + 31 * index) % 4000 + 50 for position in range(prompt_tokens)]
        engine.submit(EngineRequest(key=f"{begin}-{index}", tenant="bench", prompt_ids=prompt, sampling=sampling))
    steps = await engine.finished(batch)
    full = [index for index, (_, tokens) in enumerate(steps) if tokens >= batch]
    prefill = steps[full[0]][0] - begin
    decodes = [steps[index][0] - steps[index - 1][0] for index in full[1:]]
    total = steps[-1][0] - begin
    return (
        f"steps, {batch} sequences",
        f"decode {statistics.median(decodes) * 1e3:.1f} ms (least {min(decodes) * 1e3:.1f})"
        f" = {batch / statistics.median(decodes):.0f} tokens/s;"
        f" prefill {batch * prompt_tokens / prefill:.0f} tokens/s; whole burst {batch * output_tokens / total:.0f} tokens/s",
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


async def steps(engine: Engine, arguments: argparse.Namespace) -> list[Row]:
    collector = Collector(engine)
    engine.prepare(Input(prompt="warm up"), Sampling())
    rows = [
        await burst(collector, batch, arguments.prompt, arguments.output)
        for batch in map(int, arguments.batches.split(","))
        for _ in range(arguments.repeat)
    ]
    engine.stop()
    return rows


def serving(servers: dict[str, str], streams: int, arguments: argparse.Namespace) -> list[Row]:
    """Each server in turn, in each round: medians of the rounds, and the ratio of the first server to each other one."""
    load = argparse.Namespace(
        model=arguments.model,
        requests=16,
        per_stream=2,
        tokens=arguments.output,
        words=arguments.words,
        seed=arguments.seed,
    )
    found: dict[str, list[Measured]] = {name: [] for name in servers}
    for number in range(arguments.rounds):
        for name, url in servers.items():
            found[name].append(asyncio.run(Load(url, load, streams, number).run()))
    errors = [f"{name}: {error}" for name, rounds in found.items() for each in rounds for error in each.errors]
    if errors:
        raise SystemExit("\n".join(errors))
    rows = []
    ours: float | None = None
    for name, rounds in found.items():
        rate = statistics.median(each.tokens_per_s for each in rounds)
        ttft = [value for each in rounds for value in each.ttft]
        tpot = [value for each in rounds for value in each.tpot]
        rows.append(
            (
                f"serving {streams} streams, {name}",
                f"{rate:.0f} tokens/s; TPOT p50 {percentile_ms(tpot, 0.5):.1f}, p99 {percentile_ms(tpot, 0.99):.1f} ms;"
                f" TTFT p50 {percentile_ms(ttft, 0.5):.0f}, p99 {percentile_ms(ttft, 0.99):.0f} ms"
                + ("" if ours is None else f"; here **{ours / rate:.2f}** times its tokens/s"),
            )
        )
        ours = ours or rate
    return rows


def show(rows: Iterable[Row]) -> None:
    for row in rows:
        print("| " + " | ".join(row) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="a model's directory, or sim:PROFILE")
    parser.add_argument("--only", default=",".join(SECTIONS), help="of " + ",".join(SECTIONS))
    parser.add_argument("--prompt", type=int, default=120, help="tokens")
    parser.add_argument("--output", type=int, default=64, help="tokens")
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--runs", type=int, default=3, help="of the pacing")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="kernels=torch, for instance")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--server", action="append", default=[], metavar="NAME=URL", help="ours first, then the peers")
    parser.add_argument("--model", default="smollm2", help="its name on the servers")
    parser.add_argument("--words", type=int, default=90, help="of a prompt, for servers")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1, help="another one: prompts that no server has cached")
    arguments = parser.parse_args()
    only = arguments.only.split(",")
    if unknown := set(only) - set(SECTIONS):
        parser.error(f"--only: no {', '.join(sorted(unknown))}")
    print("| what | figure |\n|---|---|", flush=True)
    if "serving" in only:
        servers = dict(each.split("=", 1) for each in arguments.server)
        for streams in map(int, arguments.batches.split(",")) if servers else ():
            show(serving(servers, streams, arguments))
    if set(only) == {"serving"}:
        return
    given = dict(each.split("=", 1) for each in arguments.set)
    settings = msgspec.convert({"speculation": "off"} | given, EngineSettings, strict=False)  # see speculation.py
    directory = None if arguments.source.startswith(SIMULATED) else Path(arguments.source)
    engine = load_engine(arguments.source, directory, settings, arguments.threads)
    assert isinstance(engine, BatchEngine)
    info, bench = engine.info, Bench(engine, settings)
    show([("engine", f"{info.device} {info.dtype}, {info.blocks_total} blocks; load {info.load_seconds}")])
    if "steps" in only:
        show(asyncio.run(steps(bench.fresh(prefix_cache="off"), arguments)))
    if "pacing" in only:
        show(pacing(bench, arguments.runs))
    if "prefix" in only:
        show(prefix(bench))
    if "fairness" in only:
        show(fairness(bench))


if __name__ == "__main__":
    main()
