"""What NATS and HTTP have in common, as the client sees them."""

from collections.abc import AsyncIterator
from typing import Any, Protocol

from headrace.client.told import Ended, Token


class Source(Protocol):
    """The tokens of one request. It has been begun."""

    id: str
    ended: Ended | None  # set once it is complete

    @property
    def position(self) -> str:
        """From where to resume: after the tokens that were told."""

    def tokens(self) -> AsyncIterator[Token]:
        """Each once, in order, whatever dies meanwhile. Raises HeadraceError."""

    async def cancel(self) -> None:
        """End the request, if it has not ended."""

    async def detach(self) -> None:
        """Leave without ending it: it goes on for the grace, so that somebody can resume it."""


class Transport(Protocol):
    """A way to a Headrace."""

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def begin(self, model: str, body: dict[str, Any], version: str | None, session: str | None) -> Source:
        """Ask for a generation; `body` is that of the native route."""

    async def resume(self, position: str) -> Source:
        """Go on with a request; `position` may be its id alone, for all of it."""

    async def cancel(self, position: str) -> str:
        """End a request for everybody: `cancelled`, or `finished` by itself before. Raises StreamNotFound."""
