"""What arrives on the control subjects, and whether who says it may say so.

The last token of such a subject is the owner of the sender's frame addresses: `ingress`, or a tenant that publishes for
itself, which the server's accounts keep to its own (headrace/nats_config.py).
"""

from shared import subjects, wire
from shared.wire import Malformed


def items_of(subject: str, data: bytes) -> list[wire.Attach | wire.Release]:
    """Attaches and releases, which speak for addresses of their sender. Raises Malformed."""
    items = wire.decode_to_worker(data).items
    own = f"tok.{_owner_token(subject)}."
    for item in items:
        if not item.reply.startswith(own):
            raise Malformed(f"it speaks for {item.reply}")
    return items


def about_of(subject: str, data: bytes) -> wire.About:
    """Which request is asked for, by an ingress or by the tenant whose it is. Raises Malformed."""
    about = wire.decode_about(data)
    try:
        allowed = subjects.speaks_for(_owner_token(subject), about.tenant)
    except ValueError as error:
        raise Malformed(f"its tenant: {error}") from None
    if not allowed:
        raise Malformed("it asks for another tenant's request")
    return about


def _owner_token(subject: str) -> str:
    return subject.rpartition(".")[2]
