"""Registering versions, moving aliases and rolling versions out, for the routes that do."""

import asyncio
import time
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from ingress.identity import Caller
from shared import audit, config, deployment_views, deployments, encoders, manifests, registry, tools
from shared.deployment_views import DeploymentDetail, DeploymentEntry
from shared.errors import BadRequest, DeploymentNotFound, NotFound, VersionFailed
from shared.manifests import Manifest
from shared.records import EngineSettings, Route, Version, VersionLimits
from shared.rollouts import Command, Deployment, NewDeployment
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
    """The registry behind the front door. Its errors are those of `shared.registry` and `shared.deployments`,
    ObjectsUnavailable, and ModelNotAllowed where the caller's key is for other models. What is changed is audited."""

    def __init__(self, bus: "Bus", settings: Settings) -> None:
        self.bus, self._settings = bus, settings

    async def register(self, caller: Caller, model: str, asked: NewVersion) -> tuple[Version, Route | None]:
        """The version's record as it is now, and the model's route."""
        caller.check_model(model)
        target = f"{model}@{asked.version}"
        async with audit.audited(self.bus, caller.actor, "version.register", target, source=asked.source):
            record = await self._register(model, asked)
        return record, await registry.find_route(self.bus, model)

    async def _register(self, model: str, asked: NewVersion) -> Version:
        registry.check_names(model, asked.version)
        config.check_limits(asked.limits)
        await registry.check_no_alias(self.bus, model, asked.version)
        if asked.source.startswith(registry.SIMULATED):
            if asked.manifest_sha256 is not None:
                raise BadRequest("manifest_sha256: a simulated model has no files", param="manifest_sha256")
            encoder = encoders.simulated(asked.source)
            manifest = manifests.of_simulated(model, asked.version, asked.engine or EngineSettings(), encoder)
            return await registry.register(self.bus, _record(asked, manifest))
        if asked.source == registry.STORED:
            return await self._register_stored(model, asked)
        raise BadRequest(f'source: "s3" or "sim:<profile>" is expected, not {asked.source!r}', param="source")

    async def _register_stored(self, model: str, asked: NewVersion) -> Version:
        from shared import blobs
        from shared.objects import ObjectStore  # an ingress that registers nothing does without its libraries

        objects = ObjectStore(self._settings)
        manifest, tool_dialect = await asyncio.to_thread(_stored_manifest, objects, model, asked)
        record = await registry.register(self.bus, _record(asked, manifest, tool_dialect))
        await asyncio.to_thread(blobs.name_manifest, objects, manifest)
        return record

    async def configure(self, caller: Caller, model: str, version: str, changes: Changes) -> VersionConfig:
        """Change limits and engine settings. Raises BadRequest, VersionNotFound or VersionRetired."""
        caller.check_model(model)
        detail = msgspec.to_builtins(changes)
        async with audit.audited(self.bus, caller.actor, "version.change", f"{model}@{version}", **detail):
            record = await config.set_config(self.bus, model, version, changes.limits, changes.engine)
        return VersionConfig(
            model=model, version=version, state=record.state, limits=record.limits, engine=record.engine
        )

    async def set_alias(self, caller: Caller, model: str, alias: str, version: str | None) -> Route:
        """Point an alias at a version; None removes it."""
        caller.check_model(model)
        async with audit.alias(self.bus, caller.actor, model, alias, version):
            return await registry.set_alias(self.bus, model, alias, version)

    async def deploy(self, caller: Caller, asked: NewDeployment) -> DeploymentEntry:
        """Begin to move a model's traffic to a version."""
        caller.check_model(asked.model)
        async with audit.deployment(self.bus, caller.actor, asked) as note:
            made = await deployments.create(self.bus, asked, caller.actor.tenant)
            note.target = made.id
        return deployment_views.entry(made)

    async def deployments(self, caller: Caller, model: str | None) -> list[DeploymentEntry]:
        """Those of one model, or all; the newest first."""
        found = await deployments.list_deployments(self.bus, model)
        return [deployment_views.entry(each) for each in reversed(found) if caller.may_use(each.model)]

    async def deployment(self, caller: Caller, id_: str) -> DeploymentDetail:
        """One with its history. Raises DeploymentNotFound."""
        found = await self._deployment(caller, id_)
        return deployment_views.detail(found, await deployment_views.find_progress(self.bus, found))

    async def command(self, caller: Caller, id_: str, what: Command) -> DeploymentDetail:
        """Roll back, pause, resume or promote one; what it is now."""
        known = await self._deployment(caller, id_)
        async with audit.command(self.bus, caller.actor, known, what):
            changed = await deployments.command(self.bus, id_, what)
        return deployment_views.detail(changed, await deployment_views.find_progress(self.bus, changed))

    async def _deployment(self, caller: Caller, id_: str) -> Deployment:
        found = await deployments.find(self.bus, id_)
        if found is None:
            raise DeploymentNotFound(f"there is no deployment {id_}", param="deployment_id")
        caller.check_model(found[0].model)
        return found[0]


def _record(asked: NewVersion, manifest: Manifest, tool_dialect: str = "") -> Version:
    return Version(
        model=manifest.model,
        version=manifest.version,
        state="registered",
        source=asked.source,
        manifest_sha256=manifests.sha256_of(manifests.encode(manifest)),
        max_model_len=manifest.max_model_len,
        engine=manifest.engine,
        limits=asked.limits,
        tool_dialect=tool_dialect,
        encoder=manifest.encoder,
        created=int(time.time()),
    )


def _stored_manifest(objects: "ObjectStore", model: str, asked: NewVersion) -> tuple[Manifest, str]:
    """The manifest of the version that is asked for, in the store, with all its files; and how the model writes tool calls.

    Blocking. Raises BadRequest.
    """
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
    if manifest.encoder is None and any(file.name == encoders.MODULES_NAME for file in manifest.files):
        raise BadRequest(
            f"the manifest names {encoders.MODULES_NAME} and does not say `encoder`: `headrace models push` does",
            param="manifest_sha256",
        )
    raw = objects.get(manifests.blob_key(config.sha256))
    length = manifests.model_length(raw, manifests.CONFIG_NAME, manifest.engine, manifest.encoder)
    manifest = replace(manifest, max_model_len=length)
    blobs.put_manifest(objects, manifest)
    templates = {
        file.name: objects.get(manifests.blob_key(file.sha256))
        for file in manifest.files
        if file.name in tools.TEMPLATE_FILES and file.size <= manifests.TEMPLATE_BYTES_MAX
    }
    return manifest, tools.dialect_of(tools.template_of(templates))
