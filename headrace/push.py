"""Pushing a version: files to the object store, then the record. From a terminal: with progress, until it is available."""

import asyncio
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from headrace import gguf, packing
from headrace.packing import OnProgress
from shared import audit, blobs, config, encoders, manifests, registry
from shared.bus import Bus
from shared.errors import BadRequest, Unavailable
from shared.manifests import Manifest
from shared.objects import ObjectStore
from shared.records import EngineSettings, Version, VersionLimits
from shared.settings import Settings

REGISTER_TRIES_MAX = 3


async def push(
    bus: Bus,
    objects: ObjectStore,
    source: str,
    model: str,
    version: str,
    *,
    engine: EngineSettings | None = None,
    limits: VersionLimits | None = None,
    max_model_len: int = 0,
    on_progress: OnProgress = lambda _done, _total: None,
) -> Version:
    """Register `model@version` from a directory (Hugging Face layout, safetensors) or from "sim:PROFILE".

    `max_model_len` (tokens) is for simulated models; others say it in their config.json. Pushing the same again is fine, gives
    a failed version another try, and leaves what was configured since as it is. Only what the store lacks is sent.

    Raises BadRequest (names, files), Conflict (the version exists and is another), ObjectsUnavailable or Unavailable.
    """
    engine, limits = engine or EngineSettings(), limits or VersionLimits()
    registry.check_names(model, version)
    config.check_limits(limits)
    await bus.ensure()
    await registry.check_no_alias(bus, model, version)
    simulated = source.startswith(registry.SIMULATED)
    directory = Path(source)
    if simulated:
        manifest, tool_dialect = manifests.of_simulated(model, version, engine, encoders.simulated(source)), ""
    else:
        manifest = await asyncio.to_thread(packing.read_directory, directory, model, version, engine, on_progress)
        tool_dialect = packing.tool_dialect(directory)
    record = Version(
        model=model,
        version=version,
        state="registered",
        source=source if simulated else registry.STORED,
        manifest_sha256=manifests.sha256_of(manifests.encode(manifest)),
        max_model_len=max_model_len if simulated else manifest.max_model_len,
        engine=engine,
        limits=limits,
        tool_dialect=tool_dialect,
        encoder=manifest.encoder,
        created=int(time.time()),
    )
    existing = await registry.find_version(bus, model, version)
    if existing is not None:
        registry.check_same(existing, record)
    if simulated or (existing is not None and existing.state not in ("failed", "retired")):
        return await registry.register(bus, record)
    damaged = existing is not None and existing.state == "failed"
    return await _push_files(bus, objects, directory, manifest, record, damaged, on_progress)


async def _push_files(
    bus: Bus,
    objects: ObjectStore,
    directory: Path,
    manifest: Manifest,
    record: Version,
    damaged: bool,
    on_progress: OnProgress,
) -> Version:
    """Files, then the record, then one more look: until the record named them a garbage collection could take them."""
    done = manifest.size  # each byte was hashed once

    def on_bytes(more: int) -> None:
        nonlocal done
        done = min(done + more, 2 * manifest.size)
        on_progress(done, 2 * manifest.size)

    for _ in range(REGISTER_TRIES_MAX):
        await asyncio.to_thread(blobs.upload, objects, directory, manifest, on_bytes, not damaged)
        written = await registry.register(bus, record)
        if not await asyncio.to_thread(blobs.missing, objects, blobs.with_manifest(manifest)):
            await asyncio.to_thread(blobs.name_manifest, objects, manifest)
            return written
    raise Unavailable(f"files of {record.model}@{record.version} vanish from the object store as they are pushed")


def push_version(
    settings: Settings,
    source: str,
    model: str,
    version: str,
    engine: EngineSettings,
    limits: VersionLimits,
    available_within_s: float,
) -> None:
    """Push and say what came of it; a GGUF file is converted first. `available_within_s` 0: do not wait."""
    if Path(source).suffix == gguf.SUFFIX and not source.startswith(registry.SIMULATED):
        registry.check_names(model, version)
        settings.data_path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="gguf-", dir=settings.data_path) as directory:
            print(f"converting {source} to safetensors", file=sys.stderr)
            gguf.convert(Path(source), Path(directory))
            return push_version(settings, directory, model, version, engine, limits, available_within_s)
    max_model_len = simulated_length(source, engine) if source.startswith(registry.SIMULATED) else 0

    async def run(on_progress: OnProgress) -> Version:
        bus = await Bus.connect(settings, "push")
        try:
            target = f"{model}@{version}"
            async with audit.audited(bus, audit.cli_actor(), "version.register", target, source=source):
                pushed = await push(
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
    if (pushed.engine, pushed.limits) != (engine, limits):
        print("it was registered before, and its limits and settings stay as they are: headrace models show", model)
    return None


def simulated_length(source: str, engine: EngineSettings) -> int:
    """Tokens that a simulated model takes. Raises BadRequest for a profile that does not exist."""
    from workers.engine.load import LoadRefused, check_settings
    from workers.engine.sim import simulated_info
    from workers.engine.sim_encoder import simulated_encoder_info

    try:
        check_settings(engine)
        if encoders.simulated(source) is not None:
            return simulated_encoder_info(engine).max_model_len
        return simulated_info(source.removeprefix(registry.SIMULATED), engine).max_model_len
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
