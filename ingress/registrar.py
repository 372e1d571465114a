"""Registering versions, moving aliases and rolling versions out, for the routes that do."""

import asyncio
import time
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from shared import config, deployment_views, deployments, manifests, registry
from shared.deployment_views import DeploymentDetail, DeploymentEntry
from shared.errors import BadRequest, DeploymentNotFound, NotFound, VersionFailed
from shared.manifests import Manifest
from shared.records import EngineSettings, Route, Version, VersionLimits
from shared.rollouts import Command, NewDeployment
from shared.settings import Settings

if TYPE_CHECKING:
    from shared.bus import Bus
    from shared.objects import ObjectStore


class NewVersion(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What `POST /v1/models/{model}/versions` takes.

    `source` is "sim:<profile>", or "s3" for files that are in the object store. `manifest_sha256` names their manifest; without
    it the one at `models/<model>/<version>/manifest.json` is taken. `engine` instead of the manifest's.
    """

    version: str
    source: str
    manifest_sha256: str | None = None
    engine: EngineSettings | None = None
    limits: VersionLimits = VersionLimits()


class Changes(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What `PATCH /v1/models/{model}/versions/{version}` takes: settings by name; null is back to the default."""

    limits: dict[str, Any] = {}
    engine: dict[str, Any] = {}


class VersionConfig(msgspec.Struct, kw_only=True):
    """What of a version can be changed, as it is now."""

    model: str
    version: str
    state: str
    limits: VersionLimits
    engine: EngineSettings


class AliasTarget(msgspec.Struct, forbid_unknown_fields=True):
    """What `PUT /v1/models/{model}/aliases/{alias}` takes."""

    version: str


class Registrar:
    """The registry behind the front door. Its errors are those of `shared.registry` and `shared.deployments`, and
    ObjectsUnavailable."""

    def __init__(self, bus: "Bus", settings: Settings) -> None:
        self._bus, self._settings = bus, settings

    async def register(self, model: str, asked: NewVersion) -> tuple[Version, Route | None]:
        """The version's record as it is now, and the model's route."""
        registry.check_names(model, asked.version)
        config.check_limits(asked.limits)
        await registry.check_no_alias(self._bus, model, asked.version)
        if asked.source.startswith(registry.SIMULATED):
            if asked.manifest_sha256 is not None:
                raise BadRequest("manifest_sha256: a simulated model has no files", param="manifest_sha256")
            manifest = manifests.of_simulated(model, asked.version, asked.engine or EngineSettings())
            record = await registry.register(self._bus, _record(asked, manifest))
        elif asked.source == registry.STORED:
            record = await self._register_stored(model, asked)
        else:
            raise BadRequest(f'source: "s3" or "sim:<profile>" is expected, not {asked.source!r}', param="source")
        return record, await registry.find_route(self._bus, model)

    async def _register_stored(self, model: str, asked: NewVersion) -> Version:
        from shared import blobs
        from shared.objects import ObjectStore  # an ingress that registers nothing does without its libraries

        objects = ObjectStore(self._settings)
        manifest = await asyncio.to_thread(_stored_manifest, objects, model, asked)
        record = await registry.register(self._bus, _record(asked, manifest))
        await asyncio.to_thread(blobs.name_manifest, objects, manifest)
        return record

    async def configure(self, model: str, version: str, changes: Changes) -> VersionConfig:
        """Change limits and engine settings. Raises BadRequest, VersionNotFound or VersionRetired."""
        record = await config.set_config(self._bus, model, version, changes.limits, changes.engine)
        return VersionConfig(
            model=model, version=version, state=record.state, limits=record.limits, engine=record.engine
        )

    async def set_alias(self, model: str, alias: str, version: str | None) -> Route:
        """Point an alias at a version; None removes it."""
        return await registry.set_alias(self._bus, model, alias, version)

    async def deploy(self, asked: NewDeployment) -> DeploymentEntry:
        """Begin to move a model's traffic to a version."""
        return deployment_views.entry(await deployments.create(self._bus, asked))

    async def deployments(self, model: str | None) -> list[DeploymentEntry]:
        """Those of one model, or all; the newest first."""
        found = await deployments.list_deployments(self._bus, model)
        return [deployment_views.entry(each) for each in reversed(found)]

    async def deployment(self, id_: str) -> DeploymentDetail:
        """One with its history. Raises DeploymentNotFound."""
        found = await deployments.find(self._bus, id_)
        if found is None:
            raise DeploymentNotFound(f"there is no deployment {id_}", param="deployment_id")
        return deployment_views.detail(found[0], await deployment_views.find_progress(self._bus, found[0]))

    async def command(self, id_: str, what: Command) -> DeploymentDetail:
        """Roll back, pause, resume or promote one; what it is now."""
        changed = await deployments.command(self._bus, id_, what)
        return deployment_views.detail(changed, await deployment_views.find_progress(self._bus, changed))


def _record(asked: NewVersion, manifest: Manifest) -> Version:
    return Version(
        model=manifest.model,
        version=manifest.version,
        state="registered",
        source=asked.source,
        manifest_sha256=manifests.sha256_of(manifests.encode(manifest)),
        max_model_len=manifest.max_model_len,
        engine=manifest.engine,
        limits=asked.limits,
        created=int(time.time()),
    )


def _stored_manifest(objects: "ObjectStore", model: str, asked: NewVersion) -> Manifest:
    """The manifest of the version that is asked for, in the store, with all its files. Blocking. Raises BadRequest."""
    from shared import blobs

    if asked.manifest_sha256 is None:
        found = blobs.read_named_manifest(objects, model, asked.version)
    else:
        try:
            found, _ = blobs.read_manifest(objects, asked.manifest_sha256)
        except (NotFound, VersionFailed) as error:
            raise BadRequest(f"manifest_sha256: {error.message}", param="manifest_sha256") from error
    manifest = replace(found, model=model, version=asked.version, engine=asked.engine or found.engine)
    blobs.keep(objects, manifest)
    config = next((file for file in manifest.files if file.name == manifests.CONFIG_NAME), None)
    if config is None or not any(file.name.endswith(".safetensors") for file in manifest.files):
        raise BadRequest("the manifest names no config.json with *.safetensors", param="manifest_sha256")
    raw = objects.get(manifests.blob_key(config.sha256))
    manifest = replace(manifest, max_model_len=manifests.model_length(raw, manifests.CONFIG_NAME, manifest.engine))
    blobs.put_manifest(objects, manifest)
    return manifest
