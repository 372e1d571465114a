"""The client: one surface over NATS and over HTTP."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from headrace.client.generation import Generation
from headrace.client.told import Result
from headrace.client.transport import Transport
from shared.settings import Settings

Input = str | Sequence[dict[str, Any]] | Sequence[int]


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
        body = {"input": input if isinstance(input, str) else list(input), **params}
        return Generation(lambda: self._transport.begin(model, body, version, session))

    async def generate(
        self, model: str, input: Input, *, version: str | None = None, session: str | None = None, **params: Any
    ) -> Result:
        """The whole of such a generation."""
        return await self.stream(model, input, version=version, session=session, **params).complete()

    def resume(self, position: str) -> Generation:
        """Go on with a generation, whoever began it: the tokens after its `position`, or all of them for its `id`."""
        return Generation(lambda: self._transport.resume(position))

    async def cancel(self, position: str) -> str:
        """End a generation for everybody, by its position or id: `cancelled`, or `finished` by itself before.

        A queued one whose reader is gone is found by its position only.
        """
        return await self._transport.cancel(position)
