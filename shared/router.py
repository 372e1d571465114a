"""Which version of a model a request goes to. Pure: records in, a version or an error out."""

import hashlib

import msgspec

from shared.errors import (
    ModelNotFound,
    NoCapacity,
    NoReplicaForPin,
    Unavailable,
    VersionConflict,
    VersionFailed,
    VersionNotFound,
    VersionRetired,
)
from shared.records import STABLE, Route, Version, Weight

BASIS_POINTS = 10_000
REGISTERING_RETRY_S = 1.0


class ModelEntry(msgspec.Struct):
    """A model as `GET /v1/models` lists it."""

    id: str
    created: int  # unix seconds
    object: str = "model"
    owned_by: str = "headrace"


class VersionEntry(msgspec.Struct, omit_defaults=True):
    """A version as `GET /v1/models/{model}/versions` lists it."""

    version: str
    traffic_pct: float
    state: str
    reason: str = ""  # of a failed one
    manifest_sha256: str = ""  # what it is: its files and the engine settings it was pushed with
    withdrawn: str = ""  # why nothing new goes to it: it was rolled back


class Resolved(msgspec.Struct, frozen=True):
    """The version that a request goes to."""

    version: Version
    by_weights: bool  # the route chose it, so that another may take its place before the first token; else it was named


class Router:
    """The routes and versions that are known now. Fed by a watch, asked once per request."""

    def __init__(self) -> None:
        self._versions: dict[str, dict[str, Version]] = {}
        self._routes: dict[str, Route] = {}

    def put_version(self, version: Version) -> None:
        self._versions.setdefault(version.model, {})[version.version] = version

    def drop_version(self, model: str, version: str) -> None:
        known = self._versions.get(model, {})
        known.pop(version, None)
        if not known:
            self._versions.pop(model, None)

    def route(self, model: str) -> Route | None:
        """How a model's names resolve now."""
        return self._routes.get(model)

    def put_route(self, route: Route) -> None:
        self._routes[route.model] = route

    def drop_route(self, model: str) -> None:
        self._routes.pop(model, None)

    def resolve(self, reference: str, pin: str | None, sticky_key: str) -> Resolved:
        """The version that `reference` (`model`, `model@version`, `model@alias`) and the pinned version name.

        A plain name follows the route's weights: the same `sticky_key` keeps its version while weights only grow.
        Raises ModelNotFound, VersionNotFound, VersionRetired, VersionConflict, VersionFailed, NoReplicaForPin, NoCapacity,
        Unavailable.
        """
        model, at, suffix = reference.partition("@")
        if model not in self._versions and model not in self._routes:
            raise ModelNotFound(f"the model `{model}` does not exist", param="model")
        named = self._named(model, suffix) if at else None
        if pin is not None:
            pinned = self._version(model, pin)
            if named is not None and named is not pinned:
                raise VersionConflict(
                    f"X-Version-Pin is `{pin}`, but `{reference}` is version `{named.version}`", param="model"
                )
            named = pinned
        if named is None:
            return Resolved(_servable(self._weighted(model, sticky_key)), True)
        route = self._routes.get(model)
        if route is not None and named.version in route.withdrawn and named.state != "retired":
            raise withdrawn(model, named.version, route.withdrawn[named.version])
        return Resolved(_servable(named), False)

    def check_servable(self, model: str, version: str) -> None:
        """Raises what `resolve` would for a version that requests have been published to."""
        _servable(self._version(model, version))

    def models(self) -> list[ModelEntry]:
        """Every model with a version that is not retired, by name; replicas play no part."""
        entries = []
        for model, versions in sorted(self._versions.items()):
            created = [version.created for version in versions.values() if version.state != "retired"]
            if created:
                entries.append(ModelEntry(model, min(created)))
        return entries

    def model(self, reference: str) -> ModelEntry:
        """The entry of one model, named as asked for. Raises ModelNotFound or VersionNotFound."""
        model, at, suffix = reference.partition("@")
        for entry in self.models():
            if entry.id == model:
                created = self._named(model, suffix).created if at else entry.created
                return ModelEntry(reference, created)
        raise ModelNotFound(f"the model `{model}` does not exist", param="model")

    def versions(self, model: str) -> list[VersionEntry]:
        """The versions of a model, oldest first. Raises ModelNotFound."""
        known = self._versions.get(model)
        if known is None:
            raise ModelNotFound(f"the model `{model}` does not exist", param="model")
        route = self._routes.get(model)
        points = {weight.version: weight.basis_points for weight in route.weights} if route else {}
        return [
            VersionEntry(
                version.version,
                points.get(version.version, 0) / 100,
                version.state,
                version.reason,
                version.manifest_sha256,
                route.withdrawn.get(version.version, "") if route else "",
            )
            for version in sorted(known.values(), key=lambda version: (version.created, version.version))
        ]

    def _named(self, model: str, suffix: str) -> Version:
        """Version `suffix`, else what the alias `suffix` stands for."""
        route = self._routes.get(model)
        if suffix not in self._versions.get(model, {}) and route is not None and suffix in route.aliases:
            return self._routed(model, route.aliases[suffix])
        return self._version(model, suffix)

    def _version(self, model: str, name: str) -> Version:
        version = self._versions.get(model, {}).get(name)
        if version is None:
            raise VersionNotFound(f"the model `{model}` has no version or alias `{name}`", param="model")
        return version

    def _weighted(self, model: str, sticky_key: str) -> Version:
        route = self._routes.get(model)
        weights = _live(route) if route else []
        if not weights:
            if all(version.state == "retired" for version in self._versions.get(model, {}).values()):
                raise VersionRetired(f"all versions of `{model}` were taken out of service", param="model")
            raise VersionNotFound(
                f"no version of `{model}` takes its traffic; name one as `{model}@version`", param="model"
            )
        return self._routed(model, choose(model, self._working(model, weights), sticky_key))

    def _working(self, model: str, weights: list[Weight]) -> list[Weight]:
        """Without what failed and is about to be rolled back, as long as there is something else."""
        versions, route = self._versions.get(model, {}), self._routes[model]
        if not route.rolling:
            return weights
        failed = {name for name, version in versions.items() if version.state == "failed"} - {route.aliases.get(STABLE)}
        return [each for each in weights if each.version not in failed] or weights

    def _routed(self, model: str, name: str) -> Version:
        version = self._versions.get(model, {}).get(name)
        if version is None:  # the route's record came before the version's
            raise Unavailable(
                f"version `{name}` of `{model}` is still being registered", retry_after=REGISTERING_RETRY_S
            )
        return version


