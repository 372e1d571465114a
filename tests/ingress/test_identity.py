"""Whose a request is: from its key, whatever else it says; and what each role may do, route by route."""

import json
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ingress.identity import LOCAL, OPEN_PATHS, Identities
from shared import subjects, tenants
from shared.errors import InvalidApiKey, ModelNotAllowed, RoleMissing
from shared.tenants import ApiKey, Role, Tenant

CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
KEYS: dict[str, str] = {name: tenants.new_key() for name in ("infer", "deploy", "admin", "of_m", "of_other", "revoked")}


def api_key(name: str, **fields: Any) -> ApiKey:
    return ApiKey(id=f"k-{name}", sha256=tenants.sha256_of(KEYS[name]), **fields)


TENANT = Tenant(
    name="acme",
    keys=(
        api_key("infer"),
        api_key("deploy", role="deploy"),
        api_key("admin", role="admin"),
        api_key("of_m", models=("m",)),
        api_key("of_other", role="deploy", models=("other",)),
        api_key("revoked", revoked=1),
    ),
)


def put(identities: Identities, tenant: Tenant | None, name: str = "acme") -> None:
    identities.on_tenant(subjects.key(name), None if tenant is None else tenants.encode(tenant))


def bearer(name: str) -> dict[bytes, bytes]:
    return {b"authorization": b"Bearer " + KEYS[name].encode()}


# -- who it is ------------------------------------------------------------------------------------------------------


def test_without_required_keys_everybody_is_local_whatever_is_sent() -> None:
    identities = Identities(require_keys=False)
    put(identities, TENANT)
    for headers in ({}, bearer("infer"), {b"authorization": b"Bearer none"}):
        assert identities.caller(headers, 0.0) is LOCAL
    assert (LOCAL.tenant, LOCAL.key.role, LOCAL.may_use("anything")) == ("local", "admin", True)


@pytest.mark.parametrize("scheme", [b"Bearer ", b"bearer ", b"BEARER  "])
def test_a_key_is_its_tenants(scheme: bytes) -> None:
    identities = Identities(require_keys=True)
    put(identities, TENANT)
    caller = identities.caller({b"authorization": scheme + KEYS["infer"].encode()}, 0.0)
    assert (caller.tenant, caller.key.id, caller.actor.by) == ("acme", "k-infer", "k-infer")
    assert identities.caller({b"x-api-key": KEYS["infer"].encode()}, 0.0) == caller
    others = {b"x-api-key": KEYS["admin"].encode(), b"x-tenant": b"other", b"openai-organization": b"other"}
    assert identities.caller(bearer("infer") | others, 0.0) == caller


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {b"authorization": b""},
        {b"authorization": b"Bearer"},
        {b"authorization": b"Bearer "},
        {b"authorization": b"Basic " + KEYS["infer"].encode()},
        {b"authorization": KEYS["infer"].encode()},
        {b"authorization": b"Bearer " + KEYS["infer"].encode()[:-1]},
        {b"authorization": b"Bearer " + KEYS["infer"].encode() + b"A"},
        {b"authorization": b"Bearer " + tenants.sha256_of(KEYS["infer"]).encode()},
        {b"authorization": b"Bearer " + tenants.new_key().encode()},
        {b"authorization": b"Bearer \xff\xfe" + b"x" * 60_000},
        {b"authorization": b"Bearer none", b"x-api-key": KEYS["infer"].encode()},
        bearer("revoked"),
        {b"x-api-key": b""},
    ],
)
def test_nothing_else_is_a_key(headers: dict[bytes, bytes]) -> None:
    identities = Identities(require_keys=True)
    put(identities, TENANT)
    with pytest.raises(InvalidApiKey) as refused:
        identities.caller(headers, 0.0)
    for key in KEYS.values():
        assert key[3:-1] not in str(refused.value)


