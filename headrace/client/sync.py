"""The client for programs without an event loop: the same surface, with plain calls and loops."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Coroutine, Iterator
from typing import Any, Self, TypeVar

from headrace.client.client import Client, EmbeddingInput, Input
from headrace.client.generation import Generation
from headrace.client.jobs import Job, JobStatus
from headrace.client.told import Embeddings, Result, Token

T = TypeVar("T")


class _Over:
    """There are no more items."""


class SyncClient:
    """`Client`, on a thread of its own. Takes the same arguments."""

    def __init__(self, url: str, **arguments: Any) -> None:
        self._client = Client(url, **arguments)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="headrace-client", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        try:
            self._run(self._client.__aenter__())
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._run(self._client.__aexit__())
        finally:
            self._stop()

    def stream(self, model: str, input: Input, **params: Any) -> "SyncGeneration":
        """As `Client.stream`, to be read in a plain loop."""
        return SyncGeneration(self, self._client.stream(model, input, **params))

    def generate(self, model: str, input: Input, **params: Any) -> Result:
        """As `Client.generate`."""
        return self._run(self._client.generate(model, input, **params))

    def embed(self, model: str, input: EmbeddingInput, **params: Any) -> Embeddings:
        """As `Client.embed`."""
        return self._run(self._client.embed(model, input, **params))

    def resume(self, position: str) -> "SyncGeneration":
        """As `Client.resume`."""
        return SyncGeneration(self, self._client.resume(position))

    def cancel(self, position: str) -> str:
        """As `Client.cancel`."""
        return self._run(self._client.cancel(position))

    def submit(self, model: str, input: Input, **params: Any) -> "SyncJob":
        """As `Client.submit`."""
        return self.job(self._run(self._client.submit(model, input, **params)).id)

    def job(self, id: str) -> "SyncJob":
        """As `Client.job`."""
        return SyncJob(self, self._client.job(id))

    def jobs(self, *, status: str | None = None) -> Iterator[JobStatus]:
        """As `Client.jobs`."""
        return self._each(self._client.jobs(status=status))

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:  # of ours, an interrupt for instance: what we waited for is not wanted any more
            future.cancel()
            raise

    def _each(self, items: AsyncGenerator[T, None]) -> Iterator[T]:
        """`items`, one by one as they come."""

        async def following() -> T | _Over:
            return await anext(items, _Over())

        try:
            while not isinstance(item := self._run(following()), _Over):
                yield item
        finally:
            self._run(items.aclose())

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()


class SyncGeneration:
    """As `Generation`, an iterable of tokens."""

    def __init__(self, client: SyncClient, generation: Generation) -> None:
        self._client, self._generation = client, generation

    @property
    def id(self) -> str:
        return self._generation.id

    @property
    def position(self) -> str:
        return self._generation.position

    @property
    def result(self) -> Result:
        return self._generation.result

    def detach(self) -> str:
        return self._generation.detach()

    def __iter__(self) -> Iterator[Token]:
        return self._client._each(aiter(self._generation))


class SyncJob:
    """As `Job`."""

    def __init__(self, client: SyncClient, job: Job) -> None:
        self.id = job.id
        self._client, self._job = client, job

    def status(self) -> JobStatus:
        return self._client._run(self._job.status())

    def result(self, timeout: float | None = None) -> Result:
        return self._client._run(self._job.result(timeout))

    def events(self, position: str | None = None) -> SyncGeneration:
        return SyncGeneration(self._client, self._job.events(position))

    def cancel(self) -> JobStatus:
        return self._client._run(self._job.cancel())

    def delete(self) -> None:
        self._client._run(self._job.delete())
