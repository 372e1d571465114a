"""Key-value buckets on JetStream, compatible with other clients' KV, and a watch that survives a restart of the server.

nats-py's own watch rests on its ordered consumer, which dies silently with the newer ack subjects; this one is a plain
ephemeral consumer that is created anew after each reconnection and whenever its heartbeats stop.
"""

import asyncio
import base64
import contextlib
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shared import subjects
from shared.errors import QueueFull, Unavailable
from shared.streams import NOT_FOUND, SECOND, ApiError, Streams
from shared.wire import HEADER_MSG_ID, HEADER_TTL, new_id

if TYPE_CHECKING:
    from shared.bus import Bus, Message, Subscription

log = logging.getLogger(__name__)

OPERATION = "KV-Operation"
EXPECTED_REVISION = "Nats-Expected-Last-Subject-Sequence"
WRONG_REVISION = {10071, 10164}
HEARTBEAT_S = 2
WATCH_LOST_S = 3 * HEARTBEAT_S

OnChange = Callable[[str, bytes | None], None]


class KeyValue(Streams):
    """Mixed into the bus. Keys are `shared.subjects.key(...)`; values are bytes; revisions are stream sequences."""

    async def kv_get(self, bucket: str, key: str) -> tuple[bytes, int] | None:
        """(value, revision), or None when the key is not there."""
        value, revision = await self._kv_last(bucket, key)
        return None if value is None else (value, revision)

    async def kv_put(self, bucket: str, key: str, value: bytes) -> int:
        """Write, whatever is there; the new revision."""
        return await self._kv_write(bucket, key, value, {})

    async def kv_create(self, bucket: str, key: str, value: bytes, ttl_s: int = 0) -> int | None:
        """Write if the key is not there; None when it is."""
        revision = await self.kv_update(bucket, key, value, 0, ttl_s)
        if revision is not None:
            return revision
        last, at = await self._kv_last(bucket, key)
        if last is not None:
            return None
        return await self.kv_update(bucket, key, value, at, ttl_s)  # over the mark of a deletion

    async def kv_update(self, bucket: str, key: str, value: bytes, revision: int, ttl_s: int = 0) -> int | None:
        """Write if the key's revision is still `revision` (0: not there); None when it is not.

        After `ttl_s` the key goes away (0: as its bucket says), in a bucket with `message_ttl`.
        """
        ttl = {HEADER_TTL: str(ttl_s)} if ttl_s else {}
        try:
            return await self._kv_write(bucket, key, value, {EXPECTED_REVISION: str(revision)} | ttl)
        except Unavailable as error:
            if "wrong last sequence" in error.message:
                return None
            raise

    async def kv_delete(self, bucket: str, key: str, revision: int | None = None) -> None:
        """Delete the key; if `revision` is given, only while it is still the key's."""
        expected = {} if revision is None else {EXPECTED_REVISION: str(revision)}
        try:
            await self._kv_write(bucket, key, b"", {OPERATION: "DEL"} | expected)
        except Unavailable as error:
            if revision is None or "wrong last sequence" not in error.message:
                raise

    async def kv_purge(self, bucket: str, key: str) -> None:
        """Delete the key and leave no mark of it: whoever watches the bucket is not told."""
        await self.purge(f"KV_{bucket}", f"$KV.{bucket}.{key}")

    async def kv_keys_below(self, bucket: str, name: str) -> list[str]:
        """The last names of the two-name keys that begin with `name`; of a hundred thousand keys at most."""
        prefix = f"$KV.{bucket}.{subjects.encode_token(name)}."
        counts = await self.subject_counts(f"KV_{bucket}", prefix + "*")
        return [subjects.decode_token(subject.removeprefix(prefix)) for subject in counts]

    async def kv_keys(self, bucket: str) -> list[str]:
        """The keys that have a value now, sorted."""
        found: set[str] = set()
        watch = await self.watch(bucket, lambda key, value: found.add(key) if value is not None else found.discard(key))
        await watch.close()
        return sorted(found)

    async def kv_history(self, bucket: str, key: str) -> list[bytes]:
        """The values of a key that the bucket still has, the newest last; none from before its last deletion."""
        values: list[bytes] = []
        sequence = 1
        while found := await self.next_message(f"KV_{bucket}", f"$KV.{bucket}.{key}", sequence):
            if OPERATION in found.headers:
                values.clear()
            else:
                values.append(found.data)
            sequence = found.seq + 1
        return values

    async def _kv_last(self, bucket: str, key: str) -> tuple[bytes | None, int]:
        """The key's value, None when it is not there, and the revision that says so, 0 when there never was one."""
        try:
            found = (await self.api(f"STREAM.MSG.GET.KV_{bucket}", {"last_by_subj": f"$KV.{bucket}.{key}"}))["message"]
        except ApiError as error:
            if error.err_code in NOT_FOUND:
                return None, 0
            raise
        deleted = OPERATION.encode() in base64.b64decode(found.get("hdrs", ""))
        return None if deleted else base64.b64decode(found.get("data", "")), int(found["seq"])

    async def _kv_write(self, bucket: str, key: str, value: bytes, headers: dict[str, str]) -> int:
        bus: Any = self
        subject = f"$KV.{bucket}.{key}"
        try:
            sequence: int = await bus.publish_durable(subject, value, headers | {HEADER_MSG_ID: new_id()})
        except QueueFull as error:
            raise Unavailable(f"the bucket {bucket} is full: {error.message}") from error
        return sequence

    async def watch(self, bucket: str, callback: OnChange) -> "Watch":
        """Call `callback(key, value | None)` for every key now, then for every change. Returns after the first round.

        A change may be told twice; an expiry by TTL is not told.
        """
        watch = Watch(self, bucket, callback)  # type: ignore[arg-type]
        await watch.start()
        return watch