def test_keys_come_and_go_with_the_record() -> None:
    identities = Identities(require_keys=True)
    with pytest.raises(InvalidApiKey):
        identities.caller(bearer("infer"), 0.0)
    put(identities, TENANT)
    put(identities, Tenant(name="acme", weight=2.0, keys=(api_key("infer", expires=100),)))
    assert identities.tenant("acme").weight == 2.0
    assert identities.caller(bearer("infer"), 99.9).tenant == "acme"
    for name, now in (("infer", 100.0), ("deploy", 0.0)):
        with pytest.raises(InvalidApiKey):
            identities.caller(bearer(name), now)
    identities.on_tenant(subjects.key("acme"), b"{")  # it stays as it was
    put(identities, TENANT, "other")  # under another's name: it is not read
    assert identities.caller(bearer("infer"), 0.0).tenant == "acme"
    put(identities, None)
    with pytest.raises(InvalidApiKey):
        identities.caller(bearer("infer"), 0.0)
    assert identities.tenant("acme") == Tenant(name="acme")


def test_a_hash_that_is_copied_stays_its_first_tenants() -> None:
    identities = Identities(require_keys=True)
    thief = Tenant(name="thief", keys=TENANT.keys)
    put(identities, TENANT)
    put(identities, thief, "thief")
    assert identities.caller(bearer("infer"), 0.0).tenant == "acme"
    put(identities, None, "thief")
    assert identities.caller(bearer("infer"), 0.0).tenant == "acme"


def test_roles_and_models() -> None:
    identities = Identities(require_keys=True)
    put(identities, TENANT)
    allowed = {"infer": ["infer"], "deploy": ["infer", "deploy"], "admin": ["infer", "deploy", "admin"]}
    roles: list[Role] = ["infer", "deploy", "admin"]
    for name in roles:
        for role in roles:
            caller = identities.caller(bearer(name), 0.0)
            if role in allowed[name]:
                caller.check_role(role)
            else:
                with pytest.raises(RoleMissing):
                    caller.check_role(role)
    of_m = identities.caller(bearer("of_m"), 0.0)
    for reference in ("m", "m@v1", "m@"):
        of_m.check_model(reference)
    for reference in ("m2", "other", "", "@m", "M"):
        with pytest.raises(ModelNotAllowed):
            of_m.check_model(reference)


# -- over HTTP ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def guarded(start_front: Callable[..., Any], make: Any) -> Any:
    """A front that requires keys; it serves `m` and `other`."""
    front = start_front(require_keys=True, request_bytes_max=10_000)
    front.router.put_version(make.version(model="other"))
    front.router.put_route(make.route(("v1", 10_000), model="other", stable="v1"))
    front.call(put, front.identities, TENANT)
    return front


@pytest.fixture
def front(guarded: Any, make: Any) -> Iterator[Any]:
    guarded.dispatcher.streams.clear()
    guarded.dispatcher.answer = make.says("Hello")
    yield guarded
    make.wait_for(lambda: not guarded.context.open, "no request is left open")


def ask(front: Any, method: str, path: str, key: str | None, body: Any = None) -> Any:
    return front.http(method, path, body, {} if key is None else {"authorization": f"Bearer {KEYS[key]}"})


NEEDED: dict[Role, set[str]] = {
    "infer": {
        "POST /v1/chat/completions",
        "POST /v1/completions",
        "POST /v1/models/{model}/infer",
        "POST /v1/messages",
        "POST /v1/messages/count_tokens",
        "GET /v1/models",
        "GET /v1/models/{model}",
        "GET /v1/streams/{rid}",
        "GET /v1/usage",
        "DELETE /v1/streams/{rid}",
        "POST /v1/streams/{rid}/cancel",
        "POST /v1/webhooks/secret",
        "GET /v1/webhooks/secret",
        "POST /v1/responses",
        "POST /v1/embeddings",
        "POST /v1/files",
        "GET /v1/files",
        "GET /v1/files/{file_id}",
        "DELETE /v1/files/{file_id}",
        "GET /v1/files/{file_id}/content",
        "POST /v1/batches",
        "GET /v1/batches",
        "GET /v1/batches/{batch_id}",
        "POST /v1/batches/{batch_id}/cancel",
        "POST /v1/jobs",
        "GET /v1/jobs",
        "GET /v1/jobs/{job_id}",
        "DELETE /v1/jobs/{job_id}",
        "GET /v1/jobs/{job_id}/events",
        "GET /v1/jobs/{job_id}/result",
        "POST /v1/jobs/{job_id}/cancel",
        "GET /v1/responses/{response_id}",
        "DELETE /v1/responses/{response_id}",
        "GET /v1/responses/{response_id}/input_items",
        "POST /v1/responses/{response_id}/cancel",
    },
    "deploy": {
        "GET /v1/models/{model}/versions",
        "POST /v1/models/{model}/versions",
        "PATCH /v1/models/{model}/versions/{version}",
        "PUT /v1/models/{model}/aliases/{alias}",
        "DELETE /v1/models/{model}/aliases/{alias}",
        "GET /v1/deployments",
        "POST /v1/deployments",
        "GET /v1/deployments/{deployment_id}",
        *(f"POST /v1/deployments/{{deployment_id}}/{what}" for what in ("rollback", "pause", "resume", "promote")),
    },
    "admin": {
        "GET /v1/tenants",
        "POST /v1/tenants",
        "GET /v1/tenants/{tenant}",
        "PATCH /v1/tenants/{tenant}",
        "DELETE /v1/tenants/{tenant}",
        "POST /v1/tenants/{tenant}/keys",
        "POST /v1/tenants/{tenant}/keys/{key_id}/rotate",
        "DELETE /v1/tenants/{tenant}/keys/{key_id}",
    },
}


