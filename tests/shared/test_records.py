"""Records as they are stored: read whole and under their own key, or refused."""

from collections.abc import Callable
from typing import Any

import pytest

from shared import records, subjects, tenants
from shared.errors import Internal
from shared.records import Lease, Route, Version, Weight
from shared.tenants import ApiKey, Limits, Tenant

VERSION = Version(model="a/b", version="v.1", state="available", source="sim:zero")
ROUTE = Route("a/b", {"stable": "v.1"}, [Weight("v.1", 10_000)])
LEASE = Lease(worker="w1", model="a/b", version="v.1", state="active", pid=1, host="h", started=0.0)
TENANT = Tenant(
    name="a/b", weight=2.5, limits=Limits(concurrency=3), keys=(ApiKey(id="k1", sha256="0" * 64, models=("m",)),)
)
STORED: list[tuple[Callable[[str, bytes], Any], str, Any]] = [
    (records.version_at, subjects.key("a/b", "v.1"), VERSION),
    (records.route_at, subjects.key("a/b"), ROUTE),
    (records.lease_at, "w1", LEASE),
    (tenants.tenant_at, subjects.key("a/b"), TENANT),
]


@pytest.mark.parametrize(("read", "key", "record"), STORED)
def test_a_record_is_read_under_its_own_key_only(read: Callable[[str, bytes], Any], key: str, record: Any) -> None:
    assert read(key, records.encode(record)) == record
    for other in (key + "x", key + ".x", "x", "=FF.v=2E1", "=FF", "a.b.c", ""):
        with pytest.raises(Internal):
            read(other, records.encode(record))


@pytest.mark.parametrize(("read", "key", "record"), STORED)
@pytest.mark.parametrize(
    "raw", [b"", b"\xff\xfe", b"{}", b"[]", b"null", b"[" * 100_000, b'{"x":' + b"[" * 100_000, b'{"model":"\xff"}']
)
def test_what_cannot_be_read_is_one_error(read: Callable[[str, bytes], Any], key: str, record: Any, raw: bytes) -> None:
    with pytest.raises(Internal, match="cannot be read"):
        read(key, raw)


@pytest.mark.parametrize(
    "changed",
    [
        b'"limits":{"max_replicas":-3}',
        b'"limits":{"min_replicas":-1}',
        b'"limits":{"idle_seconds":-1}',
        b'"engine":{"slots":0}',
        b'"engine":{"slots":99999999999}',
        b'"engine":{"kv_blocks":99999999999}',
        b'"engine":{"prefill_chunk":0}',
        b'"engine":{"max_model_len":-5}',
    ],
)
def test_settings_of_a_version_have_bounds(changed: bytes) -> None:
    with pytest.raises(Internal):
        records.decode_version(records.encode(VERSION)[:-1] + b"," + changed + b"}")
