"""Webhooks, after Standard Webhooks (https://www.standardwebhooks.com): where to send, which events, and the signature. Pure.

Jobs, batches, responses and deployments have one each, in the body of the request that makes them; `shared.notices` keeps what
is to be sent, and the controller that leads sends it.
"""

import base64
import binascii
import hashlib
import hmac
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Literal, get_args
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta, Struct

from shared import addresses
from shared.errors import BadRequest

URL_CHARACTERS_MAX = 2048
SECRET_PREFIX = "whsec_"
SECRET_BYTES_MIN, SECRET_BYTES_MAX = 24, 64  # as the standard has it
PORTS_LOW = (80, 443)  # the others below 1024 are of services that are no receivers of webhooks
PORT_FREE_MIN = 1024
EVENT_ID_BYTES = 16
ANY_HOST = "*"

HEADER_ID, HEADER_TIMESTAMP, HEADER_SIGNATURE = "webhook-id", "webhook-timestamp", "webhook-signature"

EventType = Literal[
    "job.completed",
    "job.failed",
    "job.cancelled",
    "job.expired",
    "batch.completed",
    "batch.failed",
    "batch.expired",
    "batch.cancelled",
    "response.completed",
    "response.incomplete",
    "response.failed",
    "response.cancelled",
    "deployment.pending",
    "deployment.warming",
    "deployment.stepping",
    "deployment.baking",
    "deployment.paused",
    "deployment.promoted",
    "deployment.rolling_back",
    "deployment.rolled_back",
    "deployment.failed",
]
DeliveryState = Literal["waiting", "delivered", "given_up"]
EVENT_TYPES: tuple[EventType, ...] = get_args(EventType)

_printable = re.compile(r"[!-~]+").fullmatch


class Webhook(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Where to tell of events. As it is given and stored, secret and all: what is shown of it is `shown`."""

    url: Annotated[str, Meta(max_length=URL_CHARACTERS_MAX)]
    secret: Annotated[str, Meta(max_length=128)] | None = None  # `whsec_<base64>`; None: the tenant's
    events: Annotated[tuple[EventType, ...], Meta(max_length=len(EVENT_TYPES))] = ()  # (): all

    def wants(self, type_: EventType) -> bool:
        """Whether it is told of events of that type."""
        return not self.events or type_ in self.events

    def __repr__(self) -> str:
        return f"Webhook(to {host_of(self.url)})"


class Delivery(Struct, frozen=True, kw_only=True):
    """How far it is with telling a webhook of an event."""

    id: str  # the webhook-id
    type: EventType
    state: DeliveryState
    attempts: int
    error: str | None  # of the last attempt


class WebhookShown(Struct, kw_only=True):
    """A webhook as answers show it: without its secret."""

    url: str
    events: tuple[EventType, ...]
    delivery: Delivery | None = None  # of the end of what it is of, where that is known


def shown(webhook: Webhook) -> WebhookShown:
    return WebhookShown(url=webhook.url, events=webhook.events)


def check(webhook: Webhook, private_hosts: str, param: str = "webhook") -> None:
    """Refuse what could never be sent to, or signed. The addresses of a name are checked when it is sent to, and each time.

    `private_hosts`: the setting `webhook_private_hosts`. Raises BadRequest.
    """
    where = f"{param}.url"
    url = webhook.url
    if not _printable(url) or "\\" in url:
        raise BadRequest(f"{where}: only printable ASCII; a name in other letters in its xn-- form", param=where)
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError as error:
        raise BadRequest(f"{where}: {error}", param=where) from None
    if parts.scheme not in ("http", "https") or not host:
        raise BadRequest(f"{where}: http:// or https:// and a host are expected", param=where)
    if "@" in parts.netloc:
        raise BadRequest(f"{where}: a user or a password in it is not sent; the signature says who it is", param=where)
    if "#" in url:
        raise BadRequest(f"{where}: a fragment is never sent", param=where)
    if port is not None and port not in PORTS_LOW and port < PORT_FREE_MIN:
        raise BadRequest(f"{where}: port {port} is none of 80, 443 and those from {PORT_FREE_MIN} on", param=where)
    why = None if may_be_private(host, private_hosts) else _refusal(host)
    if why is not None:
        raise BadRequest(
            f"{where}: {host} is an address that nothing is sent to ({why}), unless webhook_private_hosts names it",
            param=where,
        )
    if webhook.secret is not None:
        secret_bytes(webhook.secret, f"{param}.secret")


def _refusal(host: str) -> str | None:
    try:
        return addresses.refusal(host)
    except ValueError:
        return None  # a name


def may_be_private(host: str, private_hosts: str) -> bool:
    """Whether a host's addresses are not checked: it is one of the setting `webhook_private_hosts`, or any may be."""
    allowed = {each.strip().lower() for each in private_hosts.split(",")}
    return ANY_HOST in allowed or host.lower() in allowed


def host_of(url: str) -> str:
    """The host and port of a URL, for logs: its path and query may be secrets."""
    try:
        parts = urlsplit(url)
        return f"{parts.hostname}:{parts.port}" if parts.port else str(parts.hostname)
    except ValueError:
        return "?"


def secret_bytes(secret: str, param: str = "secret") -> bytes:
    """The key that a secret stands for. Raises BadRequest, which does not repeat it."""
    try:
        key = base64.b64decode(secret.removeprefix(SECRET_PREFIX), validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if not secret.startswith(SECRET_PREFIX) or not SECRET_BYTES_MIN <= len(key) <= SECRET_BYTES_MAX:
        size = f"{SECRET_BYTES_MIN} to {SECRET_BYTES_MAX} bytes"
        raise BadRequest(f"{param}: `{SECRET_PREFIX}` and the base64 of {size} are expected", param=param)
    return key


def event_id(tenant: str, type_: EventType, subject: str, serial: int = 0) -> str:
    """The id of an event: the same whoever works it out, and whenever. `serial` tells events of one type and subject apart."""
    named = msgspec.json.encode([tenant, type_, subject, serial])
    return "evt_" + hashlib.blake2b(named, digest_size=EVENT_ID_BYTES).hexdigest()


def body(id_: str, type_: EventType, at: float, data: dict[str, object]) -> bytes:
    """What is sent of an event of the time `at` (unix seconds): the standard's fields, and those of OpenAI's events."""
    told = datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    event = {"id": id_, "object": "event", "type": type_, "created_at": int(at), "timestamp": told, "data": data}
    return msgspec.json.encode(event)


def signed(secrets: Sequence[str], id_: str, timestamp: int, sent: bytes) -> dict[str, str]:
    """The headers of one attempt at `timestamp` (unix seconds): a signature by each secret, of which a rotation has two."""
    content = f"{id_}.{timestamp}.".encode() + sent
    signatures = (hmac.digest(secret_bytes(secret), content, "sha256") for secret in secrets)
    return {
        HEADER_ID: id_,
        HEADER_TIMESTAMP: str(timestamp),
        HEADER_SIGNATURE: " ".join("v1," + base64.b64encode(each).decode() for each in signatures),
    }
