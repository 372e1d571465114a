"""Inputs become prompt ids on a thread of their own: a tokenizer may take long. Large ones are fetched first."""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec

from shared.background import end
from shared.errors import BadRequest, EngineFailed, HeadraceError
from shared.wire import Request, Sampling, WireError
from workers.engine.request import Engine
from workers.inputs import StoredInputs

log = logging.getLogger(__name__)


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine takes of a request: the ids of a prompt, or of each input to embed, with the whole sampling."""

    prompt_ids: list[int] = []
    inputs: list[list[int]] = []
    dimensions: int = 0
    sampling: Sampling

    @property
    def tokens(self) -> int:
        return len(self.prompt_ids) + sum(map(len, self.inputs))


Ready = Callable[[Prepared], None]


class Preparer:
    """Prepares inputs in the order in which they come, or in which they have been fetched."""

    def __init__(self, engine: Engine, inputs: StoredInputs) -> None:
        self._engine, self._inputs = engine, inputs
        self._thread = ThreadPoolExecutor(1, "prepare")
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def begin(
        self,
        run: str,
        request: Request,
        tenant: str,
        ready: Ready,
        refused: Callable[[WireError], None],
    ) -> None:
        """Prepare the input of a run, and then call one of the two."""
        self._tasks[run] = asyncio.create_task(self._prepare(run, request, tenant, ready, refused))

    def cancel(self, run: str) -> None:
        """The run is over: neither is called. Idempotent."""
        if (task := self._tasks.pop(run, None)) is not None:
            task.cancel()

    async def close(self) -> None:
        await end(*self._tasks.values())
        self._thread.shutdown(cancel_futures=True)

    async def _prepare(
        self, run: str, request: Request, tenant: str, ready: Ready, refused: Callable[[WireError], None]
    ) -> None:
        try:
            async with self._inputs.opened(request, tenant) as whole:
                prepared = await asyncio.get_running_loop().run_in_executor(self._thread, self._prepared, whole)
        except HeadraceError as error:
            refusal = WireError(error.code, error.message, error.param)
        except Exception as error:  # whatever a tokenizer or a template raises: it concerns this request only
            log.exception("request %s could not be prepared", request.rid)
            refusal = WireError(EngineFailed.code, f"the input could not be prepared: {error!r}")
        else:
            self._tasks.pop(run, None)
            ready(prepared)
            return
        self._tasks.pop(run, None)
        refused(refusal)

    def _prepared(self, request: Request) -> Prepared:
        embedding, sampling = request.input.embedding, request.sampling
        if embedding is None:
            return Prepared(prompt_ids=self._engine.prepare(request.input, sampling), sampling=sampling)
        if len(embedding.inputs) != sampling.n:
            raise BadRequest(f"n is {sampling.n}, and there are {len(embedding.inputs)} inputs", param="n")
        inputs = self._engine.prepare_inputs(embedding)
        return Prepared(inputs=inputs, dimensions=embedding.dimensions, sampling=sampling)
