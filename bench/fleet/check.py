"""Is the simulator right? What it predicts, beside what real engines and real processes do, as one table.

    python bench/fleet/check.py engine DIRECTORY [--profile FILE.json]
    python bench/fleet/check.py stack URL --model NAME --profile a100-40g-13b

engine: the profile of a real engine is fitted at 1, 4 and 16 streams (or read from a file that `headrace bench profile`
wrote); predicted are 8 and 32 streams and requests at random times. stack: the same of a running stack that serves
`sim:a100-13b`: real processes, HTTP, NATS, with a clock in the place of a GPU.
"""

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from headrace.fleet.fitting import Clients, Served, measured_steps, profile, recorded, settle
from headrace.fleet.profiles import Measured
from headrace.fleet.scenario import FleetSpec, Length, Scenario, Traffic
from headrace.fleet.simulation import simulate
from shared.records import EngineSettings
from workers.engine.engine import BatchEngine
from workers.engine.load import load_engine

PROMPT, OUTPUT = 120, 64
FITTED, PREDICTED = (1, 4, 16), (8, 32)
LOAD = 0.6  # of the throughput at 8 streams, for requests at random times
SIMULATED_S = 120.0


class Figures(msgspec.Struct):
    tokens_per_s: float
    ttft_ms: float  # the median
    tpot_ms: float  # the median


def predicted(fleet: FleetSpec, traffic: Traffic, seconds: float = SIMULATED_S, warmup_s: float = 20.0) -> Figures:
    scenario = Scenario(name="check", traffic=[traffic], fleet=fleet, seconds=seconds, warmup_s=warmup_s)
    result = simulate(scenario)
    return Figures(result.tokens_per_s, result.ttft_ms.p50, result.tpot_ms.p50)


def closed(streams: int, varied: bool) -> Traffic:
    lengths = [Length(kind="uniform", mean=mean, spread=0.5) if varied else mean for mean in (PROMPT, OUTPUT)]
    return Traffic(kind="closed", streams=streams, prompt=lengths[0], output=lengths[1], tenants=10)


def opened(arrivals: Sequence[tuple[float, int, int]]) -> Traffic:
    """The very requests that were sent: (seconds, tokens in, tokens out)."""
    file = Path(tempfile.mkdtemp()) / "trace.csv"
    rows = [f"{at},{prompt},{output}" for at, prompt, output in arrivals]
    file.write_text("\n".join(["time,tokens_in,tokens_out", *rows]))
    return Traffic(kind="trace", file=str(file), tenants=10)


def figures(served: Sequence[Served], seconds: float) -> Figures:
    return Figures(
        sum(each.tokens for each in served) / seconds,
        statistics.median(each.ttft_ms for each in served),
        statistics.median(each.tpot_ms for each in served),
    )


def show(what: str, real: Figures, simulated: Figures) -> float:
    """A row of the table; the largest error."""
    errors = [getattr(simulated, name) / getattr(real, name) - 1 for name in Figures.__struct_fields__]
    cells = [
        f"{getattr(real, name):.1f} / {getattr(simulated, name):.1f} ({error:+.0%})"
        for name, error in zip(Figures.__struct_fields__, errors, strict=True)
    ]
    print(f"| {what} | " + " | ".join(cells) + " |", flush=True)
    return max(map(abs, errors))


