"""`headrace bench profile`: what a real engine's steps cost, for the fleet simulator."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console

from headrace.fleet import fitting
from headrace.fleet.profiles import Measured
from shared.errors import BadRequest
from shared.records import EngineSettings
from workers.engine.engine import BatchEngine
from workers.engine.load import SIMULATED, load_engine


def measure_profile(
    source: str, output: Path, streams: Sequence[int], seconds: float, prompt: int, tokens: int, threads: int
) -> Measured:
    """Load `source`, serve closed loops, fit the cost of a step, write it to `output`. Raises BadRequest."""
    settings = EngineSettings()
    directory = None if source.startswith(SIMULATED) else Path(source)
    engine = load_engine(source, directory, settings, threads)
    if not isinstance(engine, BatchEngine):
        raise BadRequest(f"{source} is served by another engine: its steps cannot be seen")
    found, steps = asyncio.run(_measure(engine, settings, source, streams, seconds, prompt, tokens))
    output.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
    Console(stderr=True).print(
        f"{len(steps)} steps; a step costs {found.cost}; median error {fitting.error(found.cost, steps):.1%}: {output}"
    )
    return found


async def _measure(
    engine: BatchEngine,
    settings: EngineSettings,
    source: str,
    streams: Sequence[int],
    seconds: float,
    prompt: int,
    tokens: int,
) -> tuple[Measured, list[fitting.Step]]:
    fresh, recorder = fitting.recorded(engine, settings)
    clients = fitting.Clients(fresh, prompt, tokens)
    try:
        steps = await fitting.measured_steps(clients, recorder, streams, seconds)
    finally:
        await asyncio.to_thread(fresh.stop)
    name = source if source.startswith(SIMULATED) else Path(source).name
    return fitting.profile(engine, settings, f"{name} on {engine.info.device}", steps), steps
