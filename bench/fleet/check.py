"""Is the simulator right? What it predicts, beside what real engines and real processes do in the same minutes, as one table.

    python bench/fleet/check.py engine DIRECTORY
    python bench/fleet/check.py stack URL --model NAME --profile a100-40g-13b

engine: the profile of a real engine is fitted at 1, 4 and 16 streams; predicted are 8 and 32 streams and requests at random
times. Both are measured in turn, round by round, so that a machine that gets slower does not pass for a wrong prediction.
stack: the same of a running stack that serves `sim:a100-13b`: real processes, HTTP, NATS, with a clock in the place of a GPU;
fitted is only the way to the worker and back, at 1 stream. Prompts and answers vary by half of their length.
"""

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
from collections.abc import Awaitable, Sequence
from itertools import chain
from pathlib import Path

import aiohttp
import msgspec

from headrace.fleet.fitting import (
    Clients,
    Recorder,
    Send,
    Served,
    Step,
    closed,
    error,
    opened,
    path_ms,
    profile,
    recorded,
    settle,
)
from headrace.fleet.scenario import FleetSpec, Length, Scenario, Traffic
from headrace.fleet.simulation import simulate
from shared.errors import BadRequest
from shared.records import EngineSettings
from workers.engine.engine import BatchEngine
from workers.engine.load import SIMULATED, load_engine

PROMPT, OUTPUT, SPREAD = 120, 64, 0.5
FITTED, PREDICTED = (1, 4, 16), (8, 32)
TURNS = (1, 8, 4, 32, 16)  # of a round
LOAD = 0.6  # of the throughput at 8 streams, for requests at random times
WARMUP = 0.4  # of the time for which a number of streams is measured: so long before it
SEEDS = range(1, 6)  # of what is predicted


class Figures(msgspec.Struct):
    tokens_per_s: float
    ttft_ms: float  # the median
    tpot_ms: float  # the median


class Seen(msgspec.Struct):
    """What was measured, in all rounds."""

    seconds: float  # of one round and number of streams
    closed: dict[int, list[list[Served]]]  # by streams and round
    opened: list[list[Served]]  # by round
    steps: list[Step]  # at the numbers of streams that the profile is fitted to


async def measure(send: Send, turns: Sequence[int], seconds: float, rounds: int, recorder: Recorder | None) -> Seen:
    seen = Seen(seconds, {streams: [] for streams in turns}, [], [])
    await settle(send, max(turns))
    rate = 0.0
    for number in range(rounds):
        print(f"round {number + 1} of {rounds}", file=sys.stderr)
        for streams in turns:
            served, steps = await _turn(closed(send, streams, seconds, WARMUP * seconds), recorder)
            if not served:
                raise BadRequest(f"{streams} streams began no request within {seconds:g} s: measure for more --seconds")
            seen.closed[streams].append(served)
            seen.steps += steps if streams in FITTED else []
        rate = rate or LOAD * len(seen.closed[PREDICTED[0]][0]) / seconds
        served, _ = await _turn(opened(send, rate, 2 * seconds, seed=number), recorder)
        seen.opened.append(served)
    return seen


async def _turn(load: Awaitable[list[Served]], recorder: Recorder | None) -> tuple[list[Served], list[Step]]:
    if recorder is None:
        return await load, []
    recorder.steps()
    return await load, recorder.steps()


def predicted(fleet: FleetSpec, traffic: Traffic, seconds: float, warmup_s: float, seed: int = 1) -> Figures:
    scenario = Scenario(name="check", traffic=[traffic], fleet=fleet, seconds=seconds, warmup_s=warmup_s, seed=seed)
    result = simulate(scenario)
    return Figures(result.tokens_per_s, result.ttft_ms.p50, result.tpot_ms.p50)


def stream(streams: int) -> Traffic:
    prompt, output = (Length(kind="uniform", mean=mean, spread=SPREAD) for mean in (PROMPT, OUTPUT))
    return Traffic(kind="closed", streams=streams, prompt=prompt, output=output, tenants=10)


def trace(served: Sequence[Served], file: Path) -> Traffic:
    """The very requests that were sent."""
    begin = min(each.begun for each in served)
    rows = [f"{each.begun - begin},{each.prompt},{each.tokens}" for each in served]
    file.write_text("\n".join(["time,tokens_in,tokens_out", *rows]))
    return Traffic(kind="trace", file=str(file), tenants=10)


def figures(served: Sequence[Served], seconds: float) -> Figures:
    """Of requests that began within `seconds`, as the simulator counts them."""
    return Figures(
        sum(each.tokens for each in served) / seconds,
        statistics.median(each.ttft_ms for each in served),
        statistics.median(each.tpot_ms for each in served),
    )


def mean(all_figures: Sequence[Figures]) -> Figures:
    return Figures(
        *(statistics.mean(getattr(each, name) for each in all_figures) for name in Figures.__struct_fields__)
    )


