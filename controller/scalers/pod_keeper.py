"""Brings pods to where they are wanted: made, labelled, drained, gone. One call at a time for each, again until it holds."""

import asyncio
import contextlib
import functools
import logging
import random
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from msgspec import field

from controller.scalers import pod_template
from controller.scalers.base import Managed
from controller.scalers.kubernetes_api import ApiError, KubernetesApi
from controller.scalers.pod_template import PodOrder, TemplateError
from controller.scalers.pods import Pod
from controller.starts import Exit
from shared.settings import Settings

log = logging.getLogger(__name__)

KILL_GRACE_S = 1  # the least that still waits for the node's word that the containers have ended
DROP_GRACE_S = 0
NOT_FOUND = 404


class WorkerPod(Managed, kw_only=True):
    """A worker with the pod that it is to run in: what is wanted of it, what the API was told, what the API has shown."""

    name: str
    spawned_at: float  # unix seconds
    labelled: tuple[str, str]  # model and version that its labels tell of
    tried: bool = False  # the API was asked to make it: it may be there
    made: bool = False  # it is, or was, there
    grace_s: int | None = None  # None: it is to live
    told_grace_s: int | None = None  # the shortest that the API has accepted
    told_at: float = 0.0
    shown: Pod | None = None  # as it was last seen
    ended: Exit | None = None
    kept: bool = False  # a task sees to it
    urgent: asyncio.Event = field(default_factory=asyncio.Event)

    def end_within(self, grace_s: int) -> None:
        """Want its end; a shorter grace than an earlier one goes before it."""
        self.grace_s = grace_s if self.grace_s is None else min(self.grace_s, grace_s)
        self.urgent.set()


class PodKeeper:
    """A task for each pod that something is wanted of. `gone(pod, why)` is told of pods that are gone or never will be."""

    def __init__(self, api: KubernetesApi, settings: Settings, gone: Callable[[WorkerPod, str], None]) -> None:
        self._api, self._settings, self._gone = api, settings, gone
        self._jobs: asyncio.Queue[Callable[[], Coroutine[Any, Any, None]]] = asyncio.Queue()
        self._calls = asyncio.Semaphore(settings.kubernetes_calls_max)
        self._removing: set[str] = set()

    async def run(self) -> None:
        """See to pods until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                job = await self._jobs.get()
                group.create_task(job())

    def see_to(self, pod: WorkerPod) -> None:
        """Do what is wanted of a pod, unless that goes on already."""
        if not pod.kept:
            pod.kept = True
            self._jobs.put_nowait(functools.partial(self._keep, pod))

    def remove(self, names: Iterable[str]) -> None:
        """Delete the objects of pods that are over."""
        wanted = set(names)
        self._removing &= wanted
        for name in wanted - self._removing:
            self._removing.add(name)
            self._jobs.put_nowait(functools.partial(self._remove, name))

    def pause_s(self, failures: int, error: ApiError) -> float:
        """How long to wait after so many failures in a row; at random, so that not all come back at once."""
        settings = self._settings
        longest_s = min(settings.kubernetes_backoff_s * 2.0 ** min(failures - 1, 30), settings.kubernetes_backoff_max_s)
        return max(error.retry_after_s, longest_s * random.uniform(0.5, 1.0))

    async def check_template(self) -> None:
        """Say it now when no worker can be made of the template. Raises ApiError when that cannot be told."""
        try:
            await self._body(PodOrder(worker="w0", model="", version="", spawned_at=0.0))
        except TemplateError as error:
            log.error("no worker can be started: %s", error)

    async def _keep(self, pod: WorkerPod) -> None:
        failures = 0
        while pod.ended is None:
            pod.urgent.clear()
            call = self._next_call(pod)
            wait_s = self._unconfirmed_s(pod)
            if call is not None:
                try:
                    async with self._calls:
                        await call(pod)
                    failures = 0
                    continue
                except ApiError as error:
                    failures += 1
                    wait_s = self.pause_s(failures, error)
                    log.warning("worker %s: %s; next try in %.1f s", pod.worker, error, wait_s)
            elif wait_s is None:
                break
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await pod.urgent.wait()
        pod.kept = False

    def _next_call(self, pod: WorkerPod) -> Callable[[WorkerPod], Coroutine[Any, Any, None]] | None:
        """What the API has to be asked for next; None: nothing, for now."""
        if pod.grace_s is None:
            if not pod.made:
                return self._make
            return self._label if pod.labelled != (pod.model, pod.version) else None
        if self._unconfirmed_s(pod) == 0.0:
            pod.grace_s = DROP_GRACE_S
        return self._end if pod.told_grace_s is None or pod.grace_s < pod.told_grace_s else None

    def _unconfirmed_s(self, pod: WorkerPod) -> float | None:
        """Seconds that the node of a killed pod still has to say that it is gone; None: nobody waits for that."""
        if pod.grace_s != KILL_GRACE_S or pod.told_grace_s != KILL_GRACE_S:
            return None
        return max(0.0, pod.told_at + self._settings.kubernetes_gone_s - time.monotonic())

    async def _make(self, pod: WorkerPod) -> None:
        order = PodOrder(worker=pod.worker, model=pod.model, version=pod.version, spawned_at=pod.spawned_at)
        try:
            body = await self._body(order)
            pod.tried = True
            created = await self._api.create(body)
        except TemplateError as error:
            self._gone(pod, str(error))
        except ApiError as error:
            if error.status == 409 and not error.passing:  # an earlier try, whose answer was lost
                pod.made = True
            elif error.passing:
                raise
            elif not pod.made:  # the watch may have shown it since
                self._gone(pod, f"its pod was refused: {error}")
        else:
            pod.made, pod.labelled = True, (order.model, order.version)
            pod.shown = pod.shown or created

    async def _body(self, order: PodOrder) -> dict[str, Any]:
        """The pod of one worker. Raises TemplateError."""
        name = self._settings.kubernetes_template
        try:
            template = await self._api.template(name)
        except ApiError as error:
            if error.status == NOT_FOUND:
                raise TemplateError(f"there is no PodTemplate {name} in namespace {self._api.namespace}") from error
            raise
        return pod_template.worker_pod(template, order, self._settings)

    async def _label(self, pod: WorkerPod) -> None:
        serves = pod.model, pod.version
        try:
            await self._api.patch(pod.name, {"metadata": pod_template.model_metadata(*serves)})
        except ApiError as error:
            if error.passing:
                raise
            if error.status != NOT_FOUND:
                log.error("the labels of worker %s stay as they are: %s", pod.worker, error)
        pod.labelled = serves

    async def _end(self, pod: WorkerPod) -> None:
        grace_s = pod.grace_s
        assert grace_s is not None
        if not pod.tried and not pod.made:
            self._gone(pod, "its pod was not made any more")
            return
        try:
            await self._api.delete(pod.name, grace_s)
        except ApiError as error:
            if error.status != NOT_FOUND:
                raise
            self._gone(pod, "")
        else:
            pod.told_grace_s, pod.told_at = grace_s, time.monotonic()

    async def _remove(self, name: str) -> None:
        try:
            async with self._calls:
                await self._api.delete(name)
        except ApiError as error:
            if error.status != NOT_FOUND:
                log.info("pod %s cannot be removed: %s", name, error)
                await asyncio.sleep(self._settings.kubernetes_backoff_max_s)
            self._removing.discard(name)
