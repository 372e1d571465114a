"""The engine of models that make vectors: the `Engine` protocol over anything that turns token ids into vectors.

One thread, as that of the engine that generates: requests are taken in between two batches, and each batch's vectors are handed
to the event loop in one call. A vector is computed from nothing but its input: what is lost with a worker is computed again.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Protocol

from shared import encoders
from shared.encoders import Encoder
from shared.errors import BadRequest, ContextLength, EngineFailed, WrongTask
from shared.wire import Embedding, Input, Sampling, Usage
from workers.engine.checks import check_ids
from workers.engine.engine import LOST, DeviceLost
from workers.engine.observer import STEP_MS_WEIGHT, TEND_EVERY_S
from workers.engine.out_of_memory import give_back, is_lost
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
from workers.engine.rounds import EncoderInput, EncoderRun, RoundLimits, Rounds

BLOCKED_ROUNDS = 2  # so much work is taken at a time: more would only wait, and another worker may be free

log = logging.getLogger(__name__)


class VectorModel(Protocol):
    """What computes vectors. `tokenise` is called on any thread, `embed` on the engine's."""

    vocabulary_size: int

    def tokenise(self, texts: list[str]) -> list[list[int]]:
        """Ids with the special tokens around them. Raises BadRequest."""

    def embed(self, inputs: list[list[int]], dimensions: list[int]) -> list[bytes]:
        """A vector of each, float32 and little-endian, cut to so many numbers (0: not); b"": it has numbers that are none."""


