"""By what a request keeps its version while a rollout moves traffic."""

import hashlib

import msgspec

from ingress.schemas import Body
from shared.errors import BadRequest
from shared.wire import ChatMessage, new_id

encode = msgspec.msgpack.Encoder().encode


def sticky_key(session: str | None, body: Body, tenant: str) -> str:
    """X-Session-Id, else `prompt_cache_key` or `user`, else the conversation, else a random one."""
    named = session or body.prompt_cache_key or body.user
    if named:
        return named
    try:
        messages = body.to_inputs()[0].messages
    except BadRequest:  # it is refused later, in its turn
        messages = None
    return (_conversation(messages, tenant) if messages else None) or new_id()


def _conversation(messages: list[ChatMessage], tenant: str) -> str | None:
    """The same for every turn of a conversation: what it begins with, up to its first user message.

    None: a lone message may be anybody's first one, and would take all that begin so to one version.
    """
    if len(messages) < 2:
        return None
    begin = next((at for at, message in enumerate(messages) if message.role == "user"), len(messages) - 1)
    return hashlib.blake2b(encode([tenant, messages[: begin + 1]]), digest_size=16).hexdigest()
