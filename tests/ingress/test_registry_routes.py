"""Registering versions and moving aliases over HTTP, on a real nats-server and a real SeaweedFS."""

import json
import secrets
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from headrace.push import push
from shared import blobs, encoders, manifests, registry
from shared.bus import Bus
from shared.encoders import Encoder
from shared.manifests import Manifest, ManifestFile
from shared.objects import ObjectStore
from shared.records import EngineSettings, VersionLimits
from shared.settings import Settings

from .application import refusal, run

CONFIG = json.dumps({"max_position_embeddings": 512}).encode()


@pytest.fixture
def settings(nats_url: str, s3_settings: Settings) -> Settings:
    return replace(s3_settings, nats_url=nats_url, s3_bucket=f"test-{secrets.token_hex(6)}")


@pytest.fixture
def model() -> str:
    return f"org/m-{secrets.token_hex(4)}"


def test_a_simulated_version_is_registered_once(settings: Settings, model: str) -> None:
    async def work(client: httpx.AsyncClient, bus: Bus) -> None:
        route = f"/v1/models/{model.replace('/', '%2F')}/versions"
        body = {"version": "v1", "source": "sim:zero", "engine": {"slots": 4}, "limits": {"max_replicas": 2}}
        made = await client.post(route, json=body)
        entry = {"version": "v1", "traffic_pct": 100.0, "state": "registered"}
        assert (made.status_code, made.json() | entry) == (201, made.json())
        found = await registry.find_version(bus, model, "v1")
        assert found is not None
        assert (found.engine, found.limits) == (EngineSettings(slots=4), VersionLimits(max_replicas=2))
        assert found.manifest_sha256 == made.json()["manifest_sha256"]
        pushed = await push(bus, ObjectStore(settings), "sim:zero", model, "v1", engine=EngineSettings(slots=4))
        assert pushed == found  # by any way it is the same version
        again = await client.post(route, json=body | {"limits": {"max_replicas": 3}})
        assert again.json() == made.json()
        other = await client.post(route, json=body | {"engine": {"slots": 5}})
        assert refusal(other) == (409, "version_exists", "version")
        assert other.headers["x-should-retry"] == "false"

    run(settings, work)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"source": "sim:zero"}, "version"),
        ({"version": "stable", "source": "sim:zero"}, "version"),
        ({"version": "a@b", "source": "sim:zero"}, "version"),
        ({"version": "v1", "source": "gs://x"}, "source"),
        ({"version": "v1", "source": "sim:zero", "manifest_sha256": "0" * 64}, "manifest_sha256"),
        ({"version": "v1", "source": "s3"}, "manifest_sha256"),
        ({"version": "v1", "source": "s3", "manifest_sha256": "0" * 64}, "manifest_sha256"),
        ({"version": "v1", "source": "sim:zero", "engine": {"colour": "red"}}, "engine"),
        ({"version": "v1", "source": "sim:zero", "limits": {"min_replicas": 2, "max_replicas": 1}}, "limits"),
        ({"version": "v1", "source": "sim:zero", "weights": 3}, None),
    ],
)
def test_what_is_wrong_is_refused_by_its_place(settings: Settings, model: str, body: Any, param: str | None) -> None:
    async def work(client: httpx.AsyncClient, bus: Bus) -> None:
        ObjectStore(settings).ensure_bucket()
        answer = await client.post(f"/v1/models/{model}/versions", json=body)
        assert refusal(answer) == (400, "invalid_request", param)
        assert await registry.list_versions(bus, model) == []

    run(settings, work)


def put_by_hand(objects: ObjectStore, model: str, version: str) -> Manifest:
    """What somebody does with another tool: files under their sha256, the manifest under the version's name."""
    objects.ensure_bucket()
    files = {"config.json": CONFIG, "model.safetensors": secrets.token_bytes(1000)}
    files["tokenizer_config.json"] = json.dumps({"chat_template": "{{ tools }}<|python_tag|>"}).encode()
    for data in files.values():
        objects.put(manifests.blob_key(manifests.sha256_of(data)), data)
    manifest = Manifest(
        model=model,
        version=version,
        files=[ManifestFile(name, len(data), manifests.sha256_of(data)) for name, data in files.items()],
        engine=EngineSettings(slots=4),
        max_model_len=0,
        memory_bytes=1000,
    )
    objects.put(manifests.manifest_key(model, version), manifests.encode(manifest))
    return manifest


