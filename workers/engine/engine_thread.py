"""The thread that every engine is: what it is told and hands out, and what becomes of it when something raises.

intake -> a step -> publish. Submits and cancels are taken in between two steps only, so nothing changes under a step; the
event loop is called once with all that a step added.
"""

import asyncio
import logging
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from shared.errors import EngineFailed, HeadraceError
from workers.engine.fairness import TenantLedger
from workers.engine.request import EngineInfo, EngineRequest, Item, Outside, Standing, TenantLimits, TokenEvent

LOST = -math.inf  # as the begin of the step now running: longer ago than any limit, so that the worker ends

log = logging.getLogger(__name__)


class Begun(Protocol):
    """A request that has begun."""

    key: str

    def let_go(self) -> None:
        """It is over. It and its parts refer to one another no more: with a long prompt they would stay until a full
        collection of garbage, which comes the later the more is alive."""


R = TypeVar("R", bound=Begun)


class EngineLost(Exception):
    """No later step can succeed in this process."""


class EngineThread(ABC, Generic[R]):
    """All of the `Engine` protocol that does not depend on what is computed. `R` is a request that has begun."""

    NAME: ClassVar[str]  # of the thread

    def __init__(self, info: EngineInfo) -> None:
        self.info = info
        self._inbox: SimpleQueue[Item] = SimpleQueue()
        self._outside = {detached: Outside({}, detached) for detached in (False, True)}
        self._runs: dict[str, R] = {}
        self._submitted = 0
        self._begun = 0
        self._steps = 0
        self._prompt_tokens = 0
        self._step_started = 0.0
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop
        self._on_events: Callable[[list[TokenEvent]], None]

    # -- called on the event loop ----------------------------------------------------------------------------------------

    def start(self, loop: asyncio.AbstractEventLoop, on_events: Callable[[list[TokenEvent]], None]) -> None:
        assert self._thread is None, "an engine starts once"
        self._loop = loop
        self._on_events = on_events
        self._thread = threading.Thread(target=self._run, name=self.NAME, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopping = True
        self._inbox.put(None)
        if self._thread is not None:
            self._thread.join()

    def submit(self, request: EngineRequest) -> None:
        self._submitted += 1
        self._inbox.put(request)

    def cancel(self, key: str) -> None:
        self._inbox.put(key)

    def standings(self, outside: dict[str, TenantLimits], detached: bool = False) -> dict[str, Standing]:
        if outside != self._outside[detached].tenants:
            self._outside[detached] = Outside(outside, detached)
            self._inbox.put(self._outside[detached])
        return {tenant: self._tenants.standing(tenant, detached) for tenant in outside}

    # -- what engines differ in ------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def _tenants(self) -> TenantLedger[Any]:
        """Another one after a `_start_over`."""

    @property
    @abstractmethod
    def _idle(self) -> bool:
        """Whether there is nothing to compute."""

    @abstractmethod
    def _run_of(self, request: EngineRequest) -> R:
        """Raises HeadraceError for what is not served; another exception is a defect."""

    @abstractmethod
    def _enter(self, run: R, request: EngineRequest, events: list[TokenEvent]) -> None:
        """A run begins to wait for its first step."""

    @abstractmethod
    def _end(self, run: R) -> None:
        """Forget a run before its end: what it holds is free from here on."""

    @abstractmethod
    def _advance(self, events: list[TokenEvent]) -> None:
        """Compute a step, if there is anything to compute. Raises EngineLost."""

    @abstractmethod
    def _start_over(self) -> None:
        """Drop the state of all runs. Raises EngineLost where that cannot be done."""

    def _rest(self) -> None:
        """Called before the thread waits for something to do."""
        self._tenants.publish()

    # -- the engine thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping:
            try:
                events = self._turn()
            except EngineLost:
                log.critical("the engine is lost, with %d runs", len(self._runs), exc_info=True)
                self._step_started = LOST
                return
            if events:
                self._publish(events)

    def _turn(self) -> list[TokenEvent]:
        """One turn of the loop: intake, and a step if there is anything to compute. Raises EngineLost."""
        events: list[TokenEvent] = []
        try:
            self._intake(events)
            self._advance(events)
        except EngineLost:
            raise
        except Exception as error:  # a broken invariant of ours: nothing in this engine's state can be trusted
            self._start_over()
            log.critical("the engine starts over, %d runs fail", len(self._runs), exc_info=True)
            # what was said before stays said: a refusal, a finish
            events += [failure(key, error, "the engine failed") for key in self._runs]
            self._runs = {}
        self._step_started = 0.0
        return events

    def _intake(self, events: list[TokenEvent]) -> None:
        """Take in what was submitted and cancelled; wait for it if there is nothing else to do."""
        if self._idle:
            self._rest()
            self._take(self._inbox.get(), events)
        while True:
            try:
                item = self._inbox.get_nowait()
            except Empty:
                return
            self._take(item, events)

    def _take(self, item: Item, events: list[TokenEvent]) -> None:
        if isinstance(item, EngineRequest):
            self._begin(item, events)
            self._begun += 1
        elif isinstance(item, Outside):
            self._tenants.expect(item.tenants, item.detached)
        elif item is not None and item in self._runs:
            self._end(self._runs[item])

    def _begin(self, request: EngineRequest, events: list[TokenEvent]) -> None:
        if request.key in self._runs:
            log.error("a second run with the key %s is ignored", request.key)
            return
        try:
            run = self._run_of(request)
        except Exception as error:
            code = error.code if isinstance(error, HeadraceError) else EngineFailed.code
            defect = code == EngineFailed.code  # else what was asked for is wrong
            log.warning("run %s cannot begin: %s", request.key, error, exc_info=defect)
            events.append(TokenEvent(key=request.key, choice=0, error=(code, str(error))))
            return
        self._runs[request.key] = run
        self._prompt_tokens += len(request.prompt_ids) + sum(map(len, request.inputs))
        self._enter(run, request, events)

    def _forget(self, run: R) -> None:
        """It has ended."""
        del self._runs[run.key]
        run.let_go()

    def _publish(self, events: list[TokenEvent]) -> None:
        if self._stopping:
            return
        try:
            self._loop.call_soon_threadsafe(self._on_events, events)
        except RuntimeError:  # the loop was closed: nobody is left to serve
            log.warning("the event loop is closed; the engine stops")
            self._stopping = True


def failure(key: str, error: Exception, what: str = "the engine failed on this request") -> TokenEvent:
    """The end of a run that `error` ended."""
    return TokenEvent(key=key, choice=0, error=(EngineFailed.code, f"{what}: {type(error).__name__}: {error}"))
