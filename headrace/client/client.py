"""The client: one surface over NATS and over HTTP."""

from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any, Self

from headrace.client.generation import Generation
from headrace.client.jobs import Job, JobStatus, status_of
from headrace.client.told import Embeddings, Result
from headrace.client.transport import Transport
from shared.settings import Settings

Input = str | Sequence[dict[str, Any]] | Sequence[int]
EmbeddingInput = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]


class Client:
    """Asks models. `url` is that of NATS (nats://, tls://), or of one or several ingresses (http://, https://; by commas).

    `key`: an API key, over HTTP. `nkey`: the file with a tenant's key, over NATS. `settings`: timers and TLS of the
    connection to NATS. Every method raises HeadraceError, known by its `code`.
    """

    def __init__(
        self, url: str, *, key: str | None = None, nkey: str | Path | None = None, settings: Settings | None = None
    ) -> None:
        self._transport: Transport
        if url.startswith(("http://", "https://")):
            if nkey is not None:
                raise ValueError("nkey is for NATS; over HTTP it is a key")
            from headrace.client.over_http import OverHttp

            self._transport = OverHttp(url, key)
        elif url.startswith(("nats://", "tls://")):
            if key is not None:
                raise ValueError("key is for HTTP; over NATS it is an nkey")
            from headrace.client.over_nats import OverNats

            self._transport = OverNats(url, nkey, settings)
        else:
            raise ValueError(f"{url!r} begins with none of nats://, tls://, http:// and https://")

    async def __aenter__(self) -> Self:
        await self._transport.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._transport.close()

    def stream(
        self, model: str, input: Input, *, version: str | None = None, session: str | None = None, **params: Any
    ) -> Generation:
        """A generation by `model` (or model@version, model@alias), to be read token by token.

        `input`: text, messages, or token ids; `params` are those of the native route: max_tokens, temperature, seed, ...
        `version` pins one; the same `session` keeps its version while a route splits traffic.
        """
        body = _body(input, params)
        return Generation(lambda: self._transport.begin(model, body, version, session))

    async def generate(
        self, model: str, input: Input, *, version: str | None = None, session: str | None = None, **params: Any
    ) -> Result:
        """The whole of such a generation."""
        return await self.stream(model, input, version=version, session=session, **params).complete()

    async def embed(
        self,
        model: str,
        input: EmbeddingInput,
        *,
        dimensions: int | None = None,
        version: str | None = None,
        session: str | None = None,
    ) -> Embeddings:
        """A vector for each text of `input`, or for each list of token ids, by a model that makes them.

        `dimensions` cuts them, where the model was trained for it.
        """
        body: dict[str, Any] = {"model": model, "input": input if isinstance(input, str) else list(input)}
        if dimensions is not None:
            body["dimensions"] = dimensions
        return await self._transport.embed(body, version, session)

    def resume(self, position: str) -> Generation:
        """Go on with a generation, whoever began it: the tokens after its `position`, or all of them for its `id`."""
        return Generation(lambda: self._transport.resume(position))

    async def cancel(self, position: str) -> str:
        """End a generation for everybody, by its position or id: `cancelled`, or `finished` by itself before.

        A queued one whose reader is gone is found by its position only.
        """
        return await self._transport.cancel(position)

    async def submit(
        self,
        model: str,
        input: Input,
        *,
        version: str | None = None,
        session: str | None = None,
        idempotency_key: str | None = None,
        metadata: dict[str, str] | None = None,
        webhook: dict[str, Any] | None = None,
        ttl_seconds: int | None = None,
        deadline_seconds: int | None = None,
        **params: Any,
    ) -> Job:
        """A generation that nobody waits for. It is durable when this returns; the rest is as for POST /v1/jobs, docs/api.md.

        With an `idempotency_key` there is one job for it, however often it is submitted.
        """
        order: dict[str, Any] = {"endpoint": f"/v1/models/{model}/infer", "body": _body(input, params)}
        more = {
            "metadata": metadata,
            "webhook": webhook,
            "ttl_seconds": ttl_seconds,
            "deadline_seconds": deadline_seconds,
        }
        order |= {name: value for name, value in more.items() if value is not None}
        given = {"x-version-pin": version, "x-session-id": session, "idempotency-key": idempotency_key}
        headers = {name: value for name, value in given.items() if value is not None}
        return self.job((await self._transport.submit(order, headers))["id"])

    def job(self, id: str) -> Job:
        """A job that was submitted before, by whomever of the same tenant."""
        return Job(self._transport, id)

    async def jobs(self, *, status: str | None = None) -> AsyncGenerator[JobStatus, None]:
        """All jobs, or those of a status, the newest first."""
        asked: dict[str, Any] = {} if status is None else {"status": status}
        while True:
            page = await self._transport.list_jobs(asked)
            for each in page["data"]:
                yield status_of(each)
            if not page["has_more"]:
                return
            asked["after"] = page["last_id"]


def _body(input: Input, params: dict[str, Any]) -> dict[str, Any]:
    return {"input": input if isinstance(input, str) else list(input), **params}
