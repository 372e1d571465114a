"""From a decoded body to requests that may be published: validity, and the tenant's queue. No I/O."""

from collections import deque
from typing import Protocol

from ingress.embeddings_body import check_embedding
from ingress.schemas import Body
from ingress.translate import check_prompt_length, check_task, refuse_not_served, to_sampling
from shared.errors import BadRequest, QueueFull
from shared.records import Version
from shared.settings import Settings
from shared.wire import Input, Request, new_id

RATE_WINDOW_S = 30.0
RETRY_AFTER_UNKNOWN_S = 5.0  # nothing has left the queue of late: no rate to compute with
RETRY_AFTER_MAX_S = 60.0


class QueueRate:
    """How fast a queue has been drained of late. Pure: time and counts are passed in."""

    def __init__(self) -> None:
        self._published = 0
        self._samples: deque[tuple[float, int]] = deque()  # (time, requests that had left the queue by then)

    def published(self, queued: int, now: float) -> None:
        """Note a publish that made the queue `queued` long."""
        self._published += 1
        self._sample(self._published - queued, now)

    def retry_after(self, queued: int, queued_max: int, now: float) -> float:
        """Seconds until a full queue is likely to have room: a tenth of it, at the rate of the last half minute."""
        left = self._published - queued
        self._sample(left, now)
        since, left_then = self._samples[0]
        if left <= left_then or now <= since:
            return RETRY_AFTER_UNKNOWN_S
        room_wanted = queued - queued_max + max(1, queued_max // 10)
        return min(max(room_wanted * (now - since) / (left - left_then), 1.0), RETRY_AFTER_MAX_S)

    def _sample(self, left: int, now: float) -> None:
        samples = self._samples
        while samples and now - samples[0][0] > RATE_WINDOW_S:
            samples.popleft()
        if not samples or now - samples[-1][0] >= 1.0:
            samples.append((now, left))


class Queues(Protocol):
    def queued(self, tenant: str) -> int:
        """Requests of a tenant that are published and that no worker has accepted yet."""


class Admission:
    """The checks of an inference request once its version is known."""

    def __init__(self, settings: Settings, dispatcher: Queues) -> None:
        self._settings, self._dispatcher = settings, dispatcher
        self._rates: dict[str, QueueRate] = {}

    def admit(self, rid: str, body: Body, body_bytes: int, version: Version) -> list[Request]:
        """What to publish, a request for each prompt or pack of inputs. Raises BadRequest and what is below it."""
        check_task(body, version)
        refuse_not_served(body)
        prompts = body.to_inputs()
        self._check_count(prompts)
        samplings = [to_sampling(body, version, self._settings) for _ in prompts]  # each has a seed of its own
        for prompt, sampling in zip(prompts, samplings, strict=True):
            if prompt.embedding is None:
                check_prompt_length(prompt, body_bytes, version, self._settings)
            else:
                sampling.n = len(prompt.embedding.inputs)
                check_embedding(prompt.embedding, body_bytes, version, self._settings)
        rids = [rid, *(new_id() for _ in prompts[1:])]
        return [
            Request(each, version.model, version.version, prompt, sampling)
            for each, prompt, sampling in zip(rids, prompts, samplings, strict=True)
        ]

    def _check_count(self, prompts: list[Input]) -> None:
        inputs = [len(prompt.embedding.inputs) for prompt in prompts if prompt.embedding is not None]
        param, limit, count = "prompt", self._settings.prompts_max, len(prompts)
        if inputs:
            param, limit, count = "input", self._settings.embedding_inputs_max, sum(inputs)
        if count > limit:
            raise BadRequest(f"{param}: at most {limit} {param}s, got {count}", param=param)

    def check_queue(self, tenant: str, wanted: int, now: float, queue_max: int | None = None) -> None:
        """Take note of `wanted` requests of a tenant, about to be published; `queue_max` is its own. Raises QueueFull."""
        queued = self._dispatcher.queued(tenant)
        queued_max = self._settings.tenant_queue_max if queue_max is None else queue_max
        rate = self._rates.setdefault(tenant, QueueRate())
        if queued + wanted > queued_max:
            raise QueueFull(
                f"{queued} requests wait for a worker, the limit is {queued_max}",
                retry_after=rate.retry_after(queued, queued_max, now),
            )
        for number in range(wanted):
            rate.published(queued + number + 1, now)
