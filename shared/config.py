"""What of a version can be changed while it is served: its limits and its engine settings. Validated, compare-and-set."""

import hashlib
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from shared import records, refusals, subjects
from shared.bus import Bus
from shared.errors import BadRequest, Unavailable, VersionNotFound, VersionRetired
from shared.records import EngineSettings, Version, VersionLimits
from shared.tenants import Limits

WRITE_TRIES_MAX = 10

T = TypeVar("T", VersionLimits, EngineSettings, Limits)


async def set_config(
    bus: Bus, model: str, version: str, limits_changes: Mapping[str, Any], engine_changes: Mapping[str, Any]
) -> Version:
    """Change limits and engine settings of a version; its record afterwards. None as a value: back to the default.

    Limits hold from the next tick on. Engine settings are of workers that start later; the controller replaces the ones
    that run with others. A failed version whose engine settings change gets another try.

    Raises BadRequest for what is no setting, or has no such value, VersionNotFound and VersionRetired.
    """
    try:
        key = subjects.key(model, version)
    except ValueError as error:
        raise VersionNotFound(f"there is no {model}@{version}: {error}", param="version") from None
    for _ in range(WRITE_TRIES_MAX):
        found = await bus.kv_get(subjects.MODELS_BUCKET, key)
        if found is None:
            raise VersionNotFound(f"there is no {model}@{version}", param="version")
        before = records.decode_version(found[0])
        after = changed(before, limits_changes, engine_changes)
        if after == before:
            return before
        if await bus.kv_update(subjects.MODELS_BUCKET, key, records.encode(after), found[1]) is not None:
            return after
    raise Unavailable(f"the record of {model}@{version} changed with every try to write it")


def changed(record: Version, limits_changes: Mapping[str, Any], engine_changes: Mapping[str, Any]) -> Version:
    """The record with the changes. Raises BadRequest, or VersionRetired: one that was removed has no settings any more."""
    if record.state == "retired":
        raise VersionRetired(f"{record.model}@{record.version} was removed", param="version")
    limits = merged(record.limits, limits_changes, "limits")
    check_limits(limits)
    after = replace(record, limits=limits, engine=merged(record.engine, engine_changes, "engine"))
    if after.state == "failed" and after.engine != record.engine:
        after = replace(after, state="registered", reason="")
    return after


def check_limits(limits: VersionLimits) -> None:
    """Raises BadRequest for limits that contradict each other, or that cannot be stored."""
    most = limits.max_replicas
    if most is not None and limits.min_replicas > most:
        raise BadRequest(f"min_replicas {limits.min_replicas} is over max_replicas {most}", param="limits")
    if limits.idle_seconds is not None and not 0 <= limits.idle_seconds < float("inf"):
        raise BadRequest(f"idle_seconds must be a number of seconds, not {limits.idle_seconds}", param="limits")
    for window in limits.schedule:
        name = f"the window from {window.from_} to {window.to}"
        if not window.days:
            raise BadRequest(f"{name} has no days", param="limits")
        if most is not None and window.min_replicas > most:
            raise BadRequest(f"{name} asks for {window.min_replicas}, over max_replicas {most}", param="limits")


def engine_digest(engine: EngineSettings) -> str:
    """Of engine settings, 16 hex digits: a worker says in its lease with which it was loaded."""
    return hashlib.blake2b(msgspec.json.encode(engine, order="sorted"), digest_size=8).hexdigest()


def merged(present: T, changes: Mapping[str, Any], param: str) -> T:
    """Settings with changes, None being the default. Raises BadRequest that names the place under `param`."""
    kind = type(present)
    values = msgspec.to_builtins(present)
    for name, value in changes.items():
        if name not in kind.__struct_fields__:
            raise BadRequest(f"no setting {name!r}: there are {', '.join(kind.__struct_fields__)}", param=param)
        values.pop(name, None)
        if value is not None:
            values[name] = value
    try:
        return msgspec.convert(values, kind, strict=False)
    except msgspec.ValidationError as error:
        raise _refused(error, kind, param) from error


def _refused(error: msgspec.ValidationError, kind: type[msgspec.Struct], param: str) -> BadRequest:
    """What is wrong with a value of the settings `kind`, by its place under `param`, and what there is to choose from."""
    path, problem = refusals.read(str(error), kind)
    place = f"{param}.{path}" if path else param
    return BadRequest(f"{place}: {problem}", param=place)
