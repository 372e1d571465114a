"""Fetching weights from a real SeaweedFS: corrupt, truncated and missing objects, two at once, the store away."""

import asyncio
import errno
import hashlib
import os
import subprocess
import sys
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest
from faults.proxy import Proxy

from shared import manifests, objects
from shared.errors import Cancelled, ObjectsUnavailable, Unavailable, VersionFailed
from shared.manifests import Manifest, ManifestFile
from shared.objects import ObjectStore
from shared.records import EngineSettings, Version
from shared.settings import MIB, Settings, to_environment
from workers import download, weights
from workers.cache import Cache

CONFIG = b'{"model_type": "llama"}'
WEIGHTS = b"".join(hashlib.sha256(str(number).encode()).digest() * 512 for number in range(256))  # 4 MiB


SMALL_CHUNK_BYTES = MIB // 16


@pytest.fixture
def settings(s3_settings: Settings, tmp_path: Path) -> Settings:
    """Settings with a bucket and a cache of the test's own."""
    bucket = f"test-{hashlib.sha256(str(tmp_path).encode()).hexdigest()[:16]}"
    return msgspec.structs.replace(
        s3_settings, s3_bucket=bucket, data_dir=str(tmp_path), fetch_retry_s=1.0, log_level="debug"
    )


@pytest.fixture
def store(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    monkeypatch.setattr(download, "CHUNK_BYTES", SMALL_CHUNK_BYTES)
    monkeypatch.setattr(objects, "CHUNK_BYTES", SMALL_CHUNK_BYTES)
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
    raw = manifests.encode(manifest)
    for data in (*files.values(), raw):
        store.put(key_of(data), data)
    return Version(
        model=model, version=version, state="available", source="s3", manifest_sha256=manifests.sha256_of(raw)
    )


def key_of(data: bytes) -> str:
    return manifests.blob_key(hashlib.sha256(data).hexdigest())


class Counting(ObjectStore):
    """A store that counts the bytes it gave and calls `before` ahead of each ranged read."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.read_bytes = 0
        self.beginnings: Counter[str] = Counter()  # how often each object was read from its beginning
        self.before: Callable[[], None] | None = None

    def read_range(self, key: str, offset: int, length: int) -> Iterator[bytes]:
        if self.before is not None:
            self.before()
        self.beginnings[key] += offset == 0
        for data in super().read_range(key, offset, length):
            self.read_bytes += len(data)
            yield data


def test_names_may_be_as_long_as_names_may_be(store: ObjectStore, settings: Settings) -> None:
    for model in ("m" * 128, "語" * 42):
        directories = {weights.fetch(publish(store, model, tag * 128), store, settings) for tag in "vw"}
        assert len(directories) == 2
        assert all((directory / "model.safetensors").read_bytes() == WEIGHTS for directory in directories)


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
        (lambda _data: None, f"has no {key_of(WEIGHTS)}"),
    ],
    ids=["corrupt", "truncated", "missing"],
)
def test_an_object_that_cannot_be_used_fails_for_good_and_is_served_to_nobody(
    store: ObjectStore, settings: Settings, damage: Callable[[bytes], bytes | None], reason: str
) -> None:
    version = publish(store)
    key = key_of(WEIGHTS)
    damaged = damage(WEIGHTS)
    if damaged is None:
        store.remove(key)
    else:
        store.put(key, damaged)
    counting = Counting(settings)
    with pytest.raises(VersionFailed, match=f"model.safetensors of org/chat@v1 cannot be used.*{reason}"):
        weights.fetch(version, counting, settings)
    assert counting.beginnings[key] == 2  # it was read once more before the verdict
    assert {path.name for path in (settings.cache_path / "blobs").iterdir()} <= {key_of(CONFIG).removeprefix("blobs/")}
    store.put(key, WEIGHTS)
    assert (weights.fetch(version, store, settings) / "model.safetensors").read_bytes() == WEIGHTS


def test_an_object_that_is_whole_at_the_second_read_is_used(store: ObjectStore, settings: Settings) -> None:
    version = publish(store)
    key = key_of(WEIGHTS)
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
    store.put(manifests.blob_key(version.manifest_sha256), manifest)
    with pytest.raises(VersionFailed, match="manifest of org/chat@v1"):
        weights.fetch(version, store, settings)
    store.put(key_of(manifest), manifest)
    same = msgspec.structs.replace(version, manifest_sha256=manifests.sha256_of(manifest))
    with pytest.raises(VersionFailed, match="manifest of org/chat@v1"):
        weights.fetch(same, store, settings)


def test_a_manifest_cannot_name_a_path() -> None:
    file = ManifestFile("../../x", 1, "0" * 64)
    manifest = Manifest(model="m", version="v", files=[file], engine=EngineSettings(), max_model_len=1, memory_bytes=1)
    with pytest.raises(msgspec.ValidationError, match="not a plain file name"):
        manifests.decode(manifests.encode(manifest))


class Meter(Proxy):
    """Between clients and a store: counts what the store sends."""

    sent_bytes = 0

    async def _pipe(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_store = writer.get_extra_info("sockname")[1] == self.port
        while data := await reader.read(MIB):
            self.sent_bytes += len(data) if from_store else 0
            writer.write(data)
            await writer.drain()


@pytest.fixture
def meter(settings: Settings) -> Iterator[Meter]:
    """A meter on the way to the store, at `port`."""
    target = urlsplit(settings.s3_endpoint)
    meter = Meter((str(target.hostname), int(target.port or 0)))
    loop = asyncio.new_event_loop()
    loop.run_until_complete(meter.start())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield meter
    asyncio.run_coroutine_threadsafe(meter.close(), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)
    loop.close()


FETCH = """
import os, signal, sys
from shared import objects, records, settings
from workers import download, weights
objects.CHUNK_BYTES = download.CHUNK_BYTES = 1 << 16
kill_at = int(sys.argv[1])
def on_progress(done, total):
    if done >= kill_at:
        os.kill(os.getpid(), signal.SIGKILL)
settings = settings.load()
version = records.decode_version(sys.stdin.buffer.read())
print(weights.fetch(version, objects.ObjectStore(settings), settings, on_progress))
"""


def start_fetch(version: Version, settings: Settings, kill_at: int = 1 << 40) -> subprocess.Popen[bytes]:
    """A process that fetches, and kills itself once it has so many bytes."""
    return subprocess.Popen(
        [sys.executable, "-c", FETCH, str(kill_at)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | to_environment(settings) | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )


def test_two_workers_that_start_together_read_every_file_once(
    store: ObjectStore, settings: Settings, meter: Meter
) -> None:
    version = publish(store)
    through = msgspec.structs.replace(settings, s3_endpoint=f"http://127.0.0.1:{meter.port}")
    workers = [start_fetch(version, through) for _ in range(2)]
    paths = [worker.communicate(msgspec.json.encode(version), timeout=60)[0].split()[-1] for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0]
    assert paths[0] == paths[1]
    assert (Path(paths[0].decode()) / "model.safetensors").read_bytes() == WEIGHTS
    assert len(WEIGHTS) < meter.sent_bytes < 1.1 * len(WEIGHTS)


@pytest.mark.parametrize("part", [0.1, 0.6, 0.999])
def test_a_killed_fetch_frees_its_lock_and_the_next_reads_only_what_is_missing(
    store: ObjectStore, settings: Settings, part: float
) -> None:
    version = publish(store)
    killed = start_fetch(version, settings, int(part * len(WEIGHTS)))
    killed.communicate(msgspec.json.encode(version), timeout=60)
    assert killed.returncode == -9
    journal = Cache(settings.cache_path, 0, 0.0).journal(key_of(WEIGHTS).removeprefix("blobs/"))
    here = journal.read_bytes()[download.HEAD_BYTES :].count(1) * SMALL_CHUNK_BYTES
    assert here >= part * len(WEIGHTS) - weights.READERS * SMALL_CHUNK_BYTES
    counting = Counting(settings)
    assert (weights.fetch(version, counting, settings) / "model.safetensors").read_bytes() == WEIGHTS
    assert counting.read_bytes - len(CONFIG) * counting.beginnings[key_of(CONFIG)] == len(WEIGHTS) - here
    assert not list((settings.cache_path / "blobs").glob("*.*"))


def test_what_no_journal_vouches_for_is_read_again(store: ObjectStore, settings: Settings) -> None:
    version = publish(store)
    cache = Cache(settings.cache_path, settings.cache_bytes_max, 0.0)
    name = key_of(WEIGHTS).removeprefix("blobs/")
    cache.partial(name).write_bytes(bytes(len(WEIGHTS)))  # one large hole
    cache.journal(name).write_bytes(b"%016d" % (2 * SMALL_CHUNK_BYTES) + b"\1" * 32)  # of chunks of another size
    assert (weights.fetch(version, store, settings) / "model.safetensors").read_bytes() == WEIGHTS


def test_a_journal_that_says_too_much_is_found_out(store: ObjectStore, settings: Settings) -> None:
    version = publish(store)
    cache = Cache(settings.cache_path, settings.cache_bytes_max, 0.0)
    name = key_of(WEIGHTS).removeprefix("blobs/")
    cache.partial(name).write_bytes(bytes(len(WEIGHTS)))  # as after a loss of power
    cache.journal(name).write_bytes(b"%016d" % SMALL_CHUNK_BYTES + b"\1" * 64)
    assert (weights.fetch(version, store, settings) / "model.safetensors").read_bytes() == WEIGHTS


def test_after_a_boot_of_the_host_files_are_hashed_once_more(store: ObjectStore, settings: Settings) -> None:
    version = publish(store)
    directory = weights.fetch(version, store, settings)
    (directory / "model.safetensors").write_bytes(bytes(len(WEIGHTS)))
    assert (
        weights.fetch(version, store, settings) / "model.safetensors"
    ).read_bytes() != WEIGHTS  # of this boot: trusted
    before_boot = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) - 60
    for path in (directory, *(settings.cache_path / "blobs").iterdir()):
        os.utime(path, (before_boot, before_boot))
    counting = Counting(settings)
    assert (weights.fetch(version, counting, settings) / "model.safetensors").read_bytes() == WEIGHTS
    assert counting.read_bytes == len(WEIGHTS)  # and not the other file


def test_a_full_disk_is_told_as_such(store: ObjectStore, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    version = publish(store)

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        with pytest.raises(Unavailable, match=r"no room .*: No space left on device"):
            weights.fetch(version, store, settings)
    assert (weights.fetch(version, store, settings) / "model.safetensors").read_bytes() == WEIGHTS


def test_one_file_that_cannot_be_used_ends_the_whole_fetch(store: ObjectStore, settings: Settings) -> None:
    files = {f"model-{number}.safetensors": WEIGHTS + bytes([number]) for number in range(3)}
    version = publish(store, files=files)
    store.put(key_of(files["model-0.safetensors"]), WEIGHTS + b"?")
    counting = Counting(settings)
    with pytest.raises(VersionFailed, match=r"model-0.safetensors of org/chat@v1 cannot be used: its sha256"):
        weights.fetch(version, counting, settings)
    for number, data in files.items():
        assert counting.beginnings[key_of(data)] <= 2, number
    store.put(key_of(files["model-0.safetensors"]), files["model-0.safetensors"])
    directory = weights.fetch(version, store, settings)
    assert {name: (directory / name).read_bytes() for name in files} == files


def test_a_fetch_holds_a_few_chunks_in_memory_however_large_the_file(settings: Settings, tmp_path: Path) -> None:
    store = ObjectStore(settings)
    store.ensure_bucket()
    size = 32 * MIB
    path = tmp_path / "large"
    path.write_bytes(bytes(size))
    large = ManifestFile("w", size, hashlib.sha256(bytes(size)).hexdigest())
    store.put_file(manifests.blob_key(large.sha256), path, size, large.sha256)
    manifest = Manifest(model="m", version="v", files=[large], engine=EngineSettings(), max_model_len=1, memory_bytes=0)
    raw = manifests.encode(manifest)
    store.put(key_of(raw), raw)
    version = Version(model="m", version="v", state="available", source="s3", manifest_sha256=manifests.sha256_of(raw))
    tracemalloc.start()
    try:
        weights.fetch(version, store, settings)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2 * (weights.READERS + weights.FILES_AT_ONCE) * download.CHUNK_BYTES  # 12 MiB


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
