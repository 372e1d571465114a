"""Versions, aliases and routes: what `headrace models` writes.

A version is immutable: its files, engine settings and limits never change under its name. Files go to the object store
first and the record comes last, so that a record always has its files. The controller's loop turns `registered` into
`available`, or into `failed` with a reason.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from controller import packing
from controller.packing import OnProgress
from shared import manifests, records, subjects
from shared.bus import Bus
from shared.config import check_limits
from shared.errors import BadRequest, Conflict, Internal, ModelNotFound, Unavailable, VersionFailed, VersionNotFound
from shared.objects import ObjectStore
from shared.records import EngineSettings, Record, Route, Version, VersionLimits, Weight

log = logging.getLogger(__name__)

SIMULATED = "sim:"
STABLE = "stable"
RESERVED_ALIASES = {STABLE, "canary"}
ALL_TRAFFIC = 10_000  # basis points
WRITE_TRIES_MAX = 10


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

    The first version of a model gets all its traffic and the alias `stable`. `max_model_len` (tokens) is for simulated
    models; others say it in their config.json. Pushing the same again is fine, and gives a failed version another try.

    Raises BadRequest (names, files), Conflict (the version exists and is another), ObjectsUnavailable or Unavailable.
    """
    check_names(model, version)
    check_limits(limits or VersionLimits())
    record = Version(
        model=model,
        version=version,
        state="registered",
        source=source if source.startswith(SIMULATED) else "s3",
        max_model_len=max_model_len,
        engine=engine or EngineSettings(),
        limits=limits or VersionLimits(),
        created=int(time.time()),
    )
    await bus.ensure()
    route = await find_route(bus, model)
    if route is not None and version in route.aliases:
        raise BadRequest(f"{version} is an alias of {model} and cannot be a version too", param="version")
    directory = Path(source)
    manifest = None
    if record.source == "s3":
        manifest = await asyncio.to_thread(packing.read_directory, directory, record, on_progress)
        digest = manifests.sha256_of(manifests.encode(manifest))
        record = replace(record, manifest_sha256=digest, max_model_len=manifest.max_model_len)

    existing = await find_version(bus, model, version)
    if existing is None or existing.state == "failed":
        if existing is not None:
            check_same(existing, record)
        if manifest is not None:
            await asyncio.to_thread(packing.upload, objects, directory, manifest, on_progress)
    record = await _write_version(bus, record)
    await _write_first_route(bus, model, version)
    return record


def check_names(model: str, version: str) -> None:
    """Raises BadRequest for a name that could not be addressed as `model@version`."""
    for param, name in (("model", model), ("version", version)):
        _check_name(param, name)
    if version in RESERVED_ALIASES:
        raise BadRequest(f"{version} is the name of an alias and cannot be a version", param="version")


def check_same(existing: Version, pushed: Version) -> None:
    """Raises Conflict, saying what differs, unless both are the same version."""
    fields = {
        "files": existing.source == pushed.source and existing.manifest_sha256 == pushed.manifest_sha256,
        "engine settings": existing.engine == pushed.engine,
        "limits": existing.limits == pushed.limits,
    }
    if not fields["engine settings"]:  # they are part of the manifest, so it says nothing about the files
        del fields["files"]
    if different := [name for name, same in fields.items() if not same]:
        name = f"{existing.model}@{existing.version}"
        raise Conflict(
            f"{name} exists with other {' and '.join(different)}; a version never changes: push under a new version",
            param="version",
        )


async def wait_available(bus: Bus, model: str, version: str, timeout_s: float) -> Version:
    """Wait until a version is available. Raises VersionFailed with its reason, or Unavailable after `timeout_s`."""
    key = subjects.key(model, version)
    seen: list[Version] = []
    settled = asyncio.Event()

    def on_change(changed: str, value: bytes | None) -> None:
        if changed == key and value is not None:
            seen.append(records.version_at(key, value))
            if seen[-1].state != "registered":
                settled.set()

    watch = await bus.watch(subjects.MODELS_BUCKET, on_change)
    try:
        async with asyncio.timeout(timeout_s):
            await settled.wait()
    except TimeoutError:
        reason = f": {seen[-1].reason}" if seen and seen[-1].reason else "; is a controller running?"
        raise Unavailable(f"{model}@{version} is not available after {timeout_s:.0f} s{reason}") from None
    finally:
        await watch.close()
    if seen[-1].state == "failed":
        raise VersionFailed(f"{model}@{version} failed: {seen[-1].reason}")
    return seen[-1]


