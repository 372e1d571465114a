"""Inputs become prompt ids on a thread of their own: a tokenizer may take long."""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from shared.errors import EngineFailed, HeadraceError
from shared.wire import Request, WireError
from workers.engine.request import Engine

log = logging.getLogger(__name__)


class Preparer:
    """Prepares inputs in the order in which they come."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._thread = ThreadPoolExecutor(1, "prepare")
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def begin(
        self,
        run: str,
        request: Request,
        ready: Callable[[list[int]], None],
        refused: Callable[[WireError], None],
    ) -> None:
        """Prepare the input of a run, and then call one of the two."""
        self._tasks[run] = asyncio.create_task(self._prepare(run, request, ready, refused))

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
        self, run: str, request: Request, ready: Callable[[list[int]], None], refused: Callable[[WireError], None]
    ) -> None:
        try:
            prompt_ids = await asyncio.get_running_loop().run_in_executor(
                self._thread, self._engine.prepare, request.input, request.sampling
            )
        except HeadraceError as error:
            refusal = WireError(error.code, error.message, error.param)
        except Exception as error:  # whatever a tokenizer or a template raises: it concerns this request only
            log.exception("request %s could not be prepared", request.rid)
            refusal = WireError(EngineFailed.code, f"the input could not be prepared: {error!r}")
        else:
            self._tasks.pop(run, None)
            ready(prompt_ids)
            return
        self._tasks.pop(run, None)
        refused(refusal)
