"""Reading a request's body, with a limit on its size; the limit on its time is the caller's."""

import asyncio

from ingress.answers import Receive
from shared.errors import BadRequest, Cancelled, TooLarge

# A client that is still sending reads a refusal only after it has sent: what it sends is discarded within these limits.
DISCARD_BYTES_MAX = 64 << 20
DISCARD_SECONDS_MAX = 5.0


async def read_body(declared: bytes | None, receive: Receive, bytes_max: int) -> bytes:
    """The whole body; `declared` is the Content-Length header.

    Raises TooLarge (both numbers named), BadRequest, or Cancelled when the client left before its end.
    """
    if declared is not None:
        if not declared.isdigit():
            raise BadRequest("content-length: not a number")
        if int(declared) > bytes_max:
            raise TooLarge(f"the body has {int(declared)} bytes, the limit is {bytes_max} bytes")
    parts: list[bytes] = []
    size = 0
    while (message := await receive())["type"] == "http.request":
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > bytes_max:
            raise TooLarge(f"the body has at least {size} bytes, the limit is {bytes_max} bytes")
        if not message.get("more_body", False):
            return b"".join(parts)
    raise Cancelled("the client left before its request was complete")


async def discard_body(receive: Receive) -> None:
    """Read on and forget, so that a client which is still sending gets to read its answer."""
    size = 0
    try:
        async with asyncio.timeout(DISCARD_SECONDS_MAX):
            while size < DISCARD_BYTES_MAX and (message := await receive())["type"] == "http.request":
                size += len(message.get("body", b""))
                if not message.get("more_body", False):
                    return
    except TimeoutError:
        return
