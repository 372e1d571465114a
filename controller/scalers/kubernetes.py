"""The controller's hands in a Kubernetes cluster: each worker is a pod of its own, made of the operator's PodTemplate.

`workers` is what was asked for at once and what the API shows, reconciled: a pod counts from `start` on, and no longer when
the API has shown its end. While the API is away nothing changes: what cannot be seen has not gone. Pods are found by their
labels, so that whoever made them, the next controller has them.
"""

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Iterable
from datetime import datetime

from controller.scalers import pod_template
from controller.scalers.kubernetes_api import GONE, ApiError, KubernetesApi
from controller.scalers.pod_keeper import KILL_GRACE_S, PodKeeper, WorkerPod
from controller.scalers.pods import Ending, Pod, ending, has_run, is_over, waiting_for
from controller.starts import Exit
from shared.errors import ScalerUnavailable
from shared.records import Lease
from shared.settings import Settings

log = logging.getLogger(__name__)

RELIST_AFTER_FAILURES = 5  # in a row: the version may be one that the API never had, after a restore from a backup


class KubernetesScaler:
    """Workers as pods of one namespace. Its methods return at once; calls to the API go on in the background."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._selector = pod_template.selector(settings.kubernetes_instance)
        self._names: dict[str, str] = {}  # of pods, to worker ids
        self._finished: dict[str, Pod] = {}  # pods that are over and still there, by name
        self._version = ""  # of the API's objects, up to which their changes are known; "": list them first
        self._running: asyncio.Task[None] | None = None
        self.workers: dict[str, WorkerPod] = {}

    @property
    def makes_workers(self) -> bool:
        return True

    @property
    def replicas_max(self) -> int:
        """Replicas of one version that sets no limit. What a cluster is good for is not known: it can grow."""
        return self._settings.kubernetes_replicas_max

    @property
    def devices(self) -> None:
        """Which pod fits on which accelerator is the cluster's scheduler's to say."""

    async def open(self) -> None:
        """Take in the pods that are there, and go on with every change. Raises ScalerUnavailable."""
        self._api = await KubernetesApi.connect(self._settings)
        self._keeper = PodKeeper(self._api, self._settings, self._gone)
        try:
            await self._relist()
            await self._keeper.check_template()
        except ApiError as error:
            await self._api.close()
            raise ScalerUnavailable(f"the workers' pods cannot be seen: {error}") from error
        except BaseException:
            await self._api.close()
            raise
        log.info("namespace %s has %d workers", self._api.namespace, len(self.workers))
        self._running = asyncio.create_task(self._run())

    async def close(self) -> None:
        """End the watch and the calls in flight. The pods live on."""
        if self._running is None:
            return
        running, self._running = self._running, None
        running.cancel()
        try:
            with contextlib.suppress(asyncio.CancelledError):
                await running
        finally:
            await self._api.close()

    def owns(self, lease: Lease) -> bool:
        """Whether the lease comes from a pod of ours: its host is the pod that its worker would have."""
        return lease.host == pod_template.pod_name(self._settings.kubernetes_instance, lease.worker)

    def adopt(self, leases: Iterable[Lease]) -> None:
        """Note which warm workers have become whose; the pods themselves are taken over by their labels."""
        for lease in leases:
            pod = self.workers.get(lease.worker)
            if pod is None or not lease.model:
                continue
            pod.model, pod.version = lease.model, lease.version
            if pod.labelled != (pod.model, pod.version):
                self._keeper.see_to(pod)

    def start(self, model: str, version: str, device: str = "") -> str:
        """Ask for a pod; the worker's id. `device` has no meaning here. Raises OSError when this scaler is not open."""
        if self._running is None:
            raise OSError("the Kubernetes scaler is not open")
        worker = f"w{secrets.token_hex(5)}"
        name = pod_template.pod_name(self._settings.kubernetes_instance, worker)
        pod = WorkerPod(
            worker=worker,
            name=name,
            model=model,
            version=version,
            labelled=(model, version),
            started=time.monotonic(),
            spawned_at=time.time(),
        )
        self.workers[worker], self._names[name] = pod, worker
        self._keeper.see_to(pod)
        return worker

    def drain(self, worker: str) -> None:
        """Delete the pod with time for its drain: the node's SIGTERM says the same as the controller's message."""
        pod = self.workers[worker]
        if pod.drained_at is None:
            pod.drained_at = time.monotonic()
            pod.end_within(pod_template.drain_grace_s(self._settings))
            self._keeper.see_to(pod)

    def kill(self, worker: str, reason: str) -> None:
        """Have the node end it within a second; a pod whose node does not answer is dropped after `kubernetes_gone_s`."""
        pod = self.workers[worker]
        if not pod.killed_because:
            pod.killed_because = f"{reason}: {pod.waiting_for}" if pod.waiting_for else reason
            pod.end_within(KILL_GRACE_S)
            self._keeper.see_to(pod)

    def reap(self) -> list[Exit]:
        """The workers that have ended since the last call; their pods are removed but for the last that failed."""
        if self._running is None:
            return []
        if self._running.done():
            self._running.result()  # a defect of ours must not be taken for an API without news
        ended = [pod.ended for pod in self.workers.values() if pod.ended is not None]
        for end in ended:
            del self._names[self.workers.pop(end.worker).name]
        self._keeper.remove(self._superfluous())
        return ended

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._keeper.run())
            group.create_task(self._watch())

    async def _watch(self) -> None:
        """Follow the pods for ever, across lost connections, expired versions and an API that is away."""
        failures = 0
        while True:
            known, began = self._version, time.monotonic()
            try:
                if not self._version:
                    await self._relist()
                await self._api.watch(self._selector, self._version, self._take)
            except ApiError as error:
                failures = 1 if self._version != known else failures + 1  # with news between it is not the same trouble
                if error.status == GONE or failures >= RELIST_AFTER_FAILURES:
                    self._version = ""
                pause_s = self._keeper.pause_s(failures, error)
                level = logging.WARNING if failures > 1 else logging.INFO
                log.log(level, "the watch of the workers' pods ended: %s; next try in %.1f s", error, pause_s)
            else:
                failures = 0
                ran_s = time.monotonic() - began
                pause_s = self._settings.kubernetes_backoff_s - ran_s  # in case something ends every watch at once
            await asyncio.sleep(max(0.0, pause_s))

    async def _relist(self) -> None:
        """Take in all pods that there are. Those that were known before and are not among them have gone."""
        known = [pod for pod in self.workers.values() if pod.made]
        pods, version = await self._api.pods(self._selector)
        shown = {pod.metadata.name for pod in pods}
        self._finished.clear()
        for pod in pods:
            self._show(pod)
        for lost in known:
            if lost.name not in shown:
                self._gone(lost)
        self._version = version

    def _take(self, kind: str, pod: Pod) -> None:
        """One event of the watch."""
        if kind == "DELETED":
            self._finished.pop(pod.metadata.name, None)
            worker = self._names.get(pod.metadata.name)
            if worker is not None:
                self.workers[worker].shown = pod
                self._gone(self.workers[worker])
        elif kind != "BOOKMARK":
            self._show(pod)
        self._version = pod.metadata.resource_version

    def _show(self, shown: Pod) -> None:
        """Take in a pod as it is now."""
        name = shown.metadata.name
        if is_over(shown):
            self._finished[name] = shown
        worker = self._names.get(name)
        pod = self.workers[worker] if worker is not None else self._adopted(shown)
        if pod is None or pod.ended is not None:
            return
        pod.made, pod.shown = True, shown
        if is_over(shown):
            self._gone(pod)
            return
        waits = waiting_for(shown)
        if waits and waits != pod.waiting_for:
            log.warning("worker %s waits: %s", pod.worker, waits)
        pod.waiting_for = waits
        if shown.metadata.deletion_timestamp and pod.drained_at is None:  # by somebody else
            log.info("worker %s is being ended by the cluster or its operator", pod.worker)
            pod.drained_at = time.monotonic()

    def _adopted(self, shown: Pod) -> WorkerPod | None:
        """The worker of a pod that this controller did not make."""
        labels, notes = shown.metadata.labels or {}, shown.metadata.annotations or {}
        worker = labels.get(pod_template.WORKER_LABEL, "")
        if is_over(shown) or shown.metadata.name != pod_template.pod_name(self._settings.kubernetes_instance, worker):
            return None
        model, version = notes.get(pod_template.MODEL_LABEL, ""), notes.get(pod_template.VERSION_LABEL, "")
        created = datetime.fromisoformat(shown.metadata.creation_timestamp or "").timestamp()
        log.info("adopted %s of %s@%s", worker, model or "no model", version or "-")
        pod = WorkerPod(
            worker=worker,
            name=shown.metadata.name,
            model=model,
            version=version,
            labelled=(model, version),
            started=time.monotonic() - max(0.0, time.time() - created),
            spawned_at=created,
            own=False,
        )
        self.workers[worker], self._names[pod.name] = pod, worker
        return pod

    def _gone(self, pod: WorkerPod, why: str = "") -> None:
        """A worker has ended, or is not made: `why`, else as its pod was last seen. Only the first word counts."""
        if pod.ended is not None:
            return
        end = ending(pod.shown) if pod.shown is not None else Ending(code=None, words="", outside=True)
        overdue = pod.killed_because and pod.shown is not None and has_run(pod.shown)
        pod.ended = Exit(
            worker=pod.worker,
            model=pod.model,
            version=pod.version,
            code=end.code,
            asked=pod.drained_at is not None,
            killed_because=pod.killed_because,
            last_line=why or end.words or ("" if end.code is not None else "its pod is gone"),
            outside=end.outside and not overdue,
        )
        pod.urgent.set()

    def _superfluous(self) -> list[str]:
        """The pods that are over and that nobody will want to look at."""
        over = sorted(self._finished.values(), key=lambda pod: pod.metadata.creation_timestamp or "")
        failed = [pod.metadata.name for pod in over if pod.status.phase == "Failed"]
        kept = failed[max(0, len(failed) - self._settings.kubernetes_failed_pods_max) :]
        return [pod.metadata.name for pod in over if pod.metadata.name not in kept]
