"""Rollouts over HTTP, on a real nats-server: what is created, shown and commanded."""

import secrets
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from shared import deployments, records, registry, rollouts, subjects
from shared.bus import Bus
from shared.errors import BadRequest
from shared.records import ALL_TRAFFIC, Version, VersionLimits, Weight
from shared.rollouts import Finding, Gates, NewDeployment, Progress, Step, TpotGate, VersionProgress, noted
from shared.router import Router
from shared.settings import Settings

from .application import refusal, run


@pytest.fixture
def settings(nats_url: str) -> Settings:
    return Settings(nats_url=nats_url)


@pytest.fixture
def model() -> str:
    return f"org/r-{secrets.token_hex(4)}"


async def push(bus: Bus, model: str, version: str, **fields: Any) -> None:
    """Register a version, and let it be available."""
    await registry.register(bus, Version(model=model, version=version, state="registered", source="sim:zero"))
    key = subjects.key(model, version)
    found = await bus.kv_get(subjects.MODELS_BUCKET, key)
    assert found is not None
    record = replace(records.decode_version(found[0]), **({"state": "available"} | fields))
    await bus.kv_put(subjects.MODELS_BUCKET, key, records.encode(record))


async def move(bus: Bus, id_: str, *states: str, **fields: Any) -> None:
    """What the controller does: another state, and the route that follows."""
    for state in states:
        found = await deployments.find(bus, id_)
        assert found is not None
        changed = noted(found[0], state, f"test: {state}", 2e9, **fields)  # type: ignore[arg-type]
        assert await deployments.write(bus, changed, found[1])
        await deployments.apply_route(bus, changed)


def test_a_deployment_is_created_and_shown_with_its_history(settings: Settings, model: str) -> None:
    async def work(client: httpx.AsyncClient, bus: Bus) -> None:
        await push(bus, model, "v1")
        await push(bus, model, "v2")
        steps = [{"pct": 5, "soak_seconds": 10, "requests_min": 20}, {"pct": 100}]
        body = {"model": model, "version": "v2", "strategy": "canary", "steps": steps, "bake_seconds": 3}
        made = await client.post("/v1/deployments", json=body | {"gates": {"error_rate": {"max": 0.02}}})
        id_ = made.json()["deployment_id"]
        assert (made.status_code, made.headers["location"]) == (202, f"/v1/deployments/{id_}")
        entry = {"model": model, "version": "v2", "stable": "v1", "state": "pending", "traffic_pct": 0.0}
        entry |= {"step": 0, "steps_total": 2, "paused_in": None, "reason": "created"}
        assert made.json() | entry == made.json()

        shown = (await client.get(f"/v1/deployments/{id_}")).json()
        assert shown | made.json() == shown
        assert shown["steps"] == [steps[0], {"pct": 100.0, "soak_seconds": 60.0, "requests_min": 100}]
        assert shown["gates"]["error_rate"] == {"difference_max": 0.01, "max": 0.02}
        assert (shown["bake_seconds"], shown["progress"]) == (3.0, None)
        assert [(each["state"], each["pct"], each["reason"]) for each in shown["events"]] == [("pending", 0, "created")]

        finding = Finding(gate="error_rate", breached=True, canary=0.3, limit=0.02, samples=40, window="step")
        await move(bus, id_, "stepping", step=0)
        one = VersionProgress(active=1, needed=1, ended=7)
        told = Progress(deployment=id_, at=2e9, waits_for="rain", canary=one, stable=one, findings=[finding])
        await bus.kv_put(subjects.ROLLOUTS_BUCKET, subjects.key(id_), rollouts.encode(told))
        shown = (await client.get(f"/v1/deployments/{id_}")).json()
        assert (shown["state"], shown["step"], shown["traffic_pct"]) == ("stepping", 1, 5.0)
        assert shown["progress"]["waits_for"] == "rain"
        assert shown["progress"]["findings"][0]["canary"] == 0.3

        await move(bus, id_, "rolling_back", "rolled_back", evidence=[finding])
        shown = (await client.get(f"/v1/deployments/{id_}")).json()
        assert [each["state"] for each in shown["events"]] == ["pending", "stepping", "rolling_back", "rolled_back"]
        assert shown["events"][2]["evidence"] == [
            {"gate": "error_rate", "breached": True, "canary": 0.3, "limit": 0.02, "samples": 40, "window": "step"}
        ]
        assert shown["progress"] is None  # it has ended, whatever was said of it

    run(settings, work)


