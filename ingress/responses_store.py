"""Responses that can be asked for again: what a tenant's requests with `store` came to, and the items that they came from.

One write a response, at its end. There is room for so many bytes of all tenants; the oldest go first.
"""

import asyncio
import logging
import re

import msgspec

from ingress.keys import KeyValue
from ingress.response_items import CallItem, Item, MessageItem
from ingress.tool_calls.whole import call_id
from shared import subjects
from shared.background import Background
from shared.errors import HeadraceError
from shared.settings import Settings

log = logging.getLogger(__name__)

ID_PREFIX = "resp_"
PREFIXES = {"message": "msg_", "function_call": "fc_", "function_call_output": "fco_"}  # of the ids of items


class KeptResponse(msgspec.Struct):
    """A response that has ended, as it was answered, and all items that it came from: of those before it, too."""

    response: msgspec.Raw
    items: list[Item]


class Ended(msgspec.Struct):
    """What is needed of a response to go on after it."""

    model: str
    output: list[MessageItem | CallItem]


_is_id = re.compile(ID_PREFIX + "([0-9a-f]{32})").fullmatch

encode = msgspec.json.encode
decode = msgspec.json.Decoder(KeptResponse).decode
decode_ended = msgspec.json.Decoder(Ended).decode


def with_ids(items: list[Item], rid: str) -> list[Item]:
    """`items`, each with an id: those of the request `rid` that came without get one."""
    tagged = [(item, PREFIXES[str(item.__struct_config__.tag)]) for item in items]
    return [
        msgspec.structs.replace(item, id=item.id or call_id(rid, 1, number, prefix))
        for number, (item, prefix) in enumerate(tagged)
    ]


def rid_of(identity: str) -> str:
    """The request of a response's id; "": it is of none."""
    found = _is_id(identity)
    return found[1] if found else ""


class ResponsesStore:
    """The bucket of them, for one ingress process."""

    def __init__(self, store: KeyValue, settings: Settings) -> None:
        self._store, self._settings = store, settings
        self._writes = Background()

    async def keep(self, tenant: str, rid: str, kept: KeptResponse) -> bool:
        """Keep it, unless it is too large or that takes too long; whether that is certain."""
        value = encode(kept)
        if len(value) > self._settings.response_bytes_max:
            log.info("response %s%s is not kept: it has %d bytes", ID_PREFIX, rid, len(value))
            return False
        task = self._writes.do(self._put(subjects.key(tenant, rid), value))  # it goes on when its client has left
        done, _ = await asyncio.wait({task}, timeout=self._settings.response_keep_wait_s)
        return task in done and task.result()

    async def find(self, tenant: str, rid: str) -> KeptResponse | None:
        """None: it is not kept. Raises Unavailable."""
        found = await self._store.kv_get(subjects.RESPONSES_BUCKET, subjects.key(tenant, rid))
        return None if found is None else decode(found[0])

    async def delete(self, tenant: str, rid: str) -> None:
        """Raises Unavailable."""
        await self._store.kv_delete(subjects.RESPONSES_BUCKET, subjects.key(tenant, rid))

    async def close(self) -> None:
        """Wait for what is being written."""
        await self._writes.finish(self._settings.publish_timeout_s)

    async def _put(self, key: str, value: bytes) -> bool:
        try:
            await self._store.kv_put(subjects.RESPONSES_BUCKET, key, value)
        except HeadraceError as error:
            log.error("a response could not be kept: %s", error.message)
            return False
        return True
