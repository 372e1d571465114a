"""HTTP answers as ASGI messages: heads, JSON bodies, errors with the headers that clients act on."""

import math
import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import msgspec

from shared.errors import HeadraceError

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

RETRY_AFTER_DEFAULT_S = 1.0
RETRY_AFTER_LASTING_S = 60.0  # of a 503 that ends when somebody changes something
JSON = (b"content-type", b"application/json")
STREAM: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

_SANE_ID = re.compile(rb"^[\x21-\x7e]{1,128}$")


def request_id(given: bytes | None, rid: str) -> bytes:
    """The client's own `x-request-id` when it is sane, else one made of the rid."""
    return given if given is not None and _SANE_ID.match(given) else b"req_" + rid.encode()


def is_true(value: bytes | None) -> bool:
    """Whether a header asks for something."""
    return value is not None and value.strip().lower() in (b"true", b"1")


def start(status: int, headers: Headers) -> Message:
    return {"type": "http.response.start", "status": status, "headers": headers}


def body(data: bytes, more: bool = False) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}


def json_headers(data: bytes, headers: Headers) -> Headers:
    return [JSON, (b"content-length", b"%d" % len(data)), *headers]


def error_answer(error: HeadraceError, shown: object = None) -> tuple[bytes, Headers]:
    """Body and headers of an error that is the whole answer; `shown` is the body, if the API has a shape of its own."""
    data = msgspec.json.encode(error.body() if shown is None else shown)
    headers: Headers = []
    if error.status == 401:
        headers.append((b"www-authenticate", b'Bearer realm="headrace"'))
    if error.status in (429, 503):
        default = RETRY_AFTER_DEFAULT_S if error.retryable else RETRY_AFTER_LASTING_S
        seconds = default if error.retry_after is None else error.retry_after
        headers.append((b"retry-after", b"%d" % max(1, math.ceil(seconds))))
        headers.append((b"retry-after-ms", b"%d" % max(1, math.ceil(seconds * 1000))))
    if not error.retryable and (error.status in (408, 409, 429) or error.status >= 500):
        headers.append((b"x-should-retry", b"false"))  # SDKs would try twice more
    return data, json_headers(data, headers)
