"""vLLM behind the `Engine` protocol: for models that our engine refuses, and for those that need several GPUs.

Who is admitted is decided here, in our own order: vLLM is given no more sequences than it has room for, so that its own queue
stays empty. Text, stop strings and events are ours too. The sampler is vLLM's: a resumed run keeps its prefix exactly, and
draws on freely from there.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from shared.errors import EngineFailed, HeadraceError
from shared.wire import Input, Sampling
from workers.engine.blocks import blocks_for
from workers.engine.checks import Generates, check_ids, check_length, check_sampling
from workers.engine.engine import LOST
from workers.engine.fairness import TenantLedger
from workers.engine.request import (
    EngineInfo,
    EngineRequest,
    EngineStats,
    Item,
    Outside,
    Standing,
    TenantLimits,
    TokenEvent,
)
from workers.engine.runs import Choice, Run
from workers.engine.text import TextSide
from workers.engine.vllm_params import logprob, parameters, refuse_what_differs

FINISHES = {"stop": "stop", "length": "length"}

log = logging.getLogger(__name__)


class Llm(Protocol):
    """What is used of vLLM's LLMEngine."""

    def add_request(self, request_id: str, prompt: Any, params: Any) -> str: ...

    def abort_request(self, request_ids: list[str]) -> None: ...

    def step(self) -> list[Any]: ...


