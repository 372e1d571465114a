"""Resolution of references, pins and weights."""

import math
from typing import Any

import pytest

from shared.errors import (
    HeadraceError,
    ModelNotFound,
    NoCapacity,
    NoReplicaForPin,
    Unavailable,
    VersionConflict,
    VersionFailed,
    VersionNotFound,
    VersionRetired,
)
from shared.records import Route, VersionLimits, Weight
from shared.router import Router, choose, destination


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
    assert router.resolve(reference, pin, "key").version.version == expected


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
    assert router.resolve("m@new", None, "key").version.version == "new"
    router.drop_version("m", "new")
    router.drop_version("m", "never there")
    with pytest.raises(VersionNotFound):
        router.resolve("m@new", None, "key")
    router.put_route(make.route(("v2", 10_000)))
    assert router.resolve("m", None, "key").version.version == "v2"
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


def shares(router: Router, keys: list[str]) -> dict[str, str]:
    return {key: router.resolve("m", None, key).version.version for key in keys}


def test_raising_a_weight_only_moves_keys_over_and_each_share_is_its_weight(router: Router, make: Any) -> None:
    keys = [f"key {number}" for number in range(20_000)]
    before = dict.fromkeys(keys, "v1")
    for points in (1, 100, 500, 2_500, 5_000, 9_999, 10_000):
        router.put_route(make.route(("v1", 10_000 - points), ("v2", points)))
        now = shares(router, keys)
        assert now == shares(router, keys)  # a key keeps its version
        assert all(now[key] == "v2" for key in keys if before[key] == "v2"), points
        share = points / 10_000
        bound = 4.5 * math.sqrt(len(keys) * share * (1 - share))
        assert abs(sum(version == "v2" for version in now.values()) - len(keys) * share) <= bound
        before = now


def test_models_draw_apart(router: Router, make: Any) -> None:
    """A user that is among the first of one model's rollout is not so of every model's."""
    weights = [Weight("v1", 5_000), Weight("v2", 5_000)]
    same = sum(choose("m", weights, str(key)) == choose("n", weights, str(key)) for key in range(2_000))
    assert abs(same - 1_000) < 4.5 * math.sqrt(500)


def test_the_result_tells_who_chose_the_version(router: Router) -> None:
    assert router.resolve("m", None, "key").by_weights
    assert not router.resolve("m@v1", None, "key").by_weights
    assert not router.resolve("m@stable", None, "key").by_weights
    assert not router.resolve("m", "v1", "key").by_weights


@pytest.mark.parametrize(("reference", "pin"), [("m@v2", None), ("m@canary", None), ("m", "v2"), ("m@v2", "v2")])
def test_what_names_a_version_that_was_rolled_back_is_told_why(
    router: Router, make: Any, reference: str, pin: str | None
) -> None:
    weights = [Weight("v1", 10_000)]
    router.put_route(Route("m", {"canary": "v2"}, weights, withdrawn={"v2": "rolled back: it was slow", "old": "x"}))
    with pytest.raises(NoReplicaForPin, match=r"m@v2 .*rolled back: it was slow"):
        router.resolve(reference, pin, "key")
    assert router.resolve("m", None, "key").version.version == "v1"
    with pytest.raises(VersionRetired):
        router.resolve("m@old", None, "key")
    router.put_route(Route("m", {"canary": "v2"}, weights))  # deployed again
    assert router.resolve(reference, pin, "key").version.version == "v2"


def test_weights_never_lead_to_a_version_that_was_withdrawn() -> None:
    route = Route("m", {}, [Weight("v2", 5_000), Weight("v1", 5_000)], withdrawn={"v2": "why"})
    assert {destination(route, str(rid)) for rid in range(50)} == {"v1"}
    assert destination(Route("m", {}, [Weight("v2", 10_000)], withdrawn={"v2": "why"}), "rid") is None
    halves = Route("m", {}, [Weight("v1", 5_000), Weight("v3", 5_000)], withdrawn={"v2": "why"})
    assert {destination(halves, str(rid)) for rid in range(50)} == {"v1", "v3"}


def test_a_canary_that_failed_gets_nothing_while_it_is_about_to_be_rolled_back(router: Router, make: Any) -> None:
    keys = [str(key) for key in range(50)]
    weights = [Weight("v1", 5_000), Weight("bad", 5_000)]
    router.put_route(Route("m", {"stable": "v1"}, weights, rolling=True))
    assert set(shares(router, keys).values()) == {"v1"}
    router.put_route(
        Route("m", {"stable": "bad"}, weights, rolling=True)
    )  # the old one: the new one was not given its share
    with pytest.raises(VersionFailed):
        shares(router, keys)
    router.put_route(Route("m", {"stable": "v1"}, weights))
    with pytest.raises(VersionFailed):
        shares(router, keys)