def test_the_newest_comes_first_and_of_one_model_if_asked(settings: Settings, model: str) -> None:
    async def work(client: httpx.AsyncClient, bus: Bus) -> None:
        other, made = f"{model}-other", []
        for name in (model, other):
            await push(bus, name, "v1")
            await push(bus, name, "v2")
        for name in (model, other, model):
            answer = await client.post("/v1/deployments", json={"model": name, "version": "v2"})
            assert answer.status_code == 202, answer.text
            made.append(answer.json()["deployment_id"])
            await move(bus, made[-1], "rolling_back", "rolled_back")
        all_ = (await client.get("/v1/deployments")).json()
        assert [each["deployment_id"] for each in all_ if each["deployment_id"] in made] == made[::-1]
        assert all("events" not in each for each in all_)
        of_one = (await client.get("/v1/deployments", params={"model": model})).json()
        assert [each["deployment_id"] for each in of_one] == [made[2], made[0]]
        assert (await client.get("/v1/deployments", params={"model": "nobody"})).json() == []

    run(settings, work)


def test_what_cannot_be_rolled_out_is_refused_with_its_code(settings: Settings, model: str) -> None:
    async def work(client: httpx.AsyncClient, bus: Bus) -> None:
        async def refused(**body: Any) -> tuple[int, Any, Any]:
            return refusal(await client.post("/v1/deployments", json={"model": model, "version": "v2"} | body))

        assert await refused() == (404, "model_not_found", "model")
        await push(bus, model, "v1")
        assert await refused() == (404, "version_not_found", "version")
        await push(bus, model, "v2")
        for body, param in (
            ({"strategy": "hope"}, "strategy"),
            ({"steps": [{"pct": 0}]}, "steps[0].pct"),
            ({"steps": [{"pct": 5}]}, "steps"),
            ({"gates": {"error_rate": {"ratio_max": 2}}}, "gates.error_rate"),
            ({"version": "v1"}, "version"),
            ({"version": ""}, "version"),
            ({"version": "v" * 5000}, "version"),
            ({"model": ""}, "model"),
            ({"gates": {"ttft_p99": {"ratio_max": 1e308}}}, "gates.ttft_p99.ratio_max"),
        ):
            assert await refused(**body) == (400, "invalid_request", param), body
        assert refusal(await client.post("/v1/deployments", content=b"{")) == (400, "invalid_request", None)
        await push(bus, model, "v3", state="failed", reason="no config.json")
        assert (await refused(version="v3"))[:2] == (503, "version_failed")
        await push(bus, model, "v4", limits=VersionLimits(max_replicas=0))
        assert (await refused(version="v4"))[:2] == (503, "version_failed")
        made = await client.post("/v1/deployments", json={"model": model, "version": "v2"})
        assert await refused() == (409, "deployment_active", "model")
        for path in ("d-999999", "nonsense", "d-", "d-1x"):
            gone = (404, "deployment_not_found", "deployment_id")
            assert refusal(await client.get(f"/v1/deployments/{path}")) == gone
            assert refusal(await client.post(f"/v1/deployments/{path}/pause")) == gone
        path = f"/v1/deployments/{made.json()['deployment_id']}"
        assert refusal(await client.post(f"{path}/resume"))[:2] == (409, "deployment_state")
        assert (await client.post(f"{path}/explode")).status_code == 404
        assert (await client.delete(path)).status_code == 405

    run(settings, work)


def test_a_deployment_made_in_python_has_the_same_bounds(settings: Settings, model: str) -> None:
    async def work(client: httpx.AsyncClient, bus: Bus) -> None:
        await push(bus, model, "v1")
        await push(bus, model, "v2")
        plain = NewDeployment(model=model, version="v2")
        tpot = Gates(tpot_p99=TpotGate(ratio_max=float("inf")))
        for asked, param in (
            (replace(plain, steps=(Step(pct=100, soak_seconds=1e9),)), "steps[0].soak_seconds"),
            (replace(plain, bake_seconds=1e12), "bake_seconds"),
            (replace(plain, gates=tpot), "gates.tpot_p99.ratio_max"),
        ):
            with pytest.raises(BadRequest) as refused:
                await deployments.create(bus, asked)
            assert refused.value.param == param
        assert await deployments.list_deployments(bus, model) == []

    run(settings, work)


def test_a_number_is_given_once(settings: Settings, model: str) -> None:
    async def work(client: httpx.AsyncClient, bus: Bus) -> None:
        await push(bus, model, "v1")
        await push(bus, model, "v2")
        first = await deployments.create(bus, NewDeployment(model=model, version="v2"))
        await bus.kv_delete(subjects.DEPLOYMENTS_BUCKET, subjects.key(first.id))
        second = await deployments.create(bus, NewDeployment(model=model, version="v2"))
        assert rollouts.number_of(second.id) > rollouts.number_of(first.id)
        await bus.kv_put(subjects.DEPLOYMENTS_BUCKET, subjects.key(second.id), b"what a newer Headrace writes")
        third = await deployments.create(bus, NewDeployment(model=model, version="v2"))
        assert rollouts.number_of(third.id) > rollouts.number_of(second.id)
        await bus.kv_delete(subjects.DEPLOYMENTS_BUCKET, subjects.key(second.id))

    run(settings, work)


