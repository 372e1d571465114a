"""The registry against a real nats-server and a real SeaweedFS: immutability, aliases, routes, what is refused."""

import asyncio
import json
import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest
from msgspec.structs import replace

from controller import packing, registry
from shared import manifests, records, subjects
from shared.bus import Bus
from shared.errors import (
    BadRequest,
    Conflict,
    HeadraceError,
    ModelNotFound,
    Unavailable,
    VersionFailed,
    VersionNotFound,
)
from shared.objects import ObjectStore
from shared.records import EngineSettings, Version, VersionLimits, Weight
from shared.settings import Settings

T = TypeVar("T")


class Bench:
    """Runs coroutines with a bus; model names are the test's own, since the servers are shared."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.objects = ObjectStore(settings)
        self.model = f"org/m-{secrets.token_hex(4)}"

    def run(self, work: Callable[[Bus], Awaitable[T]]) -> T:
        async def main() -> T:
            bus = await Bus.connect(self.settings, "test")
            try:
                return await work(bus)
            finally:
                await bus.close()

        return asyncio.run(main())

    def push(self, source: str | Path, version: str = "v1", **settings: Any) -> Version:
        return self.run(lambda bus: registry.push(bus, self.objects, str(source), self.model, version, **settings))

    def set_state(self, record: Version, state: str, reason: str = "") -> None:
        """What the controller's loop does."""
        value = records.encode(replace(record, state=state, reason=reason))
        key = subjects.key(record.model, record.version)
        self.run(lambda bus: bus.kv_put(subjects.MODELS_BUCKET, key, value))


@pytest.fixture
def bench(nats_url: str, s3_settings: Settings) -> Bench:
    return Bench(msgspec.structs.replace(s3_settings, nats_url=nats_url, s3_bucket="test-registry"))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"model_type": "llama", "max_position_embeddings": 512}))
    (directory / "model.safetensors").write_bytes(secrets.token_bytes(100_000))
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    (directory / "notes.md").write_text("not part of a model")
    (directory / ".hidden.json").write_text("{}")
    return directory


def test_the_first_push_uploads_files_with_a_manifest_and_makes_the_route(bench: Bench, directory: Path) -> None:
    seen: list[tuple[int, int]] = []
    record = bench.push(directory, on_progress=lambda done, total: seen.append((done, total)))
    assert (record.state, record.source, record.max_model_len) == ("registered", "s3", 512)
    raw = bench.objects.get(manifests.object_key(bench.model, "v1", "manifest.json"))
    assert manifests.sha256_of(raw) == record.manifest_sha256
    manifest = manifests.decode(raw)
    assert [file.name for file in manifest.files] == ["chat_template.jinja", "config.json", "model.safetensors"]
    assert manifest.memory_bytes == 100_000
    for file in manifest.files:
        stored = bench.objects.get(manifests.object_key(bench.model, "v1", file.name))
        assert (len(stored), manifests.sha256_of(stored)) == (file.size, file.sha256)
    assert seen == sorted(seen)
    assert seen[-1] == (2 * manifest.size, 2 * manifest.size)
    route = bench.run(lambda bus: registry.find_route(bus, bench.model))
    assert route == records.Route(bench.model, {"stable": "v1"}, [Weight("v1", 10_000)])

    second = bench.push(directory, "v2", engine=EngineSettings(dtype="float32", max_model_len=128))
    assert second.max_model_len == 128
    assert bench.run(lambda bus: registry.find_route(bus, bench.model)) == route  # no traffic by itself
    listed = bench.run(lambda bus: registry.list_versions(bus, bench.model))
    assert [version.version for version in listed] == ["v1", "v2"]


def test_a_version_never_changes(bench: Bench, directory: Path) -> None:
    first = bench.push(directory)
    assert bench.push(directory) == first
    with pytest.raises(Conflict, match="other engine settings;"):
        bench.push(directory, engine=EngineSettings(dtype="float32"))
    with pytest.raises(Conflict, match="other limits;"):
        bench.push(directory, limits=VersionLimits(max_replicas=2))
    (directory / "model.safetensors").write_bytes(b"other bytes")
    with pytest.raises(Conflict, match="other files;") as caught:
        bench.push(directory)
    assert caught.value.status == 409
    with pytest.raises(Conflict, match="other files;"):
        bench.push("sim:zero")
    stored = bench.objects.stat(manifests.object_key(bench.model, "v1", "model.safetensors"))
    assert stored.size == 100_000
    assert bench.run(lambda bus: registry.find_version(bus, bench.model, "v1")) == first


def test_two_pushes_at_once_of_one_version_agree_on_one(bench: Bench) -> None:
    async def both(bus: Bus) -> list[Version | BaseException]:
        slots = (4, 8)
        return await asyncio.gather(
            *(
                registry.push(bus, bench.objects, "sim:zero", bench.model, "v1", engine=EngineSettings(slots=each))
                for each in slots
            ),
            return_exceptions=True,
        )

    results = bench.run(both)
    assert sorted(type(result).__name__ for result in results) == ["Conflict", "Version"]


def test_pushing_a_failed_version_again_restores_its_files_and_gives_it_another_try(
    bench: Bench, directory: Path
) -> None:
    first = bench.push(directory)
    key = manifests.object_key(bench.model, "v1", "model.safetensors")
    bench.objects.put(key, b"torn")
    verify = packing.verifier(bench.settings)
    with pytest.raises(VersionFailed, match=r"model.safetensors .* has 4 of 100000 bytes"):
        verify(first)
    bench.set_state(first, "failed", "the reason")
    with pytest.raises(Conflict):
        bench.push(directory, engine=EngineSettings(dtype="float32"))
    assert bench.push(directory) == first
    verify(first)
    bench.objects.remove(key)
    with pytest.raises(VersionFailed, match="incomplete"):
        verify(first)
    with pytest.raises(VersionFailed, match="not the one that was registered"):
        verify(replace(first, manifest_sha256="0" * 64))


