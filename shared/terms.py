"""What a requester works with: its timers, and what it has when it takes over."""

import msgspec


class RequesterLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The timers of one requester, in seconds, and its two deadlines."""

    silence_s: float = 0.5  # without a frame: ping the worker
    attach_timeout_s: float = 1.0
    seek_every_s: float = 1.0
    seek_every_max_s: float = 5.0
    ack_wait_s: float = 5.0
    orphan_grace_s: float = 15.0
    nak_hold_s: float = 2.0
    found_s: float = 2.5  # within which a worker that has it answers the broadcasts of who takes over
    unserved_max_s: float = 13.0  # of a version that was rolled back: longer than a redelivery takes
    deaths_max: int = 4
    queue_deadline: float  # monotonic time by which some worker must have accepted
    generation_s: float  # counted from the first accepted


class Known(msgspec.Struct, frozen=True, kw_only=True):
    """What a requester that takes over has: all ids per choice, or only a position and a digest per choice.

    With digests it is delivered everything from the first token on: a generation that meets them.
    """

    ids: list[list[int]] | None = None
    next: list[int] | None = None
    digest: list[str] | None = None
