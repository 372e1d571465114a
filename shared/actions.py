"""What a requester asks of its driver, in the order given. `shared.requester` decides; the driver does the I/O."""

import msgspec

from shared.errors import HeadraceError
from shared.wire import Attach, Logprob, Release, Usage


class SendAttach(msgspec.Struct, frozen=True):
    """Send to one worker, as a request (its no-responders counts), or to all workers of the version (`worker` None)."""

    worker: str | None
    attach: Attach


class SendRelease(msgspec.Struct, frozen=True):
    """Send to `worker` with a reply subject: no responders to a fenced one is an event of the requester."""

    worker: str
    release: Release


class Nak(msgspec.Struct, frozen=True):
    """Hand the message back to the broker: its worker is gone."""

    ack_subject: str


class CheckMessage(msgspec.Struct, frozen=True):
    """STREAM.MSG.GET by sequence, of the stream's leader; `message_state` takes the answer. Keep the body it brings."""

    seq: int


class Republish(msgspec.Struct, frozen=True):
    """Publish the body again with Msg-Id `<rid>.<version>.<k>`, Hr-Resume and the own Hr-Reply.

    Then `published` or `publish_failed`. k 0: the copy of a request that moves.
    """

    k: int


class Move(msgspec.Struct, frozen=True):
    """From now on the request is one for `version`: its body, the subject of its copies, the workers that are asked."""

    version: str


class DeleteMessage(msgspec.Struct, frozen=True):
    """STREAM.MSG.DELETE: nobody ever claimed it and nobody else can know of it.

    `insist`: try until it is done, since nobody may ever claim it. Its copy is stored, or its version is out of service.
    """

    seq: int
    insist: bool = False


class DeadLetter(msgspec.Struct, frozen=True):
    """Publish the body to the DLQ with `reason`."""

    reason: str


class Deliver(msgspec.Struct, gc=False):
    """The next tokens of one choice, for the client: in order, each once. `usage` comes once, with or after the last finish.

    `vector`: with the finish of a choice that is embedded.
    """

    choice: int
    ids: list[int]
    text: list[str]
    logprobs: list[Logprob] | None
    finish: str | None
    usage: Usage | None
    vector: bytes = b""


class End(msgspec.Struct, frozen=True):
    """The one terminal; None: complete. Forget the requester."""

    error: HeadraceError | None


Action = SendAttach | SendRelease | Nak | CheckMessage | Move | Republish | DeleteMessage | DeadLetter | Deliver | End