def test_waiting_for_a_version_ends_with_its_state(bench: Bench) -> None:
    record = bench.push("sim:zero", max_model_len=64)
    assert (record.source, record.max_model_len) == ("sim:zero", 64)
    with pytest.raises(Unavailable, match="is a controller running"):
        bench.run(lambda bus: registry.wait_available(bus, bench.model, "v1", 0.2))

    async def meanwhile(bus: Bus) -> Version:
        waiting = asyncio.create_task(registry.wait_available(bus, bench.model, "v1", 10))
        await asyncio.sleep(0)
        value = records.encode(replace(record, state="available"))
        await bus.kv_put(subjects.MODELS_BUCKET, subjects.key(bench.model, "v1"), value)
        return await waiting

    assert bench.run(meanwhile).state == "available"
    bench.set_state(record, "failed", "no such dtype")
    with pytest.raises(VersionFailed, match="no such dtype"):
        bench.run(lambda bus: registry.wait_available(bus, bench.model, "v1", 10))


def test_aliases_move_and_never_shadow_a_version(bench: Bench) -> None:
    bench.push("sim:zero", "v1")
    bench.push("sim:zero", "v2")

    def alias(name: str, version: str | None, model: str = bench.model) -> dict[str, str]:
        return bench.run(lambda bus: registry.set_alias(bus, model, name, version)).aliases

    assert alias("beta", "v2") == {"stable": "v1", "beta": "v2"}
    assert alias("stable", "v2") == {"stable": "v2", "beta": "v2"}
    moved = bench.run(lambda bus: registry.find_route(bus, bench.model))
    assert moved.weights == [Weight("v2", 10_000)]  # the plain name goes with it
    assert alias("beta", None) == {"stable": "v2"}
    with pytest.raises(BadRequest, match="v1 is a version"):
        alias("v1", "v2")
    with pytest.raises(BadRequest, match="only moved"):
        alias("stable", None)
    with pytest.raises(BadRequest, match="'@'"):
        alias("a@b", "v2")
    with pytest.raises(VersionNotFound):
        alias("beta", "v9")
    with pytest.raises(ModelNotFound):
        alias("beta", None, model="nobody")
    alias("next", "v2")
    with pytest.raises(BadRequest, match="next is an alias"):
        bench.push("sim:zero", "next")


@pytest.mark.parametrize(
    ("model", "version", "reason"),
    [
        ("a@b", "v1", "'@'"),
        ("m", "v@1", "'@'"),
        ("", "v1", "1 to 128 bytes"),
        ("m", "v" * 129, "1 to 128 bytes"),
        ("m", "stable", "alias"),
        (" m", "v1", "white space"),
    ],
)
def test_names_that_could_not_be_addressed_are_refused(model: str, version: str, reason: str) -> None:
    with pytest.raises(BadRequest, match=reason):
        registry.check_names(model, version)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda directory: (directory / "config.json").unlink(), "no config.json"),
        (lambda directory: (directory / "model.safetensors").unlink(), "no config.json with"),
        (lambda directory: (directory / "config.json").write_text("not json"), "not a model's configuration"),
        (lambda directory: (directory / "config.json").write_text("[]"), "not a model's configuration"),
        (lambda directory: (directory / "config.json").write_text("{}"), "--set max_model_len"),
    ],
)
def test_a_directory_that_is_no_model_is_refused(
    bench: Bench, directory: Path, change: Callable[[Path], Any], reason: str
) -> None:
    change(directory)
    with pytest.raises(BadRequest, match=reason):
        bench.push(directory)
    assert bench.run(lambda bus: registry.find_version(bus, bench.model, "v1")) is None


def test_limits_that_contradict_each_other_or_cannot_be_stored_are_refused() -> None:
    registry.check_limits(VersionLimits(min_replicas=2, max_replicas=2, idle_seconds=0))
    for limits in (
        VersionLimits(min_replicas=3, max_replicas=2),
        VersionLimits(idle_seconds=float("inf")),
        VersionLimits(idle_seconds=float("nan")),
        VersionLimits(idle_seconds=-1),
    ):
        with pytest.raises(BadRequest):
            registry.check_limits(limits)


def test_other_sources_and_lengths_are_refused(bench: Bench, directory: Path) -> None:
    with pytest.raises(BadRequest, match="is no directory"):
        bench.push(directory / "nothing")
    gguf = directory / "m.gguf"
    gguf.write_bytes(b"GGUF")
    with pytest.raises(BadRequest, match="GGUF file"):
        bench.push(gguf)
    with pytest.raises(BadRequest, match="not within the model's 512 tokens"):
        bench.push(directory, engine=EngineSettings(max_model_len=513))
    (directory / "config.json").write_text('{"text_config": {"max_position_embeddings": 64}}')
    assert bench.push(directory).max_model_len == 64


def test_a_store_that_is_away_leaves_no_record(bench: Bench, directory: Path) -> None:
    away = ObjectStore(replace(bench.settings, s3_endpoint="http://127.0.0.1:9"))
    with pytest.raises(HeadraceError, match="cannot be reached"):
        bench.run(lambda bus: registry.push(bus, away, str(directory), bench.model, "v1"))
    assert bench.run(lambda bus: registry.find_version(bus, bench.model, "v1")) is None
