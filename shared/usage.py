"""What each request came to, as durable events in the stream USAGE, and their sums.

A worker writes the event of a request before it acknowledges the request's message. So an event is written at least once for
each request that is acknowledged, whoever dies; it carries the request's id, and sums count each id once.
Where several are of one request (its claim was lost, or it moved to another version) the one that completed counts.
"""

import logging
import re
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Literal

import msgspec
from msgspec import Struct

from shared import reading, subjects
from shared.errors import BadRequest

if TYPE_CHECKING:
    from shared.bus import Bus, Message

log = logging.getLogger(__name__)

COMPLETED = "completed"
SINCE_DEFAULT_S = 30 * 86_400.0
AT_MAX = 1e11  # unix seconds: what is later is no time

By = Literal["total", "tenant", "model", "day"]


class UsageEvent(Struct, gc=False):
    """One request, as the worker that ended it knows it."""

    id: str  # the rid; of a direct publisher with its message
    at: float  # unix seconds, when it ended
    model: str
    version: str
    outcome: str  # `completed`, or the code of the error that ended it
    prompt_tokens: int
    cached_tokens: int  # of these, those that were not computed again
    output_tokens: int
    queue_s: float  # from its storing to the claim that ended it
    gpu_s: float  # its part of the engine's steps at that worker; an earlier worker that died is not in it


class UsageSum(Struct, kw_only=True):
    """Requests of one group. `group` is the tenant, the model or the day (UTC)."""

    group: str
    requests: int = 0
    completed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    queue_seconds: float = 0.0
    gpu_seconds: float = 0.0

    def add(self, event: UsageEvent, times: int = 1) -> None:
        """`times` -1: take it back."""
        self.requests += times
        self.completed += times * (event.outcome == COMPLETED)
        self.prompt_tokens += times * event.prompt_tokens
        self.cached_tokens += times * event.cached_tokens
        self.output_tokens += times * event.output_tokens
        self.queue_seconds += times * event.queue_s
        self.gpu_seconds += times * event.gpu_s


class _Row(Struct, array_like=True, gc=False):
    """An event as it is stored: some 40 bytes, of which the id has 16."""

    id: bytes  # 32 hex digits as HEX and their bytes, another one as it is
    kind: int  # its place in the message's `kinds`
    at_s: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    queue_ms: int
    gpu_us: int


class _Packed(Struct, array_like=True):
    kinds: list[tuple[str, str, str]]  # model, version, outcome
    rows: list[_Row]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Packed).decode
_HEX_ID = re.compile(r"[0-9a-f]{32}")
HEX = b"\0"


def encode(events: Iterable[UsageEvent]) -> bytes:
    """What is stored of the events of a tenant: whole seconds, milliseconds of waiting, microseconds of an engine."""
    kinds: dict[tuple[str, str, str], int] = {}
    rows = [
        _Row(
            HEX + bytes.fromhex(each.id) if _HEX_ID.fullmatch(each.id) else each.id.encode(),
            kinds.setdefault((each.model, each.version, each.outcome), len(kinds)),
            round(each.at),
            each.prompt_tokens,
            each.cached_tokens,
            each.output_tokens,
            round(each.queue_s * 1e3),
            round(each.gpu_s * 1e6),
        )
        for each in events
    ]
    return _encode(_Packed(list(kinds), rows))


def decode(data: bytes) -> list[UsageEvent]:
    """The events of a stored message. Raises ValueError."""
    packed = _decode(data)
    if any(not 0 <= row.kind < len(packed.kinds) for row in packed.rows):
        raise ValueError("an event is of no kind")
    return [
        UsageEvent(
            row.id[1:].hex() if row.id.startswith(HEX) else row.id.decode(),
            row.at_s,
            *packed.kinds[row.kind],
            row.prompt_tokens,
            row.cached_tokens,
            row.output_tokens,
            row.queue_ms / 1e3,
            row.gpu_us / 1e6,
        )
        for row in packed.rows
    ]


def day_of(at: float) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(at))


def group_key(by: By) -> Callable[[str, UsageEvent], str]:
    """The group of a tenant's event. Raises BadRequest."""
    keys: dict[str, Callable[[str, UsageEvent], str]] = {
        "total": lambda _tenant, _event: "total",
        "tenant": lambda tenant, _event: tenant,
        "model": lambda _tenant, event: event.model,
        "day": lambda _tenant, event: day_of(event.at),
    }
    if by not in keys:
        raise BadRequest(f"by: one of {', '.join(keys)}, not {by!r}", param="by")
    return keys[by]


class Sums:
    """Adds events up, each id of a tenant once."""

    def __init__(self, by: By) -> None:
        self._key = group_key(by)
        self._seen: dict[tuple[str, str], UsageEvent | None] = {}  # None: it completed, and no other one counts
        self._groups: dict[str, UsageSum] = {}

    def add(self, tenant: str, events: Iterable[UsageEvent]) -> None:
        for event in events:
            key, completed = (tenant, event.id), event.outcome == COMPLETED
            if key in self._seen:
                before = self._seen[key]
                if before is None or not (completed or event.output_tokens > before.output_tokens):
                    continue
                self._group(tenant, before).add(before, -1)
            self._seen[key] = None if completed else event
            self._group(tenant, event).add(event)

    def _group(self, tenant: str, event: UsageEvent) -> UsageSum:
        group = self._key(tenant, event)
        return self._groups.setdefault(group, UsageSum(group=group))

    def sums(self) -> list[UsageSum]:
        """By group."""
        return [self._groups[group] for group in sorted(self._groups) if self._groups[group].requests]


async def query(bus: "Bus", since: float, tenant: str | None = None, by: By = "total") -> list[UsageSum]:
    """Sums of what ended from `since` (unix seconds) on, of a tenant or of all. Raises BadRequest or Unavailable."""
    sums = Sums(by)

    def take(message: "Message") -> None:
        try:
            whose = subjects.tenant_of_usage(message.subject)
            sums.add(whose, [event for event in decode(message.data) if since <= event.at < AT_MAX])
        except (ValueError, RecursionError) as error:
            log.warning("an event on %s is left out: %s", message.subject, error)

    try:
        subject = subjects.USAGE_SUBJECTS if tenant is None else subjects.usage(tenant)
    except ValueError as error:
        raise BadRequest(f"tenant: {error}", param="tenant") from None
    await reading.read_since(bus, subjects.USAGE_STREAM, since, take, subject)
    return sums.sums()
