"""Idempotency keys and ids of requests as clients may send them."""

import logging
from typing import Any

import pytest

from ingress.keys import Keys
from shared.errors import BadRequest
from shared.settings import Settings


def claim(body: bytes, key: bytes = b"k") -> Any:
    return Keys(None, Settings()).claim("t", key, b"/v1/x", b"", body)  # type: ignore[arg-type]  # it stores nothing


def test_bodies_are_the_same_whatever_their_layout() -> None:
    asked = claim(b'{"a":1,"b":{"c":[1,2]}}')._digest
    assert claim(b' {"b": {"c": [1, 2]}, "a": 1}')._digest == asked
    assert claim(b'{"a":1,"b":{"c":[2,1]}}')._digest != asked


@pytest.mark.parametrize("body", [b'{"a":1e400}', b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"])
def test_a_body_that_cannot_be_compared_is_refused(body: bytes) -> None:
    with pytest.raises(BadRequest, match="cannot be compared"):
        claim(body)


@pytest.mark.parametrize("key", [b"", b'""', b"k" * 256, b"\xff", b"a\tb"])
def test_a_key_is_printable_and_short(key: bytes) -> None:
    with pytest.raises(BadRequest, match="Idempotency-Key"):
        claim(b"{}", key)


@pytest.mark.parametrize("rid", ["%00", "%0d%0aX-Evil:%201", "x", "a" * 33, "A" * 32, "*", "%ff"])
def test_what_is_no_id_is_of_no_request(front: Any, rid: str, caplog: pytest.LogCaptureFixture) -> None:
    for method, path in (("GET", rid), ("DELETE", rid), ("POST", f"{rid}/cancel")):
        answer = front.http(method, f"/v1/streams/{path}")
        assert (answer.status, answer.error["code"]) == (404, "stream_not_found")
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