def test_files_that_are_in_the_store_become_a_version_and_another_with_other_settings(
    settings: Settings, model: str
) -> None:
    objects = ObjectStore(settings)
    manifest = put_by_hand(objects, model, "v1")

    async def work(client: httpx.AsyncClient, bus: Bus) -> None:
        route = f"/v1/models/{model}/versions"
        made = await client.post(route, json={"version": "v1", "source": "s3"})
        assert made.status_code == 201, made.text
        first = await registry.find_version(bus, model, "v1")
        assert first is not None
        assert (first.engine, first.max_model_len) == (EngineSettings(slots=4), 512)
        assert first.tool_dialect == "llama3"
        blobs.verifier(settings)(first)
        assert (await client.post(route, json={"version": "v1", "source": "s3"})).json() == made.json()

        same_files = {"version": "v2", "source": "s3", "manifest_sha256": made.json()["manifest_sha256"]}
        made = await client.post(route, json=same_files | {"engine": {"max_model_len": 64}})
        assert (made.status_code, made.json()["traffic_pct"]) == (201, 0.0)
        second = await registry.find_version(bus, model, "v2")
        assert second is not None
        assert (second.engine, second.max_model_len) == (EngineSettings(max_model_len=64), 64)
        blobs.verifier(settings)(second)
        assert blobs.read_manifest(objects, second.manifest_sha256)[0].files == manifest.files
        too_long = await client.post(route, json=same_files | {"version": "v3", "engine": {"max_model_len": 513}})
        assert refusal(too_long) == (400, "invalid_request", "engine")

    run(settings, work)


def test_a_manifest_of_a_model_of_vectors_says_how_it_pools(settings: Settings, model: str) -> None:
    objects = ObjectStore(settings)
    manifest = put_by_hand(objects, model, "v1")
    modules = b"[]"
    objects.put(manifests.blob_key(manifests.sha256_of(modules)), modules)
    listed = [*manifest.files, ManifestFile("modules.json", len(modules), manifests.sha256_of(modules))]
    encoder = Encoder(dimensions=8, length=100, positions=300, pooling="cls_token", normalized=True)
    silent = replace(manifest, files=listed)
    objects.put(manifests.manifest_key(model, "v1"), manifests.encode(silent))
    objects.put(manifests.manifest_key(model, "v2"), manifests.encode(replace(silent, version="v2", encoder=encoder)))

    async def work(client: httpx.AsyncClient, bus: Bus) -> None:
        route = f"/v1/models/{model}/versions"
        answer = await client.post(route, json={"version": "v1", "source": "s3"})
        assert refusal(answer) == (400, "invalid_request", "manifest_sha256")
        assert "`encoder`" in answer.text
        made = await client.post(route, json={"version": "v2", "source": "s3"})
        assert made.status_code == 201, made.text
        found = await registry.find_version(bus, model, "v2")
        assert found is not None
        assert (found.encoder, found.max_model_len) == (encoder, 100)
        simulated = await client.post(route, json={"version": "v3", "source": encoders.SIMULATED})
        assert simulated.status_code == 201
        found = await registry.find_version(bus, model, "v3")
        assert found is not None
        assert found.encoder == encoders.simulated(encoders.SIMULATED)

    run(settings, work)


def test_a_manifest_whose_files_are_not_there_is_refused(settings: Settings, model: str) -> None:
    objects = ObjectStore(settings)
    manifest = put_by_hand(objects, model, "v1")
    objects.remove(manifests.blob_key(manifest.files[1].sha256))

    async def work(client: httpx.AsyncClient, bus: Bus) -> None:
        answer = await client.post(f"/v1/models/{model}/versions", json={"version": "v1", "source": "s3"})
        assert refusal(answer) == (400, "invalid_request", "manifest_sha256")
        assert "model.safetensors" in answer.text

    run(settings, work)


