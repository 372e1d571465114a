"""Reading a stream from a point in time to its end, once: the audit log, usage."""

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from shared.errors import Unavailable
from shared.streams import SECOND
from shared.wire import new_id

if TYPE_CHECKING:
    from shared.bus import Bus, Message

READ_QUIET_S_MAX = 5.0  # so long the broker may send nothing
HEARTBEAT_S = 2


async def read_since(
    bus: "Bus", stream: str, since: float, take: Callable[["Message"], None], filter_subject: str = ""
) -> None:
    """`take` each message from `since` (unix seconds; before 1970: all) on whose subject matches, the oldest first.

    Raises Unavailable.
    """
    heard, complete = asyncio.Event(), False
    inbox = f"{bus.inbox}_read.{new_id()}"
    flow: list[str] = []  # where to say that what was sent has come

    def on_message(message: "Message") -> None:
        nonlocal complete
        heard.set()
        if message.status:
            if message.reply:
                flow.append(message.reply)
            return
        try:
            take(message)
        finally:
            complete = message.reply.endswith(".0")  # nothing pending after it

    subscription = await bus.subscribe(inbox, on_message)
    config = {
        "deliver_subject": inbox,
        "deliver_policy": "by_start_time",
        "opt_start_time": datetime.fromtimestamp(max(0.0, since), UTC).isoformat().replace("+00:00", "Z"),
        "ack_policy": "none",
        "max_deliver": 1,
        "replay_policy": "instant",
        "mem_storage": True,
        "num_replicas": 1,
        "flow_control": True,
        "idle_heartbeat": HEARTBEAT_S * SECOND,
        "inactive_threshold": 10 * SECOND,
    }
    if filter_subject:
        config["filter_subject"] = filter_subject
    try:
        made = await bus.api(f"CONSUMER.CREATE.{stream}", {"stream_name": stream, "config": config})
        if not made.get("num_pending") and not made.get("delivered", {}).get("consumer_seq"):
            return
        while not complete:
            heard.clear()
            async with asyncio.timeout(READ_QUIET_S_MAX):
                await heard.wait()
            while flow:
                await bus.publish(flow.pop())
    except TimeoutError:
        raise Unavailable(f"the stream {stream} was not read to its end: silence for {READ_QUIET_S_MAX:g} s") from None
    finally:
        await subscription.unsubscribe()
