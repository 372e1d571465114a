"""vLLM behind the `Engine` protocol: for models that our engine refuses, and for those that need several GPUs.

Who is admitted is decided here, in our own order: vLLM is given no more sequences than it has room for, so that its own queue
stays empty. Text, stop strings and events are ours too. The sampler is vLLM's: a resumed run keeps its prefix exactly, and
draws on freely from there.
"""

import time
from collections.abc import Callable
from typing import Any, Protocol

from shared.errors import EngineFailed
from shared.wire import Input, Sampling
from workers.engine.blocks import blocks_for
from workers.engine.checks import Generates, check_ids, check_length, check_sampling
from workers.engine.engine_thread import EngineLost, EngineThread
from workers.engine.fairness import TenantLedger
from workers.engine.request import EngineInfo, EngineRequest, EngineStats, TokenEvent
from workers.engine.runs import Choice, Run
from workers.engine.text import TextSide
from workers.engine.vllm_params import logprob, parameters, refuse_what_differs

FINISHES = {"stop": "stop", "length": "length"}


class Llm(Protocol):
    """What is used of vLLM's LLMEngine."""

    def add_request(self, request_id: str, prompt: Any, params: Any) -> str: ...

    def abort_request(self, request_ids: list[str]) -> None: ...

    def step(self) -> list[Any]: ...


class VllmEngine(Generates, EngineThread[Run]):
    """Construct it, then `start` it once.

    vLLM does not survive an error of its own in a step. The engine is lost then: it stands still, and its stats show a step
    that takes forever, so that the worker hands back what it holds and ends.
    """

    NAME = "vllm"

    def __init__(
        self,
        llm: Llm,
        make_params: Callable[..., Any],
        text: TextSide,
        info: EngineInfo,
    ) -> None:
        """`make_params` is vLLM's SamplingParams, told to hand out what is new."""
        super().__init__(info)
        self._llm = llm
        self._make_params = make_params
        self._text = text
        self._ledger: TenantLedger[Choice] = TenantLedger(info.slots)
        self._running: dict[str, Choice] = {}  # by the id that vLLM knows
        self._generated_tokens = 0
        self._preemptions = 0

    # -- called on the event loop (prepare: on any thread) -----------------------------------------------------------

    def prepare(self, prompt: Input, sampling: Sampling) -> list[int]:
        check_sampling(sampling, self._text.vocabulary_size)
        refuse_what_differs(sampling)
        ids = self._text.encode(prompt)
        check_ids(ids, self._text.vocabulary_size, "prompt")
        check_length(len(ids), sampling.max_tokens, self.info.max_model_len)
        return ids

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

    @property
    def _tenants(self) -> TenantLedger[Choice]:
        return self._ledger

    @property
    def _idle(self) -> bool:
        return not (self._running or self._ledger.waiting or self._ledger.detached)

    def _run_of(self, request: EngineRequest) -> Run:
        for ids in (request.prompt_ids, *request.prefix):
            check_ids(ids, self._text.vocabulary_size, "prompt")
        refuse_what_differs(request.sampling)
        check_length(len(request.prompt_ids), request.sampling.max_tokens, self.info.max_model_len)
        wanted = request.sampling.max_tokens
        length = len(request.prompt_ids) + (self.info.max_model_len if wanted is None else wanted)
        return Run(request, min(length, self.info.max_model_len), self._text)

    def _enter(self, run: Run, request: EngineRequest, events: list[TokenEvent]) -> None:
        for choice in run.choices:
            events += run.opening(choice)
            if choice.text.finish is None:
                self._ledger.add(choice, request.tenant, request.limits)
            else:
                self._hand_out(choice, [], [], None, events)

    def _advance(self, events: list[TokenEvent]) -> None:
        self._admit()
        if self._running:
            self._step(events)

    def _start_over(self) -> None:
        raise EngineLost("vLLM cannot start over in the same process")

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
            self._forget(choice.run)

    def _end(self, run: Run) -> None:
        for choice in run.choices:
            if choice in choice.account.queue(choice.detached):
                self._ledger.remove(choice)
        self._abort([choice for choice in run.choices if _name(choice) in self._running])
        self._forget(run)

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


def _name(choice: Choice) -> str:
    """Another one after each preemption: vLLM may still tell of the request that was aborted."""
    return f"{choice.key}/{choice.choice}" + (f"/{choice.preemptions}" if choice.preemptions else "")
