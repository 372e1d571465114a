"""Fetching weights from a real SeaweedFS: corrupt, truncated and missing objects, two at once, the store away."""

import hashlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shared import manifests, objects
from shared.errors import Cancelled, ObjectsUnavailable, VersionFailed
from shared.manifests import Manifest, ManifestFile
from shared.objects import ObjectStore
from shared.records import EngineSettings, Version
from shared.settings import MIB, Settings, to_environment
from workers import weights
from workers.cache import Cache

CONFIG = b'{"model_type": "llama"}'
WEIGHTS = b"".join(hashlib.sha256(str(number).encode()).digest() * 512 for number in range(256))  # 4 MiB


@pytest.fixture
def settings(s3_settings: Settings, tmp_path: Path) -> Settings:
    """Settings with a bucket and a cache of the test's own."""
    bucket = f"test-{hashlib.sha256(str(tmp_path).encode()).hexdigest()[:16]}"
    return msgspec.structs.replace(
        s3_settings, s3_bucket=bucket, data_dir=str(tmp_path), fetch_retry_s=1.0, log_level="debug"
    )


@pytest.fixture
def store(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    monkeypatch.setattr(objects, "RANGE_BYTES", MIB // 2)
    store = ObjectStore(settings)
    store.ensure_bucket()
    return store


def publish(
    store: ObjectStore, model: str = "org/chat", version: str = "v1", files: dict[str, bytes] | None = None
) -> Version:
    """A version with its files and manifest in the store."""
    files = files or {"config.json": CONFIG, "model.safetensors": WEIGHTS}
    manifest = Manifest(
        model=model,
        version=version,
        files=[ManifestFile(name, len(data), hashlib.sha256(data).hexdigest()) for name, data in sorted(files.items())],
        engine=EngineSettings(),
        max_model_len=128,
        memory_bytes=len(WEIGHTS),
    )
    for name, data in files.items():
        store.put(manifests.object_key(model, version, name), data)
    raw = manifests.encode(manifest)
    store.put(manifests.object_key(model, version, "manifest.json"), raw)
    return Version(
        model=model, version=version, state="available", source="s3", manifest_sha256=manifests.sha256_of(raw)
    )


class Counting(ObjectStore):
    """A store that counts the bytes it gave and calls `before` ahead of each ranged read."""

    read_bytes = 0
    before: Callable[[], None] | None = None

    def _read(self, key: str, offset: int, length: int) -> bytes:
        if self.before is not None:
            self.before()
        data = super()._read(key, offset, length)
        self.read_bytes += len(data)
        return data


def test_files_arrive_verified_and_the_second_fetch_reads_nothing(store: ObjectStore, settings: Settings) -> None:
    version = publish(store)
    seen: list[tuple[int, int]] = []
    directory = weights.fetch(version, store, settings, lambda done, total: seen.append((done, total)))
    assert (directory / "model.safetensors").read_bytes() == WEIGHTS
    assert (directory / "config.json").read_bytes() == CONFIG
    total = len(WEIGHTS) + len(CONFIG)
    assert seen[0] == (0, total)
    assert seen[-1] == (total, total)
    assert seen == sorted(seen)
    away = ObjectStore(msgspec.structs.replace(settings, s3_endpoint="http://127.0.0.1:9"))
    assert weights.fetch(version, away, settings) == directory


def test_versions_share_the_files_that_are_the_same(store: ObjectStore, settings: Settings) -> None:
    weights.fetch(publish(store), store, settings)
    counting = Counting(settings)
    second = weights.fetch(
        publish(store, version="v2", files={"a.json": b"{}", "w.safetensors": WEIGHTS}), counting, settings
    )
    assert (second / "w.safetensors").read_bytes() == WEIGHTS
    assert counting.read_bytes < 4096


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "sha256"),
        (lambda data: data[: len(data) // 2], f"{len(WEIGHTS) // 2} of {len(WEIGHTS)} bytes"),
        (lambda _data: None, "has no models/org=2Fchat/v1/model.safetensors"),
    ],
    ids=["corrupt", "truncated", "missing"],
)
def test_an_object_that_cannot_be_used_fails_for_good_and_is_served_to_nobody(
    store: ObjectStore, settings: Settings, damage: Callable[[bytes], bytes | None], reason: str
) -> None:
    version = publish(store)
    key = manifests.object_key("org/chat", "v1", "model.safetensors")
    damaged = damage(WEIGHTS)
    if damaged is None:
        store.remove(key)
    else:
        store.put(key, damaged)
    counting = Counting(settings)
    with pytest.raises(VersionFailed, match=f"model.safetensors of org/chat@v1 cannot be used.*{reason}"):
        weights.fetch(version, counting, settings)
    assert counting.read_bytes >= 2 * len(damaged or b"")  # it was read once more before the verdict
    assert not any(path.stat().st_size > 1000 for path in (settings.cache_path / "blobs").iterdir())
    store.put(key, WEIGHTS)
    assert (weights.fetch(version, store, settings) / "model.safetensors").read_bytes() == WEIGHTS


def test_an_object_that_is_whole_at_the_second_read_is_used(store: ObjectStore, settings: Settings) -> None:
    version = publish(store)
    key = manifests.object_key("org/chat", "v1", "model.safetensors")
    store.put(key, WEIGHTS[:-1] + b"?")
    counting = Counting(settings)

    def heal() -> None:
        if counting.read_bytes > len(WEIGHTS):
            store.put(key, WEIGHTS)
            counting.before = None

    counting.before = heal
    assert (weights.fetch(version, counting, settings) / "model.safetensors").read_bytes() == WEIGHTS


@pytest.mark.parametrize("manifest", [b"{}", b"not json"])
def test_a_manifest_that_is_not_the_registered_one_fails_for_good(
    store: ObjectStore, settings: Settings, manifest: bytes
) -> None:
    version = publish(store)
    store.put(manifests.object_key("org/chat", "v1", "manifest.json"), manifest)
    with pytest.raises(VersionFailed, match="manifest of org/chat@v1"):
        weights.fetch(version, store, settings)
    same = msgspec.structs.replace(version, manifest_sha256=manifests.sha256_of(manifest))
    with pytest.raises(VersionFailed, match="manifest of org/chat@v1"):
        weights.fetch(same, store, settings)


def test_a_manifest_cannot_name_a_path() -> None:
    file = ManifestFile("../../x", 1, "0" * 64)
    manifest = Manifest(model="m", version="v", files=[file], engine=EngineSettings(), max_model_len=1, memory_bytes=1)
    with pytest.raises(msgspec.ValidationError, match="not a plain file name"):
        manifests.decode(manifests.encode(manifest))


def test_two_workers_at_once_read_every_file_once(store: ObjectStore, settings: Settings) -> None:
    version = publish(store)
    both = threading.Barrier(2)
    stores = [Counting(settings), Counting(settings)]
    paths: list[Path] = []

    def one(counting: Counting) -> None:
        both.wait(5)
        paths.append(weights.fetch(version, counting, settings))

    threads = [threading.Thread(target=one, args=[counting]) for counting in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(paths) == 2
    assert paths[0] == paths[1]
    assert (paths[0] / "model.safetensors").read_bytes() == WEIGHTS
    manifest_bytes = 2 * (paths[0] / "manifest.json").stat().st_size
    assert sum(counting.read_bytes for counting in stores) <= len(WEIGHTS) + len(CONFIG) + manifest_bytes


def test_a_killed_fetch_frees_its_lock_and_the_next_goes_on_where_it_was(
    store: ObjectStore, settings: Settings, tmp_path: Path
) -> None:
    version = publish(store)
    script = """
import os, signal, sys, msgspec
from shared import objects, records, settings
from workers import weights
objects.RANGE_BYTES = 1 << 19
def on_progress(done, total):
    if done > total / 2:
        os.kill(os.getpid(), signal.SIGKILL)
settings = settings.load()
weights.fetch(records.decode_version(sys.stdin.buffer.read()), objects.ObjectStore(settings), settings, on_progress)
"""
    killed = subprocess.run(
        [sys.executable, "-c", script],
        input=msgspec.json.encode(version),
        env=os.environ | to_environment(settings) | {"PYTHONPATH": os.pathsep.join(sys.path)},
        check=False,
        timeout=60,
    )
    assert killed.returncode == -9
    counting = Counting(settings)
    assert (weights.fetch(version, counting, settings) / "model.safetensors").read_bytes() == WEIGHTS
    assert counting.read_bytes < 0.7 * len(WEIGHTS)


def test_a_store_that_goes_away_is_waited_for(object_server: tuple[Any, Settings], tmp_path: Path) -> None:
    server, reach = object_server
    settings = msgspec.structs.replace(reach, data_dir=str(tmp_path), fetch_retry_s=0.5)
    store = ObjectStore(settings)
    store.ensure_bucket()
    version = publish(store)
    server.kill()
    started = time.monotonic()
    with pytest.raises(ObjectsUnavailable, match=r"the manifest of org/chat@v1: .* cannot be reached .* for \d s"):
        weights.fetch(version, store, settings)
    assert time.monotonic() - started < 5
    patient = msgspec.structs.replace(settings, fetch_retry_s=30.0)
    paths: list[Path] = []
    waiting = threading.Thread(target=lambda: paths.append(weights.fetch(version, store, patient)))
    waiting.start()
    server.start()
    waiting.join(30)
    assert (paths[0] / "model.safetensors").read_bytes() == WEIGHTS


def test_a_cancelled_fetch_ends_at_once(settings: Settings) -> None:
    away = ObjectStore(msgspec.structs.replace(settings, s3_endpoint="http://127.0.0.1:9"))
    version = Version(model="m", version="v", state="available", source="s3", manifest_sha256="0" * 64)
    cancelled = threading.Event()
    cancelled.set()
    with pytest.raises(Cancelled):
        weights.fetch(version, away, msgspec.structs.replace(settings, fetch_retry_s=60.0), cancelled=cancelled)


def test_the_least_recently_used_version_makes_room(store: ObjectStore, settings: Settings) -> None:
    small = msgspec.structs.replace(settings, cache_bytes_max=9 * MIB, start_seconds_max=0.0)
    directories = []
    for number in range(3):
        directories.append(
            weights.fetch(publish(store, version=f"v{number}", files={"w": WEIGHTS + bytes([number])}), store, small)
        )
        os.utime(directories[-1], (number, number))
    assert [directory.exists() for directory in directories] == [False, True, True]
    with pytest.raises(VersionFailed, match="cache_bytes_max"):
        weights.fetch(publish(store, version="big", files={"w": WEIGHTS * 3}), store, small)


def test_what_was_used_lately_is_not_evicted(tmp_path: Path, store: ObjectStore, settings: Settings) -> None:
    directory = weights.fetch(publish(store), store, settings)
    Cache(settings.cache_path, 5 * MIB, in_use_s=600.0).make_room(4 * MIB)
    assert (directory / "model.safetensors").exists()
    assert len(list((settings.cache_path / "blobs").iterdir())) == 2
