"""Creating and commanding deployments, and writing the routes that follow: for the CLI, the ingress and the controller."""

import contextlib
import time
from typing import TYPE_CHECKING

from shared import records, registry, rollouts, subjects, webhook_secrets
from shared.errors import (
    DeploymentActive,
    DeploymentNotFound,
    DeploymentState,
    Internal,
    ModelNotFound,
    Unavailable,
    VersionFailed,
    VersionNotFound,
    VersionRetired,
)
from shared.records import ALL_TRAFFIC
from shared.rollouts import Command, Deployment, NewDeployment

if TYPE_CHECKING:
    from shared.bus import Bus

WRITE_TRIES_MAX = 10


async def create(bus: "Bus", asked: NewDeployment, tenant: str = subjects.LOCAL_TENANT) -> Deployment:
    """Begin a deployment for a tenant; the controller goes on with it.

    Raises BadRequest, ModelNotFound, VersionNotFound, VersionRetired, VersionFailed, DeploymentActive (the model has one that
    goes on) or Unavailable.
    """
    asked = rollouts.checked(asked)
    if asked.webhook is not None:
        await webhook_secrets.check(bus, tenant, asked.webhook)
    registry.check_names(asked.model, asked.version)
    record = await registry.find_version(bus, asked.model, asked.version)
    route = await registry.find_route(bus, asked.model)
    if route is None:
        raise ModelNotFound(f"there is no model {asked.model}", param="model")
    if record is None:
        raise VersionNotFound(f"{asked.model} has no version {asked.version}", param="version")
    if record.state == "retired":
        raise VersionRetired(f"{asked.model}@{asked.version} was removed", param="version")
    if record.state == "failed":
        raise VersionFailed(f"{asked.model}@{asked.version} cannot be served: {record.reason}; push it again to try")
    if record.limits.max_replicas == 0:
        raise VersionFailed(
            f"{asked.model}@{asked.version} has max_replicas 0: no worker can serve it", param="version"
        )
    for _ in range(WRITE_TRIES_MAX):
        known = await list_deployments(bus)
        for each in known:
            if each.model == asked.model and not each.ended:
                raise DeploymentActive(f"{each.id} of {each.model}@{each.version} is {each.state}", param="model")
        route = await registry.find_route(bus, asked.model)
        if route is None or len(route.weights) != 1:
            raise ModelNotFound(f"{asked.model} has no version that has all its traffic", param="model")
        id_ = rollouts.id_of(await _last_number(bus) + 1)
        wanted = rollouts.plan_of(asked, id_, route.weights[0].version, time.time(), tenant)
        key = subjects.key(id_)
        if await bus.kv_create(subjects.DEPLOYMENTS_BUCKET, key, rollouts.encode(wanted)) is not None:
            return wanted
    raise Unavailable("other deployments were created with every try to create this one")


async def command(bus: "Bus", id_: str, what: Command, why: str = "by hand") -> Deployment:
    """Roll back, pause, resume or promote; what it is now. Of a rollback the route is written at once.

    A promoted deployment can be rolled back while its version has the traffic. Raises DeploymentNotFound, DeploymentState
    (it cannot be done in its state) or Unavailable.
    """
    for _ in range(WRITE_TRIES_MAX):
        found = await find(bus, id_)
        if found is None:
            raise DeploymentNotFound(f"there is no deployment {id_}", param="deployment_id")
        deployment, revision = found
        if what == "rollback" and deployment.state == "promoted":
            await _check_last(bus, deployment)
        changed = rollouts.commanded(deployment, what, why, time.time())
        if changed is not deployment and not await write(bus, changed, revision):
            continue
        if what == "rollback":
            await apply_route(bus, changed)
        return changed
    raise Unavailable(f"deployment {id_} changed with every try to write it")


async def find(bus: "Bus", id_: str) -> tuple[Deployment, int] | None:
    """A deployment and its revision."""
    try:
        key = subjects.key(id_)
    except ValueError:
        return None
    found = await bus.kv_get(subjects.DEPLOYMENTS_BUCKET, key)
    return (rollouts.deployment_at(key, found[0]), found[1]) if found else None


async def list_deployments(bus: "Bus", model: str | None = None) -> list[Deployment]:
    """All deployments that are kept, of one model or of all, the oldest first."""
    found = await registry.read_bucket(bus, subjects.DEPLOYMENTS_BUCKET, rollouts.DEPLOYMENTS)
    chosen = [each for each in found if model in (None, each.model)]
    return sorted(chosen, key=lambda each: rollouts.number_of(each.id))


async def _last_number(bus: "Bus") -> int:
    """Of the last deployment that there was: those that were deleted, or cannot be read, keep their numbers."""
    numbers = [0]

    def on_change(key: str, value: bytes | None) -> None:
        with contextlib.suppress(Internal, ValueError):  # somebody else's key
            numbers.append(rollouts.number_of(subjects.names_of(key)[0]))

    watch = await bus.watch(subjects.DEPLOYMENTS_BUCKET, on_change)
    await watch.close()
    return max(numbers)


async def write(bus: "Bus", deployment: Deployment, revision: int) -> bool:
    """Write a change; False when somebody else was faster."""
    key = subjects.key(deployment.id)
    written = await bus.kv_update(subjects.DEPLOYMENTS_BUCKET, key, rollouts.encode(deployment), revision)
    return written is not None


async def apply_route(bus: "Bus", deployment: Deployment) -> None:
    """Make the model's route what the deployment wants, unless it is of a later one. Raises Unavailable."""
    key = subjects.key(deployment.model)
    for _ in range(WRITE_TRIES_MAX):
        found = await bus.kv_get(subjects.ROUTES_BUCKET, key)
        if found is None:
            return  # the model is gone
        route = records.decode_route(found[0])
        if not rollouts.is_newer(deployment, route):
            return
        wanted = rollouts.route_of(deployment, route)
        assert sum(weight.basis_points for weight in wanted.weights) == ALL_TRAFFIC
        if await bus.kv_update(subjects.ROUTES_BUCKET, key, records.encode(wanted), found[1]) is not None:
            return
    raise Unavailable(f"the route of {deployment.model} changed with every try to write it")


async def _check_last(bus: "Bus", deployment: Deployment) -> None:
    route = await registry.find_route(bus, deployment.model)
    moved = route is not None and [weight.version for weight in route.weights] != [deployment.version]
    number = rollouts.number_of(deployment.id)
    later = [each for each in await list_deployments(bus, deployment.model) if rollouts.number_of(each.id) > number]
    if route is None or moved or route.deployment != deployment.id or later:  # whose route may not be written yet
        raise DeploymentState(
            f"{deployment.id} was promoted, and others came after it: "
            f"deploy {deployment.model}@{deployment.stable} with the strategy `immediate`"
        )
    old = await registry.find_version(bus, deployment.model, deployment.stable)
    if old is None or old.state != "available" or deployment.stable in route.withdrawn:
        state = "deleted" if old is None else "withdrawn" if deployment.stable in route.withdrawn else old.state
        raise DeploymentState(
            f"{deployment.id} cannot be rolled back: {deployment.model}@{deployment.stable} is {state}"
        )