def test_aliases_are_moved_and_removed(settings: Settings, model: str) -> None:
    async def work(client: httpx.AsyncClient, bus: Bus) -> None:
        for version in ("v1", "v2"):
            await client.post(f"/v1/models/{model}/versions", json={"version": version, "source": "sim:zero"})
        aliases = f"/v1/models/{model}/aliases"
        moved = await client.put(f"{aliases}/beta", json={"version": "v2"})
        assert (moved.status_code, moved.json()) == (200, {"model": model, "aliases": {"stable": "v1", "beta": "v2"}})
        assert (await client.delete(f"{aliases}/beta")).json()["aliases"] == {"stable": "v1"}
        assert refusal(await client.delete(f"{aliases}/stable")) == (400, "invalid_request", "alias")
        assert refusal(await client.put(f"{aliases}/beta", json={"version": "v9"})) == (
            404,
            "version_not_found",
            "version",
        )
        assert refusal(await client.put(f"{aliases}/v1", json={"version": "v2"})) == (400, "invalid_request", "alias")
        nobody = await client.put("/v1/models/nobody/aliases/beta", json={"version": "v1"})
        assert refusal(nobody) == (404, "model_not_found", "model")
        assert (await client.put(f"{aliases}/beta", content=b"{")).status_code == 400
        assert (await client.get(f"{aliases}/beta")).status_code == 404

    run(settings, work)


def test_the_document_describes_them(settings: Settings) -> None:
    async def work(client: httpx.AsyncClient, bus: Bus) -> None:
        document = (await client.get("/openapi.json")).json()
        versions = document["paths"]["/v1/models/{model}/versions"]
        assert {"get", "post"} <= versions.keys()
        body = versions["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert body == {"$ref": "#/components/schemas/NewVersion"}
        assert {"put", "delete"} == document["paths"]["/v1/models/{model}/aliases/{alias}"].keys()
        assert {"NewVersion", "AliasTarget", "Aliases", "EngineSettings"} <= document["components"]["schemas"].keys()

    run(settings, work)


def test_settings_of_a_version_are_changed_while_it_is_served_and_wrong_ones_are_refused(
    settings: Settings, model: str
) -> None:
    async def work(client: httpx.AsyncClient, bus: Bus) -> None:
        path = f"/v1/models/{model}/versions"
        assert (await client.post(path, json={"version": "v1", "source": "sim:zero"})).status_code == 201
        window = {"days": ["mon"], "from": "08:00", "to": "18:00", "min_replicas": 2}
        changes = {"limits": {"max_replicas": 3, "schedule": [window]}, "engine": {"slots": 8}}
        changed = await client.patch(f"{path}/v1", json=changes)
        assert (changed.status_code, changed.json()["limits"], changed.json()["engine"]) == (
            200,
            {"max_replicas": 3, "schedule": [window]},
            {"slots": 8},
        )
        record = await registry.find_version(bus, model, "v1")
        assert record is not None
        assert (record.limits.max_replicas, record.engine.slots) == (3, 8)
        back = await client.patch(f"{path}/v1", json={"limits": {"schedule": None}, "engine": {"slots": None}})
        assert (back.json()["limits"], back.json()["engine"]) == ({"max_replicas": 3}, {})
        for wrong in ({"limits": {"min_replicas": 4}}, {"engine": {"dtype": "float8"}}, {"limits": {"colour": 1}}):
            response = await client.patch(f"{path}/v1", json=wrong)
            assert response.status_code == 400, response.text
        assert (await client.patch(f"{path}/v1", json={"colour": 1})).status_code == 400
        assert (await client.patch(f"{path}/v2", json={})).status_code == 404
        await registry.remove(bus, model)
        removed = await client.patch(f"{path}/v1", json={"limits": {"warm": 1}})
        assert (removed.status_code, removed.json()["error"]["code"]) == (404, "version_retired")

    run(settings, work)


def test_names_that_nothing_can_have_are_refused_everywhere(settings: Settings, model: str) -> None:
    async def work(client: httpx.AsyncClient, bus: Bus) -> None:
        long = "m" * 200
        for name, version in ((long, "v1"), (model, long)):
            answer = await client.patch(f"/v1/models/{name}/versions/{version}", json={"limits": {"warm": 1}})
            assert refusal(answer) == (404, "version_not_found", "version")
        await client.post(f"/v1/models/{model}/versions", json={"version": "v1", "source": "sim:zero"})
        for name, target, param in ((long, "v1", "model"), (model, long, "version")):
            answer = await client.put(f"/v1/models/{name}/aliases/beta", json={"version": target})
            assert refusal(answer) == (400, "invalid_request", param)
        answer = await client.delete(f"/v1/models/{long}/aliases/beta")
        assert refusal(answer) == (400, "invalid_request", "model")

    run(settings, work)
