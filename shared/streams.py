"""Streams and consumers: what JetStream holds, through its JSON API."""

import asyncio
import base64
import logging
from typing import Any

import msgspec

from shared import subjects
from shared.errors import Unavailable
from shared.settings import Settings

log = logging.getLogger(__name__)

NOT_FOUND = {10014, 10037, 10059}  # consumer, message, stream
NAME_IN_USE = {10058, 10148}
NO_ROOM = {10023, 10047}  # memory and storage that the server has to give
STREAM_BYTES_MIN = 1 << 20
SMALLER = 8  # what does not fit is made so many times smaller, so that the streams after it find room as well
READS = ("STREAM.MSG.GET.", "STREAM.INFO.", "CONSUMER.INFO.")
DECISIONS_KEPT, DECISIONS_KEPT_S = 64, 30 * 24 * 3600.0  # of each version
DECISIONS_BYTES_MAX = 64 << 20
CALL_S, READ_TRY_S, RETRY_S = 5.0, 1.5, 0.1
SECOND = 1_000_000_000  # JetStream counts time in nanoseconds


class ApiError(Unavailable):
    """JetStream refused a request; `err_code` is its stable number."""

    def __init__(self, err_code: int, message: str) -> None:
        super().__init__(message)
        self.err_code = err_code


class Delivered(msgspec.Struct):
    consumer_seq: int = 0  # deliveries since the consumer was made, of the same message again too


class ConsumerInfo(msgspec.Struct):
    num_pending: int = 0  # stored, not delivered yet
    num_ack_pending: int = 0  # delivered, not acked yet
    num_waiting: int = 0  # open pulls
    delivered: Delivered = msgspec.field(default_factory=Delivered)


class StreamState(msgspec.Struct):
    messages: int = 0
    bytes: int = 0


class StoredMessage(msgspec.Struct):
    """A message as a stream holds it."""

    seq: int
    subject: str
    data: bytes
    headers: dict[str, str]
    time: str  # RFC 3339


class Delivery(msgspec.Struct):
    """What an ack subject says of its message."""

    sequence: int  # in the stream
    delivered: int  # 1: the first delivery
    stored_ms: int  # unix ms when the stream took it


