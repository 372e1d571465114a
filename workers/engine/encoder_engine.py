"""The engine of models that make vectors: the `Engine` protocol over anything that turns token ids into vectors.

A step is a batch of inputs. A vector is computed from nothing but its input: what is lost with a worker is computed again.
"""

import logging
import time
from typing import Protocol

from shared import encoders
from shared.encoders import Encoder
from shared.errors import BadRequest, ContextLength, WrongTask
from shared.wire import Embedding, Input, Sampling, Usage
from workers.engine.checks import check_ids
from workers.engine.engine_thread import EngineLost, EngineThread, failure
from workers.engine.fairness import TenantLedger
from workers.engine.observer import STEP_MS_WEIGHT, TEND_EVERY_S
from workers.engine.out_of_memory import give_back, is_lost
from workers.engine.request import EngineInfo, EngineRequest, EngineStats, TokenEvent
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


class EncoderEngine(EngineThread[EncoderRun]):
    """Construct it, then `start` it once."""

    NAME = "encoder"

    def __init__(self, model: VectorModel, encoder: Encoder, info: EngineInfo, limits: RoundLimits) -> None:
        super().__init__(info)
        self._model, self._encoder, self._limits = model, encoder, limits
        self._rounds = self._new_rounds()
        self._step_ms = 0.0
        self._tend_at = 0.0

    # -- called on the event loop (what prepares: on any thread) -------------------------------------------------------

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

    @property
    def _tenants(self) -> TenantLedger[EncoderInput]:
        return self._rounds.ledger

    @property
    def _idle(self) -> bool:
        return self._rounds.idle

    def _rest(self) -> None:
        self._rounds.check()
        super()._rest()

    def _run_of(self, request: EngineRequest) -> EncoderRun:
        run = EncoderRun(request)
        assert run.left > 0, "a run without inputs"
        return run

    def _enter(self, run: EncoderRun, request: EngineRequest, events: list[TokenEvent]) -> None:
        self._rounds.add(run)

    def _advance(self, events: list[TokenEvent]) -> None:
        if batch := self._rounds.next():
            self._step(batch, events)

    def _step(self, batch: list[EncoderInput], events: list[TokenEvent]) -> None:
        begin = self._step_started = time.monotonic()
        failed: Exception | None = None
        try:
            vectors = self._model.embed([each.ids for each in batch], [each.run.dimensions for each in batch])
        except Exception as error:  # whatever a model or a kernel raises
            if is_lost(error):
                raise EngineLost(str(error)) from error
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
                self._forget(run)
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
        events.append(failure(run.key, error))

    def _end(self, run: EncoderRun) -> None:
        for each in run.inputs:
            self._rounds.done(each)
        self._forget(run)

    def _observe(self, begin: float, now: float) -> None:
        ms = (now - begin) * 1e3
        self._step_ms += (STEP_MS_WEIGHT if self._step_ms else 1.0) * (ms - self._step_ms)
        if now >= self._tend_at:
            self._tend_at = now + TEND_EVERY_S
            self._rounds.ledger.publish()
            self._rounds.ledger.judge()

    def _start_over(self) -> None:
        self._rounds = self._new_rounds()

    def _new_rounds(self) -> Rounds:
        return Rounds(self._limits, self._limits.round)
