"""One attempt to tell a webhook something: a POST to an address that was looked up and checked, and to no other.

Strangers say where it goes. So nothing is taken from the environment, no redirect is followed, no cookie is kept, no connection
is used twice, and of the answer only the head is read.
"""

import asyncio
import contextlib
import email.utils
import socket
import ssl
import threading
import time
from collections.abc import Awaitable, Callable

import httpx
from msgspec import Struct

from shared import addresses, tls, webhooks
from shared.settings import Settings

ADDRESSES_TRIED_MAX = 4
LOOKUPS_PER_TRY = 2  # look-ups that nobody waits for any more are left to end
GONE = 410
ASKED_TO_WAIT = (429, 503)

Resolve = Callable[[str, int], Awaitable[list[str]]]


class Attempt(Struct, frozen=True, kw_only=True):
    """What came of one. Delivered when there is no error."""

    error: str = ""
    status: int = 0  # 0: no answer
    retry_after_s: float = 0.0  # as the receiver asks for

    @property
    def is_gone(self) -> bool:
        """Whether the receiver wants nothing more."""
        return self.status == GONE


class Refused(Exception):
    """It goes nowhere: the name is not known, or its addresses are not of the public internet."""


class Sender:
    """Makes attempts. `resolve` looks the addresses of a host up, and raises OSError or Refused."""

    def __init__(
        self, settings: Settings, resolve: Resolve | None = None, context: ssl.SSLContext | None = None
    ) -> None:
        self._settings = settings
        self._resolve = resolve or Resolver(LOOKUPS_PER_TRY * settings.webhook_tries_max).resolve
        # a connection to an address is of one host only: none is used twice
        self._transport = httpx.AsyncHTTPTransport(
            verify=context or tls.client_context("", "", "", ""),
            trust_env=False,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        )

    async def close(self) -> None:
        await self._transport.aclose()

    async def post(self, url: str, headers: dict[str, str], body: bytes) -> Attempt:
        """Send `body`; never raises because of the receiver."""
        try:
            async with asyncio.timeout(self._settings.webhook_answer_s):
                return await self._post(httpx.URL(url), headers, body)
        except TimeoutError:
            return Attempt(error=f"no answer within {self._settings.webhook_answer_s:g} s")
        except Refused as error:
            return Attempt(error=str(error))
        except (httpx.HTTPError, httpx.InvalidURL, OSError, UnicodeError) as error:
            return Attempt(error=f"{type(error).__name__}: {error}")

    async def _post(self, url: httpx.URL, headers: dict[str, str], body: bytes) -> Attempt:
        failed: httpx.HTTPError | None = None
        for address in (await self._addresses(url))[:ADDRESSES_TRIED_MAX]:
            try:
                return await self._post_to(address, url, headers, body)
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                failed = error
        assert failed is not None
        raise failed

    async def _addresses(self, url: httpx.URL) -> list[str]:
        """Those of the URL's host, all of them checked: one that is refused says that its host is not to be trusted."""
        found = await self._resolve(url.host, url.port or (443 if url.scheme == "https" else 80))
        if not found:
            raise Refused(f"{url.host} has no address")
        if not webhooks.may_be_private(url.host, self._settings.webhook_private_hosts):
            for address in found:
                if (why := addresses.refusal(address)) is not None:
                    raise Refused(f"{url.host} has an address that nothing is sent to ({why})")
        return found

    async def _post_to(self, address: str, url: httpx.URL, headers: dict[str, str], body: bytes) -> Attempt:
        """The name is for the certificate and the head; the connection is to the address."""
        settings = self._settings
        timeout = httpx.Timeout(settings.webhook_answer_s, connect=settings.webhook_connect_s)
        request = httpx.Request(
            "POST",
            url.copy_with(host=address),
            headers={"host": url.netloc.decode("ascii"), "content-type": "application/json", **headers},
            content=body,
            extensions={"timeout": timeout.as_dict(), "sni_hostname": url.host},
        )
        response = await self._transport.handle_async_request(request)
        await response.aclose()  # whatever its body is
        if response.is_success:
            return Attempt(status=response.status_code)
        asked_s = (
            _retry_after(response.headers.get("retry-after", "")) if response.status_code in ASKED_TO_WAIT else 0.0
        )
        return Attempt(error=f"status {response.status_code}", status=response.status_code, retry_after_s=asked_s)


def _retry_after(value: str) -> float:
    """The seconds that a Retry-After header asks for, as a number or a date; 0.0 for anything else."""
    if value.isascii() and value.isdigit():
        return float(value)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, OverflowError):
        return 0.0


class Resolver:
    """Looks names up, each in a thread of its own that does not hold up the end of the process: a look-up cannot be ended, and
    takes as long as the name servers of strangers do."""

    def __init__(self, lookups_max: int) -> None:
        self._lookups_max = lookups_max
        self._lookups = 0

    async def resolve(self, host: str, port: int) -> list[str]:
        """The addresses of a host. Raises OSError, UnicodeError or Refused."""
        if self._lookups >= self._lookups_max:
            raise Refused(f"{self._lookups} names are being looked up already")
        loop = asyncio.get_running_loop()
        found: asyncio.Future[list[str]] = loop.create_future()
        self._lookups += 1

        def settle(addresses: list[str] | None, error: Exception | None) -> None:
            self._lookups -= 1
            if found.cancelled():
                return
            if error is not None:
                found.set_exception(error)
            else:
                found.set_result(addresses or [])

        def look() -> None:
            addresses, failed = None, None
            try:
                infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
                addresses = list(dict.fromkeys(str(info[4][0]) for info in infos))
            except (OSError, UnicodeError) as error:
                failed = error
            with contextlib.suppress(RuntimeError):  # the loop is over
                loop.call_soon_threadsafe(settle, addresses, failed)

        threading.Thread(target=look, name=f"look up {host}", daemon=True).start()
        return await found
