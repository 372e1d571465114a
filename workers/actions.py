"""What a worker's claims ask of their driver, in the order given. `workers.claims` decides; `workers.server` does it."""

import msgspec

from shared.wire import Accepted, Frame, No, Ok, Request, Usage, Wait
from workers.delivery import Delivery


class Start(msgspec.Struct, frozen=True):
    """Prepare the input and submit it to the engine as run `run`, going on after `prefix` (ids per choice)."""

    run: str
    request: Request
    tenant: str
    prefix: list[list[int]]
    queue_deadline: float | None = None


class Abort(msgspec.Struct, frozen=True):
    """Cancel the run, whether it is still being prepared or in the engine."""

    run: str


class Send(msgspec.Struct, gc=False):
    """Send to a frame address, with a reply subject: no responders is an event."""

    reply: str
    item: Accepted | Frame | Ok | Wait | No


class Ack(msgspec.Struct, frozen=True):
    handle: str


class Nak(msgspec.Struct, frozen=True):
    """Hand the message back: it is redelivered at once."""

    handle: str


class Bill(msgspec.Struct, frozen=True):
    """Write down what a request came to, before the acks that follow. `usage` is None for one that did not complete.

    `id` is the rid for requests of ingresses; of others the message, since who publishes may use a rid again and again.
    """

    delivery: Delivery
    id: str
    outcome: str
    usage: Usage | None
    output_tokens: int  # of what was computed, and before that told by the requester


class DeadLetter(msgspec.Struct, frozen=True):
    """Publish the message to the DLQ with `reason`, then TERM it."""

    delivery: Delivery
    reason: str


Action = Start | Abort | Send | Bill | Ack | Nak | DeadLetter
