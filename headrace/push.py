"""Pushing a version from a terminal: progress while it is hashed and uploaded, then the wait until it is available."""

import asyncio
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from controller import registry
from shared.bus import Bus
from shared.errors import BadRequest
from shared.objects import ObjectStore
from shared.records import EngineSettings, Version, VersionLimits
from shared.settings import Settings


def push_version(
    settings: Settings,
    source: str,
    model: str,
    version: str,
    engine: EngineSettings,
    limits: VersionLimits,
    available_within_s: float,
) -> None:
    """Push and say what came of it. `available_within_s` 0: do not wait."""
    max_model_len = simulated_length(source, engine) if source.startswith(registry.SIMULATED) else 0

    async def run(on_progress: registry.OnProgress) -> Version:
        bus = await Bus.connect(settings, "push")
        try:
            pushed = await registry.push(
                bus,
                ObjectStore(settings),
                source,
                model,
                version,
                engine=engine,
                limits=limits,
                max_model_len=max_model_len,
                on_progress=on_progress,
            )
            if available_within_s:
                pushed = await registry.wait_available(bus, model, version, available_within_s)
            return pushed
        finally:
            await bus.close()

    with _bar(f"{model}@{version}") as on_progress:
        pushed = asyncio.run(run(on_progress))
    print(f"{model}@{version} is {pushed.state}")


def simulated_length(source: str, engine: EngineSettings) -> int:
    """Tokens that a simulated model takes. Raises BadRequest for a profile that does not exist."""
    from workers.engine.load import LoadRefused, load_engine

    try:
        return load_engine(source, None, engine, 0).info.max_model_len
    except LoadRefused as error:
        raise BadRequest(str(error), param="source") from error


@contextmanager
def _bar(title: str) -> Iterator[Callable[[int, int], None]]:
    if not sys.stderr.isatty():
        yield lambda _done, _total: None
        return
    with Progress(TextColumn(title), BarColumn(), DownloadColumn(), transient=True) as progress:
        task = progress.add_task(title, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