async def engine(directory: Path, file: Path | None, seconds: float, threads: int) -> float:
    settings = EngineSettings()
    loaded = load_engine(str(directory), directory, settings, threads)
    assert isinstance(loaded, BatchEngine)
    fresh, recorder = recorded(loaded, settings)
    clients = Clients(fresh, PROMPT, OUTPUT)
    if file is None:
        steps = await measured_steps(clients, recorder, FITTED, seconds)
        found = profile(loaded, settings, directory.name, steps)
        print(found.cost, file=sys.stderr)
        file = Path(tempfile.mkdtemp()) / "profile.json"
        file.write_bytes(msgspec.json.encode(found))
    else:
        clients.start()
        msgspec.json.decode(file.read_bytes(), type=Measured)
    fleet = FleetSpec(profile=str(file), path_ms=0.0)
    worst = 0.0
    await settle(clients, max(PREDICTED))
    for streams in PREDICTED:
        begin = time.perf_counter()
        served = await clients.closed(streams, seconds)
        took = time.perf_counter() - begin
        worst = max(worst, show(f"{streams} streams", figures(served, took), predicted(fleet, closed(streams, True))))
        if streams == PREDICTED[0]:
            rate = LOAD * len(served) / took
    begin = time.perf_counter()
    served = await clients.opened(rate, 2 * seconds)
    took = max(each.last for each in served) - begin
    arrivals = [(each.begun - begin, each.prompt, each.tokens) for each in served]
    simulated = predicted(fleet, opened(arrivals), took, 0.0)
    worst = max(worst, show(f"{rate:.2f} requests/s", figures(served, took), simulated))
    await asyncio.to_thread(fresh.stop)
    return worst


async def stack(url: str, model: str, fleet: FleetSpec, seconds: float) -> float:
    import aiohttp
    from load import Load

    options = argparse.Namespace(model=model, words=PROMPT, tokens=OUTPUT, per_stream=0, requests=0, seed=1)
    worst = 0.0
    for streams in PREDICTED:
        simulated = predicted(fleet, closed(streams, False))
        options.requests = int(simulated.tokens_per_s / OUTPUT * seconds)
        real = await Load(url, options, streams, 1).run()
        assert not real.errors, real.errors
        worst = max(worst, show(f"{streams} streams", _of(real.ttft, real.tpot, real.tokens_per_s), simulated))
        if streams == PREDICTED[0]:
            rate = LOAD * simulated.tokens_per_s / OUTPUT
    load = Load(url, options, 1, 2)
    arrivals: list[tuple[float, int, int]] = []
    dice, begin, at, tasks = random.Random(2), time.perf_counter(), 0.0, []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True)) as session:
        while (at := at + dice.expovariate(rate)) < 2 * seconds:
            await asyncio.sleep(max(0.0, begin + at - time.perf_counter()))
            arrivals.append((at, PROMPT, OUTPUT))
            tasks.append(asyncio.create_task(load._request(session, len(tasks))))
        await asyncio.gather(*tasks)
    took = time.perf_counter() - begin
    real_open = _of(load._ttft, load._tpot, load._tokens / took)
    return max(worst, show(f"{rate:.2f} requests/s", real_open, predicted(fleet, opened(arrivals), took, 0.0)))


def _of(ttft: Sequence[float], tpot: Sequence[float], tokens_per_s: float) -> Figures:
    return Figures(tokens_per_s, statistics.median(ttft) * 1e3, statistics.median(tpot) * 1e3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["engine", "stack"])
    parser.add_argument("where", help="a model's directory, or the URL of an ingress")
    parser.add_argument("--profile", help="a file, or a profile's name")
    parser.add_argument("--model", default="a100")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each number of streams")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument(
        "--path-ms", type=float, default=3.0, help="of the stack: its time to the first token beside the engine's"
    )
    arguments = parser.parse_args()
    print("| load | tokens/s, real / simulated | TTFT p50, ms | TPOT p50, ms |\n|---|---|---|---|", flush=True)
    if arguments.kind == "engine":
        file = Path(arguments.profile) if arguments.profile else None
        worst = asyncio.run(engine(Path(arguments.where), file, arguments.seconds, arguments.threads))
    else:
        fleet = FleetSpec(profile=arguments.profile or "a100-40g-13b", path_ms=arguments.path_ms)
        worst = asyncio.run(stack(arguments.where, arguments.model, fleet, arguments.seconds))
    print(f"largest error {worst:.0%}")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    main()
