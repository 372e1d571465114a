"""The torch runner: a Hugging Face decoder computes packed batches over our paged cache."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from workers.engine.attention import Current
from workers.engine.batch import Packer
from workers.engine.engine import Drawn
from workers.engine.sampler import Sampler, Scored
from workers.engine.scheduler import StepPlan


@dataclass(slots=True, eq=False)
class TorchRunner:
    """`model` calls attention layers that read `current` (see attention.py)."""

    verifies_drafts: ClassVar[bool] = True

    model: Any
    current: Current
    packer: Packer
    sampler: Sampler

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> torch.Tensor:
        """[n, vocabulary]: the rows of batch.logit_rows_of."""
        batch = self.packer.pack(plan)
        self.current.batch = batch
        output = self.model(
            input_ids=batch.ids,
            position_ids=batch.positions,
            use_cache=False,
            logits_to_keep=batch.logit_rows,
        )
        return output.logits[0]

    @torch.inference_mode()
    def sample(self, plan: StepPlan, computed: torch.Tensor) -> Drawn:
        return sample_step(self.sampler, plan, computed)


def sample_step(sampler: Sampler, plan: StepPlan, computed: torch.Tensor) -> Drawn:
    """The tokens of each slice that samples, and the scores of prompts; `computed` [n, vocabulary] is overwritten."""
    sequences = [part.sequence for part in plan.slices if part.samples]
    drafts = [part.draft for part in plan.slices if part.samples]
    rows = len(sequences) + sum(map(len, drafts))
    drawn = sampler.draw(computed[:rows], sequences, drafts) if sequences else Drawn([])
    if len(computed) > rows:
        prompts = [Scored(part.sequence, part.scored) for part in plan.slices if part.scored]
        drawn.prompt_logprobs, failed = sampler.score(computed[rows:], prompts)
        drawn.failed += failed
    return drawn