def withdrawn(model: str, version: str, reason: str) -> NoReplicaForPin:
    """What a request is told that only a version could serve that was rolled back."""
    return NoReplicaForPin(f"{model}@{version} is out of service: {reason}", param="model")


def destination(route: Route, rid: str) -> str | None:
    """The version that a request moves to; None: there is none. The same for everybody who may move it."""
    weights = _live(route)
    return choose(route.model, weights, rid) if weights else None


def _live(route: Route) -> list[Weight]:
    return [each for each in route.weights if each.basis_points > 0 and each.version not in route.withdrawn]


def choose(model: str, weights: list[Weight], sticky_key: str) -> str:
    """The version whose share of the ring the key falls into. `weights` keep their order as they change."""
    if len(weights) == 1:
        return weights[0].version
    digest = hashlib.blake2b(f"{model}\0{sticky_key}".encode(), digest_size=8).digest()
    point = int.from_bytes(digest) * sum(weight.basis_points for weight in weights) >> 64
    for weight in weights:
        point -= weight.basis_points
        if point < 0:
            return weight.version
    raise AssertionError("a point lies within the sum of the weights")


def _servable(version: Version) -> Version:
    name = f"{version.model}@{version.version}"
    if version.state == "retired":
        raise VersionRetired(f"{name} was taken out of service", param="model")
    if version.state == "failed":
        raise VersionFailed(f"{name} cannot be served: {version.reason}", param="model")
    if version.state != "available":
        raise Unavailable(f"{name} is still being registered", param="model", retry_after=REGISTERING_RETRY_S)
    if version.limits.max_replicas == 0:
        raise NoCapacity(f"{name} has max_replicas 0", param="model")
    return version
