"""A generation as its reader sees it."""

from collections.abc import AsyncGenerator, Awaitable, Callable

from headrace.client.told import Result, Token
from headrace.client.transport import Source
from shared.errors import Internal


class Generation:
    """An async iterable of tokens, to be read once. It is asked for when the reading begins; leaving the loop cancels it."""

    def __init__(self, begin: Callable[[], Awaitable[Source]]) -> None:
        self._begin = begin
        self._source: Source | None = None
        self._detached = False
        self._result: Result | None = None

    @property
    def id(self) -> str:
        """Of the request, once it has begun: whoever knows it and is of the same tenant can resume and cancel it."""
        return self._begun.id

    @property
    def position(self) -> str:
        """From where `Client.resume` goes on: after the tokens that were read."""
        return self._begun.position

    @property
    def result(self) -> Result:
        """What it came to, once all was read."""
        if self._result is None:
            raise RuntimeError("the generation is not complete")
        return self._result

    def detach(self) -> str:
        """The position; and leaving the loop from now on does not cancel: for a while somebody can resume it."""
        self._detached = True
        return self.position

    def __aiter__(self) -> AsyncGenerator[Token, None]:
        if self._source is not None:
            raise RuntimeError("a generation is read once")
        return self._tokens()

    async def complete(self) -> Result:
        """Read all of it."""
        async for _ in self:
            pass
        return self.result

    @property
    def _begun(self) -> Source:
        if self._source is None:
            raise RuntimeError("the generation has not begun: it does with the first token that is read")
        return self._source

    async def _tokens(self) -> AsyncGenerator[Token, None]:
        source = self._source = await self._begin()
        texts: list[str] = []
        try:
            async for token in source.tokens():
                texts.append(token.text)
                yield token
        finally:
            if source.ended is None:
                await (source.detach() if self._detached else source.cancel())
        if (ended := source.ended) is None:
            raise Internal(f"request {source.id} has no more tokens, and no end")
        self._result = Result(
            id=source.id,
            version=ended.version,
            text="".join(texts),
            finish_reason=ended.finish_reason,
            usage=ended.usage,
            claims=ended.claims,
            seed=ended.seed,
        )
