"""The fake of the Kubernetes API: its tables are those of the OpenAPI document, and it refuses what the real one would."""

import json
import re
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from kubernetes_asyncio.client import CoreV1Api

from .fake_kubernetes import MERGE_PATCH, PARAMETERS
from .kubernetes_bench import NAMESPACE, KubernetesBench, run

OPERATIONS = {  # of the client that is generated from the OpenAPI document
    "list": CoreV1Api.list_namespaced_pod,
    "create": CoreV1Api.create_namespaced_pod,
    "delete": CoreV1Api.delete_namespaced_pod,
    "patch": CoreV1Api.patch_namespaced_pod,
    "get": CoreV1Api.read_namespaced_pod_template,
}
OF_THE_CLIENT = {"async_req", "namespace", "name", "body"}
POD = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": {"containers": [{"name": "worker"}]}}


@pytest.mark.parametrize("verb", PARAMETERS)
def test_query_parameters_are_those_of_the_openapi_document(verb: str) -> None:
    documented = re.findall(r":type (\w+): (\w+)", OPERATIONS[verb].__doc__ or "")
    expected = {
        re.sub(r"_(\w)", lambda letter: letter[1].upper(), name.lstrip("_")): kind
        for name, kind in documented
        if name not in OF_THE_CLIENT
        and not name.startswith(("_preload", "_request", "_return", "_content", "_headers"))
    }
    assert {name: kind.__name__ for name, kind in PARAMETERS[verb].items()} == expected


def pods(name: str = "", query: str = "") -> str:
    return f"/api/v1/namespaces/{NAMESPACE}/pods{'/' + name if name else ''}{'?' + query if query else ''}"


def changed(**fields: Any) -> dict[str, Any]:
    return POD | fields


@pytest.mark.parametrize(
    ("method", "path", "status", "sent"),
    [
        ("GET", "/api/v1/pods", 404, {}),
        ("GET", "/api/v1/namespaces/other/pods", 404, {}),
        ("PUT", pods("p"), 405, {"json": POD}),
        ("GET", pods(query="labelselector=a"), 400, {}),
        ("GET", pods(query="limit=many"), 400, {}),
        ("GET", pods(query="watch=yes"), 400, {}),
        ("GET", pods(query="labelSelector=a=%3D"), 400, {}),
        ("GET", pods(query="watch=true&resourceVersion=x&timeoutSeconds=1"), 400, {}),
        ("DELETE", pods("p", "gracePeriodSeconds=1.5"), 400, {}),
        ("POST", pods(), 415, {"data": json.dumps(POD), "headers": {"Content-Type": "text/plain"}}),
        ("POST", pods(), 422, {"json": changed(spec={"containers": [{"name": "worker", "arguments": []}]})}),
        ("POST", pods(), 422, {"json": changed(spec={"containers": [{"name": "worker", "args": "x"}]})}),
        ("POST", pods(), 422, {"json": changed(spec={"containers": [{"image": "x"}]})}),
        ("POST", pods(), 422, {"json": changed(metadata={"name": "Upper"})}),
        ("POST", pods(), 422, {"json": changed(metadata={"name": "p", "labels": {"a": "no/slash"}})}),
        ("POST", pods(), 422, {"json": changed(metadata={"name": "p", "labels": {"a": 1}})}),
        ("PATCH", pods("p"), 415, {"json": {"metadata": {}}}),
        (
            "PATCH",
            pods("p"),
            422,
            {"data": '{"metadata": {"label": {}}}', "headers": {"Content-Type": MERGE_PATCH}},
        ),
    ],
)
def test_what_a_real_api_server_refuses_is_refused_and_noted(
    tmp_path: Path, method: str, path: str, status: int, sent: dict[str, Any]
) -> None:
    async def work(bench: KubernetesBench) -> None:
        headers = {"Authorization": f"Bearer {bench.api.token}"} | sent.get("headers", {})
        async with aiohttp.ClientSession() as session:
            async with session.post(
                bench.api.url + pods(), json=POD, headers={**headers, "Content-Type": "application/json"}
            ) as made:
                assert made.status == 201, await made.text()
            assert bench.api.problems == []
            async with session.request(method, bench.api.url + path, **(sent | {"headers": headers})) as answer:
                assert answer.status == status
                assert (await answer.json())["kind"] == "Status"
        assert len(bench.api.problems) == 1
        bench.api.problems.clear()

    run(work, tmp_path)
