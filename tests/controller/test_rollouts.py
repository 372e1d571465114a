"""Rollouts by controllers that die at every point of them: each change is made once, and the route is never older than it."""

import asyncio
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from shared import deployments, records, registry, rollouts, subjects
from shared.errors import DeploymentActive, DeploymentState, NoReplicaForPin, VersionNotFound
from shared.records import Route, Version, VersionLimits
from shared.rollouts import Deployment, Gates, NewDeployment, Step
from shared.router import Router
from shared.tally import IngressLease, Tally, VersionTally
from shared.tally import encode as encode_lease

from .test_takeover import World, run_world, until

__all__ = ["run_world"]

FORWARD = (
    "to_warming",
    "written_warming",
    "to_stepping",
    "written_stepping",
    "route_written",
    "to_baking",
    "written_baking",
    "to_promoted",
    "written_promoted",
)
BACK = ("to_rolling_back", "written_rolling_back", "route_written", "to_rolled_back", "written_rolled_back")
STEPS = tuple(Step(pct=pct, soak_seconds=0.2, requests_min=0) for pct in (1, 25, 100))


class Rollouts(World):
    """A model with two versions, and everything that its route and its deployments ever said."""

    def begin(self) -> None:
        self.routes: list[Route] = []
        self.told: list[Deployment] = []

    @classmethod
    async def of(cls, world: World) -> "Rollouts":
        self = cls(world.bus, world.settings, world.log)
        self.leases, self.controllers = world.leases, world.controllers
        self.begin()
        for version in ("v1", "v2"):
            limits = VersionLimits(min_replicas=int(version == "v1"))
            await registry.register(
                self.bus,
                Version(model="chat", version=version, state="registered", source="sim:zero", limits=limits, created=1),
            )
        await self.bus.watch(subjects.ROUTES_BUCKET, self._on_route)
        await self.bus.watch(subjects.DEPLOYMENTS_BUCKET, self._on_deployment)
        return self

    def _on_route(self, key: str, value: bytes | None) -> None:
        if value is not None:
            self.routes.append(records.route_at(key, value))

    def _on_deployment(self, key: str, value: bytes | None) -> None:
        if value is not None:
            self.told.append(rollouts.deployment_at(key, value))

    @property
    def route(self) -> Route:
        return self.routes[-1]

    @property
    def last(self) -> Deployment:
        return self.told[-1]

    def weights(self) -> list[int]:
        """What the new version had of the traffic, one change after the other."""
        found: list[int] = []
        for route in self.routes:
            share = sum(weight.basis_points for weight in route.weights if weight.version == "v2")
            if not found or found[-1] != share:
                found.append(share)
        return found

    async def deploy(self, **more: Any) -> Deployment:
        return await deployments.create(
            self.bus, NewDeployment(model="chat", version="v2", **({"steps": STEPS, "bake_seconds": 0.2} | more))
        )

    async def count(self, version: str, tally: Tally, deployment: str) -> None:
        """Let an ingress tell that it counted so much of a version."""
        lease = IngressLease(
            ingress=version,
            pid=0,
            host="",
            started=0.0,
            tallies=[VersionTally(model="chat", version=version, deployment=deployment, tally=tally)],
        )
        await self.bus.kv_put(subjects.INGRESSES_BUCKET, subjects.key(version), encode_lease(lease))

    def check(self) -> None:
        """What must hold of everything that was ever said."""
        serials = [each.serial for each in self.told]
        assert serials == sorted(set(serials)), "a change was made twice, or taken back"
        assert [route.serial for route in self.routes] == sorted(route.serial for route in self.routes)
        assert all(sum(weight.basis_points for weight in route.weights) == 10_000 for route in self.routes)
        states = [event.state for event in self.last.events]
        assert states.count("promoted") <= 1


async def end(world: World) -> None:
    controller = world.controllers[-1]
    controller.process.terminate()
    assert await asyncio.to_thread(controller.process.wait, 20) == 0


async def dying(world: Rollouts, points: tuple[str, ...], then: Callable[[], bool]) -> None:
    """A controller after the other, each of which dies at the next point; the last one gets there."""
    for fault_point in points:
        controller = world.controller(fault_point)
        assert await asyncio.to_thread(controller.process.wait, 20) == -signal.SIGKILL, world.log.read_text()
    world.controller()
    await until(then)


def test_controllers_that_die_at_every_point_promote_once(run_world: Any) -> None:
    async def work(world: World) -> None:
        seen = await Rollouts.of(world)
        first = seen.controller()
        await until(lambda: ("chat", "active") in seen.states())
        first.process.kill()
        await asyncio.to_thread(first.process.wait)
        deployment = await seen.deploy()
        await dying(seen, FORWARD, lambda: seen.route.aliases == {"stable": "v2"})
        assert seen.weights() == [0, 100, 2500, 10_000]
        assert seen.last.state == "promoted"
        assert [event.state for event in seen.last.events if event.state != "stepping"] == [
            "pending",
            "warming",
            "baking",
            "promoted",
        ]
        assert not seen.route.rolling
        assert seen.route.deployment == deployment.id
        seen.check()
        await end(seen)

    run_world(work)


