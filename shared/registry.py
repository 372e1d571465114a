"""Versions, aliases and routes: what `headrace models` and `/v1/models` write.

What a version is never changes under its name: its source, and the sha256 of its manifest, which holds files and engine
settings as they were pushed. Files go to the object store first and the record comes after them. The controller's loop turns
`registered` into `available`, or into `failed` with a reason; a version that was removed stays `retired` for a while.
"""

import asyncio
import time
from collections import Counter

from msgspec.structs import replace

from shared import records, rollouts, subjects
from shared.bus import Bus
from shared.config import check_limits
from shared.errors import (
    BadRequest,
    Conflict,
    DeploymentActive,
    ModelNotFound,
    Unavailable,
    VersionFailed,
    VersionInUse,
    VersionNotFound,
    VersionRetired,
)
from shared.records import ALL_TRAFFIC, STABLE, Lease, Route, Version, Weight
from shared.stored import Record, Stored

SIMULATED = "sim:"
STORED = "s3"  # the source of a version whose files are in the object store
RESERVED_ALIASES = {STABLE, "canary"}
WRITE_TRIES_MAX = 10


async def register(bus: Bus, record: Version) -> Version:
    """Write a version's record, and the route if it is the model's first: that gets all traffic and the alias `stable`.

    The record as it is now: the same version again is fine and changes nothing, other than that a failed one, and one that
    was removed, gets another try. Raises BadRequest (names, limits), Conflict (the version is another) or Unavailable.
    """
    check_names(record.model, record.version)
    check_limits(record.limits)
    await check_no_alias(bus, record.model, record.version)
    written = await _write_version(bus, record)
    await _write_first_route(bus, record.model, record.version)
    return written


async def check_no_alias(bus: Bus, model: str, version: str) -> None:
    """Raises BadRequest for a version's name that is an alias of the model."""
    route = await find_route(bus, model)
    if route is not None and version in route.aliases:
        raise BadRequest(f"{version} is an alias of {model} and cannot be a version too", param="version")


def check_names(model: str, version: str) -> None:
    """Raises BadRequest for a name that could not be addressed as `model@version`."""
    for param, name in (("model", model), ("version", version)):
        check_name(param, name)
    if version in RESERVED_ALIASES:
        raise BadRequest(f"{version} is the name of an alias and cannot be a version", param="version")


def check_same(existing: Version, pushed: Version) -> None:
    """Raises Conflict unless both are the same version. What can be changed while it runs plays no part."""
    if (existing.source, existing.manifest_sha256) != (pushed.source, pushed.manifest_sha256):
        name = f"{existing.model}@{existing.version}"
        was = "was removed and had" if existing.state == "retired" else "exists with"
        raise Conflict(
            f"{name} {was} other files or engine settings; a version never changes: push under a new version",
            param="version",
        )


async def wait_available(bus: Bus, model: str, version: str, timeout_s: float) -> Version:
    """Wait until a version is available. Raises VersionFailed with its reason, or Unavailable after `timeout_s`."""
    key = subjects.key(model, version)
    seen: list[Version] = []
    settled = asyncio.Event()

    def on_change(changed: str, value: bytes | None) -> None:
        change = records.VERSIONS.change(key, value) if changed == key else None
        if change is not None and change.record is not None:
            seen.append(change.record)
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
    found = await read_bucket(bus, subjects.MODELS_BUCKET, records.VERSIONS)
    chosen = [record for record in found if model in (None, record.model)]
    return sorted(chosen, key=lambda record: (record.model, record.created, record.version))


async def list_routes(bus: Bus) -> dict[str, Route]:
    """The routes, by model."""
    return {route.model: route for route in await read_bucket(bus, subjects.ROUTES_BUCKET, records.ROUTES)}