async def find_version(bus: Bus, model: str, version: str) -> Version | None:
    found = await bus.kv_get(subjects.MODELS_BUCKET, subjects.key(model, version))
    return records.decode_version(found[0]) if found else None


async def find_route(bus: Bus, model: str) -> Route | None:
    found = await bus.kv_get(subjects.ROUTES_BUCKET, subjects.key(model))
    return records.decode_route(found[0]) if found else None


async def list_versions(bus: Bus, model: str | None = None) -> list[Version]:
    """All versions, of one model or of all, by model and age."""
    found = await read_bucket(bus, subjects.MODELS_BUCKET, records.version_at)
    chosen = [record for record in found if model in (None, record.model)]
    return sorted(chosen, key=lambda record: (record.model, record.created, record.version))


async def list_routes(bus: Bus) -> dict[str, Route]:
    """The routes, by model."""
    return {route.model: route for route in await read_bucket(bus, subjects.ROUTES_BUCKET, records.route_at)}


async def set_alias(bus: Bus, model: str, alias: str, version: str | None) -> Route:
    """Point an alias at a version, or remove it (None). The model's plain name goes where `stable` goes.

    Raises BadRequest (a name that cannot be an alias), ModelNotFound or VersionNotFound.
    """
    _check_name("alias", alias)
    if version is None and alias == STABLE:
        raise BadRequest(f"the alias {STABLE} cannot be removed, only moved", param="alias")
    if await find_version(bus, model, alias) is not None:
        raise BadRequest(f"{alias} is a version of {model} and cannot be an alias too", param="alias")
    if await find_route(bus, model) is None:
        raise ModelNotFound(f"there is no model {model}", param="model")
    if version is not None and await find_version(bus, model, version) is None:
        raise VersionNotFound(f"{model} has no version {version}", param="version")
    key = subjects.key(model)
    for _ in range(WRITE_TRIES_MAX):
        found = await bus.kv_get(subjects.ROUTES_BUCKET, key)
        if found is None:
            raise ModelNotFound(f"there is no model {model}", param="model")
        route = records.decode_route(found[0])
        aliases = {name: target for name, target in route.aliases.items() if name != alias}
        route = replace(route, aliases=aliases | ({alias: version} if version else {}))
        if version is not None and alias == STABLE:
            route = replace(route, weights=[Weight(version, ALL_TRAFFIC)])
        if await bus.kv_update(subjects.ROUTES_BUCKET, key, records.encode(route), found[1]) is not None:
            return route
    raise Unavailable(f"the route of {model} changed with every try to write it")


async def _write_version(bus: Bus, record: Version) -> Version:
    """Create the record, or find it there already; a failed one gets another try. Raises Conflict."""
    key = subjects.key(record.model, record.version)
    for _ in range(WRITE_TRIES_MAX):
        found = await bus.kv_get(subjects.MODELS_BUCKET, key)
        if found is None:
            if await bus.kv_create(subjects.MODELS_BUCKET, key, records.encode(record)) is not None:
                return record
            continue
        existing = records.decode_version(found[0])
        check_same(existing, record)
        if existing.state != "failed":
            return existing
        again = replace(existing, state="registered", reason="")
        if await bus.kv_update(subjects.MODELS_BUCKET, key, records.encode(again), found[1]) is not None:
            return again
    raise Unavailable(f"the record of {record.model}@{record.version} changed with every try to write it")


async def _write_first_route(bus: Bus, model: str, version: str) -> None:
    route = Route(model=model, aliases={STABLE: version}, weights=[Weight(version, ALL_TRAFFIC)])
    await bus.kv_create(subjects.ROUTES_BUCKET, subjects.key(model), records.encode(route))


def _check_name(param: str, name: str) -> None:
    try:
        subjects.encode_token(name)
    except ValueError as error:
        raise BadRequest(f"{param}: {error}", param=param) from error
    if "@" in name or name != name.strip() or not name.isprintable():
        raise BadRequest(f"{param}: {name!r} has an '@', white space at an end or a control character", param=param)


async def read_bucket(bus: Bus, bucket: str, decode: Callable[[str, bytes], Record]) -> list[Record]:
    """All records of a bucket now, less those that cannot be read: of these a log tells."""
    values: dict[str, bytes] = {}

    def on_value(key: str, value: bytes | None) -> None:
        values.pop(key, None)
        if value is not None:
            values[key] = value

    watch = await bus.watch(bucket, on_value)
    await watch.close()
    found = []
    for key, value in values.items():
        try:
            found.append(decode(key, value))
        except Internal as error:
            log.warning("%s of bucket %s is left out: %s", key, bucket, error)
    return found
