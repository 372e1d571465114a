"""From a template to a pod."""

import copy
import re
from typing import Any

import kubernetes_validate
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.fleet import KILL_MARGIN_S
from controller.scalers import pod_template
from controller.scalers.pod_template import PodOrder, TemplateError, label_value, numbers_of, worker_pod
from shared.settings import Settings

TEMPLATE: dict[str, Any] = {
    "template": {
        "metadata": {"labels": {"team": "a", "headrace.dev/worker": "no"}, "annotations": {"note": "x"}},
        "spec": {
            "restartPolicy": "Always",
            "terminationGracePeriodSeconds": 300,
            "containers": [
                {"name": "sidecar", "image": "proxy"},
                {
                    "name": "worker",
                    "image": "headrace:test",
                    "args": ["-v"],
                    "env": [
                        {"name": "HEADRACE_LEASE_TTL_S", "value": "9"},
                        {"name": "HEADRACE_SPAWNED_AT", "value": "0"},
                        {"name": "HEADRACE_S3_SECRET_KEY", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
                    ],
                },
            ],
        },
    }
}
LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")


def order(model: str = "chat", version: str = "v1") -> PodOrder:
    return PodOrder(worker="w1", model=model, version=version, spawned_at=12.5)


def worker_of(pod: dict[str, Any]) -> dict[str, Any]:
    (container,) = [one for one in pod["spec"]["containers"] if one["name"] == "worker"]
    return container


def test_what_the_operator_wrote_stays_and_what_only_the_controller_knows_is_added() -> None:
    before = copy.deepcopy(TEMPLATE)
    settings = Settings(lease_ttl_s=7.0, ack_wait_s=6.0, nats_url="nats://user:secret@nats:4222", lifeline_fd=3)
    pod = worker_pod(TEMPLATE, order(), settings)
    assert before == TEMPLATE
    kubernetes_validate.validate(pod, kubernetes_validate.latest_version(), strict=True)
    assert pod["metadata"]["labels"]["team"] == "a"
    assert pod["metadata"]["labels"]["headrace.dev/worker"] == "w1"
    assert pod["metadata"]["annotations"]["note"] == "x"
    assert pod["spec"]["restartPolicy"] == "Never"
    assert pod["spec"]["terminationGracePeriodSeconds"] == 300  # longer than needed
    assert pod["spec"]["enableServiceLinks"] is False
    container = worker_of(pod)
    assert container["args"] == ["-v", "--model=chat", "--version=v1", "--worker-id", "w1"]
    environment = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert environment == {
        "HEADRACE_LEASE_TTL_S": "9",
        "HEADRACE_S3_SECRET_KEY": None,
        "HEADRACE_ACK_WAIT_S": "6.0",
        "HEADRACE_SPAWNED_AT": "12.5",
    }
    assert pod["spec"]["containers"][0] == {"name": "sidecar", "image": "proxy"}


def test_the_grace_covers_the_drain_and_what_the_controller_waits() -> None:
    short = copy.deepcopy(TEMPLATE)
    short["template"]["spec"]["terminationGracePeriodSeconds"] = 5
    settings = Settings(drain_budget_s=41.2)
    assert worker_pod(short, order(), settings)["spec"]["terminationGracePeriodSeconds"] == 57
    assert pod_template.DRAIN_MARGIN_S > KILL_MARGIN_S  # the controller's kill comes first, with its reason


def test_a_name_that_looks_like_a_variable_is_not_expanded() -> None:
    container = worker_of(worker_pod(TEMPLATE, order("$(HEADRACE_S3_SECRET_KEY)", "v$1"), Settings()))
    assert container["args"][1:3] == ["--model=$$(HEADRACE_S3_SECRET_KEY)", "--version=v$$1"]


def test_no_text_of_the_controllers_settings_gets_into_a_pod() -> None:
    texts = {name: "hidden" for name in Settings.__struct_fields__ if isinstance(getattr(Settings(), name), str)}
    assert texts
    assert numbers_of(Settings(**texts)) == {}
    assert numbers_of(Settings(insecure=True, step_ms_max=1.5)) == {
        "HEADRACE_INSECURE": "True",
        "HEADRACE_STEP_MS_MAX": "1.5",
    }


@pytest.mark.parametrize(
    "template", [{}, {"template": {"spec": {"containers": [{"name": "main"}]}}}, {"template": {"spec": None}}]
)
def test_a_template_without_a_worker_is_refused(template: dict[str, Any]) -> None:
    with pytest.raises(TemplateError, match="no container called worker"):
        worker_pod(template, order(), Settings())


@given(st.text(min_size=1, max_size=128))
def test_every_name_has_a_label_value(name: str) -> None:
    assert LABEL.fullmatch(label_value(name))
    if LABEL.fullmatch(name):
        assert label_value(name) == name


@given(st.lists(st.text(alphabet="aA/-._ é", min_size=1, max_size=70), min_size=2, max_size=8, unique=True))
def test_different_names_have_different_label_values(names: list[str]) -> None:
    assert len({label_value(name) for name in names}) == len(names)