class VllmEngine(Generates):
    """One thread that takes requests in, steps vLLM, and hands out tokens. `start` it once.

    vLLM does not survive an error of its own in a step. The engine is lost then: it stands still, and its stats show a step
    that takes forever, so that the worker hands back what it holds and ends.
    """

    def __init__(
        self,
        llm: Llm,
        make_params: Callable[..., Any],
        text: TextSide,
        info: EngineInfo,
    ) -> None:
        """`make_params` is vLLM's SamplingParams, told to hand out what is new."""
        self.info = info
        self._llm = llm
        self._make_params = make_params
        self._text = text
        self._ledger: TenantLedger[Choice] = TenantLedger(info.slots)
        self._inbox: SimpleQueue[Item] = SimpleQueue()
        self._outside = {detached: Outside({}, detached) for detached in (False, True)}
        self._runs: dict[str, Run] = {}
        self._running: dict[str, Choice] = {}  # by the id that vLLM knows
        self._submitted = 0
        self._begun = 0
        self._steps = 0
        self._prompt_tokens = 0
        self._generated_tokens = 0
        self._preemptions = 0
        self._step_started = 0.0
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop
        self._on_events: Callable[[list[TokenEvent]], None]

    # -- called on the event loop (prepare: on any thread) -----------------------------------------------------------

    def start(self, loop: asyncio.AbstractEventLoop, on_events: Callable[[list[TokenEvent]], None]) -> None:
        assert self._thread is None, "an engine starts once"
        self._loop = loop
        self._on_events = on_events
        self._thread = threading.Thread(target=self._run, name="vllm", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopping = True
        self._inbox.put(None)
        if self._thread is not None:
            self._thread.join()

    def prepare(self, prompt: Input, sampling: Sampling) -> list[int]:
        check_sampling(sampling, self._text.vocabulary_size)
        refuse_what_differs(sampling)
        ids = self._text.encode(prompt)
        check_ids(ids, self._text.vocabulary_size, "prompt")
        check_length(len(ids), sampling.max_tokens, self.info.max_model_len)
        return ids

    def submit(self, request: EngineRequest) -> None:
        self._submitted += 1
        self._inbox.put(request)

    def cancel(self, key: str) -> None:
        self._inbox.put(key)

    def standings(self, outside: dict[str, TenantLimits], detached: bool = False) -> dict[str, Standing]:
        if outside != self._outside[detached].tenants:
            self._outside[detached] = Outside(outside, detached)
            self._inbox.put(self._outside[detached])
        return {tenant: self._ledger.standing(tenant, detached) for tenant in outside}

    @property
    def blocked(self) -> bool:
        return False

    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self._running),
            waiting=self._ledger.waiting + self._submitted - self._begun,
            blocks_used=self._blocks_used(),
            steps=self._steps,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            preemptions=self._preemptions,
            detached_waiting=self._ledger.detached,
            step_started=self._step_started,
            service=self._ledger.service,
            jain=self._ledger.jain,
        )

    # -- the engine thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping:
            events: list[TokenEvent] = []
            self._intake(events)
            try:
                self._admit()
                if self._running:
                    self._step(events)
            except Exception:  # whatever vLLM raises: its state is broken then
                log.critical("vLLM failed with %d runs", len(self._runs), exc_info=True)
                self._step_started = LOST
                return
            self._step_started = 0.0
            if events:
                self._publish(events)

    def _intake(self, events: list[TokenEvent]) -> None:
        """Take in what was submitted and cancelled; wait for it if there is nothing else to do."""
        if not (self._running or self._ledger.waiting or self._ledger.detached):
            self._ledger.publish()
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
            self._ledger.expect(item.tenants, item.detached)
        elif item is not None and item in self._runs:
            self._end(self._runs[item])

    def _begin(self, request: EngineRequest, events: list[TokenEvent]) -> None:
        if request.key in self._runs:
            log.error("a second run with the key %s is ignored", request.key)
            return
        try:
            for ids in (request.prompt_ids, *request.prefix):
                check_ids(ids, self._text.vocabulary_size, "prompt")
            refuse_what_differs(request.sampling)
            check_length(len(request.prompt_ids), request.sampling.max_tokens, self.info.max_model_len)
            wanted = request.sampling.max_tokens
            length = len(request.prompt_ids) + (self.info.max_model_len if wanted is None else wanted)
            run = Run(request, min(length, self.info.max_model_len), self._text)
        except Exception as error:
            log.warning("run %s cannot begin: %s", request.key, error, exc_info=True)
            code = error.code if isinstance(error, HeadraceError) else EngineFailed.code
            events.append(TokenEvent(key=request.key, choice=0, error=(code, str(error))))
            return
        self._runs[request.key] = run
        self._prompt_tokens += len(request.prompt_ids)
        for choice in run.choices:
            events += run.opening(choice)
            if choice.text.finish is None:
                self._ledger.add(choice, request.tenant, request.limits)
            else:
                self._hand_out(choice, [], [], None, events)

    def _admit(self) -> None:
        """Give vLLM the next choices in our order, as many as have a slot and the memory for their tokens."""
        while (choice := self._ledger.head() or self._ledger.head(detached=True)) is not None:
            while not self._has_room(choice):
                if not self._yields_to(choice):
                    return
            self._ledger.admit(choice, 0 if choice.preemptions else len(choice.tokens))
            params = parameters(
                choice.sampling, choice.choice, choice.output_index, choice.length_max - len(choice.tokens)
            )
            name = _name(choice)
            self._running[name] = choice
            self._llm.add_request(name, {"prompt_token_ids": list(choice.tokens)}, self._make_params(**params))

    def _has_room(self, choice: Choice) -> bool:
        if not self._running:
            return True
        # Each running sequence soon needs a block more.
        needed = blocks_for(len(choice.tokens)) + len(self._running)
        return len(self._running) < self.info.slots and needed <= self.info.blocks_total - self._blocks_used()

    def _yields_to(self, choice: Choice) -> bool:
        """Whether a detached sequence has left the batch for `choice`, which is not detached."""
        candidates = [each for each in self._running.values() if each.detached]
        if choice.detached or not candidates:
            return False
        victim = self._ledger.victim(candidates)
        name = _name(victim)
        del self._running[name]
        self._llm.abort_request([name])
        victim.preemptions += 1
        self._preemptions += 1
        self._ledger.leave(victim)
        self._ledger.put_back(victim)
        return True

    def _step(self, events: list[TokenEvent]) -> None:
        self._step_started = time.monotonic()
        outputs = self._llm.step()
        self._steps += 1
        for output in outputs:
            choice = self._running.get(output.request_id)
            if choice is not None:  # else it was ended here, and vLLM was in the middle of it
                self._receive(choice, output, events)

    def _receive(self, choice: Choice, output: Any, events: list[TokenEvent]) -> None:
        completion = output.outputs[0]
        if choice.cached < 0:
            choice.cached = output.num_cached_tokens or 0
        ids, texts, scores = [], [], []
        for index, token in enumerate(completion.token_ids):
            if choice.text.finish is not None:
                break
            choice.tokens.append(token)
            ids.append(token)
            texts.append(choice.text.push(token))
            if choice.sampling.logprobs is not None:
                scores.append(logprob(token, completion.logprobs[index], choice.sampling.logprobs, self._text))
        self._generated_tokens += len(ids)
        choice.account.output += len(ids)
        if completion.finish_reason is not None:
            self._leave(choice)
            if choice.text.finish is None:  # for a reason that is vLLM's own
                self._ended_by_vllm(choice, completion.finish_reason, ids, texts, scores, events)
                return
        elif choice.text.finish is not None:
            self._abort([choice])
        if ids or choice.text.finish is not None:
            self._hand_out(choice, ids, texts, scores if choice.sampling.logprobs is not None else None, events)

    def _ended_by_vllm(
        self, choice: Choice, reason: str, ids: list[int], texts: list[str], scores: list[Any], events: list[TokenEvent]
    ) -> None:
        run = choice.run
        if reason not in FINISHES:
            self._end(run)
            message = f"vLLM ended this request: {reason}"
            events.append(TokenEvent(key=run.key, choice=0, error=(EngineFailed.code, message)))
            return
        rest = choice.text.end(FINISHES[reason])
        if texts:
            texts[-1] += rest
        self._hand_out(choice, ids, texts, scores if choice.sampling.logprobs is not None else None, events)

    def _hand_out(
        self, choice: Choice, ids: list[int], texts: list[str], scores: list[Any] | None, events: list[TokenEvent]
    ) -> None:
        events.append(choice.run.event(choice, ids, texts, scores))
        if choice.run.open == 0:
            del self._runs[choice.run.key]

    def _end(self, run: Run) -> None:
        """Forget a run before its end."""
        del self._runs[run.key]
        for choice in run.choices:
            if choice in choice.account.queue(choice.detached):
                self._ledger.remove(choice)
        self._abort([choice for choice in run.choices if _name(choice) in self._running])

    def _abort(self, choices: list[Choice]) -> None:
        names = [_name(choice) for choice in choices]
        for choice in choices:
            self._leave(choice)
        if names:
            self._llm.abort_request(names)

    def _leave(self, choice: Choice) -> None:
        del self._running[_name(choice)]
        self._ledger.leave(choice)
        self._ledger.remove(choice)

    def _blocks_used(self) -> int:
        """What the running sequences need; vLLM may share some of it."""
        return sum(blocks_for(len(choice.tokens)) for choice in list(self._running.values()))

    def _publish(self, events: list[TokenEvent]) -> None:
        try:
            self._loop.call_soon_threadsafe(self._on_events, events)
        except RuntimeError:  # the loop was closed: nobody is left to serve
            log.warning("the event loop is closed; the engine stops")
            self._stopping = True


def _name(choice: Choice) -> str:
    """Another one after each preemption: vLLM may still tell of the request that was aborted."""
    return f"{choice.key}/{choice.choice}" + (f"/{choice.preemptions}" if choice.preemptions else "")
