"""A whole controller whose workers are pods: a real nats-server, the API over HTTP, a node that runs pods as processes."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from controller.loop import Controller
from controller.metrics import Metrics
from controller.scalers.choose import make_scaler
from shared.bus import Bus
from shared.records import Version
from shared.settings import to_environment

from .kubernetes_bench import KubernetesBench, kubernetes

STAND_IN = Path(__file__).parent / "stand_in_worker.py"
# what a container is: a process whose host has the name of its pod
AS_POD = "import runpy, socket, sys; name = sys.argv.pop(1); socket.gethostname = lambda: name; del sys.argv[0]; " + (
    "runpy.run_path(sys.argv[0], run_name='__main__')"
)


class Node:
    """Runs every pod of an API at once: SIGTERM when it is deleted, SIGKILL after its grace or when it is dropped."""

    def __init__(self, cluster: KubernetesBench) -> None:
        self.api = cluster.api
        self.processes: dict[str, asyncio.subprocess.Process] = {}
        self.ended: dict[str, int] = {}  # with what the processes that are gone ended
        self._started: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.api.node = self._on_change

    def _on_change(self, kind: str, pod: dict[str, Any]) -> None:
        name = pod["metadata"]["name"]
        if kind == "ADDED":
            self._started.add(name)
            self._do(self._run(pod))
        elif kind == "MODIFIED" and "deletionTimestamp" in pod["metadata"] and name in self.processes:
            self._signal(name, signal.SIGTERM)
            loop = asyncio.get_running_loop()
            loop.call_later(pod["metadata"]["deletionGracePeriodSeconds"], self._signal, name, signal.SIGKILL)
        elif kind == "DELETED":
            self._signal(name, signal.SIGKILL)

    def _do(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _signal(self, name: str, number: signal.Signals) -> None:
        if name in self.processes:
            self.processes[name].send_signal(number)

    async def _run(self, pod: dict[str, Any]) -> None:
        name, (container,) = pod["metadata"]["name"], pod["spec"]["containers"]
        environment = {entry["name"]: entry["value"] for entry in container["env"]}
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", AS_POD, name, *container["command"], *container["args"]),
            env={"PATH": os.environ["PATH"], **environment},
            stderr=asyncio.subprocess.STDOUT,
            stdout=asyncio.subprocess.PIPE,
        )
        self.processes[name] = process
        if name in self.api.pods:
            self.api.run(name)
        output, _ = await process.communicate()
        del self.processes[name]
        code = self.ended[name] = process.returncode or 0
        if name in self.api.pods:
            self.api.end(name, code if code >= 0 else 128 - code, message=output.decode()[-2048:])

    async def close(self) -> None:
        """End what is left."""
        for name in list(self.processes):
            self._signal(name, signal.SIGKILL)
        await asyncio.gather(*self._tasks)


@contextlib.asynccontextmanager
async def cluster_of(bench: Any, behaviour: str = "serve") -> AsyncIterator[tuple[KubernetesBench, Node]]:
    """A namespace with one node, whose template runs stand-ins for workers."""
    given = {name: getattr(bench.settings, name) for name in bench.settings.__struct_fields__}
    kept = {name: value for name, value in given.items() if name not in ("data_dir", "scaler", "kubernetes_config")}
    async with kubernetes(bench.settings.data_path, **kept) as cluster:
        environment = to_environment(bench.settings) | {"PYTHONPATH": str(Path(__file__).parents[2])}
        texts = ("HEADRACE_DATA_DIR", "HEADRACE_NATS_URL", "PYTHONPATH")
        container = {
            "name": "worker",
            "image": "headrace:test",
            "command": [str(STAND_IN), behaviour],
            "env": [{"name": name, "value": environment[name]} for name in texts],
        }
        template = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "headrace-worker"}}
        cluster.api.templates["headrace-worker"] = template | {"template": {"spec": {"containers": [container]}}}
        node = Node(cluster)
        try:
            yield cluster, node
        finally:
            await node.close()


@contextlib.asynccontextmanager
async def controller_of(cluster: KubernetesBench) -> AsyncIterator[Controller]:
    """A controller with its hands in the cluster, and stopped in good order."""
    bus = await Bus.connect(cluster.settings, "controller")
    verified: list[Version] = []
    controller = Controller(bus, cluster.settings, make_scaler(cluster.settings), Metrics(), verified.append)
    running = asyncio.create_task(controller.run())
    try:
        yield controller
    finally:
        controller.stop()
        try:
            await running
        finally:
            await bus.close()


def active(controller: Controller) -> list[str]:
    seen = controller.observer.leases.values()
    return [one.lease.worker for one in seen if not one.silent and one.lease.state == "active"]


def test_a_message_makes_a_pod_a_dead_one_is_replaced_and_idleness_drains_the_last(run_bench: Any) -> None:
    async def work(bench: Any) -> None:
        async with cluster_of(bench) as (cluster, node), controller_of(cluster) as controller:
            api = cluster.api
            await bench.register("chat", idle_seconds=0.5)
            await bench.available("chat")
            assert not api.pods
            await bench.request("chat")
            await bench.until(lambda: active(controller))
            (first,) = api.pods
            assert api.pods[first]["metadata"]["labels"]["headrace.dev/model"] == "chat"
            node.processes[first].send_signal(signal.SIGKILL)
            await bench.until(lambda: api.pods.keys() - {first} and api.pods.keys() - {first} == node.processes.keys())
            (second,) = node.processes
            await bench.until(lambda: active(controller) == [second.removeprefix("headrace-worker-")])
            assert await bench.state_is("chat", "available")
            await bench.clear_queue("chat")
            await bench.until(lambda: not node.processes)
            assert node.ended == {first: -signal.SIGKILL, second: 0}
            await bench.until(lambda: list(api.pods) == [first])  # kept for its log
            await bench.request("chat")
            await bench.until(lambda: active(controller))
            assert len(node.processes) == 1

    run_bench(work)


def test_the_next_controller_has_the_pods_of_the_last_one_and_makes_no_more(run_bench: Any) -> None:
    async def work(bench: Any) -> None:
        async with cluster_of(bench) as (cluster, node):
            async with controller_of(cluster) as controller:
                await bench.register("chat", idle_seconds=0.5)
                await bench.available("chat")
                await bench.request("chat")
                await bench.until(lambda: active(controller))
                (name,) = node.processes
            assert list(node.processes) == [name]
            async with controller_of(cluster) as controller:
                await bench.until(lambda: active(controller))
                assert list(cluster.api.pods) == [name]
                await bench.clear_queue("chat")
                await bench.until(lambda: not cluster.api.pods)
                assert node.ended == {name: 0}
            assert [call.verb for call in cluster.api.calls].count("create") == 1

    run_bench(work)


def test_a_worker_that_crashes_again_and_again_fails_its_version_with_its_last_words(run_bench: Any) -> None:
    async def work(bench: Any) -> None:
        async with cluster_of(bench, "crash") as (cluster, node), controller_of(cluster):
            await bench.register("chat")
            await bench.available("chat")
            await bench.request("chat")
            await bench.until(lambda: bench.state_is("chat", "failed"))
            assert (await bench.record("chat")).reason == "the worker exited with code 7: boom: no such kernel"
            assert sorted(node.ended.values()) == [7, 7]

    run_bench(work, start_failures_max=2)


def test_a_worker_that_does_not_drain_is_killed_once_and_gone_when_its_node_says_so(
    run_bench: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("controller.fleet.KILL_MARGIN_S", 0.2)

    async def work(bench: Any) -> None:
        async with cluster_of(bench, "stubborn") as (cluster, node), controller_of(cluster) as controller:
            await bench.register("chat", idle_seconds=0.2)
            await bench.available("chat")
            await bench.request("chat")
            await bench.until(lambda: active(controller))
            (name,) = node.processes
            await bench.clear_queue("chat")
            await bench.until(lambda: not cluster.api.pods or cluster.api.pods[name]["status"]["phase"] == "Failed")
            assert node.ended == {name: -signal.SIGKILL}
            graces = [call.query.get("gracePeriodSeconds") for call in cluster.api.calls if call.verb == "delete"]
            assert graces == [16, 1]
            assert await bench.state_is("chat", "available")
        assert len([record for record in caplog.records if "killing" in record.message]) == 1

    run_bench(work, drain_budget_s=0.3, kubernetes_gone_s=10.0)
