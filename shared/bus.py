"""The bus: one supervised NATS connection. The only module that imports nats-py.

What nats-py leaves open is closed here: callbacks never raise into its read loop, payload and headers are measured before a
publish (the server would close the connection for good), a client that was closed is replaced and everything is subscribed
again, and a round trip every few seconds finds a connection that only looks alive.
"""

import asyncio
import contextlib
import logging
import math
import os
import re
import ssl
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Self

import msgspec
import nats
import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as NatsSubscription

from shared import tls
from shared.errors import QueueFull, TooLarge, Unavailable
from shared.keyvalue import KeyValue
from shared.settings import Settings, SettingsError
from shared.wire import HEADER_MSG_ID, Malformed

log = logging.getLogger(__name__)

PROBE_EVERY_S = 5.0
PROBE_TIMEOUT_S = 3
PAYLOAD_MARGIN_BYTES = 64 * 1024  # what is kept free of the server's max_payload for headers and growth
PENDING_BYTES_MAX = 8 << 20  # publishes kept while the connection is away
SUBSCRIPTION_MESSAGES_MAX = 1 << 19
MALFORMED_TOLD_EVERY_S = 1.0
STATUS = "Status"
NO_RESPONDERS = "503"
STORE_FAILED = 10077  # a limit of the stream, or the disk's

Headers = Mapping[str, str]

_is_subject = re.compile(r"[!-~]{1,2048}").fullmatch


class Message(msgspec.Struct, gc=False):
    """What arrives: `status` is that of a server message ("503", "408", "100", ...), "" for an ordinary one, whatever it says
    of itself."""

    subject: str
    reply: str
    data: bytes
    headers: dict[str, str]
    status: str


class PubAck(msgspec.Struct):
    """What JetStream says of a publish. `duplicate`: a message of that Nats-Msg-Id was stored before."""

    stream: str = ""
    seq: int = 0
    duplicate: bool = False
    error: dict[str, Any] | None = None


_decode_pub_ack = msgspec.json.Decoder(PubAck).decode


class _Client(Client):
    """nats-py's client, whose read loop would end with a header that is not UTF-8 and with the answer to a flush that has
    given up, and which would go on without TLS where a server, or whoever answers in its place, offers none."""

    def _connect_command(self) -> bytes:
        if "tls" in self.options and not self._is_secured():
            raise nats.errors.Error("the server offers no TLS, and nats_url says tls://")
        command: bytes = super()._connect_command()
        return command

    def _is_secured(self) -> bool:
        writer = getattr(self._transport, "_io_writer", None)
        return writer is not None and writer.get_extra_info("ssl_object") is not None

    async def _process_pong(self) -> None:
        if self._pongs and self._pongs[0].done():
            self._pongs[0] = asyncio.get_running_loop().create_future()  # it counts, though nobody waits for it
        await super()._process_pong()

    async def _process_headers(self, headers: bytes) -> dict[str, str] | None:
        try:
            found: dict[str, str] | None = await super()._process_headers(headers)
        except (UnicodeDecodeError, IndexError) as error:
            log.warning("a message with headers that cannot be read: %s", error)
            return None
        return found


class Subscription:
    """A subject and the function that its messages go to; it survives a new connection and a new client."""

    def __init__(self, bus: "Bus", subject: str, queue: str, callback: Callable[[Message], None]) -> None:
        self._bus, self._subject, self._queue, self._callback = bus, subject, queue, callback
        self._own = subject.rstrip("*>")
        self._inner: NatsSubscription | None = None

    async def bind(self, client: Client) -> None:
        self._inner = await client.subscribe(
            self._subject,
            queue=self._queue,
            cb=self._on_message,
            pending_msgs_limit=SUBSCRIPTION_MESSAGES_MAX,
            pending_bytes_limit=256 << 20,
        )

    async def unsubscribe(self) -> None:
        """End it; messages that have already arrived may still be delivered."""
        self._bus.forget(self)
        if self._inner is not None:
            with contextlib.suppress(nats.errors.Error):
                await self._inner.unsubscribe()

    async def _on_message(self, raw: Msg) -> None:
        headers = raw.headers or {}
        # what a stream delivers keeps its own subject: a status in it is its publisher's, and means nothing
        said = not raw.data and raw.subject.startswith(self._own)
        status = headers.get(STATUS, "") if said else ""
        try:
            self._callback(Message(raw.subject, raw.reply, raw.data, headers, status))
        except Malformed as error:
            self._bus.note_malformed(raw.subject, error)
        except Exception:
            log.exception("a message on %s was not handled", self._subject)