def test_what_was_promoted_stays_once_the_next_one_is_created(settings: Settings, model: str) -> None:
    """Before any controller has written the route of the next one, too."""

    async def work(client: httpx.AsyncClient, bus: Bus) -> None:
        for version in ("v1", "v2", "v3"):
            await push(bus, model, version)
        made = await deployments.create(bus, NewDeployment(model=model, version="v2", strategy="immediate"))
        await move(bus, made.id, "promoted")
        found = await deployments.find(bus, made.id)
        assert found is not None
        await deployments.apply_route(bus, found[0])
        later = await client.post("/v1/deployments", json={"model": model, "version": "v3"})
        assert (later.status_code, later.json()["stable"]) == (202, "v2")
        answer = await client.post(f"/v1/deployments/{made.id}/rollback")
        assert refusal(answer)[:2] == (409, "deployment_state")

    run(settings, work)


def test_a_deployment_does_what_it_is_told(settings: Settings, model: str) -> None:
    async def work(client: httpx.AsyncClient, bus: Bus) -> None:
        await push(bus, model, "v1")
        await push(bus, model, "v2")
        made = await client.post("/v1/deployments", json={"model": model, "version": "v2"})
        id_ = made.json()["deployment_id"]

        async def told(command: str) -> dict[str, Any]:
            answer = await client.post(f"/v1/deployments/{id_}/{command}")
            assert answer.status_code == 200, answer.text
            shown: dict[str, Any] = answer.json()
            assert shown == (await client.get(f"/v1/deployments/{id_}")).json()
            return shown

        await move(bus, id_, "stepping", step=1)
        paused = await told("pause")
        assert (paused["state"], paused["paused_in"], paused["traffic_pct"]) == ("paused", "stepping", 5.0)
        assert (await told("resume"))["state"] == "stepping"
        assert (await told("promote"))["events"][-1]["reason"] == "to be promoted by hand"
        route = await registry.find_route(bus, model)
        assert route is not None
        assert route.weights == [Weight("v1", 9500), Weight("v2", 500)]

        assert (await told("rollback"))["state"] == "rolling_back"
        route = await registry.find_route(bus, model)  # before any controller has heard of it
        assert route is not None
        assert route.weights == [Weight("v1", ALL_TRAFFIC)]
        await move(bus, id_, "rolled_back")
        again = await client.post(f"/v1/deployments/{id_}/promote")
        assert refusal(again)[:2] == (409, "deployment_state")

    run(settings, work)


def test_a_withdrawn_version_is_listed_with_the_reason() -> None:
    router = Router()
    for version in ("v1", "v2"):
        router.put_version(Version(model="m", version=version, state="available", source="sim:zero"))
    weights = [Weight("v1", ALL_TRAFFIC)]
    router.put_route(records.Route(model="m", aliases={}, weights=weights, withdrawn={"v2": "d-1 was rolled back"}))
    shown = {entry.version: (entry.traffic_pct, entry.withdrawn) for entry in router.versions("m")}
    assert shown == {"v1": (100.0, ""), "v2": (0.0, "d-1 was rolled back")}


def test_the_document_describes_the_routes(settings: Settings) -> None:
    async def work(client: httpx.AsyncClient, bus: Bus) -> None:
        document = (await client.get("/openapi.json")).json()
        made = document["paths"]["/v1/deployments"]["post"]
        answer = made["responses"]["202"]["content"]["application/json"]["schema"]
        assert answer == {"$ref": "#/components/schemas/DeploymentEntry"}
        assert made["requestBody"]["content"]["application/json"]["schema"] == {
            "$ref": "#/components/schemas/NewDeployment"
        }
        assert set(made["responses"]) == {"202", "default"}
        listed = document["paths"]["/v1/deployments"]["get"]
        assert [parameter["name"] for parameter in listed["parameters"]] == ["model"]
        for command in ("rollback", "pause", "resume", "promote"):
            assert "post" in document["paths"][f"/v1/deployments/{{deployment_id}}/{command}"]
        for name in (
            "Step",
            "Gates",
            "RateGate",
            "TtftGate",
            "TpotGate",
            "Event",
            "Finding",
            "Progress",
            "DeploymentDetail",
        ):
            assert name in document["components"]["schemas"]

    run(settings, work)
