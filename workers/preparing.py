"""Inputs become prompt ids on a thread of their own: a tokenizer may take long. Large ones are fetched first."""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from shared.errors import EngineFailed, HeadraceError
from shared.wire import Request, Sampling, WireError
from workers.engine.request import Engine
from workers.inputs import StoredInputs

log = logging.getLogger(__name__)


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
        ready: Callable[[list[int], Sampling], None],
        refused: Callable[[WireError], None],
    ) -> None:
        """Prepare the input of a run, and then call one of the two: `ready` with the prompt, and with the whole sampling."""
        self._tasks[run] = asyncio.create_task(self._prepare(run, request, tenant, ready, refused))

    def cancel(self, run: str) -> None:
        """The run is over: neither is called. Idempotent."""
        if (task := self._tasks.pop(run, None)) is not None:
            task.cancel()

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        self._thread.shutdown(cancel_futures=True)

    async def _prepare(
        self,
        run: str,
        request: Request,
        tenant: str,
        ready: Callable[[list[int], Sampling], None],
        refused: Callable[[WireError], None],
    ) -> None:
        try:
            async with self._inputs.opened(request, tenant) as whole:
                prompt_ids = await asyncio.get_running_loop().run_in_executor(
                    self._thread, self._engine.prepare, whole.input, whole.sampling
                )
        except HeadraceError as error:
            refusal = WireError(error.code, error.message, error.param)
        except Exception as error:  # whatever a tokenizer or a template raises: it concerns this request only
            log.exception("request %s could not be prepared", request.rid)
            refusal = WireError(EngineFailed.code, f"the input could not be prepared: {error!r}")
        else:
            self._tasks.pop(run, None)
            ready(prompt_ids, whole.sampling)
            return
        self._tasks.pop(run, None)
        refused(refusal)