def compare(seen: Seen, fleet: FleetSpec, directory: Path) -> float:
    """Print the table; the largest error of what is predicted."""
    print(
        "| load | tokens/s, real / simulated | TTFT p50, ms | TPOT p50, ms | tokens/s of the rounds |\n|---|---|---|---|---|"
    )
    worst = 0.0
    for streams in sorted(seen.closed):
        real = [figures(served, seen.seconds) for served in seen.closed[streams]]
        simulated = [predicted(fleet, stream(streams), seen.seconds, WARMUP * seen.seconds, seed) for seed in SEEDS]
        found = show(f"{streams} streams" + (", fitted" if streams in FITTED else ""), real, simulated)
        worst = max(worst, found if streams in PREDICTED else 0.0)
    real, simulated = [], []
    for number, served in enumerate(seen.opened):
        took = max(each.last for each in served) - min(each.begun for each in served)
        real.append(figures(served, took))
        simulated.append(predicted(fleet, trace(served, directory / f"trace-{number}.csv"), took, 0.0))
    rate = sum(map(len, seen.opened)) / len(seen.opened) / (2 * seen.seconds)
    return max(worst, show(f"{rate:.2f} requests/s", real, simulated))


def show(what: str, rounds: Sequence[Figures], simulated: Sequence[Figures]) -> float:
    """A row of the table; the largest error."""
    real, expected = mean(rounds), mean(simulated)
    errors = [getattr(expected, name) / getattr(real, name) - 1 for name in Figures.__struct_fields__]
    cells = [
        f"{getattr(real, name):.1f} / {getattr(expected, name):.1f} ({error:+.0%})"
        for name, error in zip(Figures.__struct_fields__, errors, strict=True)
    ]
    cells.append(" ".join(f"{each.tokens_per_s:.0f}" for each in rounds))
    print(f"| {what} | " + " | ".join(cells) + " |", flush=True)
    return max(map(abs, errors))


async def engine(source: str, seconds: float, rounds: int, threads: int, directory: Path) -> float:
    settings = EngineSettings()
    loaded = load_engine(source, None if source.startswith(SIMULATED) else Path(source), settings, threads)
    if not isinstance(loaded, BatchEngine):
        raise BadRequest(f"{source} is served by another engine: its steps cannot be seen")
    fresh, recorder = recorded(loaded, settings)
    clients = Clients(fresh, PROMPT, OUTPUT)
    clients.start()
    try:
        seen = await measure(clients.one, TURNS, seconds, rounds, recorder)
    finally:
        await asyncio.to_thread(fresh.stop)
    found = profile(loaded, settings, "check", seen.steps)
    file = directory / "profile.json"
    file.write_bytes(msgspec.json.encode(found))
    path = path_ms(found.cost.ms, list(chain(*seen.closed[1])))
    print(
        f"{found.cost}, median error of a step {error(found.cost, seen.steps):.1%}; path {path:.2f} ms", file=sys.stderr
    )
    return compare(seen, FleetSpec(profile=str(file), path_ms=path), directory)


async def stack(url: str, model: str, fleet: FleetSpec, seconds: float, rounds: int, directory: Path) -> float:
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import load

    dice = random.Random(1)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector) as session:

        async def send() -> Served:
            words, tokens = (round(size * dice.uniform(1 - SPREAD, 1 + SPREAD)) for size in (PROMPT, OUTPUT))
            prompt = " ".join(dice.choice(load.WORDS) for _ in range(words))
            done = await load.stream(session, url, model, prompt, tokens)
            return Served(done.begun, words, done.first, done.last, done.tokens)

        seen = await measure(send, (1, *PREDICTED), seconds, rounds, None)
    fleet = msgspec.structs.replace(fleet, path_ms=0.0)
    step_ms = Scenario(name="check", traffic=[stream(1)], fleet=fleet).profile().step_ms
    path = path_ms(step_ms, list(chain(*seen.closed[1])))
    print(f"path {path:.2f} ms", file=sys.stderr)
    return compare(seen, msgspec.structs.replace(fleet, path_ms=path), directory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["engine", "stack"])
    parser.add_argument("where", help="a model's directory or sim:PROFILE, or the URL of an ingress")
    parser.add_argument("--profile", default="a100-40g-13b", help="of the stack: what it is said to serve")
    parser.add_argument("--model", default="a100", help="of the stack")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each number of streams in each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory, seconds, rounds = Path(name), arguments.seconds, arguments.rounds
        if arguments.kind == "engine":
            worst = asyncio.run(engine(arguments.where, seconds, rounds, arguments.threads, directory))
        else:
            fleet = FleetSpec(profile=arguments.profile)
            worst = asyncio.run(stack(arguments.where, arguments.model, fleet, seconds, rounds, directory))
    print(f"largest error of what is predicted: {worst:.0%}")


if __name__ == "__main__":
    main()
