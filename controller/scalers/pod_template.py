"""From an operator's PodTemplate to the pod of one worker: its name, labels, arguments and environment. Pure."""

import copy
import hashlib
import math
import re
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from controller.scalers.pods import WORKER_CONTAINER
from controller.scalers.process import SPAWNED_AT
from shared.settings import Settings, to_environment

APP, WORKER, MANAGER = "headrace", "worker", "headrace-controller"
APP_LABEL = "app.kubernetes.io/name"
INSTANCE_LABEL = "app.kubernetes.io/instance"
COMPONENT_LABEL = "app.kubernetes.io/component"
MANAGER_LABEL = "app.kubernetes.io/managed-by"
WORKER_LABEL = "headrace.dev/worker"
MODEL_LABEL = "headrace.dev/model"  # as a label in a safe spelling, as an annotation exact
VERSION_LABEL = "headrace.dev/version"
DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
COST_WARM, COST_WITH_MODEL = "0", "100"
DRAIN_MARGIN_S = 15  # from the end of the drain budget to the node's SIGKILL; more than the controller itself waits
NOT_PASSED_ON = "HEADRACE_LIFELINE_FD"

_LABEL_VALUE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")
_DIGEST_BYTES, _PREFIX_MAX = 5, 52


class TemplateError(Exception):
    """The template is not one that a worker can be made of."""


class PodOrder(Struct, frozen=True, kw_only=True):
    """The worker that a pod is wanted for; a warm one has no model and no version."""

    worker: str
    model: str
    version: str
    spawned_at: float  # unix seconds


def pod_name(instance: str, worker: str) -> str:
    """The name of a worker's pod. It follows from the id, so that making a worker twice makes one pod."""
    return f"{instance}-worker-{worker}"


def selector(instance: str) -> str:
    """The label selector of the workers that controllers of `instance` made."""
    return ",".join((f"{APP_LABEL}={APP}", f"{INSTANCE_LABEL}={instance}", f"{COMPONENT_LABEL}={WORKER}", WORKER_LABEL))


def label_value(name: str) -> str:
    """`name` where it can be a label's value; else what can be kept of it, and a digest that keeps names apart."""
    if _LABEL_VALUE.fullmatch(name):
        return name
    digest = hashlib.blake2b(name.encode(), digest_size=_DIGEST_BYTES).hexdigest()
    kept = _UNSAFE.sub("-", name)[:_PREFIX_MAX].strip("._-")
    return f"{kept}-{digest}" if kept else digest


def drain_grace_s(settings: Settings) -> int:
    """Seconds from SIGTERM to SIGKILL of a worker that drains: its budget, and what the node may be late."""
    return math.ceil(settings.drain_budget_s) + DRAIN_MARGIN_S


def model_metadata(model: str, version: str) -> dict[str, dict[str, str]]:
    """The labels and annotations that say what a worker serves; those of a warm one say nothing but its low cost."""
    if not model:
        return {"labels": {}, "annotations": {DELETION_COST: COST_WARM}}
    return {
        "labels": {MODEL_LABEL: label_value(model), VERSION_LABEL: label_value(version)},
        "annotations": {MODEL_LABEL: model, VERSION_LABEL: version, DELETION_COST: COST_WITH_MODEL},
    }


def worker_pod(template: Mapping[str, Any], order: PodOrder, settings: Settings) -> dict[str, Any]:
    """The pod of one worker, as the API takes it: `template` (a PodTemplate) and what only the controller can say.

    What is ours wins in labels and in the restart policy; the template wins in its environment. Raises TemplateError.
    """
    inner = template.get("template") or {}
    spec = copy.deepcopy(inner.get("spec") or {})
    given = inner.get("metadata") or {}
    ours = model_metadata(order.model, order.version)
    labels = {
        APP_LABEL: APP,
        INSTANCE_LABEL: settings.kubernetes_instance,
        COMPONENT_LABEL: WORKER,
        MANAGER_LABEL: MANAGER,
        WORKER_LABEL: order.worker,
    }
    _prepare(_worker_container(spec), order, settings)
    spec["restartPolicy"] = "Never"  # a worker that ended is the controller's to judge and to replace
    spec["terminationGracePeriodSeconds"] = max(spec.get("terminationGracePeriodSeconds") or 0, drain_grace_s(settings))
    spec.setdefault("enableServiceLinks", False)  # a Service `headrace-http` would set HEADRACE_HTTP_PORT
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": pod_name(settings.kubernetes_instance, order.worker),
            "labels": (given.get("labels") or {}) | labels | ours["labels"],
            "annotations": (given.get("annotations") or {}) | ours["annotations"],
        },
        "spec": spec,
    }


def _worker_container(spec: Mapping[str, Any]) -> dict[str, Any]:
    for container in spec.get("containers") or ():
        if container.get("name") == WORKER_CONTAINER:
            return container
    raise TemplateError(f"the template has no container called {WORKER_CONTAINER}")


def _prepare(container: dict[str, Any], order: PodOrder, settings: Settings) -> None:
    arguments = [f"--model={order.model}", f"--version={order.version}"] if order.model else []
    arguments += ["--worker-id", order.worker]
    container["args"] = [*(container.get("args") or ()), *(_literal(argument) for argument in arguments)]
    container.setdefault("terminationMessagePolicy", "FallbackToLogsOnError")
    environment = [entry for entry in container.get("env") or () if entry["name"] != SPAWNED_AT]
    named = {entry["name"] for entry in environment}
    passed_on = numbers_of(settings) | {SPAWNED_AT: repr(order.spawned_at)}
    environment += [{"name": name, "value": value} for name, value in passed_on.items() if name not in named]
    container["env"] = environment


def numbers_of(settings: Settings) -> dict[str, str]:
    """The settings that a worker gets from its controller: the limits and switches that differ from the defaults.

    Texts are the template's, since they are addresses, paths and credentials, and a pod's spec is no place for those.
    """
    texts = {
        f"HEADRACE_{name.upper()}" for name in settings.__struct_fields__ if isinstance(getattr(settings, name), str)
    }
    return {
        name: value for name, value in to_environment(settings).items() if name not in texts and name != NOT_PASSED_ON
    }


def _literal(argument: str) -> str:
    """`argument` as it comes out of the expansion of $(VARIABLE) that Kubernetes does in arguments."""
    return argument.replace("$", "$$")
