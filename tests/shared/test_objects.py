"""The object store against a real SeaweedFS."""

import hashlib
import time
from pathlib import Path

import msgspec
import pytest

from shared.errors import Internal, NotFound, ObjectsUnavailable
from shared.objects import CHUNK_BYTES, ObjectStore
from shared.settings import MIB, Settings


@pytest.fixture
def store(s3_settings: Settings, tmp_path: Path) -> ObjectStore:
    """A store with a bucket of the test's own."""
    bucket = f"test-{hashlib.sha256(str(tmp_path).encode()).hexdigest()[:16]}"
    store = ObjectStore(msgspec.structs.replace(s3_settings, s3_bucket=bucket))
    store.ensure_bucket()
    return store


def test_put_get_stat_list_remove(store: ObjectStore) -> None:
    store.ensure_bucket()  # again: not an error
    store.put("a/one", b"1")
    store.put("a/two", b"22")
    store.put("b/three", b"")
    assert store.get("a/two") == b"22"
    assert store.get("b/three") == b""
    assert store.stat("a/two").size == 2
    assert [(found.key, found.size) for found in store.list("a/")] == [("a/one", 1), ("a/two", 2)]
    store.remove("a/one")
    store.remove("a/one")
    with pytest.raises(NotFound, match="a/one"):
        store.get("a/one")
    with pytest.raises(NotFound):
        store.stat("a/one")


def test_a_file_in_parts_is_read_back_in_ranges(store: ObjectStore, tmp_path: Path) -> None:
    data = b"".join(hashlib.sha256(str(number).encode()).digest() * 1024 for number in range(640))  # 20 MiB: two parts
    path = tmp_path / "weights"
    path.write_bytes(data)
    store.put_file("w", path, len(data), hashlib.sha256(data).hexdigest())
    assert b"".join(store.read_range("w", 0, len(data))) == data
    start = 3 * MIB + 17
    chunks = list(store.read_range("w", start, 5 * MIB))
    assert b"".join(chunks) == data[start : start + 5 * MIB]
    assert max(len(chunk) for chunk in chunks) == CHUNK_BYTES
    assert b"".join(store.read_range("w", start, len(data))) == data[start:]  # shorter than said: ends early
    assert list(store.read_range("w", len(data) + 5, MIB)) == []


@pytest.mark.parametrize("size", [7, 17 * MIB], ids=["in one part", "in two parts"])
def test_a_file_that_is_not_what_was_hashed_never_becomes_an_object(
    store: ObjectStore, tmp_path: Path, size: int
) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(size))
    with pytest.raises(Internal, match="changed while"):
        store.put_file("f", path, size, hashlib.sha256(b"hashed!").hexdigest())
    assert store.list("f") == []
    with pytest.raises(Internal, match="cannot be read"):
        store.put_file("f", path, size + 1, hashlib.sha256(b"longer").hexdigest())
    assert store.list("f") == []


def test_a_touched_object_is_new_and_the_same(store: ObjectStore, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(17 * MIB))
    store.put_file("t", path, 17 * MIB, hashlib.sha256(bytes(17 * MIB)).hexdigest())
    before = store.stat("t")
    assert abs(before.modified - time.time()) < 60
    deadline = time.monotonic() + 10
    while store.stat("t").modified <= before.modified:  # its clock shows seconds
        store.touch("t")
        assert time.monotonic() < deadline
    assert b"".join(store.read_range("t", 0, 17 * MIB)) == bytes(17 * MIB)
    [listed] = store.list("t")
    assert (listed.size, listed.modified) == (17 * MIB, pytest.approx(store.stat("t").modified, abs=1.0))
    with pytest.raises(NotFound):
        store.touch("nothing")


def test_a_wrong_key_is_refused_without_naming_it(s3_settings: Settings) -> None:
    wrong = msgspec.structs.replace(s3_settings, s3_secret_key="0" * 40)
    with pytest.raises(ObjectsUnavailable, match="refuses the access key") as caught:
        ObjectStore(wrong).get("x")
    assert wrong.s3_secret_key not in str(caught.value)
    assert wrong.s3_access_key not in str(caught.value)


def test_a_store_that_is_not_there_is_unavailable_within_seconds() -> None:
    started = time.monotonic()
    with pytest.raises(ObjectsUnavailable, match=r"127\.0\.0\.1:9 cannot be reached"):
        ObjectStore(Settings(s3_endpoint="http://127.0.0.1:9")).get("x")
    assert time.monotonic() - started < 5
    with pytest.raises(ObjectsUnavailable, match="s3_endpoint"):
        ObjectStore(Settings(s3_endpoint="somewhere"))
