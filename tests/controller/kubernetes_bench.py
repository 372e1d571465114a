"""What the tests of the Kubernetes scaler work with: a fake API, a kubeconfig that reaches it, scalers, the Role of deploy/."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import yaml

from controller.scalers.kubernetes import KubernetesScaler
from shared.settings import Settings

from .fake_kubernetes import FakeKubernetes

DEPLOY = Path(__file__).parents[2] / "deploy" / "kubernetes"
NAMESPACE = "models"
QUICK = {"kubernetes_backoff_s": 0.05, "kubernetes_backoff_max_s": 0.2, "kubernetes_gone_s": 0.3}


def manifests(name: str) -> list[dict[str, Any]]:
    return [found for found in yaml.safe_load_all((DEPLOY / name).read_text()) if found]


def role() -> set[tuple[str, str]]:
    """What the manifest lets the controller do: (verb, resource)."""
    (found,) = [one for one in manifests("rbac.yaml") if one["kind"] == "Role"]
    return {(verb, resource) for rule in found["rules"] for resource in rule["resources"] for verb in rule["verbs"]}


class KubernetesBench:
    """One namespace, and the controllers' scalers in it."""

    def __init__(self, api: FakeKubernetes, directory: Path, given: dict[str, Any]) -> None:
        self.api = api
        self._config = directory / "kubeconfig"
        self.settings = Settings(
            data_dir=str(directory),
            scaler="kubernetes",
            kubernetes_config=str(self._config),
            **(QUICK | given),
        )
        self._scalers: list[KubernetesScaler] = []

    def write_config(self) -> None:
        """The kubeconfig, with the token that the API takes now."""
        cluster = {"name": "fake", "cluster": {"server": self.api.url}}
        context = {"name": "fake", "context": {"cluster": "fake", "user": "controller", "namespace": NAMESPACE}}
        user = {"name": "controller", "user": {"token": self.api.token}}
        config = {"apiVersion": "v1", "kind": "Config", "current-context": "fake"}
        config |= {"clusters": [cluster], "contexts": [context], "users": [user]}
        self._config.write_text(yaml.safe_dump(config))

    def forget_config(self) -> None:
        self._config.unlink()

    async def open(self) -> KubernetesScaler:
        """A controller's scaler, with its watch going."""
        scaler = KubernetesScaler(self.settings)
        await scaler.open()
        self._scalers.append(scaler)
        return scaler

    async def close(self) -> None:
        """Close what `open` gave out."""
        for scaler in self._scalers:
            await scaler.close()

    async def made(self, worker: str) -> str:
        """The name of a worker's pod, once it is there."""
        name = f"headrace-worker-{worker}"
        await self.until(lambda: name in self.api.pods)
        return name

    async def until(self, condition: Callable[[], Any], budget_s: float = 15.0) -> None:
        deadline = time.monotonic() + budget_s
        while not condition():
            assert time.monotonic() < deadline, "the condition did not come true"
            await asyncio.sleep(0.005)

    def verbs(self) -> list[str]:
        return [call.verb for call in self.api.calls]


@contextlib.asynccontextmanager
async def kubernetes(directory: Path, **given: Any) -> AsyncIterator[KubernetesBench]:
    """A namespace with the template of deploy/; at its end everything is closed, and no request was one to be refused."""
    api = FakeKubernetes(NAMESPACE, role())
    (template,) = manifests("worker-template.yaml")
    api.templates[template["metadata"]["name"]] = template
    await api.start()
    bench = KubernetesBench(api, directory, given)
    bench.write_config()
    try:
        yield bench
    finally:
        await bench.close()
        await api.stop()
    assert api.problems == []


def run(work: Callable[[KubernetesBench], Awaitable[None]], directory: Path, **given: Any) -> None:
    """`await work(bench)`, in a namespace of its own."""

    async def main() -> None:
        async with kubernetes(directory, **given) as bench:
            await work(bench)

    asyncio.run(main())
