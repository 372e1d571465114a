"""A source of an answer around another one."""

from typing import Generic, TypeVar

from ingress.relay import Source
from shared import wire
from shared.dispatch import Delta

Inner = TypeVar("Inner", bound=Source)


class Around(Generic[Inner]):
    """What `source` says, until a subclass says something else."""

    def __init__(self, source: Inner) -> None:
        self.source = source
        self.rid = source.rid

    @property
    def usage(self) -> wire.Usage | None:
        return self.source.usage

    @property
    def ended(self) -> bool:
        return self.source.ended

    @property
    def claims(self) -> int:
        return self.source.claims

    @property
    def sequence(self) -> int:
        return self.source.sequence

    @property
    def version(self) -> str:
        return self.source.version

    async def next(self, timeout: float | None = None) -> list[Delta]:
        return await self.source.next(timeout)

    def leave(self) -> None:
        self.source.leave()