def test_every_route_needs_a_key_of_its_role(front: Any) -> None:
    paths = front.http("GET", "/openapi.json").json["paths"]
    known = {f"{method.upper()} {path}" for path, methods in paths.items() for method in methods}
    assert known == set().union(*NEEDED.values()) | {f"GET {path}" for path in OPEN_PATHS if path in paths}
    lesser: dict[Role, str | None] = {"infer": None, "deploy": "infer", "admin": "deploy"}
    for role, routes in NEEDED.items():
        for route in routes:
            method, path = re.sub(r"\{[a-z_]+\}", "m", route).split(" ")
            for key in (None, "revoked"):
                refused = ask(front, method, path, key, b"{")
                assert (refused.status, refused.error["code"]) == (401, "invalid_api_key"), route
                assert refused.headers["www-authenticate"].startswith("Bearer")
            if (less := lesser[role]) is not None:
                refused = ask(front, method, path, less, b"{")
                assert (refused.status, refused.error["code"]) == (403, "role_missing"), route
            assert ask(front, method, path, role, b"{").status not in (401, 403), route
    assert front.dispatcher.streams == []


def test_what_is_open_stays_open_and_nothing_else(front: Any) -> None:
    for path in sorted(OPEN_PATHS):
        assert front.http("GET", path).status == 200, path
    for path in (
        "/",
        "/v1",
        "/v1/",
        "/v1/nothing",
        "//v1/models",
        "/v1/models/",
        "/%76%31/models",
        "/livez/",
        "/docs/x",
    ):
        assert front.http("GET", path).status == 401, path
    assert ask(front, "GET", "/%76%31/models", "infer").status == 200
    assert ask(front, "GET", "/v1/nothing", "infer").status == 404


def test_the_tenant_is_the_keys(front: Any) -> None:
    given: list[str] = []
    submit = front.dispatcher.submit

    async def noted(request: Any, tenant: str, **more: Any) -> Any:
        given.append(tenant)
        return await submit(request, tenant, **more)

    front.dispatcher.submit = noted
    headers = {"authorization": f"Bearer {KEYS['infer']}", "x-tenant": "other", "x-headrace-tenant": "other"}
    assert front.http("POST", "/v1/chat/completions", CHAT | {"user": "other"}, headers).status == 200
    keyed = headers | {"idempotency-key": "one"}
    assert front.http("POST", "/v1/models/m/infer", {"input": "Hi"}, keyed).status == 200
    assert front.http("POST", "/v1/completions", {"model": "m", "prompt": ["a", "b"]}, headers).status == 200
    front.dispatcher.submit = submit
    assert given == ["acme"] * 4