def _check_size(size: int, bytes_max: int) -> None:
    """Raises TooLarge, for which `shared.claim_check` is the remedy. No limit: the server has not told it yet."""
    if size > bytes_max > 0:
        raise TooLarge(f"a message of {size} bytes is over the bus's limit of {bytes_max} bytes")


def _tls_of(settings: Settings) -> ssl.SSLContext | None:
    """Of connections to NATS; None: without TLS. Raises SettingsError."""
    secured = {url.strip().startswith("tls://") for url in settings.nats_url.split(",")}
    if len(secured) > 1:
        raise SettingsError("nats_url has servers with and without tls://: all of them, or none")
    if secured == {False}:
        if settings.nats_tls_ca or settings.nats_tls_cert or settings.nats_tls_key:
            raise SettingsError(
                "nats_tls_ca, nats_tls_cert and nats_tls_key are for a nats_url that begins with tls://"
            )
        return None
    return tls.client_context(settings.nats_tls_ca, settings.nats_tls_cert, settings.nats_tls_key, "nats_tls")


class Bus(KeyValue):
    """A connection to NATS, with durable publishes, requests, streams and key-value buckets."""

    def __init__(self, settings: Settings, name: str) -> None:
        self.settings = settings
        self.name = name
        self.inbox = f"_INBOX.{name.replace('.', '-')}.{os.urandom(9).hex()}"
        self.reconnects = 0
        self.malformed = 0  # messages that were none of the wire
        self._malformed_told_at = -math.inf
        self.dropped = 0  # core publishes that could not be sent
        self._tls = _tls_of(settings)
        if settings.nats_nkey:
            from shared import nkey  # few need it

            nkey.public_key(Path(settings.nats_nkey))  # a file that is of no use is told at once
        self.refusal = ""  # why there is no connection, or what the server did not permit; the last of it
        self._client = _Client()
        self._subscriptions: dict[int, Subscription] = {}
        self._on_reconnect: list[Callable[[], Awaitable[None] | None]] = []
        self._on_disconnect: list[Callable[[], None]] = []
        self._acks: dict[str, asyncio.Future[Message]] = {}
        self._ack_number = 0
        self._closing = False
        self._probing: asyncio.Task[None] | None = None
        self._replacing: asyncio.Task[None] | None = None

    # -- life ----------------------------------------------------------------------------------------------------------

    @classmethod
    async def connect(cls, settings: Settings, name: str, wait_s: float = 30.0) -> Self:
        """Connect as `name`, waiting for a server that is not there yet. Raises Unavailable after `wait_s`, and says why."""
        bus = cls(settings, name)
        try:
            async with asyncio.timeout(wait_s):
                await bus._open()
        except TimeoutError:
            raise Unavailable(
                f"there is no connection to NATS at {settings.nats_shown}: {bus.refusal or 'no answer'}"
            ) from None
        await bus.subscribe(bus.inbox + ".*", bus._on_ack)
        bus._probing = asyncio.create_task(bus._probe())
        return bus

    async def close(self) -> None:
        """Send what is pending and close the connection."""
        self._closing = True
        for task in (self._probing, self._replacing, self._keeping_leases):
            if task is not None:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
        with contextlib.suppress(nats.errors.Error, TimeoutError, OSError):
            if self._client.is_connected:
                await self._client.flush(timeout=2)
        try:
            await self._client.close()
        except OSError:
            pass  # the connection is lost at this moment
        except asyncio.CancelledError:  # perhaps only what the client itself waited for was cancelled
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise

    @property
    def connected(self) -> bool:
        return self._client.is_connected

    @property
    def payload_bytes_max(self) -> int:
        """The largest body that `publish_durable` takes."""
        return self._client.max_payload - PAYLOAD_MARGIN_BYTES

    def on_reconnect(self, callback: Callable[[], Awaitable[None] | None]) -> None:
        """Run `callback` after each reconnection, when all subscriptions are live again."""
        self._on_reconnect.append(callback)

    def on_disconnect(self, callback: Callable[[], None]) -> None:
        """Run `callback` each time that the connection is lost, before any try to connect again."""
        self._on_disconnect.append(callback)

    async def _open(self) -> None:
        options: dict[str, Any] = {"tls": self._tls} if self._tls is not None else {}
        if self.settings.nats_nkey:
            options["nkeys_seed"] = self.settings.nats_nkey
        while True:
            client = _Client()
            try:
                await client.connect(
                    servers=self.settings.nats_url.split(","),
                    name=self.name,
                    error_cb=self._error,
                    disconnected_cb=self._disconnected,
                    reconnected_cb=self._reconnected,
                    closed_cb=self._closed,
                    allow_reconnect=True,
                    connect_timeout=2,
                    reconnect_time_wait=0.1,
                    max_reconnect_attempts=-1,
                    ping_interval=10,
                    max_outstanding_pings=2,
                    inbox_prefix=self.inbox + "_",
                    pending_size=PENDING_BYTES_MAX,
                    flusher_queue_size=65536,
                    skip_subject_validation=True,
                    **options,
                )
                break
            except (nats.errors.Error, OSError, TimeoutError) as error:
                with contextlib.suppress(Exception):
                    await client.close()
                log.info("NATS at %s is not there yet: %r", self.settings.nats_shown, error)
                self.refusal = str(error)
                await asyncio.sleep(0.2)
        self._client, self.refusal = client, ""
        for subscription in list(self._subscriptions.values()):
            await subscription.bind(client)
        await client.flush()

    async def _probe(self) -> None:
        while not self._closing:  # a flush that is answered in the moment in which it is cancelled swallows that
            await asyncio.sleep(PROBE_EVERY_S)
            client = self._client
            if not client.is_connected:
                continue
            try:
                await client.flush(timeout=PROBE_TIMEOUT_S)
            except (nats.errors.Error, TimeoutError, OSError) as error:
                if client is self._client and client.is_connected:
                    log.warning("NATS does not answer a round trip (%r): reconnecting", error)
                    await client.force_reconnect()

    async def _error(self, error: Exception) -> None:
        self.refusal = str(error)  # nats-py's own tries to make the first connection are told here only
        # while it is away, every try to connect again says so
        log.log(logging.WARNING if self._client.is_connected else logging.DEBUG, "NATS: %r", error)

    async def _disconnected(self) -> None:
        if not self._closing:
            log.warning("NATS: connection lost")
            for callback in self._on_disconnect:
                callback()

    async def _reconnected(self) -> None:
        log.warning("NATS: connected again")
        await self._run_reconnect_hooks()

    async def _closed(self) -> None:
        if self._closing or (self._replacing is not None and not self._replacing.done()):
            return
        log.error("NATS: the client was closed for good; a new one takes its place")
        self._replacing = asyncio.create_task(self._replace())

    async def _replace(self) -> None:
        await self._open()
        await self._run_reconnect_hooks()

    async def _run_reconnect_hooks(self) -> None:
        self.reconnects += 1
        for callback in self._on_reconnect:
            try:
                result = callback()
                if result is not None:
                    await result
            except Exception:
                log.exception("a reconnect hook failed")

    # -- core ----------------------------------------------------------------------------------------------------------

    async def subscribe(self, subject: str, callback: Callable[[Message], None], queue: str = "") -> Subscription:
        """Call `callback` for each message on `subject`, in order. Live on the server when this returns."""
        subscription = Subscription(self, subject, queue, callback)
        self._subscriptions[id(subscription)] = subscription
        if self._client.is_connected:
            await subscription.bind(self._client)
            with contextlib.suppress(nats.errors.Error, TimeoutError):
                await self._client.flush()
        return subscription

    def forget(self, subscription: Subscription) -> None:
        self._subscriptions.pop(id(subscription), None)

    def note_malformed(self, subject: str, error: Malformed) -> None:
        """A message of somebody else, or damaged: counted, and told at most once a second."""
        self.malformed += 1
        now = asyncio.get_running_loop().time()
        if now - self._malformed_told_at >= MALFORMED_TOLD_EVERY_S:
            self._malformed_told_at = now
            log.warning("%d messages so far were none of ours; the last, on %s: %s", self.malformed, subject, error)

    async def publish(self, subject: str, data: bytes = b"", reply: str = "", headers: Headers | None = None) -> bool:
        """Core publish, at most once. False: dropped, since the connection is away and its buffer is full.

        So is what is addressed to something that is no subject, since the server would close the connection.
        Raises TooLarge when payload and headers together are over the server's limit.
        """
        if not _is_subject(subject) or (reply and not _is_subject(reply)):
            log.error("not a subject: %.80r, or its reply %.80r", subject, reply)
            self.dropped += 1
            return False
        size = len(data) + (64 + sum(len(key) + len(value) + 4 for key, value in headers.items()) if headers else 0)
        _check_size(size, self._client.max_payload)
        try:
            await self._client.publish(subject, data, reply, dict(headers) if headers else None)
        except (nats.errors.Error, OSError):
            self.dropped += 1
            return False
        return True

    async def request(
        self, subject: str, data: bytes = b"", timeout: float = 2.0, headers: Headers | None = None
    ) -> Message:
        """One request, one answer. Raises Unavailable when nobody answers in time."""
        return await self._ask(subject, data, headers, timeout)

    async def publish_durable(self, subject: str, data: bytes, headers: Headers) -> int:
        """Store a message in the stream that captures `subject`; its sequence. As `publish_once`."""
        return (await self.publish_once(subject, data, headers)).seq

    async def publish_once(self, subject: str, data: bytes, headers: Headers) -> PubAck:
        """Store a message in the stream that captures `subject`, unless one of its Nats-Msg-Id is there. Retried.

        Raises TooLarge (over `payload_bytes_max`), QueueFull (the subject or the stream is at its limit) or Unavailable.
        """
        _check_size(len(data), self.payload_bytes_max)
        if HEADER_MSG_ID not in headers:
            raise ValueError("a durable publish is retried and so needs a Nats-Msg-Id")
        deadline = asyncio.get_running_loop().time() + self.settings.publish_timeout_s
        reason = ""
        while (left := deadline - asyncio.get_running_loop().time()) > 0:
            try:
                answer = await self._ask(subject, data, headers, min(left, 1.5))
                ack = _decode_pub_ack(answer.data)
            except (Unavailable, msgspec.DecodeError) as error:  # no leader, or the answer was lost
                reason = str(error)
                await asyncio.sleep(0.05)
                continue
            if ack.error is None:
                return ack
            reason = str(ack.error.get("description"))
            if ack.error.get("err_code") == STORE_FAILED and reason.startswith("maximum "):
                raise QueueFull(f"the queue is full: {reason}", retry_after=1.0)
            if ack.error.get("code") == 400:
                raise Unavailable(f"the stream refuses the message: {reason}")
            await asyncio.sleep(0.1)
        raise Unavailable(f"the message was not stored within {self.settings.publish_timeout_s:g} s: {reason}")

    async def _ask(self, subject: str, data: bytes, headers: Headers | None, timeout: float) -> Message:
        self._ack_number += 1
        token = f"{self.inbox}.{self._ack_number}"
        future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._acks[token] = future
        try:
            async with asyncio.timeout(timeout):
                if not await self.publish(subject, data, token, headers):
                    raise Unavailable("NATS is away")
                answer = await future
        except TimeoutError:
            raise Unavailable(f"no answer on {subject} within {timeout:.1f} s") from None
        finally:
            del self._acks[token]
        if answer.status == NO_RESPONDERS:
            raise Unavailable(f"nobody answers on {subject}")
        return answer

    def _on_ack(self, message: Message) -> None:
        future = self._acks.get(message.subject)
        if future is not None and not future.done():
            future.set_result(message)
