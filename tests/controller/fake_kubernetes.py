"""The Kubernetes API over HTTP, as far as the controller uses it, and as strict as the real one.

Bodies are checked against the JSON schemas that are made of Kubernetes' OpenAPI document (kubernetes-validate), in their strict
form; paths, content types, query parameters and what the caller's Role allows are checked too. What a real API server would
have refused is refused, and noted in `problems`, which a test wants empty. Faults are the test's to order.
"""

import asyncio
import copy
import json
import re
import time
import uuid
from collections import defaultdict, deque
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import kubernetes_validate
from aiohttp import web
from msgspec import Struct

SCHEMA_VERSION = kubernetes_validate.latest_version()
NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
LABEL_KEY = re.compile(r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?")
REQUIREMENT = re.compile(r"(?P<key>[A-Za-z0-9./_-]+)(=(?P<value>[A-Za-z0-9._-]*))?")
TRUE, FALSE = ("1", "t", "T", "true", "True", "TRUE"), ("0", "f", "F", "false", "False", "FALSE")
MERGE_PATCH = "application/merge-patch+json"
# Query parameters of each operation; test_fake_kubernetes.py compares them with the OpenAPI document.
PARAMETERS: dict[str, dict[str, type]] = {
    "list": {
        "pretty": str,
        "allowWatchBookmarks": bool,
        "continue": str,
        "fieldSelector": str,
        "labelSelector": str,
        "limit": int,
        "resourceVersion": str,
        "resourceVersionMatch": str,
        "sendInitialEvents": bool,
        "shardSelector": str,
        "timeoutSeconds": int,
        "watch": bool,
    },
    "create": {"pretty": str, "dryRun": str, "fieldManager": str, "fieldValidation": str},
    "delete": {
        "pretty": str,
        "dryRun": str,
        "gracePeriodSeconds": int,
        "ignoreStoreReadErrorWithClusterBreakingPotential": bool,
        "orphanDependents": bool,
        "propagationPolicy": str,
    },
    "patch": {"pretty": str, "dryRun": str, "fieldManager": str, "fieldValidation": str, "force": bool},
    "get": {"pretty": str},
}

Object = dict[str, Any]


class Call(Struct, frozen=True):
    verb: str  # as in a Role
    resource: str
    name: str
    query: dict[str, Any]


class Refusal(Exception):
    """An answer that is not 2xx."""

    def __init__(self, status: int, reason: str, message: str, retry_after_s: int = 0) -> None:
        super().__init__(message)
        self.status, self.reason, self.message, self.retry_after_s = status, reason, message, retry_after_s

    def body(self) -> Object:
        return {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.message,
            "reason": self.reason,
            "code": self.status,
        }


class FakeKubernetes:
    """One namespace of a cluster without nodes: what becomes of a pod the test says (`run`, `end`, ...), or a `node`."""

    def __init__(self, namespace: str, allowed: set[tuple[str, str]]) -> None:
        self.namespace, self.allowed = namespace, allowed
        self.token = "token-1"
        self.pods: dict[str, Object] = {}
        self.templates: dict[str, Object] = {}
        self.calls: list[Call] = []
        self.problems: list[str] = []
        self.page_max = 500
        self.expire_by_status = False  # a watch that is too old gets HTTP 410, instead of an event that says so
        self.node: Callable[[str, Object], None] = lambda _kind, _pod: None  # told of every change
        self._faults: defaultdict[str, deque[Refusal]] = defaultdict(deque)
        self._lost: set[str] = set()
        self._held: dict[str, asyncio.Event] = {}
        self._version = 100
        self._oldest = 100
        self._history: list[tuple[int, str, Object]] = []
        self._watches: dict[asyncio.Queue[bytes | None], Object] = {}  # with their queries
        self._runner: web.AppRunner | None = None
        self._port = 0

    # the server

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    async def start(self) -> None:
        """Serve; on the same port as before."""
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(application, handle_signals=False, handler_cancellation=True, shutdown_timeout=0.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port)
        await site.start()
        self._port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Away: connections are closed, new ones are refused."""
        self.drop_watches()
        if self._runner is not None:
            runner, self._runner = self._runner, None
            await runner.cleanup()

    # faults

    def fail(self, verb: str, *refusals: Refusal) -> None:
        """Answer the next calls like that."""
        self._faults[verb] += refusals

    def work_again(self, verb: str) -> None:
        """Answer the next calls as they deserve."""
        self._faults[verb].clear()

    def lose_answer(self, verb: str) -> None:
        """Carry the next call out, and close its connection without an answer."""
        self._lost.add(verb)

    def hold(self, verb: str) -> asyncio.Event:
        """Carry the next call out at once, and answer it when the event is set."""
        self._held[verb] = asyncio.Event()
        return self._held[verb]

    def drop_watches(self) -> None:
        """Close every watch's connection in the middle."""
        for queue in self._watches:
            queue.put_nowait(None)

    def compact(self) -> None:
        """Forget all changes so far: a watch from before gets 410."""
        self._oldest = self._version
        self._history.clear()

    def bookmark(self) -> None:
        """Move on without a change that the watchers see, and tell them so."""
        self._version += 1
        bookmark = {"kind": "Pod", "apiVersion": "v1", "metadata": {"resourceVersion": str(self._version)}}
        for queue in self._watches:
            queue.put_nowait(_line("BOOKMARK", bookmark))

    @property
    def watches(self) -> int:
        return len(self._watches)

    # the nodes

    def run(self, name: str, node: str = "node-1") -> None:
        """A node takes the pod and runs its containers."""
        self._set(name, phase="Running", state={"running": {"startedAt": _now()}}, node=node)

    def unschedulable(self, name: str, message: str) -> None:
        condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
        self._set(name, phase="Pending", conditions=[condition])

    def wait(self, name: str, reason: str, message: str) -> None:
        """A node has the pod and cannot start its container."""
        self._set(name, phase="Pending", state={"waiting": {"reason": reason, "message": message}}, node="node-1")

    def end(self, name: str, code: int, reason: str = "", message: str = "", disruption: str = "") -> None:
        """The container ends; a pod that is being deleted is gone then."""
        reason = reason or ("Completed" if code == 0 else "Error")
        terminated = {"exitCode": code, "reason": reason, "message": message, "startedAt": _now(), "finishedAt": _now()}
        conditions = []
        if disruption:
            conditions = [{"type": "DisruptionTarget", "status": "True", "reason": disruption, "message": disruption}]
        phase = "Succeeded" if code == 0 else "Failed"
        self._set(name, phase=phase, state={"terminated": terminated}, conditions=conditions)
        if "deletionTimestamp" in self.pods[name]["metadata"]:
            self._remove(name)

    def evict(self, name: str, message: str) -> None:
        """The node is short of something: the pod fails before its container could say a word."""
        condition = {"type": "DisruptionTarget", "status": "True", "reason": "TerminationByKubelet", "message": message}
        self._set(name, phase="Failed", reason="Evicted", message=message, conditions=[condition])

    def lose(self, name: str) -> None:
        """The pod's node is gone, and the pod with it."""
        self._remove(name)

    def delete_by_hand(self, name: str, grace_s: int = 30) -> None:
        """What an operator's `kubectl delete pod` does."""
        self._delete(name, grace_s)

    def _set(self, name: str, *, state: Object | None = None, node: str = "", **status: Any) -> None:
        pod = copy.deepcopy(self.pods[name])
        pod["status"] |= status
        if node:
            pod["spec"]["nodeName"] = node
            pod["status"]["conditions"] = [{"type": "PodScheduled", "status": "True"}]
        if state is not None:
            container = pod["spec"]["containers"][0]
            pod["status"]["containerStatuses"] = [
                {
                    "name": container["name"],
                    "image": container["image"],
                    "imageID": "",
                    "ready": "running" in state,
                    "restartCount": 0,
                    "state": state,
                }
            ]
        kubernetes_validate.validate(pod, SCHEMA_VERSION, strict=True)  # the fake's own answers are real ones too
        self._change("MODIFIED", pod)

    def _change(self, kind: str, pod: Object) -> None:
        self._version += 1
        pod["metadata"]["resourceVersion"] = str(self._version)
        name = pod["metadata"]["name"]
        if kind == "DELETED":
            del self.pods[name]
        else:
            self.pods[name] = pod
        self._history.append((self._version, kind, pod))
        for queue, query in self._watches.items():
            if self._matches(pod, query):
                queue.put_nowait(_line(kind, pod))
        self.node(kind, pod)

    def _remove(self, name: str) -> None:
        self._change("DELETED", copy.deepcopy(self.pods[name]))

    # requests

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        try:
            verb, resource, name = self._route(request)
            query = self._query(verb, request)
            verb = "watch" if query.get("watch") else verb
            self.calls.append(Call(verb, resource, name, query))
            self._authorize(request, verb, resource)
            if self._faults[verb]:
                raise self._faults[verb].popleft()
            if verb == "watch":
                return await self._watch(request, query)
            body = await self._body(request, verb)
            answer = self._answer(verb, resource, name, query, body)
        except Refusal as refusal:
            headers = {"Retry-After": str(refusal.retry_after_s)} if refusal.retry_after_s else {}
            return web.json_response(refusal.body(), status=refusal.status, headers=headers)
        if verb in self._held:
            await self._held.pop(verb).wait()
        if verb in self._lost and request.transport is not None:
            self._lost.discard(verb)
            request.transport.close()
        return web.json_response(answer, status=201 if verb == "create" else 200)

    def _problem(self, status: int, reason: str, message: str) -> Refusal:
        self.problems.append(message)
        return Refusal(status, reason, message)

    def _route(self, request: web.Request) -> tuple[str, str, str]:
        match = re.fullmatch(r"/api/v1/namespaces/([^/]+)/(pods|podtemplates)(?:/([^/]+))?", request.path)
        if match is None or match[1] != self.namespace:
            raise self._problem(404, "NotFound", f"there is no {request.method} {request.path}")
        resource, name = match[2], match[3] or ""
        verbs = {"GET": "get", "DELETE": "delete", "PATCH": "patch"} if name else {"GET": "list", "POST": "create"}
        if request.method not in verbs:
            raise self._problem(405, "MethodNotAllowed", f"{request.method} {request.path}")
        if not any(kind in request.headers.get("Accept", "") for kind in ("application/json", "*/*")):
            raise self._problem(406, "NotAcceptable", f"Accept: {request.headers.get('Accept')}")
        return verbs[request.method], resource, name

    def _query(self, verb: str, request: web.Request) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, text in request.query.items():
            kind = PARAMETERS[verb].get(name)
            if kind is None or name in found:
                raise self._problem(400, "BadRequest", f"query parameter {name} of {verb}")
            if (kind is bool and text not in TRUE + FALSE) or (kind is int and not text.isdigit()):
                raise self._problem(400, "BadRequest", f"{name}={text} is no {kind.__name__}")
            found[name] = text in TRUE if kind is bool else kind(text)
        return found

    def _authorize(self, request: web.Request, verb: str, resource: str) -> None:
        if request.headers.get("Authorization") != f"Bearer {self.token}":
            raise Refusal(401, "Unauthorized", "Unauthorized")
        if (verb, resource) not in self.allowed:
            raise self._problem(403, "Forbidden", f'cannot {verb} resource "{resource}"')

    async def _body(self, request: web.Request, verb: str) -> Object:
        raw = await request.read()
        wanted = {"create": "application/json", "patch": MERGE_PATCH, "delete": "application/json"}.get(verb)
        if wanted is None or (verb == "delete" and not raw):
            if raw:
                raise self._problem(400, "BadRequest", f"{verb} with a body")
            return {}
        if request.content_type != wanted:
            raise self._problem(415, "UnsupportedMediaType", f"{verb} with {request.content_type}")
        try:
            body = json.loads(raw)
        except ValueError as error:
            raise self._problem(400, "BadRequest", f"{verb}: {error}") from error
        if verb == "delete":
            self._check({"apiVersion": "meta/v1", **body, "kind": "DeleteOptions"})
        return body

    def _answer(self, verb: str, resource: str, name: str, query: Object, body: Object) -> Object:
        if resource == "podtemplates":
            if name not in self.templates:
                raise Refusal(404, "NotFound", f'podtemplates "{name}" not found')
            return self.templates[name]
        if verb == "list":
            return self._list(query)
        if verb == "create":
            return self._create(body)
        if name not in self.pods:
            raise Refusal(404, "NotFound", f'pods "{name}" not found')
        if verb == "delete":
            return self._delete(name, query.get("gracePeriodSeconds"))
        if verb == "patch":
            pod = _merged(self.pods[name], body)
            self._check(pod)
            self._change("MODIFIED", pod)
            return pod
        return self.pods[name]

    def _check(self, body: Object) -> None:
        """What the schema says of a body, and what the API server checks beside it."""
        try:
            kubernetes_validate.validate(body, SCHEMA_VERSION, strict=True)
        except kubernetes_validate.ValidationError as error:
            path = ".".join(str(part) for part in error.path)
            raise self._problem(422, "Invalid", f"{path}: {error.message}") from error
        metadata = body.get("metadata", {})
        if not NAME.fullmatch(metadata.get("name", "x")) or len(metadata.get("name", "x")) > 63:
            raise self._problem(422, "Invalid", f"metadata.name: {metadata['name']!r}")
        for key, value in (metadata.get("labels") or {}).items():
            if not LABEL_KEY.fullmatch(key) or not LABEL_VALUE.fullmatch(value):
                raise self._problem(422, "Invalid", f"metadata.labels: {key}={value!r}")
        for key in metadata.get("annotations") or {}:
            if not LABEL_KEY.fullmatch(key):
                raise self._problem(422, "Invalid", f"metadata.annotations: {key}")

    def _create(self, body: Object) -> Object:
        self._check(body)
        if body.get("kind") != "Pod" or not body.get("metadata", {}).get("name"):
            raise self._problem(422, "Invalid", "a pod with a name is wanted")
        name = body["metadata"]["name"]
        if name in self.pods:
            raise Refusal(409, "AlreadyExists", f'pods "{name}" already exists')
        pod = copy.deepcopy(body)
        pod["metadata"] |= {"namespace": self.namespace, "uid": str(uuid.uuid4()), "creationTimestamp": _now()}
        pod["spec"].setdefault("terminationGracePeriodSeconds", 30)
        pod["status"] = {"phase": "Pending", "qosClass": "BestEffort"}
        self._change("ADDED", pod)
        return pod

    def _delete(self, name: str, grace_s: int | None) -> Object:
        pod = copy.deepcopy(self.pods[name])
        metadata = pod["metadata"]
        asked_s = pod["spec"]["terminationGracePeriodSeconds"] if grace_s is None else grace_s
        left_s = min(asked_s, metadata.get("deletionGracePeriodSeconds", asked_s))
        if left_s == 0 or "nodeName" not in pod["spec"] or pod["status"]["phase"] in ("Succeeded", "Failed"):
            self._remove(name)
        elif left_s != metadata.get("deletionGracePeriodSeconds"):
            metadata |= {"deletionTimestamp": _now(left_s), "deletionGracePeriodSeconds": left_s}
            self._change("MODIFIED", pod)
        return pod

    def _list(self, query: Object) -> Object:
        matching = [pod for pod in self.pods.values() if self._matches(pod, query)]
        first = 0
        if "continue" in query:
            version, _, position = query["continue"].partition("/")
            if int(version) < self._oldest:
                raise Refusal(410, "Expired", "the provided continue parameter is too old")
            first = int(position)
        last = first + min(self.page_max, query.get("limit") or self.page_max)
        metadata: Object = {"resourceVersion": str(self._version)}
        if last < len(matching):
            metadata |= {"continue": f"{self._version}/{last}", "remainingItemCount": len(matching) - last}
        items = [{key: value for key, value in pod.items() if key not in ("kind", "apiVersion")} for pod in matching]
        return {"kind": "PodList", "apiVersion": "v1", "metadata": metadata, "items": items[first:last]}

    def _matches(self, pod: Object, query: Object) -> bool:
        labels = pod["metadata"].get("labels", {})
        for text in query.get("labelSelector", "").split(","):
            requirement = REQUIREMENT.fullmatch(text)
            if requirement is None:
                raise self._problem(400, "BadRequest", f"labelSelector: {text!r}")
            key, value = requirement["key"], requirement["value"]
            if key not in labels or (value is not None and labels[key] != value):
                return False
        return True

    async def _watch(self, request: web.Request, query: Object) -> web.StreamResponse:
        since = query.get("resourceVersion", "")
        if not since.isdigit() or not query.get("timeoutSeconds"):
            raise self._problem(400, "BadRequest", "a watch without resourceVersion and timeoutSeconds")
        queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        expired = Refusal(410, "Expired", f"too old resource version: {since} ({self._oldest})")
        if int(since) < self._oldest:
            if self.expire_by_status:
                raise expired
            queue.put_nowait(_line("ERROR", expired.body()))
        for version, kind, pod in self._history:
            if version > int(since) and self._matches(pod, query):
                queue.put_nowait(_line(kind, pod))
        self._watches[queue] = query
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        deadline = time.monotonic() + query["timeoutSeconds"]
        try:
            await response.prepare(request)
            while (left_s := deadline - time.monotonic()) > 0:
                async with asyncio.timeout(left_s):
                    line = await queue.get()
                if line is None:
                    if request.transport is not None:
                        request.transport.close()
                    break
                await response.write(line)
        except (TimeoutError, ConnectionError):
            pass
        finally:
            del self._watches[queue]
        return response


def _line(kind: str, thing: Object) -> bytes:
    return json.dumps({"type": kind, "object": thing}).encode() + b"\n"


def _merged(target: Any, patch: Any) -> Any:
    """RFC 7396."""
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    result = copy.deepcopy(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = _merged(result.get(key), value)
    return result


def _now(plus_s: float = 0.0) -> str:
    return datetime.fromtimestamp(time.time() + plus_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