async def set_alias(bus: Bus, model: str, alias: str, version: str | None) -> Route:
    """Point an alias at a version, or remove it (None). The model's plain name goes where `stable` goes.

    Raises BadRequest (a name that cannot be an alias), ModelNotFound or VersionNotFound.
    """
    for param, name in (("model", model), ("alias", alias), ("version", version)):
        if name is not None:
            check_name(param, name)
    if version is None and alias == STABLE:
        raise BadRequest(f"the alias {STABLE} cannot be removed, only moved", param="alias")
    if await find_version(bus, model, alias) is not None:
        raise BadRequest(f"{alias} is a version of {model} and cannot be an alias too", param="alias")
    if await find_route(bus, model) is None:
        raise ModelNotFound(f"there is no model {model}", param="model")
    if version is not None:
        target = await find_version(bus, model, version)
        if target is None:
            raise VersionNotFound(f"{model} has no version {version}", param="version")
        if target.state == "retired":
            raise VersionRetired(f"{model}@{version} was removed", param="version")
    key = subjects.key(model)
    for _ in range(WRITE_TRIES_MAX):
        found = await bus.kv_get(subjects.ROUTES_BUCKET, key)
        if found is None:
            raise ModelNotFound(f"there is no model {model}", param="model")
        route = records.decode_route(found[0])
        if route.rolling and alias in RESERVED_ALIASES:
            raise DeploymentActive(f"{route.deployment} moves the traffic of {model}: roll it back or promote it first")
        aliases = {name: target for name, target in route.aliases.items() if name != alias}
        route = replace(route, aliases=aliases | ({alias: version} if version else {}))
        if version is not None and alias == STABLE:
            route = replace(route, weights=[Weight(version, ALL_TRAFFIC)])
        if await bus.kv_update(subjects.ROUTES_BUCKET, key, records.encode(route), found[1]) is not None:
            return route
    raise Unavailable(f"the route of {model} changed with every try to write it")


async def remove(bus: Bus, model: str, version: str | None = None) -> list[Version]:
    """Take a version, or all of a model, out of service; their records as they were. Their files are the caller's to delete.

    Requests are answered `version_retired` until the controller forgets the name. The last version of a model takes the
    route with it. Raises ModelNotFound, VersionNotFound, VersionRetired, or VersionInUse, which says by what.
    """
    known = {record.version: record for record in await list_versions(bus, model)}
    live = [record for record in known.values() if record.state != "retired"]
    if not known or (version is None and not live):
        raise ModelNotFound(f"there is no model {model}", param="model")
    if version is not None and version not in known:
        raise VersionNotFound(f"{model} has no version {version}", param="version")
    doomed = live if version is None else [record for record in live if record.version == version]
    if not doomed:
        raise VersionRetired(f"{model}@{version} was removed before", param="version")
    last = len(doomed) == len(live)
    route = await bus.kv_get(subjects.ROUTES_BUCKET, subjects.key(model))
    for record in doomed:
        await _check_unused(bus, record, None if last or route is None else records.decode_route(route[0]))
    for record in doomed:
        await _retire(bus, record)
    if last and route is not None:
        await bus.kv_delete(subjects.ROUTES_BUCKET, subjects.key(model), route[1])
        await _forget_deployments(bus, model)
    return doomed


async def _forget_deployments(bus: Bus, model: str) -> None:
    """What they did must not be done to a model that gets the name later."""
    for each in await read_bucket(bus, subjects.DEPLOYMENTS_BUCKET, rollouts.DEPLOYMENTS):
        if each.model == model:
            await bus.kv_delete(subjects.DEPLOYMENTS_BUCKET, subjects.key(each.id))


async def _retire(bus: Bus, record: Version) -> None:
    key = subjects.key(record.model, record.version)
    for _ in range(WRITE_TRIES_MAX):
        found = await bus.kv_get(subjects.MODELS_BUCKET, key)
        if found is None:
            return
        retired = replace(records.decode_version(found[0]), state="retired", reason="", retired=int(time.time()))
        if await bus.kv_update(subjects.MODELS_BUCKET, key, records.encode(retired), found[1]) is not None:
            return
    raise Unavailable(f"the record of {record.model}@{record.version} changed with every try to write it")


