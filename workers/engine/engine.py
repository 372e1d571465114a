"""Continuous batching: an engine thread whose step is plan -> forward -> sample -> commit."""

import asyncio
import logging
import time
from collections.abc import Callable
from itertools import compress, islice
from queue import SimpleQueue
from typing import Any, ClassVar, Protocol

import msgspec

from shared.errors import ContextLength
from shared.records import EngineSettings
from shared.wire import Input, Logprob, Sampling
from workers.engine.blocks import BlockPool
from workers.engine.checks import Generates, check_ids, check_length, check_sampling
from workers.engine.drafts import Drafter
from workers.engine.engine_thread import EngineLost, EngineThread, failure
from workers.engine.fairness import TenantLedger
from workers.engine.observer import StepObserver
from workers.engine.out_of_memory import give_back, is_lost, is_out_of_memory
from workers.engine.pacer import Cost, Pacer
from workers.engine.probe import measure
from workers.engine.request import EngineInfo, EngineRequest, EngineStats, TokenEvent
from workers.engine.runs import Choice, Run
from workers.engine.scheduler import Scheduler
from workers.engine.sequence import Sequence, StepPlan
from workers.engine.text import TextSide

FAILURES_MAX = 3  # steps that may raise with a sequence in them before it is given up
TPOT_MS_TARGET_GPU = 30.0
UNREAD_STEPS_MAX = 2  # handed to the event loop and not yet taken: over it the engine waits, whatever its speed

log = logging.getLogger(__name__)


class Drawn(msgspec.Struct, gc=False):
    """The tokens of one step, in the order of the plan's slices that sample."""

    tokens: list[int]
    logprobs: list[Logprob | None] | None = None  # one for each token; None: nobody asked
    prompt_logprobs: list[list[Logprob]] = []  # for each slice that scores (`Slice.scored`), in the order of the plan
    failed: list[tuple[Sequence, Exception]] = []  # what they have in the lists above is of no use
    counts: list[int] | None = None  # tokens of each slice that samples, where drafts were verified; None: one each


class Runner(Protocol):
    """What computes a step. Both methods may raise: that concerns the sequences of the plan and no others."""

    verifies_drafts: ClassVar[bool] = False  # whether it computes and draws drafts, and that pays

    def forward(self, plan: StepPlan) -> Any:
        """Compute the plan's slices; the result is for `sample` only."""

    def sample(self, plan: StepPlan, computed: Any) -> Drawn:
        """Choose a token for each slice that samples."""


