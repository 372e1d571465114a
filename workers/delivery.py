"""A request as a worker pulled it."""

import msgspec

from shared.wire import Request


class Delivery(msgspec.Struct, kw_only=True):
    """A message of REQ as it came out of a pull."""

    request: Request
    tenant: str
    seq: int
    handle: str  # its ack subject
    reply: str  # Hr-Reply: the frame address of whoever published it
    deliveries: int = 1  # from the ack subject: 1 is the first
    resume: bool = False  # Hr-Resume
    queued_ms: int = 0
    generation_s: float = 600.0  # Hr-Generation-Ms
    queue_deadline: float | None = None  # Hr-Queue-Deadline, as a monotonic time
