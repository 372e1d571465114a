"""Steps by our own kernels, and the change-over from another runner while requests are being served."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from workers.engine.batch import Packer
from workers.engine.engine import Drawn, Runner
from workers.engine.native.decoder import NativeDecoder
from workers.engine.runner import sample_step
from workers.engine.sampler import Sampler
from workers.engine.scheduler import StepPlan

log = logging.getLogger(__name__)


class NativeRunner(Runner):
    verifies_drafts = True

    def __init__(self, decoder: NativeDecoder, packer: Packer, sampler: Sampler) -> None:
        self.decoder = decoder
        self._packer = packer
        self._sampler = sampler

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> torch.Tensor:
        """[n, vocabulary]: the rows of batch.logit_rows_of."""
        return self.decoder.logits(self._packer.pack(plan))

    @torch.inference_mode()
    def sample(self, plan: StepPlan, computed: torch.Tensor) -> Drawn:
        return sample_step(self._sampler, plan, computed)


class UpgradingRunner(Runner):
    """Begins with one runner and goes over to a better one at a step edge, whenever that is offered.

    The two round differently in bf16. So a sequence is computed to its end by what computed its first token: until the
    last of the older ones has ended a step may be two forwards. Both work on the same cache.
    """

    verifies_drafts = True

    def __init__(self, first: Runner, retire: Callable[[], None]) -> None:
        """`retire` is called when `first` is not needed any more."""
        self._retiring: Runner | None = None
        self._current = first
        self._retire = retire
        self._offered: Runner | None = None

    def offer(self, better: Runner) -> None:
        """Thread-safe, once."""
        self._offered = better

    def forward(self, plan: StepPlan) -> Any:
        if self._offered is not None:
            self._retiring, self._current, self._offered = self._current, self._offered, None
            log.info("the compiled kernels take over; sequences that have begun end as they are")
        shares: dict[Runner, StepPlan] = {}
        for part in plan.slices:
            runner = self._retiring if part.sequence.runner is self._retiring is not None else self._current
            part.sequence.runner = runner
            shares.setdefault(runner, StepPlan([])).slices.append(part)
        if self._retiring is not None and self._retiring not in shares:
            # One that was preempted and comes back is computed anew in any case.
            self._retiring = None
            self._retire()
        if len(shares) == 1:
            return next(iter(shares)).forward(plan)
        return _Shares({runner: (share, runner.forward(share)) for runner, share in shares.items()})

    def sample(self, plan: StepPlan, computed: Any) -> Drawn:
        if not isinstance(computed, _Shares):
            runner: Runner = plan.slices[0].sequence.runner
            return runner.sample(plan, computed)
        return _merged(plan, {runner: runner.sample(*share) for runner, share in computed.of.items()})


@dataclass(slots=True)
class _Shares:
    """What each of two runners computed, and of what."""

    of: dict[Runner, tuple[StepPlan, Any]]


def _merged(plan: StepPlan, drawn: dict[Runner, Drawn]) -> Drawn:
    """In the order of the plan."""
    tokens = {runner: iter(each.tokens) for runner, each in drawn.items()}
    counts = {runner: iter(each.counts or [1] * len(each.tokens)) for runner, each in drawn.items()}
    logprobs = {runner: iter(each.logprobs or [None] * len(each.tokens)) for runner, each in drawn.items()}
    scores = {runner: iter(each.prompt_logprobs) for runner, each in drawn.items()}
    sampling = [(part.sequence.runner, next(counts[part.sequence.runner])) for part in plan.slices if part.samples]
    result = Drawn(
        tokens=[token for runner, count in sampling for token in islice(tokens[runner], count)],
        logprobs=[each for runner, count in sampling for each in islice(logprobs[runner], count)],
        prompt_logprobs=[next(scores[part.sequence.runner]) for part in plan.slices if part.scored],
        failed=[failed for each in drawn.values() for failed in each.failed],
        counts=[count for _, count in sampling],
    )
    if all(each.logprobs is None for each in drawn.values()):
        result.logprobs = None
    return result