class BatchEngine(Generates, EngineThread[Run]):
    """The `Engine` protocol over any runner and text side. Construct it, then `start` it once."""

    NAME = "engine"

    def __init__(
        self,
        runner: Runner,
        text: TextSide,
        info: EngineInfo,
        settings: EngineSettings,
        max_tokens_default: int | None = None,
        cost: Cost | None = None,
    ) -> None:
        """`cost`: of a step, where it is known; else it is measured at the start, if there is a target for it."""
        super().__init__(info)
        self._runner = runner
        self._text = text
        self._settings = settings
        self._max_tokens_default = max_tokens_default
        target = settings.tpot_ms_target
        if target is None and info.device.startswith("cuda"):
            target = TPOT_MS_TARGET_GPU
        self._pacer = Pacer(target, cost)
        self._scheduler = self._new_scheduler()
        self._drafter = Drafter() if settings.speculation == "ngram" and runner.verifies_drafts else None
        self._generated_tokens = 0
        self._preemptions = 0
        self._observer = StepObserver(settings.ttft_ms_target)
        self._unread: SimpleQueue[None] = SimpleQueue()  # a semaphore, at a tenth of threading's price
        for _ in range(UNREAD_STEPS_MAX):
            self._unread.put(None)

    # -- called on the event loop (prepare: on any thread) -----------------------------------------------------------

    def start(self, loop: asyncio.AbstractEventLoop, on_events: Callable[[list[TokenEvent]], None]) -> None:
        def deliver(events: list[TokenEvent]) -> None:
            self._unread.put(None)
            on_events(events)

        super().start(loop, deliver)

    def stop(self) -> None:
        self._stopping = True
        self._unread.put(None)
        super().stop()

    def prepare(self, prompt: Input, sampling: Sampling) -> list[int]:
        check_sampling(sampling, self._text.vocabulary_size)
        ids = self._text.encode(prompt)
        check_ids(ids, self._text.vocabulary_size, "prompt")
        check_length(len(ids), sampling.max_tokens, self.info.max_model_len)
        if sampling.grammar is not None:
            self._text.matcher(sampling.grammar)  # compiled here, and known to the run that follows
        return ids

    @property
    def blocked(self) -> bool:
        return self._scheduler.blocked

    def stats(self) -> EngineStats:
        scheduler, drafter = self._scheduler, self._drafter
        return EngineStats(
            running=len(scheduler.running),
            waiting=scheduler.waiting + self._submitted - self._begun,
            blocks_used=scheduler.pool.used,
            steps=self._steps,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            preemptions=self._preemptions,
            step_started=self._step_started,
            step_ms=self._observer.step_ms,
            blocks_cached=scheduler.pool.cached,
            cache_queries=scheduler.cache.queries,
            cache_hits=scheduler.cache.hits,
            blocked=self.blocked,
            detached_waiting=scheduler.ledger.detached,
            late=self._observer.late,
            service=scheduler.ledger.service,
            jain=scheduler.ledger.jain,
            drafted=drafter.drafted if drafter is not None else 0,
            accepted=drafter.accepted if drafter is not None else 0,
        )

    # -- the engine thread -------------------------------------------------------------------------------------------

    @property
    def _tenants(self) -> TenantLedger[Sequence]:
        return self._scheduler.ledger

    @property
    def _idle(self) -> bool:
        return self._scheduler.idle

    def _run(self) -> None:
        self._measure()
        super()._run()

    def _measure(self) -> None:
        if self._pacer.target is None or self._pacer.cost is not None:
            return
        self._step_started = time.monotonic()
        try:
            self._pacer.cost = measure(self._runner, self.info, self._settings.prefill_chunk)
        except Exception as error:  # whatever a model or a kernel raises: it will raise again where it matters
            log.error("the cost of a step cannot be measured, and there is no bound on it", exc_info=error)
        self._step_started = 0.0
        log.info("a step costs %s ms", self._pacer.cost)

    def _rest(self) -> None:
        self._scheduler.pool.check()
        assert self._scheduler.pool.used == 0, f"idle, and {self._scheduler.pool.used} blocks are held"
        self._observer.idle(self._scheduler)

    def _run_of(self, request: EngineRequest) -> Run:
        return Run(request, self._length_max(request), self._text)

    def _enter(self, run: Run, request: EngineRequest, events: list[TokenEvent]) -> None:
        for choice in run.choices:
            events += run.opening(choice)
            if choice.text.finish is None or choice.score_from is not None:
                self._scheduler.add(choice, request.limits)
            else:
                events.append(run.event(choice, [], [], None))
        if run.open == 0:
            self._forget(run)

    def _length_max(self, request: EngineRequest) -> int:
        prompt_tokens = len(request.prompt_ids)
        assert prompt_tokens > 0, "an empty prompt"
        for ids in (request.prompt_ids, *request.prefix):  # on a GPU one wrong id would end the process
            check_ids(ids, self._text.vocabulary_size, "prompt")
        check_length(prompt_tokens, request.sampling.max_tokens, self.info.max_model_len)
        wanted = request.sampling.max_tokens
        length_max = min(self.info.max_model_len, self._scheduler.capacity(request.limits))
        least = prompt_tokens + (wanted or 1)  # with the last logits of a prompt comes a token, wanted or not
        if least > length_max:
            raise ContextLength(
                f"The memory that you may use at a time holds {length_max} tokens. However, you requested {least} tokens."
            )
        if wanted is None:
            wanted = self._max_tokens_default or length_max
        return min(prompt_tokens + max(wanted, 1), length_max)

    def _advance(self, events: list[TokenEvent]) -> None:
        if not self._scheduler.idle:
            self._step(events)

    def _step(self, events: list[TokenEvent]) -> None:
        begin = time.monotonic()
        if self._drafter is not None:
            self._drafter.propose(self._scheduler.running, self._pacer)
        plan = self._scheduler.plan()
        assert plan.slices, "nothing to compute, and not idle"
        self._preemptions += plan.preempted
        self._step_started = begin
        shrunk = False
        try:
            drawn = self._runner.sample(plan, self._runner.forward(plan))
        except Exception as error:  # whatever a model or a kernel raises
            if is_lost(error):
                raise EngineLost(str(error)) from error
            shrunk = is_out_of_memory(error) and self._scheduler.shrink(plan)
            if not shrunk:
                self._step_raised(plan, error, events)
                return
            log.warning("%s: steps are smaller from now on: %s", error, self._scheduler.limits)
        if shrunk:
            give_back()
            return
        if drawn.failed:
            plan, drawn = self._without_failed(plan, drawn, events)
        self._scheduler.commit(plan, drawn.tokens, drawn.counts)
        if self._drafter is not None and drawn.counts is not None:
            self._drafter.learn(plan, drawn.counts)
        self._steps += 1
        self._generated_tokens += len(drawn.tokens)
        logprobs = iter(drawn.logprobs) if drawn.logprobs is not None else None
        counts = iter(drawn.counts) if drawn.counts is not None else None
        tokens, prompt_logprobs = iter(drawn.tokens), iter(drawn.prompt_logprobs)
        for part in plan.slices:
            choice = part.sequence
            assert isinstance(choice, Choice)
            if choice.score_from is not None and (scored := part.scored):
                scores = next(prompt_logprobs)
                if self._runs.get(choice.run.key) is choice.run:
                    events.append(choice.run.scored(choice, scored.stop, scores))
            if part.samples:
                ids = [next(tokens)] if counts is None else list(islice(tokens, next(counts)))
                self._emit(choice, ids, None if logprobs is None else list(islice(logprobs, len(ids))), events)
        self._observer.step(self._scheduler, plan, begin, time.monotonic())

    def _without_failed(self, plan: StepPlan, drawn: Drawn, events: list[TokenEvent]) -> tuple[StepPlan, Drawn]:
        """End the runs that failed in this step; the rest of it. Nothing of an ended run may be committed."""
        for choice, error in drawn.failed:
            assert isinstance(choice, Choice)
            if self._runs.get(choice.run.key) is choice.run:
                self._fail(choice.run, error, events)
        lives = [self._runs.get(part.sequence.key) is not None for part in plan.slices]
        samples = [alive for part, alive in zip(plan.slices, lives, strict=True) if part.samples]
        scores = [alive for part, alive in zip(plan.slices, lives, strict=True) if part.scored]
        counts = drawn.counts or [1] * len(samples)
        tokens = [alive for alive, count in zip(samples, counts, strict=True) for _ in range(count)]
        rest = Drawn(
            list(compress(drawn.tokens, tokens)),
            None if drawn.logprobs is None else list(compress(drawn.logprobs, tokens)),
            list(compress(drawn.prompt_logprobs, scores)),
            counts=None if drawn.counts is None else list(compress(counts, samples)),
        )
        return StepPlan(list(compress(plan.slices, lives)), plan.preempted), rest

    def _emit(
        self, choice: Choice, ids: list[int], logprobs: list[Logprob | None] | None, events: list[TokenEvent]
    ) -> None:
        run = choice.run
        if self._runs.get(run.key) is not run:
            return  # another choice of the run failed in this step
        output = choice.text
        is_over = output.finish is not None
        if is_over:  # nothing was asked for but the prompt
            del choice.tokens[-len(ids) :]
            self._hand_out(choice, [], [], None, events)
            return
        try:
            text = [output.push(ids[0])]
            while len(text) < len(ids):
                if output.finish is not None:  # the rest of a draft lies behind the end
                    del choice.tokens[len(text) - len(ids) :]
                    ids = ids[: len(text)]
                else:
                    text.append(output.push(ids[len(text)]))
        except Exception as error:
            log.exception("run %s: no text for the tokens %s", run.key, ids)
            self._fail(run, error, events)
            return
        known = None
        if logprobs is not None:
            known = [each for each in logprobs[: len(ids)] if each is not None] or None
        self._hand_out(choice, ids, text, known, events)

    def _hand_out(
        self,
        choice: Choice,
        ids: list[int],
        text: list[str],
        logprobs: list[Logprob] | None,
        events: list[TokenEvent],
    ) -> None:
        run = choice.run
        if choice.text.finish is not None:
            self._scheduler.remove(choice)
        events.append(run.event(choice, ids, text, logprobs))
        if run.open == 0:
            self._forget(run)

    def _step_raised(self, plan: StepPlan, error: Exception, events: list[TokenEvent]) -> None:
        """Recompute each sequence of the step alone; one that raises again ends its run."""
        log.error("a step of %d sequences raised", len(plan.slices), exc_info=error)
        for part in plan.slices:
            choice = part.sequence
            assert isinstance(choice, Choice)
            if self._runs.get(choice.run.key) is not choice.run:
                continue
            if choice.alone or choice.failures >= FAILURES_MAX:
                self._fail(choice.run, error, events)
            else:
                self._scheduler.suspect(choice)
        self._scheduler.check()

    def _fail(self, run: Run, error: Exception, events: list[TokenEvent]) -> None:
        for choice in run.choices:  # what they computed may be the cause, and must not spread
            self._scheduler.pool.forget(choice.blocks)
        self._end(run)
        events.append(failure(run.key, error))

    def _end(self, run: Run) -> None:
        for choice in run.choices:
            if not choice.ended:
                self._scheduler.remove(choice)
        self._forget(run)

    def _start_over(self) -> None:
        self._scheduler = self._new_scheduler()

    def _new_scheduler(self) -> Scheduler:
        return Scheduler(
            BlockPool(self.info.blocks_total),
            self.info.slots,
            self._settings.prefill_chunk,
            reserved_fraction=self._settings.slots_reserved_fraction,
            length_max=self.info.max_model_len,
            pacer=self._pacer,
            prefix_cache=self._settings.prefix_cache,
        )

    def _publish(self, events: list[TokenEvent]) -> None:
        self._unread.get()
        super()._publish(events)
