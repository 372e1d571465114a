"""Commands that go to an ingress: its URL and key, its errors as ours, and patience where it is away for a moment."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from headrace.globals import Globals
from shared.errors import HeadraceError, Unavailable, by_code

if TYPE_CHECKING:
    import httpx

CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 90.0  # longer than an ingress lets anybody wait for the end of a job
PATIENCE_S, RETRY_S = 60.0, 0.5  # an ingress that dies is started again

T = TypeVar("T")


def client(given: Globals, read_timeout_s: float | None = READ_TIMEOUT_S) -> "httpx.Client":
    """A client of the ingress that a command is about. Raises StackError."""
    import httpx  # few commands need it

    headers = {"authorization": f"Bearer {given.key}"} if given.key else {}
    timeout = httpx.Timeout(read_timeout_s, connect=CONNECT_TIMEOUT_S)
    return httpx.Client(base_url=given.http_url(), headers=headers, timeout=timeout)


def call(client: "httpx.Client", method: str, path: str, **more: Any) -> Any:
    """The JSON that one request, made once, is answered with. Raises HeadraceError: Unavailable where nobody answers."""
    return patiently(lambda: answer(client.request(method, path, **more)), 0.0)


def answer(response: "httpx.Response") -> Any:
    """The JSON of an answer. Raises the error that it is."""
    if not response.is_success:
        raise error_of(response)
    try:
        return response.json()
    except ValueError:
        raise _foreign(response) from None


def error_of(response: "httpx.Response") -> HeadraceError:
    """What an answer of another status says; something in between may have given it."""
    response.read()
    try:
        return error_in(response.json())
    except (ValueError, KeyError, TypeError):
        return _foreign(response)


def error_in(body: dict[str, Any]) -> HeadraceError:
    """What a body says that is an error of ours. Raises KeyError or TypeError for another one."""
    error = body["error"]
    return by_code(error["code"], error["message"], error.get("param"))


def _foreign(response: "httpx.Response") -> HeadraceError:
    return Unavailable(f"{response.url} answered {response.status_code}: {response.text[:200].strip()}")


def patiently(call: Callable[[], T], patience_s: float = PATIENCE_S) -> T:
    """What `call` returns, which may be repeated for so long. Raises HeadraceError: Unavailable where nobody answers."""
    import httpx

    deadline = time.monotonic() + patience_s
    while True:
        try:
            return call()
        except httpx.RequestError as error:
            failed: HeadraceError = Unavailable(f"{error.request.url} cannot be reached or broke off: {error!r}")
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
