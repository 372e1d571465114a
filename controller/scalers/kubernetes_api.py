"""The calls to the Kubernetes API that the controller makes, all in one namespace. The only module that knows the library.

Answers are decoded here, into the few fields of `pods.py`: the library's own models of a pod have hundreds.
"""

import os
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import msgspec
from msgspec import Struct

from controller.scalers.pods import Pod, PodList
from shared.errors import ScalerUnavailable
from shared.settings import Settings

if TYPE_CHECKING:
    from aiohttp import ClientResponse

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
IN_CLUSTER = "KUBERNETES_SERVICE_HOST"  # the variable that every container of a cluster has
FIELD_MANAGER = "headrace-controller"
MERGE_PATCH = "application/merge-patch+json"
PAGE_PODS = 500
PASSING = (0, 401, 408, 429, 500, 502, 503, 504)  # statuses of what may go well the next time; 0: no answer
GONE = 410

T = TypeVar("T")


class Status(Struct, rename="camel"):
    """The API's word on a call that went wrong."""

    message: str = ""
    reason: str = ""
    code: int = 0


class Event(Struct):
    """One line of a watch: ADDED, MODIFIED, DELETED or BOOKMARK with a pod, ERROR with a Status."""

    type: str
    object: msgspec.Raw


class ApiError(Exception):
    """A call to the API failed. `status` is HTTP's, 0 when there was no answer."""

    def __init__(self, status: int, reason: str, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.status, self.reason, self.message, self.retry_after_s = status, reason, message, retry_after_s

    @property
    def passing(self) -> bool:
        """Whether the same call may succeed later. A conflict may: a quota that two pods were counted in at once."""
        return self.status in PASSING or (self.status == 409 and self.reason != "AlreadyExists")

    def __str__(self) -> str:
        named = " ".join(part for part in (str(self.status or ""), self.reason) if part)
        return f"{named}: {self.message}" if named else self.message


class KubernetesApi:
    """Pods, and pod templates, of one namespace. Every method raises ApiError."""

    def __init__(self, client: Any, pods: Any, load: Callable[[], Awaitable[None]], settings: Settings) -> None:
        self._client, self._pods, self._load = client, pods, load
        self._settings = settings
        self.namespace = ""

    @classmethod
    async def connect(cls, settings: Settings) -> Self:
        """Read where the API is and who we are; nothing is asked yet. Raises ScalerUnavailable."""
        try:
            from kubernetes_asyncio import client, config
        except ImportError as error:
            missing = f"scaler=kubernetes needs the extra: pip install 'headrace[kubernetes]' ({error})"
            raise ScalerUnavailable(missing) from error
        configuration = client.Configuration()
        namespace = settings.kubernetes_namespace

        async def load() -> None:
            nonlocal namespace
            if not settings.kubernetes_config and os.environ.get(IN_CLUSTER):
                config.load_incluster_config(configuration)
                namespace = namespace or (SERVICE_ACCOUNT / "namespace").read_text().strip()
                return
            loader = await config.load_kube_config(
                config_file=settings.kubernetes_config or None,
                client_configuration=configuration,
                persist_config=False,
            )
            namespace = namespace or loader.current_context["context"].get("namespace") or "default"

        try:
            await load()
        except (config.ConfigException, OSError, KeyError) as error:
            raise ScalerUnavailable(f"there is no usable configuration of a Kubernetes cluster: {error}") from error
        connected = client.ApiClient(configuration)
        api = cls(connected, client.CoreV1Api(connected), load, settings)
        api.namespace = namespace
        return api

    async def close(self) -> None:
        await self._client.close()

    async def template(self, name: str) -> dict[str, Any]:
        """The PodTemplate of that name, whole."""
        answer = await self._call(self._pods.read_namespaced_pod_template, name=name)
        return _decode(answer, dict[str, Any])

    async def pods(self, selector: str) -> tuple[list[Pod], str]:
        """The pods that the selector matches, and the resource version that a watch can go on from."""
        found: list[Pod] = []
        following: dict[str, str] = {}
        while True:
            answer = await self._call(
                self._pods.list_namespaced_pod, label_selector=selector, limit=PAGE_PODS, **following
            )
            page = _decode(answer, PodList)
            found += page.items or []
            if not page.metadata.continue_at:
                return found, page.metadata.resource_version
            following = {"_continue": page.metadata.continue_at}

    async def watch(self, selector: str, resource_version: str, take: Callable[[str, Pod], None]) -> None:
        """Tell `take` of every change after `resource_version`, until the server ends the stream.

        Bookmarks come as pods that have nothing but a resource version. Status 410: so old a version is not known any more.
        """
        settings = self._settings
        response = await self._open(
            self._pods.list_namespaced_pod,
            label_selector=selector,
            watch=True,
            allow_watch_bookmarks=True,
            resource_version=resource_version,
            timeout_seconds=max(1, round(settings.kubernetes_watch_s)),
            # a connection that is dead at the other end ends too, a while after the server should have ended it
            _request_timeout=(settings.kubernetes_call_s, settings.kubernetes_watch_s + settings.kubernetes_call_s),
        )
        try:
            while line := await _reading(response.content.readline()):
                event = _decode(line, Event)
                if event.type == "ERROR":
                    raise _error(_decode(event.object, Status), 0)
                take(event.type, _decode(event.object, Pod))
        finally:
            response.close()

    async def create(self, body: Mapping[str, Any]) -> Pod:
        answer = await self._call(self._pods.create_namespaced_pod, body=body, field_manager=FIELD_MANAGER)
        return _decode(answer, Pod)

    async def delete(self, name: str, grace_s: int | None = None) -> None:
        """Begin the end of a pod: SIGTERM, and SIGKILL after `grace_s`, or after what its spec says.

        With 0 the API drops it at once and does not wait for its node's word that the containers have ended.
        """
        given = {} if grace_s is None else {"grace_period_seconds": grace_s}
        await self._call(self._pods.delete_namespaced_pod, name=name, **given)

    async def patch(self, name: str, body: Mapping[str, Any]) -> None:
        await self._call(
            self._pods.patch_namespaced_pod,
            name=name,
            body=body,
            field_manager=FIELD_MANAGER,
            _content_type=MERGE_PATCH,
        )

    async def _call(self, operation: Callable[..., Awaitable[Any]], **given: Any) -> bytes:
        response = await self._open(operation, _request_timeout=self._settings.kubernetes_call_s, **given)
        try:
            return await _reading(response.read())
        finally:
            response.close()

    async def _open(self, operation: Callable[..., Awaitable[Any]], **given: Any) -> "ClientResponse":
        """The answer to a call, when it is a good one, with its body still to be read."""
        response = await _reading(operation(namespace=self.namespace, _preload_content=False, **given))
        if 200 <= response.status < 300:
            return response
        try:
            body = await _reading(response.read())
        finally:
            response.close()
        if response.status == 401:
            await self._renew_credentials()
        try:
            status = _decode(body, Status)
        except ApiError:  # of a proxy in front of the API, perhaps
            status = Status(message=body[:200].decode(errors="replace"))
        status.code = response.status
        raise _error(status, _seconds(response.headers.get("Retry-After", "")))

    async def _renew_credentials(self) -> None:
        """Those of a kubeconfig may expire; those in a cluster the library reads again by itself."""
        try:
            await self._load()
        except Exception as error:  # plugins of every kind run here
            raise ApiError(401, "Unauthorized", f"the credentials cannot be renewed: {error!r}") from error


async def _reading(answer: Awaitable[Any]) -> Any:
    """What `answer` comes to; whatever keeps it from coming is an ApiError without a status."""
    import aiohttp
    from kubernetes_asyncio.config import ConfigException

    try:
        return await answer
    except (aiohttp.ClientError, ConfigException, TimeoutError, OSError) as error:
        raise ApiError(0, "", f"the Kubernetes API does not answer: {error or type(error).__name__}") from error


def _error(status: Status, retry_after_s: float) -> ApiError:
    return ApiError(status.code, status.reason, status.message, retry_after_s)


def _decode(raw: bytes | msgspec.Raw, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ApiError(0, "", f"the Kubernetes API's answer cannot be read: {error}") from error


def _seconds(text: str) -> float:
    return float(text) if text.isdigit() else 0.0
