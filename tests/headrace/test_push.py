"""Pushes, the registry and its garbage, on a real nats-server and a real SeaweedFS."""

import asyncio
import json
import secrets
import shutil
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest
from msgspec.structs import replace

from headrace import garbage, push
from shared import blobs, config, manifests, records, registry, subjects
from shared.bus import Bus
from shared.encoders import Encoder
from shared.errors import (
    BadRequest,
    Conflict,
    HeadraceError,
    Internal,
    ModelNotFound,
    NotFound,
    Unavailable,
    VersionFailed,
    VersionInUse,
    VersionNotFound,
    VersionRetired,
)
from shared.manifests import Manifest
from shared.objects import ObjectStore
from shared.records import EngineSettings, Lease, Version, VersionLimits, Weight
from shared.settings import Settings

T = TypeVar("T")
INDEX = "model.safetensors.index.json"


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
        return self.run(lambda bus: push.push(bus, self.objects, str(source), self.model, version, **settings))

    def find(self, version: str) -> Version | None:
        return self.run(lambda bus: registry.find_version(bus, self.model, version))

    def record(self, version: str) -> Version:
        found = self.find(version)
        assert found is not None
        return found

    def manifest(self, version: str) -> Manifest:
        return blobs.read_manifest(self.objects, self.record(version).manifest_sha256)[0]

    def remove(self, version: str | None) -> list[Version]:
        return self.run(lambda bus: registry.remove(bus, self.model, version))

    def collect(self, dry_run: bool = False, age_s: float = garbage.AGE_S) -> set[str]:
        found = self.run(lambda bus: garbage.collect(bus, self.objects, dry_run, age_s))
        return {one.key for one in found}

    def touch_until_newer(self, key: str, than: float) -> None:
        """The store's clock shows seconds."""
        deadline = time.monotonic() + 10
        while self.objects.stat(key).modified <= than:
            self.objects.touch(key)
            assert time.monotonic() < deadline

    def with_own_bucket(self) -> "Bench":
        return Bench(replace(self.settings, s3_bucket=f"test-{secrets.token_hex(6)}"))

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
    (directory / "chat_template.jinja").write_text("{{ messages }}{{ tools }}[TOOL_CALLS]")
    (directory / "notes.md").write_text("not part of a model")
    (directory / ".hidden.json").write_text("{}")
    return directory


def test_the_first_push_uploads_files_with_a_manifest_and_makes_the_route(bench: Bench, directory: Path) -> None:
    seen: list[tuple[int, int]] = []
    record = bench.push(directory, on_progress=lambda done, total: seen.append((done, total)))
    assert (record.state, record.source, record.max_model_len) == ("registered", "s3", 512)
    assert record.tool_dialect == "mistral"
    raw = bench.objects.get(manifests.manifest_key(bench.model, "v1"))
    assert manifests.sha256_of(raw) == record.manifest_sha256
    assert bench.objects.get(manifests.blob_key(record.manifest_sha256)) == raw
    manifest = manifests.decode(raw)
    assert [file.name for file in manifest.files] == ["chat_template.jinja", "config.json", "model.safetensors"]
    assert manifest.memory_bytes == 100_000
    for file in manifest.files:
        stored = bench.objects.get(manifests.blob_key(file.sha256))
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


def test_a_model_of_vectors_is_known_by_its_files(bench: Bench, directory: Path) -> None:
    (directory / "modules.json").write_text(
        json.dumps([{"path": "", "type": "models.Transformer"}, {"path": "1_Pooling", "type": "models.Pooling"}])
    )
    with pytest.raises(BadRequest, match="pools by nothing that is known"):
        bench.push(directory)
    (directory / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 8, "pooling_mode_cls_token": True}
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (directory / "sentence_bert_config.json").write_text('{"max_seq_length": 100}')
    record = bench.push(directory)
    assert record.encoder == Encoder(dimensions=8, length=100, positions=512, pooling="cls_token", normalized=False)
    assert record.max_model_len == 100
    assert bench.manifest("v1").encoder == record.encoder
    assert bench.push(directory, "v2", engine=EngineSettings(max_model_len=300)).max_model_len == 300
    with pytest.raises(BadRequest, match="not within the model's 512 tokens"):
        bench.push(directory, "v3", engine=EngineSettings(max_model_len=513))
    assert bench.push(directory) == bench.record("v1"), "the same again"
    generating = bench.push("sim:zero", "v4")
    assert generating.encoder is None
    assert b"encoder" not in manifests.encode(manifests.of_simulated(bench.model, "v4", EngineSettings()))


