"""The torch runner on a GPU: batches from pinned memory, decode steps from graphs."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from workers.engine.batch_cuda import CudaBatch, CudaCurrent, CudaPacker
from workers.engine.decode_graphs import DecodeGraphs, Recorder, bucket_of
from workers.engine.engine import Drawn
from workers.engine.runner import sample_step
from workers.engine.sampler import Sampler
from workers.engine.scheduler import StepPlan


@dataclass(slots=True)
class CudaRunner:
    """`model` calls attention layers that read `current` (see attention.py). Without `graphs` every step runs eagerly."""

    verifies_drafts: ClassVar[bool] = False

    model: Any
    current: CudaCurrent
    packer: CudaPacker
    sampler: Sampler
    graphs: DecodeGraphs | None = None

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> torch.Tensor:
        """[n, vocabulary]: the rows of batch.logit_rows_of; after a replay valid until the next."""
        if self.graphs is None or (bucket := bucket_of(plan, self.graphs.buckets)) is None:
            return self.compute(self.packer.pack(plan))
        self.packer.pack(plan, bucket)
        return self.graphs.replay(bucket, len(plan.slices))

    @torch.inference_mode()
    def sample(self, plan: StepPlan, computed: torch.Tensor) -> Drawn:
        return sample_step(self.sampler, plan, computed)

    @torch.inference_mode()
    def compute(self, batch: CudaBatch) -> torch.Tensor:
        """[rows, vocabulary] of a packed batch, eagerly."""
        self.current.batch = batch
        output = self.model(
            input_ids=batch.ids,
            position_ids=batch.positions,
            use_cache=False,
            logits_to_keep=batch.logit_rows,
        )
        logits: torch.Tensor = output.logits[0]
        return logits

    @torch.inference_mode()
    def capture(self, slots: int, record: Recorder) -> None:
        """Record decode steps of up to `slots` rows. The cache must be attached: graphs keep its addresses."""
        graphs = DecodeGraphs(self.compute, self.packer, slots, record)
        graphs.capture()
        self.graphs = graphs