class Watch:
    """One watched bucket. `live` is False while its consumer is being made anew."""

    def __init__(self, bus: "Bus", bucket: str, callback: OnChange) -> None:
        self._bus, self._bucket, self._callback = bus, bucket, callback
        self._prefix = f"$KV.{bucket}."
        self._heard = 0.0
        self._ready = asyncio.Event()
        self._lost = asyncio.Event()
        self._subscription: Subscription | None = None
        self._consumer = ""
        self._task: asyncio.Task[None] | None = None

    @property
    def live(self) -> bool:
        return self._ready.is_set() and not self._lost.is_set()

    async def start(self) -> None:
        self._bus.on_reconnect(self._lost.set)
        await self._create()
        self._task = asyncio.create_task(self._keep())
        await self._ready.wait()

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        await self._end_consumer()

    async def _end_consumer(self) -> None:
        """What the server does not hear goes away there by itself, after a while."""
        if self._subscription is not None:
            await self._subscription.unsubscribe()
        if self._consumer:
            await self._bus.publish(f"$JS.API.CONSUMER.DELETE.KV_{self._bucket}.{self._consumer}")
            self._consumer = ""

    async def _create(self) -> None:
        await self._end_consumer()
        inbox = f"{self._bus.inbox}_watch.{new_id()}"
        self._subscription = await self._bus.subscribe(inbox, self._on_message)
        config = {
            "deliver_subject": inbox,
            "filter_subject": self._prefix + ">",
            "deliver_policy": "last_per_subject",
            "ack_policy": "none",
            "max_deliver": 1,
            "replay_policy": "instant",
            "mem_storage": True,
            "num_replicas": 1,
            "idle_heartbeat": HEARTBEAT_S * SECOND,
            "inactive_threshold": 30 * SECOND,
        }
        stream = f"KV_{self._bucket}"
        self._heard = asyncio.get_running_loop().time()
        self._lost.clear()
        made = await self._bus.api(f"CONSUMER.CREATE.{stream}", {"stream_name": stream, "config": config})
        self._consumer = made["name"]
        if not made.get("num_pending") and not made.get("delivered", {}).get("consumer_seq"):
            self._ready.set()  # an empty bucket: no message will say that it was the last of the first round

    async def _keep(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HEARTBEAT_S):
                    await self._lost.wait()
            if self._lost.is_set() or loop.time() - self._heard > WATCH_LOST_S:
                try:
                    await self._create()
                except Unavailable as error:
                    log.info("watch of %s: %s", self._bucket, error)
                    self._lost.set()
                    await asyncio.sleep(0.2)

    def _on_message(self, message: "Message") -> None:
        self._heard = asyncio.get_running_loop().time()
        if message.status:
            self._ready.set()  # a heartbeat: what the first round still lacked has expired meanwhile
            return
        try:
            self._callback(
                message.subject.removeprefix(self._prefix), None if OPERATION in message.headers else message.data
            )
        finally:
            if message.reply.endswith(".0"):  # nothing pending after it
                self._ready.set()