def test_a_key_sees_and_uses_its_models_only(front: Any) -> None:
    def models(key: str) -> list[str]:
        return [entry["id"] for entry in ask(front, "GET", "/v1/models", key).json["data"]]

    assert models("infer") == ["m", "other"]
    assert models("of_m") == ["m"]
    assert models("of_other") == ["other"]
    allowed = ask(front, "POST", "/v1/chat/completions", "of_m", CHAT | {"model": "m@v1"})
    assert allowed.status == 200
    hidden = [
        ("POST", "/v1/chat/completions", "of_m", CHAT | {"model": "other"}),
        ("POST", "/v1/chat/completions", "of_m", CHAT | {"model": "no-such-model"}),  # what there is, is not told
        ("POST", "/v1/models/other/infer", "of_m", {"input": "Hi"}),
        ("GET", "/v1/models/other", "of_m", None),
        ("GET", "/v1/models/other@v1", "of_m", None),
        ("GET", "/v1/models/m/versions", "of_other", None),
        ("POST", "/v1/models/m/versions", "of_other", {"version": "v2", "source": "sim:zero"}),
        ("PATCH", "/v1/models/m/versions/v1", "of_other", {}),
        ("PUT", "/v1/models/m/aliases/a", "of_other", {"version": "v1"}),
        ("DELETE", "/v1/models/m/aliases/a", "of_other", None),
        ("POST", "/v1/deployments", "of_other", {"model": "m", "version": "v1"}),
    ]
    for method, path, key, body in hidden:
        refused = ask(front, method, path, key, body)
        assert (refused.status, refused.error["code"]) == (403, "model_not_allowed"), f"{method} {path}"
        assert refused.error["param"] == "model"


def test_a_response_that_ends_after_its_tenant_is_not_kept(front: Any, make: Any) -> None:
    body = {"model": "m", "input": "Hi"}

    def removed(stream: Any) -> None:
        put(front.identities, None)
        make.says("a", "b")(stream)

    for answer, is_kept in ((make.says("a", "b"), True), (removed, False)):
        front.dispatcher.answer = answer
        told = ask(front, "POST", "/v1/responses", "infer", body)
        front.call(put, front.identities, TENANT)
        assert (told.status, told.json["store"]) == (200, is_kept)
        found = ask(front, "GET", f"/v1/responses/{told.json['id']}", "infer")
        assert found.status == (200 if is_kept else 404)


def test_the_order_of_the_checks(front: Any) -> None:
    unknown, path = CHAT | {"model": "no-such-model"}, "/v1/chat/completions"
    too_large = json.dumps(CHAT | {"metadata": "x" * 20_000}).encode()
    assert ask(front, "POST", path, None, too_large).status == 413
    assert ask(front, "POST", "/v1/tenants", None, too_large).status == 413
    assert ask(front, "POST", path, None, b"{").status == 401
    assert ask(front, "POST", path, "infer", b"{").status == 400
    assert ask(front, "POST", path, "of_m", unknown | {"max_tokens": -1}).status == 400  # what has no type has no model
    assert ask(front, "POST", path, "infer", unknown | {"max_tokens": 10**6}).status == 404
    assert ask(front, "POST", path, "infer", CHAT | {"model": "m@v9", "max_tokens": 10**6}).status == 404
    assert ask(front, "POST", path, "infer", CHAT | {"max_tokens": 10**6}).status == 400


def test_nothing_of_a_body_is_read_without_a_key(front: Any, raw: Any) -> None:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9000\r\n\r\n"
    begun = time.monotonic()
    with raw(front.port, head) as client:
        answer = client.read_until(b"invalid_api_key")
    assert answer.startswith(b"HTTP/1.1 401 ")
    assert time.monotonic() - begun < 2
    assert b"headrace_requests" in front.http("GET", "/metrics").body


def test_no_key_is_in_the_metrics_or_in_an_answer(front: Any, make: Any, capfd: pytest.CaptureFixture[str]) -> None:
    for name in KEYS:
        for answer in (
            ask(front, "POST", "/v1/chat/completions", name, CHAT),
            ask(front, "GET", f"/v1/{KEYS[name]}x", None),
        ):
            assert KEYS[name][3:] not in str(answer.headers) + answer.body.decode()
    make.wait_for(lambda: not front.context.open, "all ended")
    metrics = front.http("GET", "/metrics").body.decode()
    assert 'code="invalid_api_key"' in metrics
    written = "".join(capfd.readouterr())
    for key in KEYS.values():
        assert key[3:] not in metrics
        assert key[3:] not in written
