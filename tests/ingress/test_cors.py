"""Calls from web pages: nobody may by default, and whom the setting names may."""

from collections.abc import Callable
from typing import Any

import pytest

from ingress.cors import EXPOSED, origins
from shared.settings import Settings, SettingsError

PAGE = "https://app.example"
CHAT = "/v1/chat/completions"
BODY = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
ASKED = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-os",
}


@pytest.fixture(scope="module")
def open_front(start_front: Callable[..., Any]) -> Any:
    return start_front(cors_origins=f"{PAGE}, http://localhost:3000", require_keys=True)


def granted(headers: dict[str, str]) -> set[str]:
    return {name for name in headers if name.startswith("access-control")}


def test_by_default_no_page_may(front: Any, make: Any) -> None:
    front.dispatcher.answer = make.says("Hi")
    refused = front.http("OPTIONS", CHAT, headers={"origin": PAGE} | ASKED)
    assert (refused.status, refused.error["code"], refused.headers["allow"]) == (405, "method_not_allowed", "POST")
    assert not granted(refused.headers)
    assert not granted(front.post(CHAT, BODY, origin=PAGE).headers)


def test_a_page_that_is_named_may(open_front: Any) -> None:
    before = open_front.http(
        "OPTIONS", CHAT, headers={"origin": PAGE, "access-control-request-private-network": "true"} | ASKED
    )
    assert before.status == 200  # without a key: browsers send none
    assert before.headers["access-control-allow-origin"] == PAGE
    assert "POST" in before.headers["access-control-allow-methods"]
    assert before.headers["access-control-allow-headers"] == ASKED["access-control-request-headers"]
    assert before.headers["access-control-allow-private-network"] == "true"
    assert "Origin" in before.headers["vary"]
    answer = open_front.post(CHAT, BODY, origin="http://localhost:3000")
    assert answer.error["code"] == "invalid_api_key"  # which the page can read
    assert answer.headers["access-control-allow-origin"] == "http://localhost:3000"
    assert set(answer.headers["access-control-expose-headers"].split(", ")) == set(EXPOSED)
    assert "access-control-allow-credentials" not in answer.headers
    assert open_front.http("OPTIONS", CHAT).error["code"] == "invalid_api_key"  # no preflight


def test_another_page_may_not(open_front: Any) -> None:
    refused = open_front.http("OPTIONS", CHAT, headers={"origin": "https://evil.example"} | ASKED)
    assert (refused.status, refused.error["param"]) == (400, "origin")
    assert "https://evil.example" in refused.error["message"]
    assert not granted(refused.headers)
    assert "access-control-allow-origin" not in open_front.post(CHAT, BODY, origin="https://evil.example").headers


def test_any_page_may_where_that_is_said(start_front: Callable[..., Any], make: Any) -> None:
    front = start_front(cors_origins="*")
    front.dispatcher.answer = make.says("Hi")
    for stream in (False, True):
        answer = front.post(CHAT, BODY | {"stream": stream}, origin=PAGE)
        assert (answer.status, answer.headers["access-control-allow-origin"]) == (200, "*")
    assert front.http("OPTIONS", "/v1/models", headers={"origin": PAGE} | ASKED).status == 200


@pytest.mark.parametrize("given", ["app.example", "https://app.example/", "https://*.example", "*, nowhere"])
def test_what_is_no_origin_is_refused_at_the_start(given: str) -> None:
    with pytest.raises(SettingsError, match="cors_origins"):
        origins(Settings(cors_origins=given))


def test_several_origins_are_separated_by_commas() -> None:
    assert origins(Settings(cors_origins=f" {PAGE},http://[::1]:80 ,")) == [PAGE, "http://[::1]:80"]
    assert origins(Settings()) == []
