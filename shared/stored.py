"""Records as buckets hold them: the one place where stored bytes become structs.

Who reads one record gets Internal for what cannot be read. Who watches a bucket, or reads all of it, gets None: that is told
once in the log, and is as if nobody had written it.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

import msgspec

from shared import subjects
from shared.errors import Internal

log = logging.getLogger(__name__)

TOLD_MAX = 1000  # keys that are remembered

Record = TypeVar("Record")


class Change(NamedTuple, Generic[Record]):
    """A record that is new or changed, or (None) gone, and the names that its key is made of."""

    names: tuple[str, ...]
    record: Record | None


class Stored(Generic[Record]):
    """One kind of record: `what` it is, in words."""

    def __init__(
        self,
        decode: Callable[[bytes], Record],
        what: str,
        names: Callable[[Record], Sequence[str]] | None = None,
        count: int = 1,
    ) -> None:
        """`names`: those that its key is made of, where the record has them; `count` of them."""
        self._decode, self._what, self._names, self._count = decode, what, names, count
        self._told: dict[str, bytes | None] = {}  # what could not be read last, by key

    def decode(self, raw: bytes) -> Record:
        """Raises Internal."""
        try:
            return self._decode(raw)
        except (ValueError, OverflowError, RecursionError) as error:  # all that msgspec can raise
            raise Internal(f"{self._what} cannot be read: {error}") from None

    def at(self, key: str, raw: bytes) -> Record:
        """What is stored under `key`. Raises Internal, also when it is not of that key."""
        record = self.decode(raw)
        if self._names is not None and self.names(key) != tuple(self._names(record)):
            raise Internal(f"what is stored under {key} is of another key")
        return record

    def names(self, key: str) -> tuple[str, ...]:
        """The names that `key` is made of. Raises Internal for a key that is none of ours."""
        try:
            found = tuple(subjects.names_of(key))
        except ValueError as error:
            raise Internal(f"{key} is no key of ours: {error}") from None
        if len(found) != self._count:
            raise Internal(f"{key} is no key of ours: {len(found)} names for {self._count}")
        return found

    def change(self, key: str, raw: bytes | None) -> Change[Record] | None:
        """What a watch told of `key`. None: it cannot be read, and what was there before is to stay."""
        try:
            change = Change(self.names(key), None if raw is None else self.at(key, raw))
        except Internal as error:
            self._tell(key, raw, error)
            return None
        self._told.pop(key, None)
        return change

    def follow(self, records: dict[str, Record], key: str, raw: bytes | None) -> bool:
        """Keep `records`, by the one name of their keys, as a watch tells them. Whether it told something that can be read."""
        change = self.change(key, raw)
        if change is None:
            return False
        [name] = change.names
        if change.record is None:
            records.pop(name, None)
        else:
            records[name] = change.record
        return True

    def _tell(self, key: str, raw: bytes | None, error: Internal) -> None:
        """Once for each value: a watch that is made anew tells everything again."""
        if key in self._told and self._told[key] == raw:
            return
        self._told[key] = raw
        if len(self._told) > TOLD_MAX:
            del self._told[next(iter(self._told))]
        log.error("%s under %s is not heeded: %s", self._what, key, error.message)


def json(type_: type[Record]) -> Callable[[bytes], Record]:
    """The decoder of records that are JSON."""
    return msgspec.json.Decoder(type_).decode
