"""Reading a request's body, with a limit on its size; the limit on its time is the caller's."""

import asyncio
from typing import TYPE_CHECKING

import msgspec

from ingress.answers import Receive
from ingress.decoding import BodyType, decode
from shared.errors import BadRequest, BodyTimeout, Cancelled, TooLarge, Unsupported

if TYPE_CHECKING:
    from starlette.requests import Request

    from ingress.context import Context

# A client that is still sending reads a refusal only after it has sent: what it sends is discarded within these limits.
DISCARD_BYTES_MAX = 64 << 20
DISCARD_SECONDS_MAX = 5.0


def check_declared(declared: bytes | None, bytes_max: int) -> None:
    """Raises TooLarge, or BadRequest, for a Content-Length header."""
    if declared is not None:
        if not declared.isdigit():
            raise BadRequest("content-length: not a number")
        if int(declared) > bytes_max:
            raise TooLarge(f"the body has {int(declared)} bytes, the limit is {bytes_max} bytes")


def check_encoding(given: bytes | None) -> None:
    """Raises Unsupported for a Content-Encoding header: bodies are read as they come."""
    if given is not None and given.strip().lower() not in (b"", b"identity"):
        named = given.decode("latin-1")
        raise Unsupported(
            f"content-encoding: `{named}` is not served; send the body as it is", param="content-encoding"
        )


async def read_body(declared: bytes | None, receive: Receive, bytes_max: int) -> bytes:
    """The whole body; `declared` is the Content-Length header.

    Raises TooLarge (both numbers named), BadRequest, or Cancelled when the client left before its end.
    """
    check_declared(declared, bytes_max)
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


async def read_json(context: "Context", request: "Request", decoder: "msgspec.json.Decoder[BodyType]") -> BodyType:
    """The decoded body of a request. Raises Draining, TooLarge, BodyTimeout, Cancelled or BadRequest."""
    context.check_accepting()
    declared = request.headers.get("content-length")
    check_encoding(request.headers.get("content-encoding", "").encode("latin-1"))
    try:
        async with asyncio.timeout(context.settings.request_read_s):
            raw = await read_body(
                declared.encode() if declared is not None else None, request.receive, context.settings.request_bytes_max
            )
    except TimeoutError:
        raise BodyTimeout("the body did not arrive in time") from None
    return decode(decoder, raw)


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