def test_a_version_never_changes(bench: Bench, directory: Path) -> None:
    first = bench.push(directory)
    assert bench.push(directory) == first
    with pytest.raises(Conflict, match="other files or engine settings;"):
        bench.push(directory, engine=EngineSettings(dtype="float32"))
    (directory / "model.safetensors").write_bytes(b"other bytes")
    with pytest.raises(Conflict, match="other files or engine settings;") as caught:
        bench.push(directory)
    assert caught.value.status == 409
    with pytest.raises(Conflict):
        bench.push("sim:zero")
    assert bench.manifest("v1").memory_bytes == 100_000
    assert bench.record("v1") == first


@pytest.mark.parametrize("source", ["sim:zero", "files"])
def test_what_was_configured_since_is_no_part_of_what_a_version_is(bench: Bench, directory: Path, source: str) -> None:
    source = source if source.startswith("sim:") else str(directory)
    first = bench.push(source, engine=EngineSettings(slots=4), limits=VersionLimits(max_replicas=1))
    configured = replace(first, state="available", engine=EngineSettings(slots=9), limits=VersionLimits(warm=1))
    bench.set_state(configured, "available")
    assert bench.push(source, engine=EngineSettings(slots=4), limits=VersionLimits(max_replicas=3)) == configured
    with pytest.raises(Conflict):
        bench.push(source, engine=EngineSettings(slots=9))
    bench.set_state(configured, "failed", "the reason")
    assert bench.push(source, engine=EngineSettings(slots=4)) == replace(configured, state="registered")


def test_only_what_the_store_lacks_is_sent(bench: Bench, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str] = []
    put_file = ObjectStore.put_file

    def broken(self: ObjectStore, key: str, path: Path, size: int, sha256: str) -> None:
        if path.name == "model.safetensors":
            raise Internal("the push is broken off here")
        put_file(self, key, path, size, sha256)

    with monkeypatch.context() as patched:
        patched.setattr(ObjectStore, "put_file", broken)
        with pytest.raises(Internal, match="broken off"):
            bench.push(directory)
    assert bench.find("v1") is None

    def noting(self: ObjectStore, key: str, path: Path, size: int, sha256: str) -> None:
        sent.append(path.name)
        put_file(self, key, path, size, sha256)

    monkeypatch.setattr(ObjectStore, "put_file", noting)
    blobs.verifier(bench.settings)(bench.push(directory))
    assert sent == ["model.safetensors"]
    bench.push(directory, "v2", engine=EngineSettings(slots=3))
    assert sent == ["model.safetensors"]


def test_pushes_at_once_with_other_bytes_do_not_spoil_each_other(bench: Bench, directory: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(directory, tmp_path / "other"))
    (other / "model.safetensors").write_bytes(secrets.token_bytes(100_000))

    async def both(bus: Bus) -> list[Version | BaseException]:
        pushes = (push.push(bus, bench.objects, str(each), bench.model, "v1") for each in (directory, other))
        return await asyncio.gather(*pushes, return_exceptions=True)

    results = bench.run(both)
    assert sorted(type(result).__name__ for result in results) == ["Conflict", "Version"]
    [won] = [result for result in results if isinstance(result, Version)]
    blobs.verifier(bench.settings)(won)
    named = bench.objects.get(manifests.manifest_key(bench.model, "v1"))
    assert manifests.sha256_of(named) == won.manifest_sha256


