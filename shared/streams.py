"""Streams and consumers: what JetStream holds, through its JSON API."""

import asyncio
import base64
import logging
from collections.abc import Awaitable, Callable
from datetime import datetime
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
SMALLER = 8  # what does not fit is made so many times smaller, and those after it as much
READS = ("STREAM.MSG.GET.", "STREAM.INFO.", "CONSUMER.INFO.")
DEAD_LETTERS_KEPT_S = 7 * 24 * 3600.0
DECISIONS_KEPT, DECISIONS_KEPT_S = 64, 30 * 24 * 3600.0  # of each version
NOTICE_MARGIN_S = 3600.0  # a notice is kept for so long after it may be told
RESULT_ACK_WAIT_S = 30.0
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
    left: int  # messages that its consumer had not delivered then


def delivery_of(ack_subject: str) -> Delivery:
    """Parse `$JS.ACK[.<domain>.<account>].<stream>.<consumer>.<delivered>.<sseq>.<cseq>.<time>.<pending>`.

    Raises ValueError.
    """
    tokens = ack_subject.split(".")
    if len(tokens) < 9:
        raise ValueError(f"not an ack subject: {ack_subject[:80]!r}")
    offset = 4 if len(tokens) == 9 else 6
    number = [int(token) for token in tokens[offset : offset + 5]]
    return Delivery(number[1], number[0], number[3] // 1_000_000, number[4])


def _reply(operation: str, answer: Any) -> dict[str, Any]:
    reply: dict[str, Any] = msgspec.json.decode(answer.data)
    if error := reply.get("error"):
        raise ApiError(error.get("err_code", 0), f"{operation}: {error.get('description', '')}")
    return reply


class Bucket(msgspec.Struct, frozen=True, kw_only=True):
    """A key-value bucket: the stream behind it. Leases are in memory: renewed every second, and worth nothing later."""

    name: str
    ttl_s: float = 0.0  # 0: for ever
    history: int = 1
    bytes_max: int = -1
    in_memory: bool = False
    message_ttl: bool = False  # a value may have a time of its own after which it goes away
    drops_oldest: bool = False  # when it is full; else it takes no more

    def config(self, replicas: int) -> dict[str, Any]:
        return {
            "name": f"KV_{self.name}",
            "subjects": [f"$KV.{self.name}.>"],
            "storage": "memory" if self.in_memory else "file",
            "max_msgs_per_subject": self.history,
            "max_age": int(self.ttl_s * SECOND),
            "max_bytes": self.bytes_max,
            "discard": "old" if self.drops_oldest else "new",
            "allow_rollup_hdrs": True,
            "allow_direct": True,
            "allow_msg_ttl": self.message_ttl,
            "deny_delete": True,
            "num_replicas": replicas,
        }


def _kept(settings: Settings) -> dict[str, Any]:
    """What all streams have in common."""
    return {"retention": "limits", "storage": "file", "num_replicas": settings.nats_replicas}


def _streams(settings: Settings) -> list[dict[str, Any]]:
    """All but the audit log's."""
    kept = _kept(settings)
    queue = kept | {
        "retention": "workqueue",
        "discard": "new",
        "discard_new_per_subject": True,
        "duplicate_window": int(settings.dedupe_window_s * SECOND),
        "allow_msg_ttl": True,
    }
    return [
        queue
        | {
            "name": subjects.REQ_STREAM,
            "subjects": [subjects.REQ_SUBJECTS],
            "max_msgs_per_subject": settings.req_messages_per_subject_max,
            "max_age": int(settings.req_max_age_s * SECOND),
            "max_bytes": settings.req_bytes_max,
            "max_consumers": settings.req_consumers_max,
        },
        queue
        | {
            "name": subjects.JOB_STREAM,
            "subjects": [subjects.JOB_SUBJECTS],
            "max_msgs_per_subject": settings.job_messages_per_subject_max,
            "max_age": int(settings.job_max_age_s * SECOND),
            "max_bytes": settings.job_bytes_max,
            "max_consumers": settings.job_consumers_max,
        },
        kept
        | {
            "name": subjects.RES_STREAM,
            "subjects": [subjects.RES_SUBJECTS],
            "discard": "new",  # full: results wait in their workers, and none is lost
            "max_msgs_per_subject": 1,
            "max_age": int(settings.result_kept_s * SECOND),
            "max_bytes": settings.result_bytes_max,
            "duplicate_window": int(2 * settings.publish_timeout_s * SECOND),
            "allow_msg_ttl": True,
        },
        kept
        | {
            "name": subjects.DLQ_STREAM,
            "subjects": [subjects.DLQ_SUBJECTS],
            "max_age": int(DEAD_LETTERS_KEPT_S * SECOND),
            "max_bytes": 1 << 30,
        },
        kept
        | {
            "name": subjects.USAGE_STREAM,
            "subjects": [subjects.USAGE_SUBJECTS],
            "max_age": int(settings.usage_kept_s * SECOND),
            "max_bytes": settings.usage_bytes_max,
            "duplicate_window": int(settings.dedupe_window_s * SECOND),
        },
    ]


def _buckets(settings: Settings) -> list[Bucket]:
    return [
        Bucket(name=subjects.MODELS_BUCKET),
        Bucket(name=subjects.ROUTES_BUCKET),
        Bucket(name=subjects.DEPLOYMENTS_BUCKET),
        Bucket(name=subjects.TENANTS_BUCKET),
        Bucket(name=subjects.FILES_BUCKET),
        Bucket(name=subjects.BATCHES_BUCKET, ttl_s=settings.batch_kept_s),
        Bucket(name=subjects.ROLLOUTS_BUCKET, ttl_s=settings.lease_ttl_s, in_memory=True),
        Bucket(name=subjects.WORKERS_BUCKET, ttl_s=settings.lease_ttl_s, in_memory=True),
        Bucket(name=subjects.INGRESSES_BUCKET, ttl_s=settings.lease_ttl_s, in_memory=True),
        Bucket(name=subjects.LEADER_BUCKET, ttl_s=settings.leader_ttl_s, in_memory=True),
        Bucket(
            name=subjects.DECISIONS_BUCKET,
            ttl_s=DECISIONS_KEPT_S,
            history=DECISIONS_KEPT,
        ),
        Bucket(
            name=subjects.IDEMPOTENCY_BUCKET,
            ttl_s=settings.idempotency_kept_s,
            bytes_max=settings.idempotency_bytes_max,
        ),
        Bucket(
            name=subjects.JOBS_BUCKET,
            ttl_s=settings.job_max_age_s + settings.result_kept_s,
            bytes_max=settings.job_records_bytes_max,
            message_ttl=True,
        ),
        Bucket(
            name=subjects.NOTICES_BUCKET,
            ttl_s=settings.webhook_age_max_s + NOTICE_MARGIN_S,
            bytes_max=settings.webhook_bytes_max,
            message_ttl=True,
        ),
        Bucket(name=subjects.WEBHOOK_SECRETS_BUCKET),
        Bucket(
            name=subjects.RESPONSES_BUCKET,
            ttl_s=settings.responses_kept_s,
            bytes_max=settings.responses_bytes_max,
            drops_oldest=True,
        ),
    ]


class Streams:
    """Mixed into the bus. Every method raises Unavailable (ApiError with JetStream's number) when it cannot be done."""

    settings: Settings
    _smaller = 1  # how many times the streams are smaller than the settings say
    _keeps_leases = False
    _keeping_leases: asyncio.Task[None] | None = None

    def on_reconnect(self, callback: Callable[[], Awaitable[None] | None]) -> None:
        raise NotImplementedError("the bus provides it")

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
        """Create the streams and buckets that are missing; bring the configuration of the others up to date.

        Whoever has done so looks after each reconnection whether those that a server only had in memory are still there.
        """
        settings, self._smaller = self.settings, 1
        for config in _streams(settings):
            await self._ensure_stream(config)
        for bucket in _buckets(settings):
            await self._ensure_stream(bucket.config(settings.nats_replicas))
        await self._ensure_audit()
        if not self._keeps_leases:
            self._keeps_leases = True
            self.on_reconnect(self._keep_leases)

    async def _ensure_audit(self) -> None:
        """The last one: where the disk has no room for it, everything but the audit log works."""
        settings = self.settings
        config = _kept(settings) | {
            "name": subjects.AUDIT_STREAM,
            "subjects": [subjects.AUDIT_SUBJECTS],
            "max_age": int(settings.audit_kept_s * SECOND),
            "max_bytes": settings.audit_bytes_max,
        }
        try:
            await self._ensure_stream(config)
        except ApiError as error:
            if error.err_code not in NO_ROOM:
                raise
            log.warning("there is no room for the audit log: what is changed is not recorded: %s", error.message)

    def _keep_leases(self) -> None:
        """Buckets in the memory of a single server are gone when it was restarted."""
        if self._keeping_leases is not None:
            self._keeping_leases.cancel()
        self._keeping_leases = asyncio.create_task(self._ensure_leases())

    async def _ensure_leases(self) -> None:
        while True:
            try:
                for bucket in _buckets(self.settings):
                    if bucket.in_memory:
                        await self._ensure_stream(bucket.config(self.settings.nats_replicas))
                return
            except Unavailable as error:
                log.info("the buckets of leases: %s; trying again", error)
                await asyncio.sleep(RETRY_S)

    async def _ensure_stream(self, config: dict[str, Any]) -> None:
        """The server sets a stream's limit aside when the stream is made: a smaller disk has room for less."""
        name, known = config["name"], await self._config_of(config["name"])
        if known is not None and known["storage"] != config["storage"]:  # cannot be changed, and only leases ever were
            await self.api(f"STREAM.DELETE.{name}")
            known = None
        wanted = config["max_bytes"]
        if known is None and wanted > STREAM_BYTES_MIN:
            config = config | {"max_bytes": max(STREAM_BYTES_MIN, wanted // self._smaller)}
        while True:
            try:
                await self.api(f"STREAM.{'CREATE' if known is None else 'UPDATE'}.{name}", config)
                return
            except ApiError as error:
                if error.err_code in NAME_IN_USE and known is None:  # another process was faster
                    known = await self._config_of(name)
                    continue
                if error.err_code not in NO_ROOM or config["max_bytes"] < SMALLER * STREAM_BYTES_MIN:
                    raise
                less = config["max_bytes"] // SMALLER
                if known is not None and known["max_bytes"] < config["max_bytes"]:
                    less = known["max_bytes"]
                self._smaller = max(self._smaller, wanted // less)
                config = config | {"max_bytes": less}
                log.log(
                    logging.WARNING if known is None else logging.INFO,
                    "stream %s: %s; trying with %d bytes",
                    *(name, error.message, less),
                )

    async def _config_of(self, name: str) -> dict[str, Any] | None:
        """How a stream is; None: there is no such stream."""
        try:
            config: dict[str, Any] = (await self.api(f"STREAM.INFO.{name}"))["config"]
            return config
        except ApiError as error:
            if error.err_code in NOT_FOUND:
                return None
            raise

    async def ensure_consumer(self, model: str, version: str, lane: str) -> str:
        """Create the durable pull consumer of (model, version, lane) unless it is there; its name."""
        return await self._ensure_consumer(
            subjects.REQ_STREAM, lane, subjects.requests_of_lane(model, version, lane), {}
        )

    async def ensure_fair_consumer(self, model: str, version: str, tenant: str) -> str:
        """The same of one tenant's backlog. Without pulls and claims it goes away by itself, and nothing is lost by that."""
        filter_subject = subjects.request(model, version, subjects.LANE_FAIR, tenant)
        return await self._ensure_consumer(subjects.REQ_STREAM, subjects.LANE_FAIR, filter_subject, self._idle)

    async def ensure_job_consumer(self, model: str, version: str, tenant: str) -> str:
        """The same of one tenant's detached work."""
        filter_subject = subjects.job(model, version, tenant)
        return await self._ensure_consumer(subjects.JOB_STREAM, subjects.JOBS, filter_subject, self._idle)

    @property
    def _idle(self) -> dict[str, Any]:
        return {"inactive_threshold": int(self.settings.fair_consumer_idle_s * SECOND)}

    async def ensure_results_consumer(self) -> str:
        """Create the durable pull consumer of all results, less what they are, unless it is there; its name."""
        name = subjects.RESULTS_CONSUMER
        config = {
            "durable_name": name,
            "filter_subject": subjects.RESULTS,
            "headers_only": True,
            "ack_policy": "explicit",
            "ack_wait": int(RESULT_ACK_WAIT_S * SECOND),
            "max_deliver": -1,
            "deliver_policy": "all",
            "replay_policy": "instant",
        }
        stream = subjects.RES_STREAM
        await self.api(f"CONSUMER.CREATE.{stream}.{name}.{subjects.RESULTS}", {"stream_name": stream, "config": config})
        return name

    async def _ensure_consumer(self, stream: str, lane: str, filter_subject: str, more: dict[str, Any]) -> str:
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
            f"CONSUMER.CREATE.{stream}.{name}.{filter_subject}",
            {"stream_name": stream, "config": config | more},
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

    async def subject_counts(self, stream: str, filter_subject: str) -> dict[str, int]:
        """Messages stored on each subject that matches, claimed ones too; of a hundred thousand subjects at most."""
        state = (await self.api(f"STREAM.INFO.{stream}", {"subjects_filter": filter_subject}))["state"]
        return state.get("subjects") or {}

    async def stream_made_us(self, stream: str) -> int:
        """When a stream was made, in unix microseconds on the server's clock: one that was lost is made later again."""
        made = msgspec.convert((await self.api(f"STREAM.INFO.{stream}"))["created"], datetime)
        return int(made.timestamp() * 1e6)

    async def get_message(self, stream: str, sequence: int) -> StoredMessage | None:
        """A stored message, asked of the stream's leader; None when it is gone."""
        return await self._get_message(stream, {"seq": sequence})

    async def next_message(self, stream: str, filter_subject: str, sequence: int) -> StoredMessage | None:
        """The first stored message from `sequence` on whose subject matches; None: there is none."""
        return await self._get_message(stream, {"seq": sequence, "next_by_subj": filter_subject})

    async def last_message(self, stream: str, subject: str) -> StoredMessage | None:
        """The last message that is stored on a subject; None: there is none."""
        return await self._get_message(stream, {"last_by_subj": subject})

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
