"""The services of an ingress over NATS, as both sides see them: the headers of a reply, and a call with one answer.

A reply is one JSON event. They are numbered, and one of them is the last; docs/protocol.md, "The service". Core NATS carries
them: at most once, so that who counts them sees a gap.
"""

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from shared.encoders import Encoder
from shared.errors import HeadraceError, Unavailable, by_code

if TYPE_CHECKING:
    from shared.bus import Bus, Message

HEADER_NUMBER = "Hr-Event"  # 0, 1, 2, ...
HEADER_END = "Hr-End"  # of the last reply: complete | error
HEADER_STATUS = "Hr-Status"  # of the first reply: what it would be over HTTP
HEADER_EVENT_ID = "Hr-Event-Id"  # of a resumable stream: from where to go on
HEADER_LAST_EVENT_ID = "Last-Event-ID"  # of a request to go on
HEADER_KEEPALIVE = "Hr-Keepalive"  # "1": there is nothing to tell yet
ERROR_CODE, ERROR = "Nats-Service-Error-Code", "Nats-Service-Error"  # as NATS's own services tell it
COMPLETE, FAILED = "complete", "error"

CALL_TIMEOUT_S = 30.0
ASK_AGAIN_S = 0.2  # where no ingress is there: one may be about to start


class Routed(msgspec.Struct, kw_only=True):
    """Answer of `headrace.route`: who asks, and where its request for a model goes."""

    tenant: str
    model: str
    version: str
    movable: bool  # the route's weights chose it: another version may take its place until the first token
    max_model_len: int = 0  # tokens; 0: not known
    encoder: Encoder | None = None  # it makes vectors; None: it generates text


class Asked(msgspec.Struct, kw_only=True):
    """Question to `headrace.route`."""

    model: str  # or model@version, model@alias
    pin: str | None = None
    session: str = ""  # the same keeps its version while a route splits traffic


def error_in(body: Any) -> HeadraceError | None:
    """The error that an answer tells; None: it tells none."""
    told = body.get("error") if isinstance(body, dict) else None
    if not isinstance(told, dict):
        return None
    return by_code(str(told.get("code")), str(told.get("message")), told.get("param"))


async def call(
    bus: "Bus", subject: str, body: Any, headers: Mapping[str, str] | None = None, answer_s: float = 0.0
) -> Any:
    """What a service answers to one question, decoded; waits for an ingress to be there, and `answer_s` more for its answer.

    Raises the error that it tells, or Unavailable.
    """
    answer = await _answer(bus, subject, msgspec.json.encode(body), headers, answer_s)
    try:
        told = msgspec.json.decode(answer.data or b"null")
    except msgspec.DecodeError as error:
        raise Unavailable(f"the answer of {subject} is no JSON: {error}") from None
    if answer.headers.get(HEADER_END) == FAILED:
        raise error_in(told) or Unavailable(f"{subject} says that it failed, and not why")
    return told


async def _answer(
    bus: "Bus", subject: str, data: bytes, headers: Mapping[str, str] | None, answer_s: float
) -> "Message":
    loop = asyncio.get_running_loop()
    deadline = loop.time() + CALL_TIMEOUT_S
    while True:
        try:
            return await bus.request(subject, data, max(deadline - loop.time(), ASK_AGAIN_S) + answer_s, headers)
        except Unavailable:
            if loop.time() + ASK_AGAIN_S >= deadline:
                raise
            await asyncio.sleep(ASK_AGAIN_S)