def test_controllers_that_die_at_every_point_of_a_rollback_take_it_back_once(run_world: Any) -> None:
    async def work(world: World) -> None:
        seen = await Rollouts.of(world)
        slow = (Step(pct=50, soak_seconds=600), Step(pct=100))
        deployment = await seen.deploy(steps=slow)
        first = seen.controller()
        await until(lambda: seen.weights()[-1] == 5000)
        first.process.kill()
        await asyncio.to_thread(first.process.wait)
        await seen.count("v1", Tally(ended=200), deployment.id)
        await seen.count("v2", Tally(ended=200, errors=60), deployment.id)
        await dying(seen, BACK, lambda: seen.last.state == "rolled_back" and not seen.route.rolling)
        assert seen.weights() == [0, 5000, 0]
        assert seen.route.aliases == {"stable": "v1"}
        assert "error_rate" in seen.route.withdrawn["v2"]
        (rolled,) = [event for event in seen.last.events if event.state == "rolling_back"]
        assert {finding.gate for finding in rolled.evidence if finding.breached} == {"error_rate"}
        seen.check()
        await end(seen)

    run_world(work, lease_ttl_s=30.0)  # the ingresses of this test tell once


def test_a_controller_that_was_stopped_does_not_bring_back_what_it_knew(run_world: Any) -> None:
    async def work(world: World) -> None:
        seen = await Rollouts.of(world)
        first = seen.controller()
        deployment = await seen.deploy(steps=(Step(pct=50, soak_seconds=600), Step(pct=100)))
        await until(lambda: seen.weights()[-1] == 5000)
        first.process.send_signal(signal.SIGSTOP)
        seen.controller()
        await until(lambda: seen.log.read_text().count("leads controller, term") == 2)
        await deployments.command(seen.bus, deployment.id, "rollback")
        await until(lambda: seen.last.state == "rolled_back" and not seen.route.rolling)
        first.process.send_signal(signal.SIGCONT)
        await until(lambda: "leads controller no more" in seen.log.read_text())
        await end(seen)
        await until(lambda: seen.log.read_text().count("leads controller, term") == 3)
        assert seen.weights() == [0, 5000, 0]
        seen.check()
        first.process.terminate()
        assert await asyncio.to_thread(first.process.wait, 20) == 0

    run_world(work, leader_ttl_s=3.0)


def test_a_rollback_by_hand_needs_no_controller(run_world: Any) -> None:
    async def work(world: World) -> None:
        seen = await Rollouts.of(world)
        first = seen.controller()
        deployment = await seen.deploy(steps=(Step(pct=50, soak_seconds=600), Step(pct=100)))
        await until(lambda: seen.weights()[-1] == 5000)
        first.process.kill()
        await asyncio.to_thread(first.process.wait)
        after = await deployments.command(seen.bus, deployment.id, "rollback", "it answers in French")
        assert after.state == "rolling_back"
        route = await registry.find_route(seen.bus, "chat")
        assert route is not None
        router = Router()
        router.put_route(route)
        for version in ("v1", "v2"):
            record = await registry.find_version(seen.bus, "chat", version)
            assert record is not None
            router.put_version(record)
        with pytest.raises(NoReplicaForPin, match="it answers in French"):
            router.resolve("chat@v2", None, "")
        seen.check()

    run_world(work)


def test_commands_and_what_they_refuse(run_world: Any) -> None:
    async def work(world: World) -> None:
        seen = await Rollouts.of(world)
        bus = seen.bus
        seen.controller()
        with pytest.raises(VersionNotFound):
            await deployments.create(bus, NewDeployment(model="chat", version="v9"))
        deployment = await seen.deploy(steps=(Step(pct=10, soak_seconds=600), Step(pct=100)))
        with pytest.raises(DeploymentActive):
            await seen.deploy()
        await until(lambda: seen.weights()[-1] == 1000)
        with pytest.raises(DeploymentActive):
            await registry.set_alias(bus, "chat", "stable", "v2")
        paused = await deployments.command(bus, deployment.id, "pause")
        assert (paused.state, paused.basis_points) == ("paused", 1000)
        assert (await deployments.command(bus, deployment.id, "resume")).state == "stepping"
        with pytest.raises(DeploymentState):
            await deployments.command(bus, deployment.id, "resume")
        await deployments.command(bus, deployment.id, "promote")
        await until(lambda: seen.last.state == "promoted" and not seen.route.rolling)
        assert seen.weights() == [0, 1000, 10_000]
        with pytest.raises(DeploymentState):
            await deployments.command(bus, deployment.id, "pause")
        await deployments.command(bus, deployment.id, "rollback")
        await until(lambda: seen.last.state == "rolled_back" and not seen.route.rolling)
        assert seen.route.aliases == {"stable": "v1"}
        again = await seen.deploy(strategy="immediate", steps=None)
        await until(lambda: seen.last.id == again.id and seen.last.state == "promoted" and not seen.route.rolling)
        assert seen.weights() == [0, 1000, 10_000, 0, 10_000]
        assert not seen.route.withdrawn
        await end(seen)

    run_world(work)


def test_a_version_that_ends_its_workers_is_taken_back_before_it_has_traffic(run_world: Any) -> None:
    async def work(world: World) -> None:
        seen = await Rollouts.of(world)
        seen.controller()
        deployment = await seen.deploy(
            gates=Gates(crashes_max=0), steps=(Step(pct=50, soak_seconds=600), Step(pct=100))
        )
        await until(lambda: seen.weights()[-1] == 5000)
        (lease,) = [each for each in seen.leases.values() if each.version == "v2"]
        os.kill(lease.pid, signal.SIGKILL)
        await until(lambda: seen.last.state == "rolled_back")
        (event,) = [each for each in seen.last.events if each.state == "rolling_back"]
        assert "ended by themselves" in event.reason
        assert deployment.id in seen.route.withdrawn["v2"]
        await end(seen)

    run_world(work)
