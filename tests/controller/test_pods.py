"""What a pod's state says of its worker."""

from typing import Any

import msgspec
import pytest

from controller.scalers.pods import Ending, Pod, ending, has_run, is_over, waiting_for


def pod(phase: str = "Running", state: dict[str, Any] | None = None, **status: Any) -> Pod:
    containers = [{"name": "sidecar", "state": {"running": {}}}]
    if state is not None:
        containers.append({"name": "worker", "state": state})
    shown = {"metadata": {"name": "p"}, "status": {"phase": phase, "containerStatuses": containers, **status}}
    return msgspec.convert(shown, Pod)


def terminated(code: int, reason: str = "Error", message: str = "") -> dict[str, Any]:
    return {"terminated": {"exitCode": code, "reason": reason, "message": message}}


DISRUPTED = [{"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler", "message": "preempted"}]
UNSCHEDULED = [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/2 nodes"}]


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (pod("Succeeded", terminated(0, "Completed")), Ending(code=0, words="", outside=False)),
        (pod("Failed", terminated(3, message="a\nb \n\n")), Ending(code=3, words="b", outside=False)),
        (pod("Failed", terminated(137, "OOMKilled")), Ending(code=-9, words="OOMKilled", outside=False)),
        (pod("Failed", terminated(255)), Ending(code=255, words="", outside=False)),
        (
            pod("Failed", terminated(143), reason="Terminated", message="node shutdown", conditions=DISRUPTED),
            Ending(code=-15, words="Terminated: node shutdown", outside=True),
        ),
        (
            pod("Failed", terminated(137, "ContainerStatusUnknown", "not located"), reason="Evicted", message="disk"),
            Ending(code=None, words="Evicted: disk", outside=True),
        ),
        (
            pod("Failed", reason="UnexpectedAdmissionError", message="no devices"),
            Ending(code=None, words="UnexpectedAdmissionError: no devices", outside=True),
        ),
        (
            pod("Failed", initContainerStatuses=[{"name": "fetch", "state": terminated(1, message="no route")}]),
            Ending(code=None, words="init container fetch exited with code 1: no route", outside=True),
        ),
        (
            pod("Pending", conditions=DISRUPTED),
            Ending(code=None, words="PreemptionByScheduler: preempted", outside=True),
        ),
        (
            pod("Pending", conditions=UNSCHEDULED),
            Ending(code=None, words="Unschedulable: 0/2 nodes", outside=True),
        ),
        (pod("Running", {"running": {}}), Ending(code=None, words="", outside=True)),
    ],
)
def test_an_ending_has_the_workers_code_a_reason_and_whose_doing_it_was(shown: Pod, expected: Ending) -> None:
    assert ending(shown) == expected


def test_a_worker_is_over_with_its_container_whatever_runs_beside_it() -> None:
    assert is_over(pod("Running", terminated(0)))
    assert is_over(pod("Failed"))
    assert not is_over(pod("Running", {"running": {}}))
    assert not is_over(pod("Pending"))


def test_a_worker_has_run_once_its_container_was_started() -> None:
    assert has_run(pod("Running", {"running": {}}))
    assert has_run(pod("Running", terminated(1)))
    assert not has_run(pod("Pending", {"waiting": {"reason": "ImagePullBackOff"}}))
    assert not has_run(pod("Pending"))


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (pod("Pending", conditions=UNSCHEDULED), "Unschedulable: 0/2 nodes"),
        (pod("Pending", {"waiting": {"reason": "ErrImagePull", "message": "x\ndenied"}}), "ErrImagePull: denied"),
        (pod("Pending", {"waiting": {"reason": "ContainerCreating"}}), ""),
        (pod("Pending", {"waiting": {"reason": "PodInitializing"}}), ""),
        (
            pod("Pending", initContainerStatuses=[{"name": "i", "state": {"waiting": {"reason": "CrashLoopBackOff"}}}]),
            "CrashLoopBackOff",
        ),
        (pod("Running", {"running": {}}), ""),
    ],
)
def test_only_waits_out_of_the_ordinary_are_told(shown: Pod, expected: str) -> None:
    assert waiting_for(shown) == expected


def test_long_messages_are_cut() -> None:
    assert len(ending(pod("Failed", terminated(1, message="x" * 5000))).words) == 300
