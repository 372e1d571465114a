"""Commands that go to an ingress: its URL and key, its errors as ours, and patience where it is away for a moment."""

import time
from collections.abc import Callable
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from headrace.globals import Globals
from shared.errors import HeadraceError, Unavailable, by_code

if TYPE_CHECKING:
    import httpx

CONNECT_TIMEOUT_S, READ_TIMEOUT_S = 5.0, 60.0
PATIENCE_S, RETRY_S = 60.0, 0.5  # an ingress that dies is started again

T = TypeVar("T")


def client(given: Globals) -> "httpx.Client":
    """A client of the ingress that a command is about. Raises StackError."""
    import httpx  # few commands need it

    headers = {"authorization": f"Bearer {given.key}"} if given.key else {}
    timeout = httpx.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
    return httpx.Client(base_url=given.http_url(), headers=headers, timeout=timeout)


def answer(response: "httpx.Response") -> Any:
    """The JSON of an answer. Raises the error that it is."""
    if response.status_code == HTTPStatus.OK:
        return response.json()
    response.read()
    raise error_of(response)


def error_of(response: "httpx.Response") -> HeadraceError:
    """What an answer that is none says."""
    try:
        error = response.json()["error"]
        return by_code(error["code"], error["message"])
    except (ValueError, KeyError, TypeError):
        return Unavailable(f"{response.url} answered with status {response.status_code}")


def patiently(call: Callable[[], T], patience_s: float = PATIENCE_S) -> T:
    """What `call` returns, which may be repeated for so long. Raises HeadraceError: Unavailable where nobody answers."""
    import httpx

    deadline = time.monotonic() + patience_s
    while True:
        try:
            return call()
        except httpx.TransportError as error:
            failed: HeadraceError = Unavailable(f"the ingress cannot be reached, or broke off: {error!r}")
        except HeadraceError as error:
            if error.status < 500 or not error.retryable:
                raise
            failed = error
        if time.monotonic() >= deadline:
            raise failed
        time.sleep(RETRY_S)


def formatted(data: Any) -> str:
    """JSON for people and scripts."""
    return msgspec.json.format(msgspec.json.encode(data), indent=2).decode()
