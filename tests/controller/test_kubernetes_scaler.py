"""The Kubernetes scaler against an API over HTTP: what it asks for, what it makes of what it sees, what it survives."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from controller.scalers.kubernetes import RELIST_AFTER_FAILURES
from controller.starts import judge
from shared.errors import ScalerUnavailable
from shared.records import Lease

from .fake_kubernetes import Refusal
from .kubernetes_bench import KubernetesBench, role, run

BUSY = Refusal(429, "TooManyRequests", "too many requests, please try again later")
BROKEN = Refusal(500, "InternalError", "etcdserver: request timed out")


def lease(worker: str, model: str = "chat", version: str = "v1", host: str = "") -> Lease:
    return Lease(worker=worker, model=model, version=version, state="active", pid=1, host=host, started=0.0)


def test_a_start_is_a_pod_of_the_template_with_arguments_labels_and_limits(tmp_path: Path) -> None:
    async def work(bench: KubernetesBench) -> None:
        scaler = await bench.open()
        worker = scaler.start("org/Chat model", "v1")
        assert scaler.workers[worker].own  # it counts before the API has heard of it
        assert not bench.api.pods
        pod = bench.api.pods[await bench.made(worker)]
        labels, notes = pod["metadata"]["labels"], pod["metadata"]["annotations"]
        assert labels == {
            "app.kubernetes.io/name": "headrace",
            "app.kubernetes.io/instance": "headrace",
            "app.kubernetes.io/component": "worker",
            "app.kubernetes.io/managed-by": "headrace-controller",
            "headrace.dev/worker": worker,
            "headrace.dev/model": labels["headrace.dev/model"],
            "headrace.dev/version": "v1",
        }
        assert labels["headrace.dev/model"].startswith("org-Chat-model-")
        assert notes["headrace.dev/model"] == "org/Chat model"
        assert notes["controller.kubernetes.io/pod-deletion-cost"] == "100"
        assert notes["karpenter.sh/do-not-disrupt"] == "true"  # the template's
        spec = pod["spec"]
        (container,) = spec["containers"]
        assert container["args"] == ["--model=org/Chat model", "--version=v1", "--worker-id", worker]
        assert (spec["restartPolicy"], spec["terminationGracePeriodSeconds"]) == ("Never", 75)
        environment = {entry["name"]: entry["value"] for entry in container["env"]}
        assert environment["HEADRACE_LEASE_TTL_S"] == "7.5"  # a limit that worker and controller must agree on
        assert environment["HEADRACE_METRICS_PORT"] == "9100"  # the template's goes before the controller's
        assert "HEADRACE_S3_SECRET_KEY" not in environment
        assert float(environment["HEADRACE_SPAWNED_AT"]) == pytest.approx(time.time(), abs=30)
        assert scaler.devices is None
        assert scaler.replicas_max == 8

    run(work, tmp_path, lease_ttl_s=7.5, s3_secret_key="hidden", metrics_port=1)


def test_a_warm_worker_has_no_model_and_its_labels_follow_when_it_gets_one(tmp_path: Path) -> None:
    async def work(bench: KubernetesBench) -> None:
        scaler = await bench.open()
        worker = scaler.start("", "")
        name = await bench.made(worker)
        metadata = bench.api.pods[name]["metadata"]
        assert bench.api.pods[name]["spec"]["containers"][0]["args"] == ["--worker-id", worker]
        assert "headrace.dev/model" not in metadata["labels"]
        assert metadata["annotations"]["controller.kubernetes.io/pod-deletion-cost"] == "0"
        bench.api.run(name)
        scaler.adopt([lease(worker, model="", version="")])
        scaler.adopt([lease(worker)])
        assert (scaler.workers[worker].model, scaler.workers[worker].version) == ("chat", "v1")
        await bench.until(lambda: bench.api.pods[name]["metadata"]["labels"].get("headrace.dev/model") == "chat")
        metadata = bench.api.pods[name]["metadata"]
        assert metadata["annotations"]["controller.kubernetes.io/pod-deletion-cost"] == "100"
        assert metadata["annotations"]["karpenter.sh/do-not-disrupt"] == "true"
        scaler.adopt([lease(worker)])
        scaler.adopt([lease(worker, model="", version="")])  # an old word
        assert scaler.workers[worker].model == "chat"
        await asyncio.sleep(0)
        assert bench.verbs().count("patch") == 1

    run(work, tmp_path)


@pytest.mark.parametrize("watching", [True, False])
def test_a_start_whose_answer_was_lost_makes_one_pod(tmp_path: Path, watching: bool) -> None:
    async def work(bench: KubernetesBench) -> None:
        scaler = await bench.open()
        if not watching:
            await bench.until(lambda: bench.api.watches)
            for verb in ("watch", "list"):
                bench.api.fail(verb, *[BROKEN] * 10_000)
            bench.api.drop_watches()
            await bench.until(lambda: not bench.api.watches)
        bench.api.lose_answer("create")
        worker = scaler.start("chat", "v1")
        await bench.until(lambda: scaler.workers[worker].made and not scaler.workers[worker].kept)
        assert list(bench.api.pods) == [await bench.made(worker)]
        if not watching:
            assert bench.verbs().count("create") == 2  # the second one was told that there is such a pod
            for verb in ("watch", "list"):
                bench.api.work_again(verb)
        bench.api.run(await bench.made(worker))
        await bench.until(lambda: (shown := scaler.workers[worker].shown) and shown.status.phase == "Running")
        assert scaler.reap() == []
        assert list(scaler.workers) == [worker]

    run(work, tmp_path)


def test_what_passes_is_tried_again_and_the_servers_wish_to_wait_is_kept(tmp_path: Path) -> None:
    async def work(bench: KubernetesBench) -> None:
        scaler = await bench.open()
        conflict = Refusal(409, "Conflict", "the object has been modified")  # of a quota that two pods are counted in
        bench.api.fail("create", BROKEN, conflict, Refusal(429, "TooManyRequests", "later", retry_after_s=1))
        began = time.monotonic()
        worker = scaler.start("chat", "v1")
        await bench.made(worker)
        assert bench.verbs().count("create") == 4
        assert time.monotonic() - began >= 1.0
        assert scaler.reap() == []

    run(work, tmp_path)


def test_a_pod_that_is_refused_is_an_exit_that_says_why_and_counts_against_no_version(tmp_path: Path) -> None:
    async def work(bench: KubernetesBench) -> None:
        scaler = await bench.open()
        refusal = 'pods "x" is forbidden: exceeded quota: gpus, requested: 1, used: 8, limited: 8'
        bench.api.fail("create", Refusal(403, "Forbidden", refusal))
        worker = scaler.start("chat", "v1")
        await bench.until(lambda: scaler.workers[worker].ended)
        (ended,) = scaler.reap()
        assert (ended.worker, ended.model, ended.code) == (worker, "chat", None)
        failure = judge(ended, None, was_active=False)
        assert failure is not None
        assert failure.kind == "transient"
        assert refusal in failure.reason
        assert not scaler.workers
        assert scaler.reap() == []

    run(work, tmp_path)


def test_a_template_that_is_missing_or_wrong_is_said_and_one_that_comes_is_used(tmp_path: Path) -> None:
    async def work(bench: KubernetesBench) -> None:
        template = bench.api.templates.pop("headrace-worker")
        scaler = await bench.open()
        worker = scaler.start("chat", "v1")
        await bench.until(lambda: scaler.workers[worker].ended)
        (ended,) = scaler.reap()
        assert ended.last_line == "there is no PodTemplate headrace-worker in namespace models"
        bench.api.templates["headrace-worker"] = {"kind": "PodTemplate", "template": {"spec": {"containers": []}}}
        worker = scaler.start("chat", "v1")
        await bench.until(lambda: scaler.workers[worker].ended)
        (ended,) = scaler.reap()
        assert ended.last_line == "the template has no container called worker"
        assert ended.outside
        bench.api.templates["headrace-worker"] = template
        await bench.made(scaler.start("chat", "v1"))

    run(work, tmp_path)


def test_a_drain_gives_the_budget_and_a_margin_and_ends_with_the_workers_own_code(tmp_path: Path) -> None:
    async def work(bench: KubernetesBench) -> None:
        scaler = await bench.open()
        worker = scaler.start("chat", "v1")
        name = await bench.made(worker)
        bench.api.run(name)
        scaler.drain(worker)
        scaler.drain(worker)
        await bench.until(lambda: "deletionTimestamp" in bench.api.pods[name]["metadata"])
        assert scaler.workers[worker].drained_at is not None
        await bench.until(lambda: not scaler.workers[worker].kept)
        assert [call.query for call in bench.api.calls if call.verb == "delete"] == [{"gracePeriodSeconds": 57}]
        assert scaler.reap() == []
        bench.api.end(name, 0)
        await bench.until(lambda: scaler.workers[worker].ended)
        (ended,) = scaler.reap()
        assert (ended.code, ended.asked, ended.killed_because, ended.last_line) == (0, True, "", "")
        assert not scaler.workers

    run(work, tmp_path, drain_budget_s=41.5)


def test_a_kill_waits_for_the_nodes_word_and_not_for_ever(tmp_path: Path) -> None:
    async def work(bench: KubernetesBench) -> None:
        scaler = await bench.open()
        obeys, hangs = scaler.start("chat", "v1"), scaler.start("chat", "v1")
        for worker in (obeys, hangs):
            bench.api.run(await bench.made(worker))
        await bench.until(
            lambda: all(pod.shown and pod.shown.status.phase == "Running" for pod in scaler.workers.values())
        )
        scaler.drain(hangs)
        await bench.until(lambda: bench.verbs().count("delete") == 1)
        for worker in (obeys, hangs):
            scaler.kill(worker, "it was silent")
            scaler.kill(worker, "and once more")
        await bench.until(lambda: bench.verbs().count("delete") == 3)
        bench.api.end(await bench.made(obeys), 137)
        await bench.until(lambda: len([pod for pod in scaler.workers.values() if pod.ended]) == 2)
        graces = [(call.name, call.query["gracePeriodSeconds"]) for call in bench.api.calls if call.verb == "delete"]
        assert graces[0] == (f"headrace-worker-{hangs}", 45)
        assert sorted(graces[1:3]) == sorted([(f"headrace-worker-{worker}", 1) for worker in (obeys, hangs)])
        assert graces[3:] == [(f"headrace-worker-{hangs}", 0)]
        by_worker = {ended.worker: ended for ended in scaler.reap()}
        assert by_worker[obeys].code == -9
        assert by_worker[obeys].killed_because == "it was silent"
        assert (by_worker[hangs].code, by_worker[hangs].asked) == (None, True)
        assert not by_worker[hangs].outside  # it ran: that it hung is its own doing
        failure = judge(by_worker[obeys], None, was_active=False)
        assert failure is not None
        assert failure.kind == "timeout"

    run(work, tmp_path)


def test_what_is_told_to_end_before_it_was_made_is_not_made(tmp_path: Path) -> None:
    async def work(bench: KubernetesBench) -> None:
        scaler = await bench.open()
        drained, killed = scaler.start("chat", "v1"), scaler.start("chat", "v1")
        scaler.drain(drained)
        scaler.kill(killed, "too late")
        await bench.until(lambda: len([pod for pod in scaler.workers.values() if pod.ended]) == 2)
        assert {ended.worker for ended in scaler.reap()} == {drained, killed}
        assert "create" not in bench.verbs()

    run(work, tmp_path)


def test_a_pod_that_no_node_has_room_for_stays_and_says_so_and_is_held_against_nobody(tmp_path: Path) -> None:
    async def work(bench: KubernetesBench) -> None:
        scaler = await bench.open()
        worker = scaler.start("chat", "v1")
        name = await bench.made(worker)
        bench.api.unschedulable(name, "0/3 nodes are available: 3 Insufficient nvidia.com/gpu.")
        await bench.until(lambda: scaler.workers[worker].waiting_for)
        waits = "Unschedulable: 0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
        assert scaler.workers[worker].waiting_for == waits
        assert scaler.reap() == []
        bench.api.wait(name, "ImagePullBackOff", 'Back-off pulling image "headrace:0.1.0"')
        await bench.until(lambda: scaler.workers[worker].waiting_for.startswith("ImagePullBackOff: Back-off"))
        assert scaler.reap() == []  # no exit: it may come yet
        scaler.kill(worker, "the worker was not active within 600 s")
        await bench.until(lambda: scaler.workers[worker].ended)
        (ended,) = scaler.reap()
        failure = judge(ended, None, was_active=False)
        assert failure is not None
        assert failure.kind == "transient"
        assert failure.reason.startswith("the worker was not active within 600 s: ImagePullBackOff: Back-off")

    run(work, tmp_path)


def test_exits_tell_code_signal_and_reason_and_the_last_failed_pods_are_kept(tmp_path: Path) -> None:
    async def work(bench: KubernetesBench) -> None:
        scaler = await bench.open()
        names: dict[str, str] = {}
        for _ in range(5):
            worker = scaler.start("chat", "v1")
            names[worker] = await bench.made(worker)  # one after the other: the oldest is removed first
            bench.api.run(names[worker])
        crash, killed, evicted, lost, done = names
        bench.api.end(names[crash], 4, message="step 7\nthe engine hung\n")
        bench.api.end(names[killed], 137, "OOMKilled")
        bench.api.evict(names[evicted], "The node was low on resource: memory.")
        bench.api.lose(names[lost])
        bench.api.end(names[done], 0)
        await bench.until(lambda: all(pod.ended for pod in scaler.workers.values()))
        ended = {one.worker: one for one in scaler.reap()}
        assert ended[crash].description() == "the worker exited with code 4: the engine hung"
        assert ended[killed].description() == "the worker was ended by signal 9 (Killed): OOMKilled"
        assert ended[evicted].description() == "the worker ended: Evicted: The node was low on resource: memory."
        assert ended[lost].description() == "the worker ended: its pod is gone"
        assert (ended[done].code, ended[done].asked) == (0, False)
        assert {worker for worker in names if ended[worker].outside} == {evicted, lost}
        await bench.until(lambda: set(bench.api.pods) == {names[worker] for worker in (killed, evicted)})
        again = scaler.start("chat", "v1")
        bench.api.run(await bench.made(again))
        bench.api.end(await bench.made(again), 3)
        await bench.until(lambda: scaler.workers[again].ended)
        scaler.reap()
        await bench.until(lambda: names[killed] not in bench.api.pods)
        assert len(bench.api.pods) == 2
        assert not scaler.workers

    run(work, tmp_path, kubernetes_failed_pods_max=2)


def test_a_pod_that_somebody_else_deletes_is_draining_and_has_not_failed(tmp_path: Path) -> None:
    async def work(bench: KubernetesBench) -> None:
        scaler = await bench.open()
        worker = scaler.start("chat", "v1")
        name = await bench.made(worker)
        bench.api.run(name)
        bench.api.delete_by_hand(name)
        await bench.until(lambda: scaler.workers[worker].drained_at is not None)
        bench.api.end(name, 0)
        await bench.until(lambda: scaler.workers[worker].ended)
        (ended,) = scaler.reap()
        assert ended.asked
        assert judge(ended, None, was_active=False) is None

    run(work, tmp_path)


def test_a_new_controller_has_the_pods_of_the_one_before_and_knows_dead_workers_leases(tmp_path: Path) -> None:
    async def work(bench: KubernetesBench) -> None:
        first = await bench.open()
        serving, warm, over = first.start("org/chat", "v1"), first.start("", ""), first.start("chat", "v2")
        for worker in (serving, warm, over):
            bench.api.run(await bench.made(worker))
        bench.api.page_max = 1  # the list comes in pages
        await first.close()
        bench.api.end(await bench.made(over), 7)
        second = await bench.open()
        assert set(second.workers) == {serving, warm}
        assert (second.workers[serving].model, second.workers[serving].version) == ("org/chat", "v1")
        assert second.workers[warm].model == ""
        assert not second.workers[serving].own
        assert second.workers[serving].started == pytest.approx(time.monotonic(), abs=30)
        assert second.reap() == []
        assert second.owns(lease(over, host=f"headrace-worker-{over}"))
        assert not second.owns(lease("w1", host="a-machine-beside-the-cluster"))
        third = second.start("chat", "v2")
        await bench.until(lambda: len(bench.api.pods) == 4)
        second.drain(serving)
        await bench.until(lambda: "deletionTimestamp" in bench.api.pods[f"headrace-worker-{serving}"]["metadata"])
        bench.api.end(await bench.made(serving), 0)
        await bench.until(lambda: second.workers[serving].ended)
        assert [ended.worker for ended in second.reap()] == [serving]
        assert set(second.workers) == {warm, third}

    run(work, tmp_path)


def test_two_controllers_see_the_same_workers(tmp_path: Path) -> None:
    async def work(bench: KubernetesBench) -> None:
        leader, other = await bench.open(), await bench.open()
        worker = leader.start("chat", "v1")
        await bench.until(lambda: worker in other.workers)
        assert (other.workers[worker].model, other.workers[worker].own) == ("chat", False)
        bench.api.lose(await bench.made(worker))
        await bench.until(lambda: leader.workers[worker].ended and other.workers[worker].ended)

    run(work, tmp_path)


def test_a_dropped_watch_goes_on_where_it_was(tmp_path: Path) -> None:
    async def work(bench: KubernetesBench) -> None:
        scaler = await bench.open()
        worker = scaler.start("chat", "v1")
        name = await bench.made(worker)
        await bench.until(lambda: bench.api.watches)
        for round_ in range(3):
            bench.api.fail("watch", BROKEN, BUSY)
            bench.api.drop_watches()
            await bench.until(lambda: not bench.api.watches)
            bench.api.wait(name, f"Reason{round_}", "while nobody watched")
            await bench.until(lambda round_=round_: f"Reason{round_}" in scaler.workers[worker].waiting_for)
        assert bench.verbs().count("list") == 1
        bench.api.bookmark()
        await bench.until(lambda: scaler._version == str(bench.api._version))
        bench.api.compact()  # what was before the bookmark
        bench.api.drop_watches()
        await bench.until(lambda: not bench.api.watches)
        await bench.until(lambda: bench.api.watches)
        bench.api.run(name)
        await bench.until(lambda: not scaler.workers[worker].waiting_for)
        assert bench.verbs().count("list") == 1

    run(work, tmp_path)


def test_a_version_that_the_api_does_not_have_is_given_up_after_a_while(tmp_path: Path) -> None:
    async def work(bench: KubernetesBench) -> None:
        scaler = await bench.open()
        await bench.until(lambda: bench.api.watches)
        too_large = Refusal(504, "Timeout", "Too large resource version: 200, current: 100")
        bench.api.fail("watch", *[too_large] * RELIST_AFTER_FAILURES)
        bench.api.drop_watches()
        await bench.until(lambda: bench.verbs().count("list") == 2 and bench.api.watches)
        worker = scaler.start("chat", "v1")
        bench.api.run(await bench.made(worker))
        await bench.until(lambda: (shown := scaler.workers[worker].shown) and shown.status.phase == "Running")

    run(work, tmp_path)


@pytest.mark.parametrize("by_status", [False, True])
def test_a_watch_that_is_too_old_lists_again_and_finds_what_has_gone_and_what_has_come(
    tmp_path: Path, by_status: bool
) -> None:
    async def work(bench: KubernetesBench) -> None:
        bench.api.expire_by_status = by_status
        scaler, other = await bench.open(), await bench.open()
        stays, goes = scaler.start("chat", "v1"), scaler.start("chat", "v1")
        names = [await bench.made(stays), await bench.made(goes)]
        await bench.until(lambda: set(other.workers) == {stays, goes})
        await scaler.close()  # so that the changes below are the other one's to find out about
        await bench.until(lambda: bench.api.watches == 1)
        bench.api.fail("watch", BROKEN)
        bench.api.drop_watches()
        await bench.until(lambda: not bench.api.watches)
        bench.api.lose(names[1])
        comes = await bench.open()
        new = comes.start("chat", "v1")
        await bench.made(new)
        bench.api.compact()
        await bench.until(lambda: new in other.workers and other.workers[goes].ended)
        (ended,) = other.reap()
        assert (ended.worker, ended.last_line) == (goes, "its pod is gone")
        assert set(other.workers) == {stays, new}

    run(work, tmp_path)


def test_a_list_that_is_older_than_a_pod_does_not_tell_that_it_has_gone(tmp_path: Path) -> None:
    async def work(bench: KubernetesBench) -> None:
        scaler = await bench.open()
        await bench.until(lambda: bench.api.watches)
        answer = bench.api.hold("list")
        bench.api.fail("watch", BROKEN)
        bench.api.drop_watches()
        await bench.until(lambda: not bench.api.watches)
        bench.api.bookmark()  # that nobody hears
        bench.api.compact()
        await bench.until(lambda: bench.verbs().count("list") == 2)
        worker = scaler.start("chat", "v1")
        await bench.until(lambda: scaler.workers[worker].made)
        answer.set()
        bench.api.run(await bench.made(worker))
        await bench.until(lambda: (shown := scaler.workers[worker].shown) and shown.status.phase == "Running")
        assert scaler.reap() == []

    run(work, tmp_path)


def test_while_the_api_is_away_workers_count_and_nothing_is_done_twice(tmp_path: Path) -> None:
    async def work(bench: KubernetesBench) -> None:
        scaler = await bench.open()
        before = [scaler.start("chat", "v1") for _ in range(2)]
        for worker in before:
            bench.api.run(await bench.made(worker))
        await bench.until(lambda: all(pod.made and not pod.kept for pod in scaler.workers.values()))
        await bench.api.stop()
        during = scaler.start("chat", "v1")
        scaler.drain(before[0])
        await asyncio.sleep(0.5)  # several tries
        assert set(scaler.workers) == {*before, during}
        assert scaler.reap() == []
        bench.api.lose(f"headrace-worker-{before[1]}")
        await bench.api.start()
        await bench.until(lambda: scaler.workers[before[1]].ended)
        await bench.made(during)
        await bench.until(lambda: "deletionTimestamp" in bench.api.pods[f"headrace-worker-{before[0]}"]["metadata"])
        assert [ended.worker for ended in scaler.reap()] == [before[1]]
        assert set(scaler.workers) == {before[0], during}
        assert sorted(bench.api.pods) == sorted(f"headrace-worker-{worker}" for worker in (before[0], during))

    run(work, tmp_path)


def test_a_watch_ends_and_begins_in_good_order_and_credentials_are_renewed(tmp_path: Path) -> None:
    async def work(bench: KubernetesBench) -> None:
        scaler = await bench.open()
        bench.api.token = "token-2"
        bench.write_config()
        await bench.until(lambda: bench.verbs().count("watch") >= 3)  # it ended after a second; 401; and on
        worker = scaler.start("chat", "v1")
        await bench.made(worker)
        assert bench.verbs().count("list") == 1

    run(work, tmp_path, kubernetes_watch_s=1.0)


def test_the_role_of_the_manifest_is_what_is_used_and_no_more(tmp_path: Path) -> None:
    async def work(bench: KubernetesBench) -> None:
        scaler = await bench.open()
        worker = scaler.start("", "")
        name = await bench.made(worker)
        bench.api.run(name)
        scaler.adopt([lease(worker)])
        await bench.until(lambda: "patch" in bench.verbs())
        scaler.drain(worker)
        await bench.until(lambda: "delete" in bench.verbs())
        await bench.until(lambda: "watch" in bench.verbs())
        assert {(call.verb, call.resource) for call in bench.api.calls} == role()

    run(work, tmp_path)


def test_an_api_that_cannot_be_reached_or_does_not_know_us_is_said_at_the_start(tmp_path: Path) -> None:
    async def work(bench: KubernetesBench) -> None:
        bench.api.token = "another"
        with pytest.raises(ScalerUnavailable, match="Unauthorized"):
            await bench.open()
        await bench.api.stop()
        with pytest.raises(ScalerUnavailable, match="does not answer"):
            await bench.open()
        bench.forget_config()
        with pytest.raises(ScalerUnavailable, match="no usable configuration"):
            await bench.open()

    run(work, tmp_path)


def test_the_library_is_an_extra_and_its_absence_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "kubernetes_asyncio", None)

    async def work(bench: KubernetesBench) -> None:
        with pytest.raises(ScalerUnavailable, match=r"pip install 'headrace\[kubernetes\]'") as raised:
            await bench.open()
        assert raised.value.code == "scaler_unavailable"

    run(work, tmp_path)


def test_a_defect_in_the_background_is_not_taken_for_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(bench: KubernetesBench) -> None:
        scaler = await bench.open()

        def broken(*_given: Any) -> None:
            raise AssertionError("a defect")

        monkeypatch.setattr(scaler, "_show", broken)
        scaler.start("chat", "v1")

        def reaped() -> bool:
            try:
                return bool(scaler.reap())
            except ExceptionGroup:
                return True

        await bench.until(reaped)
        with pytest.raises(ExceptionGroup):
            await scaler.close()
        bench._scalers.clear()

    run(work, tmp_path)
