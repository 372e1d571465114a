"""Resolution of references, pins and weights."""

from typing import Any

import pytest

from shared.errors import (
    HeadraceError,
    ModelNotFound,
    NoCapacity,
    Unavailable,
    VersionConflict,
    VersionFailed,
    VersionNotFound,
    VersionRetired,
)
from shared.records import VersionLimits, Weight
from shared.router import Router, choose


@pytest.fixture
def router(make: Any) -> Router:
    router = Router()
    for record in (
        make.version("v1", created=10),
        make.version("v2", created=20),
        make.version("bad", state="failed", reason="weights are corrupt", created=30),
        make.version("old", state="retired", created=5),
        make.version("new", state="registered", created=40),
        make.version("later", state="of a later release", created=45),
        make.version("none", limits=VersionLimits(max_replicas=0), created=50),
        make.version("v1", model="Qwen/Qwen3-0.6B", created=3),
        make.version("gone", model="retired-only", state="retired"),
    ):
        router.put_version(record)
    router.put_route(make.route(("v1", 10_000), ("v2", 0), stable="v1", canary="v2", coming="v9"))
    router.put_route(make.route(("v7", 10_000), model="early"))
    return router


@pytest.mark.parametrize(
    ("reference", "pin", "expected"),
    [
        ("m", None, "v1"),
        ("m@v2", None, "v2"),
        ("m@stable", None, "v1"),
        ("m@canary", None, "v2"),
        ("m", "v2", "v2"),
        ("m@v2", "v2", "v2"),
        ("m@stable", "v1", "v1"),
    ],
)
def test_a_reference_names_a_version(router: Router, reference: str, pin: str | None, expected: str) -> None:
    assert router.resolve(reference, pin, "key").version == expected


@pytest.mark.parametrize(
    ("reference", "pin", "error", "words"),
    [
        ("x", None, ModelNotFound, "`x`"),
        ("", None, ModelNotFound, "does not exist"),
        ("x@v1", "v1", ModelNotFound, "`x`"),
        ("m@v3", None, VersionNotFound, "`v3`"),
        ("m@", None, VersionNotFound, "version or alias"),
        ("m", "stable", VersionNotFound, "`stable`"),  # a pin names a version, never an alias
        ("m@v1", "v2", VersionConflict, "X-Version-Pin"),
        ("m@canary", "v1", VersionConflict, "`v2`"),
        ("m@bad", None, VersionFailed, "weights are corrupt"),
        ("m@old", None, VersionRetired, "out of service"),
        ("retired-only", None, VersionRetired, "all versions"),
        ("m@new", None, Unavailable, "still being registered"),
        ("m@later", None, Unavailable, "still being registered"),
        ("m@none", None, NoCapacity, "max_replicas 0"),
        ("m@coming", None, Unavailable, "`v9`"),
        ("early", None, Unavailable, "`v7`"),  # the route's record came first
        ("Qwen/Qwen3-0.6B", None, VersionNotFound, "no version of"),  # no route
    ],
)
def test_a_reference_is_refused(
    router: Router, reference: str, pin: str | None, error: type[HeadraceError], words: str
) -> None:
    with pytest.raises(HeadraceError, match=words) as caught:
        router.resolve(reference, pin, "key")
    assert type(caught.value) is error
    assert caught.value.param == "model" or error is Unavailable


def test_a_version_that_is_being_registered_may_be_asked_for_again(router: Router) -> None:
    with pytest.raises(Unavailable) as caught:
        router.resolve("m@new", None, "key")
    assert caught.value.retryable
    assert caught.value.retry_after == 1.0


def test_changes_replace_and_drop(router: Router, make: Any) -> None:
    router.put_version(make.version("new"))
    assert router.resolve("m@new", None, "key").version == "new"
    router.drop_version("m", "new")
    router.drop_version("m", "never there")
    with pytest.raises(VersionNotFound):
        router.resolve("m@new", None, "key")
    router.put_route(make.route(("v2", 10_000)))
    assert router.resolve("m", None, "key").version == "v2"
    router.drop_route("m")
    with pytest.raises(VersionNotFound):
        router.resolve("m", None, "key")
    router.drop_version("Qwen/Qwen3-0.6B", "v1")
    with pytest.raises(ModelNotFound):
        router.resolve("Qwen/Qwen3-0.6B@v1", None, "key")


def test_models_list_what_is_not_retired(router: Router) -> None:
    assert [(entry.id, entry.created) for entry in router.models()] == [("Qwen/Qwen3-0.6B", 3), ("m", 10)]
    assert router.model("m@canary").id == "m@canary"
    assert router.model("m@canary").created == 20
    with pytest.raises(ModelNotFound):
        router.model("retired-only")
    with pytest.raises(VersionNotFound):
        router.model("m@v9")


def test_versions_are_listed_oldest_first_with_their_share(router: Router, make: Any) -> None:
    router.put_route(make.route(("v1", 9_950), ("v2", 50)))
    listed = [(entry.version, entry.traffic_pct, entry.state, entry.reason) for entry in router.versions("m")]
    assert listed[:4] == [
        ("old", 0, "retired", ""),
        ("v1", 99.5, "available", ""),
        ("v2", 0.5, "available", ""),
        ("bad", 0, "failed", "weights are corrupt"),
    ]
    with pytest.raises(ModelNotFound):
        router.versions("x")


def test_weights_are_kept_to() -> None:
    weights = [Weight("old", 7_500), Weight("new", 2_500)]
    chosen = [choose("m", weights, str(key)) for key in range(4_000)]
    assert 0.22 < chosen.count("new") / len(chosen) < 0.28


def test_raising_a_weight_moves_keys_only_to_it() -> None:
    keys = [str(key) for key in range(1_000)]
    before = {key: choose("m", [Weight("old", 9_000), Weight("new", 1_000)], key) for key in keys}
    after = {key: choose("m", [Weight("old", 5_000), Weight("new", 5_000)], key) for key in keys}
    assert all(after[key] == "new" for key in keys if before[key] == "new")
    assert any(after[key] != before[key] for key in keys)
    assert all(choose("m", [Weight("old", 0), Weight("new", 10_000)], key) == "new" for key in keys)
