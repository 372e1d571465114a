"""Pods as the Kubernetes API shows them, reduced to what matters here, and what they say of a worker. Pure."""

import signal

from msgspec import Struct, field

WORKER_CONTAINER = "worker"  # the container of a pod that the worker runs in; others are the operator's
EXPECTED_WAITS = ("", "ContainerCreating", "PodInitializing")
PLAIN_REASONS = ("", "Error", "Completed")  # of a container's end: they say no more than its exit code
SIGNAL_BASE = 128  # a container that signal N ended has exit code 128 + N
LINE_MAX = 300


class Metadata(Struct, rename="camel"):
    name: str = ""
    resource_version: str = ""
    creation_timestamp: str | None = None  # RFC 3339
    deletion_timestamp: str | None = None
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None


class Waiting(Struct, rename="camel"):
    reason: str = ""
    message: str = ""


class Terminated(Struct, rename="camel"):
    exit_code: int = 0
    reason: str = ""
    message: str = ""  # the container's termination message


class Running(Struct, rename="camel"):
    started_at: str | None = None  # RFC 3339


class ContainerState(Struct, rename="camel"):
    waiting: Waiting | None = None
    running: Running | None = None
    terminated: Terminated | None = None


class ContainerStatus(Struct, rename="camel"):
    name: str
    state: ContainerState = field(default_factory=ContainerState)


class Condition(Struct, rename="camel"):
    type: str
    status: str  # True | False | Unknown
    reason: str = ""
    message: str = ""


class PodStatus(Struct, rename="camel"):
    phase: str = "Pending"  # Pending | Running | Succeeded | Failed
    reason: str = ""
    message: str = ""
    conditions: list[Condition] = []
    init_container_statuses: list[ContainerStatus] = []
    container_statuses: list[ContainerStatus] = []


class Pod(Struct, rename="camel"):
    metadata: Metadata
    status: PodStatus = field(default_factory=PodStatus)


class ListMetadata(Struct, rename="camel"):
    resource_version: str = ""
    continue_at: str = field(default="", name="continue")


class PodList(Struct, rename="camel"):
    metadata: ListMetadata
    items: list[Pod] | None = None


class Ending(Struct, frozen=True, kw_only=True):
    """How a worker's container came to its end.

    `outside`: by the cluster's doing (evicted, preempted, refused by the node), so that nothing is known against it.
    """

    code: int | None  # as of Popen: negative for a signal; None: it never ran, or nobody saw its end
    words: str  # reason and message
    outside: bool


def is_over(pod: Pod) -> bool:
    """Whether the worker has ended. A sidecar may still keep its pod alive."""
    return pod.status.phase in ("Succeeded", "Failed") or _state(pod).terminated is not None


def ending(pod: Pod) -> Ending:
    """How the worker of a pod ended that is over, or that was deleted in this state."""
    disrupted = next((one for one in pod.status.conditions if one.type == "DisruptionTarget"), None)
    outside = disrupted is not None and disrupted.status == "True"
    own = _state(pod).terminated
    if own is not None and own.reason != "ContainerStatusUnknown":
        reason = own.reason if own.reason not in PLAIN_REASONS else pod.status.reason
        words = _words(reason, own.message or pod.status.message)
        by_signal = SIGNAL_BASE < own.exit_code < SIGNAL_BASE + signal.NSIG
        code = SIGNAL_BASE - own.exit_code if by_signal else own.exit_code
        return Ending(code=code, words=words, outside=outside)
    words = _words(pod.status.reason, pod.status.message)
    if not words and disrupted is not None:
        words = _words(disrupted.reason, disrupted.message)
    return Ending(code=None, words=words or _init_failure(pod) or waiting_for(pod), outside=True)


def waiting_for(pod: Pod) -> str:
    """What keeps a pod from running its worker, where that is out of the ordinary: "" for the usual steps of a start."""
    for condition in pod.status.conditions:
        if condition.type == "PodScheduled" and condition.status == "False":
            return _words(condition.reason, condition.message)
    for status in (*pod.status.init_container_statuses, *pod.status.container_statuses):
        waiting = status.state.waiting
        if waiting is not None and waiting.reason not in EXPECTED_WAITS:
            return _words(waiting.reason, waiting.message)
    return ""


def has_run(pod: Pod) -> bool:
    """Whether the worker's container was started."""
    state = _state(pod)
    return state.running is not None or state.terminated is not None


def _state(pod: Pod) -> ContainerState:
    for status in pod.status.container_statuses:
        if status.name == WORKER_CONTAINER:
            return status.state
    return ContainerState()


def _init_failure(pod: Pod) -> str:
    for status in pod.status.init_container_statuses:
        end = status.state.terminated
        if end is not None and end.exit_code != 0:
            return _words(f"init container {status.name} exited with code {end.exit_code}", end.message)
    return ""


def _words(reason: str, message: str) -> str:
    """Reason and the last line of a message, shortened."""
    line = next((line.strip() for line in reversed(message.split("\n")) if line.strip()), "")
    return ": ".join(part for part in (reason, line) if part)[:LINE_MAX]