def test_two_pushes_at_once_of_one_version_agree_on_one(bench: Bench) -> None:
    async def both(bus: Bus) -> list[Version | BaseException]:
        slots = (4, 8)
        return await asyncio.gather(
            *(
                push.push(bus, bench.objects, "sim:zero", bench.model, "v1", engine=EngineSettings(slots=each))
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
    verify = blobs.verifier(bench.settings)
    data = (directory / "model.safetensors").read_bytes()
    key = manifests.blob_key(manifests.sha256_of(data))
    bench.objects.put(key, b"torn")
    with pytest.raises(VersionFailed, match=r"model.safetensors has 4 of 100000 bytes"):
        verify(first)
    bench.set_state(first, "failed", "the reason")
    with pytest.raises(Conflict):
        bench.push(directory, engine=EngineSettings(dtype="float32"))
    assert bench.push(directory) == first
    verify(first)
    bench.objects.put(key, bytes(100_000))  # what only a worker finds
    bench.set_state(first, "failed", "its sha256 is another")
    assert bench.push(directory) == first
    assert bench.objects.get(key) == data
    bench.objects.remove(key)
    with pytest.raises(VersionFailed, match=r"incomplete: model.safetensors is not in the object store"):
        verify(first)
    with pytest.raises(VersionFailed, match="incomplete"):
        verify(replace(first, manifest_sha256="0" * 64))
    bench.objects.put(manifests.blob_key(first.manifest_sha256), b"{}")
    with pytest.raises(VersionFailed, match="not the one that was registered"):
        verify(first)


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
        (lambda directory: (directory / "config.json").write_text("{}"), "set max_model_len"),
        (lambda directory: (directory / INDEX).write_text("{}"), "no index of shards"),
        (
            lambda directory: (directory / INDEX).write_text('{"weight_map": {"a": "model-2.safetensors"}}'),
            r"names model-2.safetensors, and there is no such file",
        ),
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
    config.check_limits(VersionLimits(min_replicas=2, max_replicas=2, idle_seconds=0))
    for limits in (
        VersionLimits(min_replicas=3, max_replicas=2),
        VersionLimits(idle_seconds=float("inf")),
        VersionLimits(idle_seconds=float("nan")),
        VersionLimits(idle_seconds=-1),
    ):
        with pytest.raises(BadRequest):
            config.check_limits(limits)


def test_other_sources_and_lengths_are_refused(bench: Bench, directory: Path) -> None:
    with pytest.raises(BadRequest, match="does not exist"):
        bench.push(directory / "nothing")
    with pytest.raises(BadRequest, match="is no directory, GGUF file or sim:PROFILE"):
        bench.push(directory / "config.json")
    with pytest.raises(BadRequest, match="not within the model's 512 tokens"):
        bench.push(directory, engine=EngineSettings(max_model_len=513))
    (directory / "config.json").write_text('{"text_config": {"max_position_embeddings": 64}}')
    assert bench.push(directory).max_model_len == 64


def test_a_store_that_is_away_leaves_no_record(bench: Bench, directory: Path) -> None:
    away = ObjectStore(replace(bench.settings, s3_endpoint="http://127.0.0.1:9"))
    with pytest.raises(HeadraceError, match="cannot be reached"):
        bench.run(lambda bus: push.push(bus, away, str(directory), bench.model, "v1"))
    assert bench.run(lambda bus: registry.find_version(bus, bench.model, "v1")) is None


def test_a_version_in_use_is_not_removed_and_the_answer_says_by_what(bench: Bench) -> None:
    for version in ("v1", "v2"):
        bench.push("sim:zero", version)
    bench.run(lambda bus: registry.set_alias(bus, bench.model, "beta", "v1"))
    with pytest.raises(
        VersionInUse, match="the alias beta points at it; the alias stable points at it; 100% of"
    ) as caught:
        bench.remove("v1")
    assert (caught.value.status, caught.value.code) == (409, "version_in_use")

    lease = Lease(
        worker=f"w-{secrets.token_hex(4)}", model=bench.model, version="v2", state="active", pid=1, host="h", started=0
    )
    key = subjects.key(lease.worker)
    bench.run(lambda bus: bus.kv_put(subjects.WORKERS_BUCKET, key, records.encode(lease)))
    with pytest.raises(VersionInUse, match=r"v2 is in use: workers: 1 active$"):
        bench.remove("v2")
    bench.run(lambda bus: config.set_config(bus, bench.model, "v2", {"warm": 1}, {}))
    with pytest.raises(VersionInUse, match=r"workers: 1 active; it keeps .*@v2 --unset warm`$"):
        bench.remove(None)  # all of the model
    failed = records.encode(replace(lease, state="failed"))
    bench.run(lambda bus: bus.kv_put(subjects.WORKERS_BUCKET, key, failed))

    async def ask(bus: Bus) -> None:
        await bus.ensure_consumer(bench.model, "v2", subjects.LANE_FAST)
        subject = subjects.request(bench.model, "v2", subjects.LANE_FAST, "local")
        await bus.publish_durable(subject, b"{}", {"Nats-Msg-Id": secrets.token_hex(8)})

    bench.run(ask)
    with pytest.raises(VersionInUse, match="requests that are not answered yet: 1"):
        bench.remove("v2")
    bench.run(lambda bus: bus.purge(subjects.REQ_STREAM, subjects.requests_of_version(bench.model, "v2")))
    assert [record.version for record in bench.remove("v2")] == ["v2"]
    assert bench.record("v2").state == "retired"
    with pytest.raises(VersionRetired, match="removed before"):
        bench.remove("v2")
    with pytest.raises(VersionRetired, match="was removed"):
        bench.run(lambda bus: registry.set_alias(bus, bench.model, "beta", "v2"))
    with pytest.raises(VersionNotFound):
        bench.remove("v3")


def test_the_last_version_takes_the_route_with_it_and_the_name_is_kept(bench: Bench) -> None:
    bench.push("sim:zero", "v1", engine=EngineSettings(slots=4))
    bench.run(lambda bus: config.set_config(bus, bench.model, "v1", {"max_replicas": 0}, {}))
    bench.push("sim:zero", "v2")
    bench.remove("v2")
    bench.remove("v1")  # stable points at it, and nothing else could serve its traffic
    assert bench.run(lambda bus: registry.find_route(bus, bench.model)) is None
    with pytest.raises(ModelNotFound):
        bench.remove(None)
    with pytest.raises(Conflict, match="was removed and had other"):
        bench.push("sim:zero", "v1")
    again = bench.push("sim:zero", "v1", engine=EngineSettings(slots=4))
    assert (again.state, again.retired, again.limits) == ("registered", 0, VersionLimits())
    route = bench.run(lambda bus: registry.find_route(bus, bench.model))
    assert route == records.Route(bench.model, {"stable": "v1"}, [Weight("v1", 10_000)])


def test_a_removed_version_takes_its_files_with_it_but_not_those_of_others(bench: Bench, directory: Path) -> None:
    bench = bench.with_own_bucket()
    first = bench.push(directory)
    data = (directory / "model.safetensors").read_bytes()
    (directory / "model.safetensors").write_bytes(secrets.token_bytes(100_000))
    second = bench.push(directory, "v2")
    bench.run(lambda bus: registry.set_alias(bus, bench.model, "stable", "v2"))
    [removed] = bench.remove("v1")
    deleted = bench.run(lambda bus: garbage.delete_files(bus, bench.objects, removed))
    assert {one.key for one in deleted} == {
        manifests.blob_key(manifests.sha256_of(data)),
        manifests.blob_key(first.manifest_sha256),
        manifests.manifest_key(bench.model, "v1"),
    }
    blobs.verifier(bench.settings)(second)
    assert len(bench.objects.list("")) == 5
    [removed] = bench.remove("v2")
    bench.run(lambda bus: garbage.delete_files(bus, bench.objects, removed))
    assert bench.objects.list("") == []
    blobs.verifier(bench.settings)(bench.push(directory, "v2"))


def test_files_that_a_push_has_touched_since_outlive_their_version(bench: Bench, directory: Path) -> None:
    bench = bench.with_own_bucket()
    bench.push(directory)
    manifest = bench.manifest("v1")
    named_at = bench.objects.stat(manifests.manifest_key(bench.model, "v1")).modified
    key = manifests.blob_key(manifest.files[0].sha256)
    bench.touch_until_newer(key, named_at)  # as a push does that has not written its record yet
    [removed] = bench.remove("v1")
    bench.run(lambda bus: garbage.delete_files(bus, bench.objects, removed))
    assert [one.key for one in bench.objects.list("")] == [key]


def test_garbage_is_what_is_old_and_named_by_no_version(bench: Bench, directory: Path) -> None:
    bench = bench.with_own_bucket()
    kept = bench.push(directory)
    bench.push("sim:zero", "v2")
    before = {one.key for one in bench.objects.list("")}
    orphan = manifests.blob_key("0" * 64)
    bench.objects.put(orphan, b"left behind")
    assert bench.collect() == set()  # young: somebody may be about to name it
    assert bench.collect(dry_run=True, age_s=-60) == {orphan}
    assert orphan in {one.key for one in bench.objects.list("")}
    assert bench.collect(age_s=-60) == {orphan}
    assert {one.key for one in bench.objects.list("")} == before
    blobs.verifier(bench.settings)(kept)
    bench.remove(None)
    assert bench.collect(age_s=-60) == before


def test_a_store_without_a_bucket_is_empty_unless_versions_have_files(
    bench: Bench, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.push(directory)
    own = bench.record("v1")
    bench.objects = ObjectStore(replace(bench.settings, s3_bucket=f"none-{secrets.token_hex(6)}"))

    async def versions(_: Bus) -> list[Version]:
        return [own]

    monkeypatch.setattr(registry, "list_versions", versions)
    with pytest.raises(NotFound, match="no bucket"):
        bench.collect()
    own = replace(own, source="sim:zero")
    assert bench.collect() == set()


def test_what_a_collection_took_while_it_was_pushed_is_sent_again(
    bench: Bench, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = bench.with_own_bucket()
    write = registry.register

    async def after_a_collection(bus: Bus, record: Version) -> Version:
        for one in bench.objects.list("blobs/"):
            bench.objects.remove(one.key)
        written = await write(bus, record)
        monkeypatch.setattr(registry, "register", write)
        failed = records.encode(
            replace(written, state="failed", reason="incomplete")
        )  # by a controller that looked then
        await bus.kv_put(subjects.MODELS_BUCKET, subjects.key(record.model, record.version), failed)
        return written

    monkeypatch.setattr(registry, "register", after_a_collection)
    pushed = bench.push(directory)
    assert (bench.record("v1").state, bench.record("v1").reason) == ("registered", "")
    blobs.verifier(bench.settings)(pushed)
