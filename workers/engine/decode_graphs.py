"""Decode steps as CUDA graphs, one for each bucket of batch sizes: one launch instead of thousands.

A graph repeats what was recorded on the same memory. So the batch is padded to the bucket and lies where it lay at capture
(batch_cuda.py), and all that differs between steps is data: lengths, block tables, the pieces of work.
"""

import logging
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from workers.engine.batch_cuda import CudaBatch, CudaPacker
from workers.engine.scheduler import StepPlan

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
BUCKET_STEP = 64  # beyond the last
WARM_UPS = 2  # compile kernels, choose algorithms, make workspaces: none of that may happen under capture

log = logging.getLogger(__name__)


def buckets_up_to(slots: int) -> list[int]:
    """The batch sizes that have a graph, ascending; the last is `slots`."""
    beyond = range(BUCKETS[-1] + BUCKET_STEP, slots, BUCKET_STEP)
    return [*(bucket for bucket in (*BUCKETS, *beyond) if bucket < slots), slots]


def bucket_of(plan: StepPlan, buckets: list[int]) -> int | None:
    """The smallest of `buckets` that holds the plan; None if it has more than one token and one logit a slice."""
    if any(part.count != 1 or not part.samples or part.scored for part in plan.slices):
        return None
    return next((bucket for bucket in buckets if bucket >= len(plan.slices)), None)


class Recorder(Protocol):
    """Turns work into something that repeats it on the same memory."""

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]: ...


class GraphRecorder:
    """Records CUDA graphs that share one pool of memory, for no two of them run at once."""

    def __init__(self) -> None:
        self._pool: Any = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            work()
        return graph.replay


class DecodeGraphs:
    """`forward` computes a batch's logits [rows, vocabulary] eagerly; a replay gives the same from what was recorded."""

    def __init__(
        self, forward: Callable[[CudaBatch], torch.Tensor], packer: CudaPacker, slots: int, record: Recorder
    ) -> None:
        self._forward = forward
        self._packer = packer
        self._slots = slots
        self._record = record
        self._replays: dict[int, Callable[[], None]] = {}
        self._logits: torch.Tensor  # [slots, vocabulary], the output of all graphs
        self.buckets: list[int] = []  # those that were recorded

    def capture(self) -> None:
        """Record all buckets, the largest first, so that the others fit into its memory. Ends with the first that fails:
        a model that reads a value back in its forward cannot be recorded, and runs eagerly.
        """
        begin = time.monotonic()
        for bucket in reversed(buckets_up_to(self._slots)):
            try:
                self._capture(bucket)
            except Exception as error:  # whatever a model's code raises when it is recorded
                log.warning("decode steps of up to %d rows run without a CUDA graph: %s", bucket, error)
                break
            self.buckets.insert(0, bucket)
        log.info("%d decode graphs in %.1f s", len(self.buckets), time.monotonic() - begin)

    def replay(self, bucket: int, rows: int) -> torch.Tensor:
        """[rows, vocabulary] of the batch that was packed into this bucket; valid until the next replay."""
        self._replays[bucket]()
        return self._logits[:rows]

    def _capture(self, bucket: int) -> None:
        self._packer.fill_idle(bucket)
        for _ in range(WARM_UPS):
            logits = self._forward(self._packer.bucket_batch(bucket))
        if not self._replays:
            self._logits = logits.new_empty((self._slots, logits.shape[-1]))
        del logits

        def work() -> None:
            # Into memory outside the graphs' pool: what is inside, the next graph may use again.
            self._logits[:bucket].copy_(self._forward(self._packer.bucket_batch(bucket)))

        self._replays[bucket] = self._record(work)
