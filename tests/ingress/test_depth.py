"""Bodies that are nested deeply: refused, or ignored where the field is, on every route that takes a body. Never a crash."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from shared.wire import new_id

from .test_identity import NEEDED

DEEP, RATHER_DEEP = 10_000, 400  # the recursion limit of Python is between the two
INSTEAD = "DEEP"  # in a body, of the nested value
CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
NESTED: list[Callable[[int], str]] = [
    lambda depth: "[" * depth + "]" * depth,
    lambda depth: '{"a":' * depth + "1" + "}" * depth,
    lambda depth: '[{"a":' * (depth // 2) + "1" + "}]" * (depth // 2),
    lambda depth: "[" * depth,
    lambda depth: '{"items":' * depth + "{}" + "}" * depth,
]
PLACES = [
    ("/v1/chat/completions", {**CHAT, "metadata": INSTEAD}),
    ("/v1/chat/completions", {**CHAT, "unknown": INSTEAD}),
    ("/v1/chat/completions", {**CHAT, "tools": INSTEAD}),
    ("/v1/chat/completions", {**CHAT, "messages": INSTEAD}),
    ("/v1/chat/completions", {**CHAT, "messages": [{"role": "user", "content": INSTEAD}]}),
    ("/v1/chat/completions", {**CHAT, "logit_bias": INSTEAD}),
    ("/v1/chat/completions", {**CHAT, "guided_json": INSTEAD}),
    (
        "/v1/chat/completions",
        {**CHAT, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": INSTEAD}}},
    ),
    ("/v1/completions", {"model": "m", "prompt": INSTEAD}),
    ("/v1/completions", {"model": "m", "prompt": "Hi", "unknown": INSTEAD}),
    ("/v1/models/m/infer", {"input": INSTEAD}),
    ("/v1/messages", {**CHAT, "max_tokens": 5, "system": INSTEAD}),
    ("/v1/messages", {**CHAT, "max_tokens": 5, "tools": [{"name": "f", "input_schema": {"a": INSTEAD}}]}),
    ("/v1/messages", {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": INSTEAD}]}),
    ("/v1/messages/count_tokens", {**CHAT, "thinking": INSTEAD}),
    ("/v1/models/m/infer", {"input": "Hi", "unknown": INSTEAD}),
]


@pytest.mark.parametrize(("path", "body"), PLACES)
@pytest.mark.parametrize("headers", [{}, {"idempotency-key": "k"}])
def test_no_depth_breaks_an_inference_route(
    front: Any, make: Any, path: str, body: Any, headers: dict[str, str]
) -> None:
    front.dispatcher.answer = make.says("Hello")
    for number, nested in enumerate(NESTED):
        for depth in (DEEP, RATHER_DEEP):
            raw = json.dumps(body).replace(f'"{INSTEAD}"', nested(depth)).encode()
            given = {name: f"{value}-{new_id()}" for name, value in headers.items()}
            answer = front.http("POST", path, raw, given)
            if depth == DEEP or answer.status != 200:
                assert answer.status == 400, (number, depth, answer.body)
                assert answer.error["code"] in ("invalid_request", "unsupported_parameter")
    assert front.http("GET", "/livez").status == 200


def test_every_other_route_with_a_body_refuses_what_is_deep(front: Any) -> None:
    documented = front.http("GET", "/openapi.json").json["paths"]
    routes = [
        (method, path)
        for path, methods in documented.items()
        for method, described in methods.items()
        if "requestBody" in described
    ]
    assert len(routes) >= 3 + 4 + 4  # inference, the registry, tenants
    assert {f"{method.upper()} {path}" for method, path in routes} <= set().union(*NEEDED.values())
    for method, path in routes:
        actual = path.replace("{", "").replace("}", "")
        for nested in NESTED:
            for raw in (nested(DEEP), f'{{"limits":{nested(DEEP)}}}', f'{{"unknown":{nested(DEEP)},"name":"x"}}'):
                answer = front.http(method.upper(), actual, raw.encode())
                assert (answer.status, answer.error["code"]) == (400, "invalid_request"), (method, path, raw[:40])