class EncoderEngine:
    """Construct it, then `start` it once."""

    def __init__(self, model: VectorModel, encoder: Encoder, info: EngineInfo, limits: RoundLimits) -> None:
        self.info = info
        self._model, self._encoder, self._limits = model, encoder, limits
        self._rounds = self._new_rounds()
        self._inbox: SimpleQueue[Item] = SimpleQueue()
        self._outside = {detached: Outside({}, detached) for detached in (False, True)}
        self._runs: dict[str, EncoderRun] = {}
        self._submitted = 0
        self._begun = 0
        self._steps = 0
        self._prompt_tokens = 0
        self._step_ms = 0.0
        self._step_started = 0.0
        self._tend_at = 0.0
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop
        self._on_events: Callable[[list[TokenEvent]], None]

    # -- called on the event loop (what prepares: on any thread) -------------------------------------------------------

    def start(self, loop: asyncio.AbstractEventLoop, on_events: Callable[[list[TokenEvent]], None]) -> None:
        assert self._thread is None, "an engine starts once"
        self._loop = loop
        self._on_events = on_events
        self._thread = threading.Thread(target=self._run, name="encoder", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopping = True
        self._inbox.put(None)
        if self._thread is not None:
            self._thread.join()

    def prepare(self, prompt: Input, sampling: Sampling) -> list[int]:
        raise WrongTask("this model makes embeddings and generates no text", param="model")

    def prepare_inputs(self, embedding: Embedding) -> list[list[int]]:
        encoders.check_dimensions(self._encoder, embedding.dimensions)
        texts = [each for each in embedding.inputs if isinstance(each, str)]
        if self._encoder.lower_case:
            texts = [each.lower() for each in texts]
        tokenised = iter(self._model.tokenise(texts) if texts else [])
        inputs = [next(tokenised) if isinstance(each, str) else each for each in embedding.inputs]
        for number, ids in enumerate(inputs, embedding.first):
            where = f"input[{number}]"
            if not ids:
                raise BadRequest(f"{where}: it has no tokens", param=where)
            if len(ids) > self.info.max_model_len:
                raise ContextLength(
                    f"This model's maximum input length is {self.info.max_model_len} tokens. However, {where} has"
                    f" {len(ids)} tokens.",
                    param=where,
                )
            check_ids(ids, self._model.vocabulary_size, where)
        return inputs

    def submit(self, request: EngineRequest) -> None:
        self._submitted += 1
        self._inbox.put(request)

    def cancel(self, key: str) -> None:
        self._inbox.put(key)

    def standings(self, outside: dict[str, TenantLimits], detached: bool = False) -> dict[str, Standing]:
        if outside != self._outside[detached].tenants:
            self._outside[detached] = Outside(outside, detached)
            self._inbox.put(self._outside[detached])
        return {tenant: self._rounds.ledger.standing(tenant, detached) for tenant in outside}

    @property
    def blocked(self) -> bool:
        return self._rounds.tokens > BLOCKED_ROUNDS * self._limits.round

    def stats(self) -> EngineStats:
        rounds = self._rounds
        return EngineStats(
            running=len(rounds.running),
            waiting=rounds.ledger.waiting + self._submitted - self._begun,
            blocks_used=0,
            steps=self._steps,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=0,
            preemptions=0,
            step_started=self._step_started,
            step_ms=self._step_ms,
            blocked=self.blocked,
            detached_waiting=rounds.ledger.detached,
            service=rounds.ledger.service,
            jain=rounds.ledger.jain,
        )

    # -- the engine thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping:
            events: list[TokenEvent] = []
            try:
                self._intake()
                if batch := self._rounds.next():
                    self._step(batch, events)
            except DeviceLost:
                log.critical("the device is lost, with %d runs", len(self._runs), exc_info=True)
                self._step_started = LOST
                return
            except Exception as error:  # a broken invariant of ours: nothing in this engine's state can be trusted
                log.critical("the engine starts over, %d runs fail", len(self._runs), exc_info=True)
                events += [_failure(key, error) for key in self._runs]
                self._runs, self._rounds = {}, self._new_rounds()
            self._step_started = 0.0
            if events:
                self._publish(events)

    def _intake(self) -> None:
        """Take in what was submitted and cancelled; wait for it if there is nothing else to do."""
        if self._rounds.idle:
            self._rounds.check()
            self._rounds.ledger.publish()
            self._take(self._inbox.get())
        while True:
            try:
                item = self._inbox.get_nowait()
            except Empty:
                return
            self._take(item)

    def _take(self, item: Item) -> None:
        if isinstance(item, EngineRequest):
            self._begin(item)
            self._begun += 1
        elif isinstance(item, Outside):
            self._rounds.ledger.expect(item.tenants, item.detached)
        elif item is not None and item in self._runs:
            self._end(self._runs[item])

    def _begin(self, request: EngineRequest) -> None:
        if request.key in self._runs:
            log.error("a second run with the key %s is ignored", request.key)
            return
        run = self._runs[request.key] = EncoderRun(request)
        assert run.left > 0, "a run without inputs"
        self._prompt_tokens += run.tokens
        self._rounds.add(run)

    def _step(self, batch: list[EncoderInput], events: list[TokenEvent]) -> None:
        begin = self._step_started = time.monotonic()
        failed: Exception | None = None
        try:
            vectors = self._model.embed([each.ids for each in batch], [each.run.dimensions for each in batch])
        except Exception as error:  # whatever a model or a kernel raises
            if is_lost(error):
                raise DeviceLost(str(error)) from error
            failed = error.with_traceback(None)
        self._steps += 1
        if failed is not None:
            self._step_raised(batch, failed, events)
            return
        for each, vector in zip(batch, vectors, strict=True):
            run = each.run
            if self._runs.get(run.key) is not run:
                continue  # another input of it failed in this batch
            if not vector:
                self._fail(run, ValueError("its vector has numbers that are not finite"), events)
                continue
            self._rounds.done(each)
            run.left -= 1
            usage = None if run.left else Usage(run.tokens, 0)
            events.append(TokenEvent(key=run.key, choice=each.number, finish="stop", usage=usage, vector=vector))
            if not run.left:
                del self._runs[run.key]
        self._observe(begin, time.monotonic())

    def _step_raised(self, batch: list[EncoderInput], error: Exception, events: list[TokenEvent]) -> None:
        """Compute each input of the batch alone; one that raises again ends its run."""
        log.error("a batch of %d inputs raised: %s", len(batch), error, exc_info=error)
        give_back()
        if len(batch) > 1 or not batch[0].alone:
            self._rounds.suspect(batch)
        else:
            self._fail(batch[0].run, error, events)

    def _fail(self, run: EncoderRun, error: Exception, events: list[TokenEvent]) -> None:
        self._end(run)
        events.append(_failure(run.key, error))

    def _end(self, run: EncoderRun) -> None:
        """Forget a run before its end."""
        del self._runs[run.key]
        for each in run.inputs:
            self._rounds.done(each)

    def _observe(self, begin: float, now: float) -> None:
        ms = (now - begin) * 1e3
        self._step_ms += (STEP_MS_WEIGHT if self._step_ms else 1.0) * (ms - self._step_ms)
        if now >= self._tend_at:
            self._tend_at = now + TEND_EVERY_S
            self._rounds.ledger.publish()
            self._rounds.ledger.judge()

    def _new_rounds(self) -> Rounds:
        return Rounds(self._limits, self._limits.round)

    def _publish(self, events: list[TokenEvent]) -> None:
        if self._stopping:
            return
        try:
            self._loop.call_soon_threadsafe(self._on_events, events)
        except RuntimeError:  # the loop was closed: nobody is left to serve
            log.warning("the event loop is closed; the engine stops")
            self._stopping = True


def _failure(key: str, error: Exception) -> TokenEvent:
    message = f"the engine failed on this request: {type(error).__name__}: {error}"
    return TokenEvent(key=key, choice=0, error=(EngineFailed.code, message))
