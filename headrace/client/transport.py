"""What NATS and HTTP have in common, as the client sees them."""

from collections.abc import AsyncIterator
from typing import Any, Literal, Protocol

from headrace.client.told import Embeddings, Ended, Token
from shared.errors import StreamNotFound

JobOperation = Literal["show", "cancel", "delete"]


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

    async def embed(self, body: dict[str, Any], version: str | None, session: str | None) -> Embeddings:
        """The vectors of inputs; `body` is that of /v1/embeddings."""

    async def resume(self, position: str) -> Source:
        """Go on with a request; `position` may be its id alone, for all of it."""

    async def cancel(self, position: str) -> str:
        """End a request for everybody: `cancelled`, or `finished` by itself before. Raises StreamNotFound."""

    async def submit(self, order: dict[str, Any], headers: dict[str, str]) -> Any:
        """Store a job; `order` is the body of POST /v1/jobs. What GET shows of it."""

    async def list_jobs(self, asked: dict[str, Any]) -> Any:
        """A page of jobs: what GET /v1/jobs answers."""

    async def ask_job(self, job: str, operation: JobOperation, wait_s: float = 0.0) -> Any:
        """What becomes of a job; `wait_s`: for its end, at most."""

    async def watch_job(self, job: str, position: str | None) -> Source:
        """Its tokens, while it comes to be and after its end."""


def all_told(id: str) -> StreamNotFound:
    """To who wants to go on after the end."""
    return StreamNotFound(f"{id} was told to its end: there is nothing to go on with")