def delivery_of(ack_subject: str) -> Delivery:
    """Parse `$JS.ACK[.<domain>.<account>].<stream>.<consumer>.<delivered>.<sseq>.<cseq>.<time>.<pending>`.

    Raises ValueError.
    """
    tokens = ack_subject.split(".")
    if len(tokens) < 9:
        raise ValueError(f"not an ack subject: {ack_subject[:80]!r}")
    offset = 4 if len(tokens) == 9 else 6
    return Delivery(int(tokens[offset + 1]), int(tokens[offset]), int(tokens[offset + 3]) // 1_000_000)


def _reply(operation: str, answer: Any) -> dict[str, Any]:
    reply: dict[str, Any] = msgspec.json.decode(answer.data)
    if error := reply.get("error"):
        raise ApiError(error.get("err_code", 0), f"{operation}: {error.get('description', '')}")
    return reply


class Streams:
    """Mixed into the bus. Every method raises Unavailable (ApiError with JetStream's number) when it cannot be done."""

    settings: Settings

    async def request(self, subject: str, data: bytes = b"", timeout: float = 2.0) -> Any:
        raise NotImplementedError("the bus provides it")

    async def api(self, operation: str, body: object = None) -> dict[str, Any]:
        """One call of JetStream's API, e.g. `STREAM.INFO.REQ`.

        One that only reads is repeated for `publish_timeout_s`, as a publish is: in an election nobody answers.
        """
        data = msgspec.json.encode(body) if body is not None else b""
        if not operation.startswith(READS):
            return _reply(operation, await self.request(f"$JS.API.{operation}", data, CALL_S))
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.settings.publish_timeout_s
        while True:
            try:
                return _reply(operation, await self.request(f"$JS.API.{operation}", data, READ_TRY_S))
            except ApiError:
                raise
            except Unavailable:
                if loop.time() > deadline:
                    raise
                await asyncio.sleep(RETRY_S)

    async def ensure(self) -> None:
        """Create the streams and buckets that are missing; bring the configuration of the others up to date."""
        settings = self.settings
        await self._ensure_stream(
            {
                "name": subjects.REQ_STREAM,
                "subjects": [subjects.REQ_SUBJECTS],
                "retention": "workqueue",
                "storage": "file",
                "discard": "new",
                "discard_new_per_subject": True,
                "max_msgs_per_subject": settings.req_messages_per_subject_max,
                "max_age": int(settings.req_max_age_s * SECOND),
                "max_bytes": settings.req_bytes_max,
                "max_consumers": settings.req_consumers_max,
                "duplicate_window": int(settings.dedupe_window_s * SECOND),
                "allow_msg_ttl": True,
                "num_replicas": settings.nats_replicas,
            }
        )
        await self._ensure_stream(
            {
                "name": subjects.DLQ_STREAM,
                "subjects": [subjects.DLQ_SUBJECTS],
                "retention": "limits",
                "storage": "file",
                "max_age": 7 * 24 * 3600 * SECOND,
                "max_bytes": 1 << 30,
                "num_replicas": settings.nats_replicas,
            }
        )
        buckets = {
            subjects.MODELS_BUCKET: 0.0,
            subjects.ROUTES_BUCKET: 0.0,
            subjects.WORKERS_BUCKET: settings.lease_ttl_s,
            subjects.DECISIONS_BUCKET: DECISIONS_KEPT_S,
            subjects.INGRESSES_BUCKET: settings.lease_ttl_s,
            subjects.LEADER_BUCKET: settings.leader_ttl_s,
            subjects.IDEMPOTENCY_BUCKET: settings.idempotency_kept_s,
        }
        bytes_max = {
            subjects.IDEMPOTENCY_BUCKET: settings.idempotency_bytes_max,
            subjects.DECISIONS_BUCKET: DECISIONS_BYTES_MAX,
        }
        for bucket, ttl_s in buckets.items():
            await self._ensure_stream(
                {
                    "name": f"KV_{bucket}",
                    "subjects": [f"$KV.{bucket}.>"],
                    "storage": "file",
                    "max_msgs_per_subject": DECISIONS_KEPT if bucket == subjects.DECISIONS_BUCKET else 1,
                    "max_age": int(ttl_s * SECOND),
                    "max_bytes": bytes_max.get(bucket, -1),
                    "discard": "new",
                    "allow_rollup_hdrs": True,
                    "allow_direct": True,
                    "deny_delete": True,
                    "num_replicas": settings.nats_replicas,
                }
            )

    async def _ensure_stream(self, config: dict[str, Any]) -> None:
        """The server sets a stream's limit aside when the stream is made: a smaller disk has room for less."""
        name, known = config["name"], await self._bytes_max(config["name"])
        while True:
            try:
                await self.api(f"STREAM.{'CREATE' if known is None else 'UPDATE'}.{name}", config)
                return
            except ApiError as error:
                if error.err_code in NAME_IN_USE and known is None:  # another process was faster
                    known = await self._bytes_max(name)
                    continue
                if error.err_code not in NO_ROOM or config["max_bytes"] < SMALLER * STREAM_BYTES_MIN:
                    raise
                less = known if known is not None and known < config["max_bytes"] else config["max_bytes"] // SMALLER
                config = config | {"max_bytes": less}
                log.log(
                    logging.WARNING if known is None else logging.INFO,
                    "stream %s: %s; trying with %d bytes",
                    *(name, error.message, less),
                )

    async def _bytes_max(self, name: str) -> int | None:
        """The limit of a stream; None: there is no such stream."""
        try:
            return int((await self.api(f"STREAM.INFO.{name}"))["config"]["max_bytes"])
        except ApiError as error:
            if error.err_code in NOT_FOUND:
                return None
            raise

    async def ensure_consumer(self, model: str, version: str, lane: str) -> str:
        """Create the durable pull consumer of (model, version, lane) unless it is there; its name."""
        filter_subject = subjects.requests_of_lane(model, version, lane)
        name = subjects.consumer(lane, filter_subject)
        config = {
            "durable_name": name,
            "filter_subject": filter_subject,
            "ack_policy": "explicit",
            "ack_wait": int(self.settings.ack_wait_s * SECOND),
            "max_deliver": -1,
            "max_ack_pending": 100_000,
            "max_waiting": 4096,
            "deliver_policy": "all",
            "replay_policy": "instant",
        }
        await self.api(
            f"CONSUMER.CREATE.{subjects.REQ_STREAM}.{name}.{filter_subject}",
            {"stream_name": subjects.REQ_STREAM, "config": config},
        )
        return name

    async def delete_consumer(self, model: str, version: str, lane: str) -> None:
        name = subjects.consumer(lane, subjects.requests_of_lane(model, version, lane))
        try:
            await self.api(f"CONSUMER.DELETE.{subjects.REQ_STREAM}.{name}")
        except ApiError as error:
            if error.err_code not in NOT_FOUND:
                raise

    async def consumer_info(self, stream: str, name: str) -> ConsumerInfo | None:
        """Counts of a consumer; None when there is none of that name."""
        try:
            return msgspec.convert(await self.api(f"CONSUMER.INFO.{stream}.{name}"), ConsumerInfo)
        except ApiError as error:
            if error.err_code in NOT_FOUND:
                return None
            raise

    async def stream_info(self, stream: str) -> StreamState:
        return msgspec.convert((await self.api(f"STREAM.INFO.{stream}"))["state"], StreamState)

    async def get_message(self, stream: str, sequence: int) -> StoredMessage | None:
        """A stored message, asked of the stream's leader; None when it is gone."""
        return await self._get_message(stream, {"seq": sequence})

    async def next_message(self, stream: str, filter_subject: str, sequence: int) -> StoredMessage | None:
        """The first stored message from `sequence` on whose subject matches; None: there is none."""
        return await self._get_message(stream, {"seq": sequence, "next_by_subj": filter_subject})

    async def _get_message(self, stream: str, which: dict[str, Any]) -> StoredMessage | None:
        try:
            found = (await self.api(f"STREAM.MSG.GET.{stream}", which))["message"]
        except ApiError as error:
            if error.err_code in NOT_FOUND:
                return None
            raise
        lines = base64.b64decode(found.get("hdrs", "")).decode("utf-8", "replace").split("\r\n")[1:]
        headers = {name: value.strip() for name, colon, value in (line.partition(":") for line in lines) if colon}
        data = base64.b64decode(found.get("data", ""))
        return StoredMessage(found["seq"], found["subject"], data, headers, found.get("time", ""))

    async def delete_message(self, stream: str, sequence: int) -> None:
        """Delete a message; one that is gone already is fine."""
        try:
            await self.api(f"STREAM.MSG.DELETE.{stream}", {"seq": sequence, "no_erase": True})
        except ApiError as error:
            if error.err_code not in NOT_FOUND | {10057, 10043}:
                raise

    async def purge(self, stream: str, filter_subject: str) -> int:
        """Delete the messages whose subject matches; how many there were."""
        return int((await self.api(f"STREAM.PURGE.{stream}", {"filter": filter_subject}))["purged"])
