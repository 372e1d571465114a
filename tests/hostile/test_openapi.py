"""Every operation of the OpenAPI document, called with what it allows and with what it does not, by Schemathesis.

No 5xx, and each answer has the type and the shape that the document says. What changes something is done to models and tenants
of this test; inference is asked of a model that is served.
"""

from collections import Counter
from typing import Any

import hypothesis
import requests
import schemathesis
from hypothesis import HealthCheck, Phase
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance

from shared import registry
from shared.records import Version

from .conftest import MODEL, Target
from .corpus import count

CASES = 12  # of each operation, of what is allowed, and again of what is not
PLAYED = "played"
SERVED = {"/v1/chat/completions", "/v1/completions", "/v1/models/{model}/infer"}
SERVED |= {"/v1/messages", "/v1/messages/count_tokens", "/v1/responses"}
# 503s that a caller can bring about: there is no object store here, and versions can be registered that nobody can serve
BROUGHT_ABOUT = {"objects_unavailable", "version_failed", "no_capacity"}
SETTINGS = hypothesis.settings(
    max_examples=count(CASES),
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


REFUSED = (
    "response_format",
    "structured_outputs",
    "guided_",
    "stream_options",
    "top_logprobs",
    "prompt_cache",
    "logit_bias",
)


class Aim:
    """What is there, to be named by what is generated: else nothing but 404 would be tested."""

    def __init__(self, session: requests.Session, url: str) -> None:
        assert session.post(f"{url}/v1/tenants", json={"name": PLAYED}).status_code == 201
        key = session.post(f"{url}/v1/tenants/{PLAYED}/keys", json={}).json()["id"]
        rolled = session.post(f"{url}/v1/deployments", json={"model": PLAYED, "version": "w"}).json()["deployment_id"]
        asked = {"model": MODEL, "prompt": "hi", "max_tokens": 2, "stream": True}
        self.position = session.post(f"{url}/v1/completions", json=asked, headers={"x-resumable": "true"}).headers[
            "x-headrace-last-event-id"
        ]
        self.rid = self.position.partition(".")[0]
        self._path = {
            "model": PLAYED,
            "version": "v",
            "alias": "beta",
            "tenant": PLAYED,
            "key_id": key,
            "rid": self.rid,
        }
        self._path["deployment_id"] = rolled
        order = {"endpoint": "/v1/completions", "body": asked}
        self._path["job_id"] = job = session.post(f"{url}/v1/jobs", json=order).json()["id"]
        assert session.get(f"{url}/v1/jobs/{job}?wait=20").json()["status"] == "completed"
        responded = {"model": MODEL, "input": "hi", "max_output_tokens": 2}
        self._path["response_id"] = session.post(f"{url}/v1/responses", json=responded).json()["id"]
        self._number = 0

    def at(self, case: Case) -> None:
        """One of three cases as it was generated, one with a path that is there, one with names in its body, too."""
        self._number += 1
        if self._number % 3 == 0:
            return
        served = case.path in SERVED
        for name in case.path_parameters.keys() & self._path.keys():
            case.path_parameters[name] = MODEL if served else self._path[name]
        if "Last-Event-ID" in case.headers:
            case.headers["Last-Event-ID"] = self.position
        if self._number % 3 == 1 and isinstance(case.body, dict):
            self._body(case.body, served, case.path)

    def _body(self, body: dict[str, Any], served: bool, path: str) -> None:
        new = f"new-{self._number}"
        names = {"model": MODEL if served else PLAYED, "version": "v", "source": "sim:zero", "name": new}
        names |= {"messages": [{"role": "user", "content": "hi"}], "prompt": "hi", "input": [1, 2]}
        asked = {"model": MODEL, "prompt": "hi", "max_tokens": 2}
        names |= {
            "endpoint": "/v1/completions",
            "body": asked,
            "ttl_seconds": 60,
            "deadline_seconds": 60,
            "webhook": None,
        }
        if "source" in body:
            names["version"] = new
        body.update({name: names[name] for name in names.keys() & body.keys()})
        if served:
            if path == "/v1/responses":
                body |= {"input": "hi", "max_output_tokens": 5}
                body.pop("previous_response_id", None)
            elif "count_tokens" not in path:
                body["max_tokens"] = 5
            for field in [field for field in body if field.startswith(REFUSED)]:
                del body[field]


def in_turn(operation: Any) -> tuple[bool, int]:
    """What is removed is so at last, the keys of a tenant before the tenant."""
    return operation.method == "delete", -len(operation.path)


def check(case: Case, answer: Any) -> None:
    if answer.status_code == 503 and case.path not in ("/readyz", "/health"):
        error = answer.json()["error"]
        registering = error["code"] == "bus_unavailable" and "still being registered" in error["message"]
        assert registering or error["code"] in BROUGHT_ABOUT, (case.as_curl_command(), answer.text)
        checks = [content_type_conformance, response_schema_conformance]
    else:
        checks = [not_a_server_error, content_type_conformance, response_schema_conformance]
    case.validate_response(answer, checks=checks)


def test_no_operation_is_answered_with_a_5xx_or_in_another_shape(target: Target) -> None:
    async def prepare() -> None:
        for version in ("v", "w"):
            record = Version(model=PLAYED, version=version, state="registered", source="sim:zero")
            await registry.register(target.bus, record)
            await registry.wait_available(target.bus, PLAYED, version, 20)

    target.run(prepare())
    url = target.first.url
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    operations = sorted((each.ok() for each in schema.get_all_operations()), key=in_turn)
    assert len(operations) > 30
    answered: Counter[int] = Counter()
    with requests.Session() as session:
        aim = Aim(session, url)
        for operation in operations:
            can_be_wrong = operation.body or operation.query  # a path or a header may be any string
            for mode in GenerationMode if can_be_wrong else [GenerationMode.POSITIVE]:

                @SETTINGS
                @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
                def call(case: Case) -> None:
                    aim.at(case)
                    answer = case.call(base_url=url, session=session, timeout=30)
                    answered[answer.status_code] += 1
                    check(case, answer)

                call()
    assert answered[200] > 100
    assert answered[400] > 100

    async def well() -> None:
        await target.answers()
        await target.registered("after-openapi")
        await target.settled()

    target.run(well())
    assert target.tracebacks() == ""