def uses(version: str, route: Route | None, leases: list[Lease], requests: int) -> list[str]:
    """What a version is in use by, in words. `leases` are its workers', `requests` those stored and not answered."""
    found = []
    if route is not None:
        found += [
            f"the alias {alias} points at it" for alias in sorted(route.aliases) if route.aliases[alias] == version
        ]
        points = sum(weight.basis_points for weight in route.weights if weight.version == version)
        found += [f"{points / 100:g}% of the model's traffic goes to it"] if points else []
    states = Counter(lease.state for lease in leases if lease.state != "failed")
    found += [f"workers: {count} {state}" for state, count in sorted(states.items())]
    found += [f"requests that are not answered yet: {requests}"] if requests else []
    return found


async def _check_unused(bus: Bus, record: Version, route: Route | None) -> None:
    name = (record.model, record.version)
    leases = [
        lease
        for lease in await read_bucket(bus, subjects.WORKERS_BUCKET, records.LEASES)
        if (lease.model, lease.version) == name
    ]
    requests = sum((await bus.subject_counts(subjects.REQ_STREAM, subjects.requests_of_version(*name))).values())
    requests += sum((await bus.subject_counts(subjects.JOB_STREAM, subjects.jobs_of_version(*name))).values())
    if found := uses(record.version, route, leases, requests):
        kept = [name for name in ("min_replicas", "warm", "schedule") if getattr(record.limits, name)]
        if leases and kept:
            unset = " ".join(f"--unset {name}" for name in kept)
            found.append(
                f"it keeps workers without work: `headrace models set {record.model}@{record.version} {unset}`"
            )
        raise VersionInUse(f"{record.model}@{record.version} is in use: {'; '.join(found)}", param="version")


async def _write_version(bus: Bus, record: Version) -> Version:
    """Create the record, or find it there already; a failed or retired one gets another try. Raises Conflict."""
    key = subjects.key(record.model, record.version)
    for _ in range(WRITE_TRIES_MAX):
        found = await bus.kv_get(subjects.MODELS_BUCKET, key)
        if found is None:
            if await bus.kv_create(subjects.MODELS_BUCKET, key, records.encode(record)) is not None:
                return record
            continue
        existing = records.decode_version(found[0])
        check_same(existing, record)
        if existing.state not in ("failed", "retired"):
            return existing
        removed = existing.state == "retired"  # then nothing of how it was configured goes on
        again = record if removed else replace(existing, state="registered", reason="")
        if await bus.kv_update(subjects.MODELS_BUCKET, key, records.encode(again), found[1]) is not None:
            return again
    raise Unavailable(f"the record of {record.model}@{record.version} changed with every try to write it")


async def _write_first_route(bus: Bus, model: str, version: str) -> None:
    route = Route(model=model, aliases={STABLE: version}, weights=[Weight(version, ALL_TRAFFIC)])
    await bus.kv_create(subjects.ROUTES_BUCKET, subjects.key(model), records.encode(route))


def check_name(param: str, name: str) -> None:
    """Raises BadRequest for what cannot be the name of a model, version or alias."""
    try:
        subjects.encode_token(name)
    except ValueError as error:
        raise BadRequest(f"{param}: {error}", param=param) from error
    if "@" in name or name != name.strip() or not name.isprintable():
        raise BadRequest(f"{param}: {name!r} has an '@', white space at an end or a control character", param=param)


async def read_bucket(bus: Bus, bucket: str, kind: Stored[Record]) -> list[Record]:
    """All records of a bucket now, less those that cannot be read: of these a log tells."""
    found: dict[str, Record] = {}

    def on_value(key: str, value: bytes | None) -> None:
        change = kind.change(key, value)
        if change is None or change.record is None:
            found.pop(key, None)
        else:
            found[key] = change.record

    watch = await bus.watch(bucket, on_value)
    await watch.close()
    return list(found.values())
