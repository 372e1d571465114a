"""The routes through a real server: OpenAI's SDK, statuses, headers, refusals."""

import json
from typing import Any

import openai
import pytest

from shared import errors
from shared.errors import HeadraceError
from shared.wire import Logprob, TopLogprob

CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
COMPLETION = {"model": "m", "prompt": "Hi"}
ROUTES = [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION), ("/v1/models/m/infer", {"input": "Hi"})]


@pytest.fixture
def sdk(front: Any) -> Any:
    with openai.OpenAI(base_url=front.url + "/v1", api_key="none", max_retries=0, timeout=10) as client:
        yield client


# -- the SDK -----------------------------------------------------------------------------------------------------------


def test_sdk_plain_chat(front: Any, sdk: openai.OpenAI, make: Any) -> None:
    front.dispatcher.answer = make.says("Hel", "lo", finish="length")
    answer = sdk.chat.completions.create(**CHAT, n=2)
    assert answer.id == f"chatcmpl-{front.stream().rid}"
    assert (answer.object, answer.model) == ("chat.completion", "m")
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert [choice.message.content for choice in answer.choices] == ["Hello", "Hello"]
    assert {(choice.message.role, choice.finish_reason) for choice in answer.choices} == {("assistant", "length")}
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (5, 4, 9)
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 2
    assert answer.choices[0].logprobs is None


def test_sdk_streamed_chat(front: Any, sdk: openai.OpenAI, make: Any) -> None:
    front.dispatcher.answer = make.says("Hel", "", "lo")
    chunks = list(sdk.chat.completions.create(**CHAT, n=2, stream=True, stream_options={"include_usage": True}))
    assert len({(chunk.id, chunk.created, chunk.object, chunk.model) for chunk in chunks}) == 1
    texts, finishes = ["", ""], {}
    for chunk in chunks[:-1]:
        assert chunk.usage is None
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        if choice.finish_reason is not None:
            assert choice.index not in finishes
            finishes[choice.index] = choice.finish_reason
    assert texts == ["Hello", "Hello"]
    assert finishes == {0: "stop", 1: "stop"}
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 6


@pytest.mark.parametrize("options", [{}, {"stream_options": {}}, {"stream_options": {"include_usage": False}}])
def test_sdk_no_usage_unless_asked_for(front: Any, make: Any, options: dict[str, Any]) -> None:
    front.dispatcher.answer = make.says("Hi")
    answer = front.post("/v1/chat/completions", CHAT | {"stream": True} | options)
    assert b"usage" not in answer.body
    assert answer.body.endswith(b"data: [DONE]\n\n")


def test_sdk_accumulates_a_chat_stream(front: Any, sdk: openai.OpenAI, make: Any) -> None:
    front.dispatcher.answer = make.says("Hel", "lo")
    with sdk.chat.completions.stream(**CHAT) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == "Hello"


def test_sdk_logprobs(front: Any, sdk: openai.OpenAI, make: Any) -> None:
    score = [Logprob(11, -0.5, b"Hi", [TopLogprob(11, -0.5, b"Hi"), TopLogprob(12, -1.5, b"Ho")])]

    def answer(stream: Any) -> None:
        stream.push(make.token("Hi", finish="stop", logprobs=score))
        make.says("")(stream)
        stream._deltas.pop()

    front.dispatcher.answer = answer
    chat = sdk.chat.completions.create(**CHAT, logprobs=True, top_logprobs=2)
    assert chat.choices[0].logprobs is not None
    (entry,) = chat.choices[0].logprobs.content or []
    assert (entry.token, entry.logprob, entry.bytes, len(entry.top_logprobs)) == ("Hi", -0.5, [72, 105], 2)
    assert front.stream().request.sampling.logprobs == 2
    text = sdk.completions.create(**COMPLETION, logprobs=2)
    assert text.choices[0].logprobs is not None
    assert text.choices[0].logprobs.top_logprobs == [{"Hi": -0.5, "Ho": -1.5}]
    streamed = list(sdk.chat.completions.create(**CHAT, logprobs=True, top_logprobs=2, stream=True))
    found = [chunk.choices[0].logprobs for chunk in streamed if chunk.choices[0].logprobs]
    assert [one.content[0].token for one in found if one.content] == ["Hi"]


def test_sdk_completions(front: Any, sdk: openai.OpenAI, make: Any) -> None:
    front.dispatcher.answer = make.says("Hel", "lo")
    plain = sdk.completions.create(**COMPLETION, n=2)
    assert (plain.object, [choice.text for choice in plain.choices]) == ("text_completion", ["Hello", "Hello"])
    chunks = list(sdk.completions.create(**COMPLETION, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "Hello"
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, None, "stop"]
    assert front.stream().request.sampling.max_tokens == 16


def test_sdk_models(sdk: openai.OpenAI) -> None:
    assert [(model.id, model.object, model.owned_by) for model in sdk.models.list()] == [("m", "model", "headrace")]
    assert sdk.models.retrieve("m").created == 7
    with pytest.raises(openai.NotFoundError) as caught:
        sdk.models.retrieve("x")
    assert caught.value.code == "model_not_found"


def test_sdk_sees_errors_with_their_codes(front: Any, sdk: openai.OpenAI, make: Any) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        sdk.chat.completions.create(**(CHAT | {"model": "x"}))
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as tools:
        sdk.chat.completions.create(**CHAT, functions=[{"name": "f"}])
    assert (tools.value.code, tools.value.param) == ("unsupported_parameter", "functions")

    def breaks(stream: Any) -> None:
        stream.push(make.token("Hel"))
        stream.fail(errors.EngineFailed("it broke"))

    front.dispatcher.answer = breaks
    with pytest.raises(openai.APIError, match="it broke"):
        list(sdk.chat.completions.create(**CHAT, stream=True))


def test_sdk_does_not_retry_what_cannot_succeed(front: Any, make: Any) -> None:
    front.router.put_version(make.version("bad", state="failed", reason="weights are corrupt"))
    sent: list[Any] = []

    def count(request: Any) -> None:
        sent.append(request)

    with openai.OpenAI(base_url=front.url + "/v1", api_key="none", max_retries=2) as client:
        client._client.event_hooks["request"].append(count)
        with pytest.raises(openai.InternalServerError, match="weights are corrupt"):
            client.chat.completions.create(**(CHAT | {"model": "m@bad"}))
    front.router.drop_version("m", "bad")
    assert len(sent) == 1


# -- heads -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "body"), ROUTES)
@pytest.mark.parametrize("stream", [False, True])
def test_heads(front: Any, make: Any, path: str, body: dict[str, Any], stream: bool) -> None:
    front.dispatcher.answer = make.says("Hi")
    answer = front.post(path, body | {"stream": stream})
    assert answer.status == 200
    assert answer.headers["x-request-id"] == f"req_{front.stream().rid}"
    assert answer.headers["x-headrace-version"] == "v1"
    assert int(answer.headers["openai-processing-ms"]) >= 0
    if stream:
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert answer.headers["cache-control"] == "no-cache"
        assert answer.headers["x-accel-buffering"] == "no"
        assert "x-headrace-claims" not in answer.headers
    else:
        assert answer.headers["content-type"] == "application/json"
        assert answer.headers["x-headrace-claims"] == "1"


def test_a_clients_request_id_is_kept_when_it_is_sane(front: Any, make: Any) -> None:
    front.dispatcher.answer = make.says("Hi")
    assert front.post("/v1/completions", COMPLETION, x_request_id="abc-1").headers["x-request-id"] == "abc-1"
    assert front.post("/v1/completions", COMPLETION, x_request_id="a b").headers["x-request-id"].startswith("req_")
    assert front.post("/v1/completions", COMPLETION, x_request_id="a" * 129).headers["x-request-id"][:4] == "req_"
    assert front.post("/v1/completions", {"model": "x", "prompt": "y"}, x_request_id="e").headers["x-request-id"] == "e"


def test_native_plain_answer(front: Any, make: Any) -> None:
    front.dispatcher.answer = make.says("Hel", "lo")
    answer = front.post("/v1/models/m/infer", {"input": "Hi", "seed": 3}).json
    usage = {
        "prompt_tokens": 5,
        "completion_tokens": 2,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    assert answer == {
        "id": front.stream().rid,
        "model": "m",
        "version": "v1",
        "text": "Hello",
        "finish_reason": "stop",
        "usage": usage,
        "claims": 1,
        "seed": 3,
    }


def test_native_stream(front: Any, make: Any) -> None:
    front.dispatcher.answer = make.says("Hel", "", "lo")
    answer = front.post("/v1/models/m/infer", {"input": "Hi", "stream": True})
    events = [json.loads(line[6:]) for line in answer.body.decode().strip().split("\n\n")]
    assert [(event["token"], event["index"]) for event in events[:-1]] == [("Hel", 0), ("", 1), ("lo", 2)]
    assert (events[-1]["finish_reason"], events[-1]["usage"]["completion_tokens"]) == ("stop", 3)


# -- models and versions -----------------------------------------------------------------------------------------------


def test_models_with_slashes(front: Any, make: Any) -> None:
    front.router.put_version(make.version(model="Qwen/Qwen3"))
    front.router.put_route(make.route(("v1", 10_000), model="Qwen/Qwen3", stable="v1"))
    front.dispatcher.answer = make.says("Hi")
    for name in ("Qwen/Qwen3", "Qwen%2FQwen3", "Qwen%2FQwen3@stable", "Qwen/Qwen3@v1", "Qwen%2FQwen3%40v1"):
        assert front.post(f"/v1/models/{name}/infer", {"input": "Hi"}).json["text"] == "Hi", name
        assert front.stream().request.model == "Qwen/Qwen3"
    for name in ("Qwen/Qwen3", "Qwen%2FQwen3"):
        assert front.http("GET", f"/v1/models/{name}").json["id"] == "Qwen/Qwen3"
        versions = front.http("GET", f"/v1/models/{name}/versions").json
        assert versions == [{"version": "v1", "traffic_pct": 100.0, "state": "available"}]
    front.router.drop_version("Qwen/Qwen3", "v1")
    front.router.drop_route("Qwen/Qwen3")
    assert front.http("GET", "/v1/models/Qwen/Qwen3/versions").error["code"] == "model_not_found"


def test_the_version_is_chosen_by_reference_and_pin(front: Any, make: Any) -> None:
    front.router.put_version(make.version("v2"))
    front.dispatcher.answer = make.says("Hi")
    for reference, headers, chosen in (
        ("m", {}, "v1"),
        ("m@v2", {}, "v2"),
        ("m", {"x_version_pin": "v2"}, "v2"),
        ("m@stable", {"x_version_pin": "v1"}, "v1"),
    ):
        answer = front.post("/v1/completions", {"model": reference, "prompt": "x"}, **headers)
        assert answer.headers["x-headrace-version"] == chosen
        assert answer.json["model"] == reference
        assert front.stream().request.version == chosen
    refused = front.post("/v1/completions", {"model": "m@v2", "prompt": "x"}, x_version_pin="v1")
    assert (refused.status, refused.error["code"]) == (400, "version_conflict")
    front.router.drop_version("m", "v2")
    gone = front.post("/v1/completions", {"model": "m", "prompt": "x"}, x_version_pin="v2")
    assert (gone.status, gone.error["code"]) == (404, "version_not_found")


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_refusals_have_one_shape_on_every_route(front: Any, path: str, body: dict[str, Any]) -> None:
    for raw, headers, status, code in (
        (b"{", {}, 400, "invalid_request"),
        (b"\xff", {}, 400, "invalid_request"),
        (body | {"max_tokens": -1}, {}, 400, "invalid_request"),
        (body | {"max_tokens": 5000}, {}, 400, "context_length_exceeded"),
        (body | {"prediction": {}}, {}, 400, "unsupported_parameter"),
        (body, {"x_version_pin": "v9"}, 404, "version_not_found"),
        (body | {"user": "x" * 300_000}, {}, 413, "request_too_large"),
    ):
        answer = front.post(path, raw, **headers)
        assert (answer.status, answer.error["code"]) == (status, code)
        assert answer.headers["content-type"] == "application/json"
        assert "x-request-id" in answer.headers
        assert "openai-processing-ms" in answer.headers
        assert "x-should-retry" not in answer.headers
    assert not front.dispatcher.streams


def test_the_model_is_checked_before_the_request(front: Any) -> None:
    answer = front.post("/v1/chat/completions", {"model": "x", "messages": [], "n": 99})
    assert answer.error == {
        "message": "the model `x` does not exist",
        "type": "not_found_error",
        "param": "model",
        "code": "model_not_found",
    }


RETRIES: list[tuple[HeadraceError, int, str | None, str | None]] = [
    (errors.QueueFull("full", retry_after=2.2), 429, "3", None),
    (errors.Unavailable("away"), 503, "1", None),
    (errors.ObjectsUnavailable("away"), 503, "1", None),
    (errors.VersionFailed("corrupt"), 503, "60", "false"),
    (errors.NoCapacity("none"), 503, "60", "false"),
    (errors.EngineFailed("broke"), 500, None, "false"),
    (errors.Poisoned("killed four"), 500, None, "false"),
    (errors.QueueDeadline("late"), 504, None, None),
    (errors.GenerationDeadline("late"), 504, None, "false"),
    (errors.ContextLength("long"), 400, None, None),
    (errors.TooLarge("large"), 413, None, None),
]


@pytest.mark.parametrize(("error", "status", "retry_after", "should_retry"), RETRIES)
@pytest.mark.parametrize("where", ["submit", "stream"])
@pytest.mark.parametrize("stream", [False, True])
def test_errors_before_the_head_have_their_status(
    front: Any,
    error: HeadraceError,
    status: int,
    retry_after: str | None,
    should_retry: str | None,
    where: str,
    stream: bool,
) -> None:
    if where == "submit":
        front.dispatcher.refusal = error
    else:
        front.dispatcher.answer = lambda fake: fake.fail(error)
    answer = front.post("/v1/chat/completions", CHAT | {"stream": stream})
    assert (answer.status, answer.error["code"]) == (status, error.code)
    assert answer.headers.get("retry-after") == retry_after
    assert ("retry-after-ms" in answer.headers) == (retry_after is not None)
    assert answer.headers.get("x-should-retry") == should_retry


def test_a_full_queue_is_a_429(front: Any) -> None:
    front.dispatcher.queued_now = front.settings.tenant_queue_max
    answer = front.post("/v1/chat/completions", CHAT)
    assert (answer.status, answer.error["code"]) == (429, "queue_full")
    assert int(answer.headers["retry-after"]) >= 1


def test_a_defect_is_a_500_with_the_request_id(front: Any, caplog: pytest.LogCaptureFixture) -> None:
    def defect(stream: Any) -> None:
        raise ZeroDivisionError("in the dispatcher")

    front.dispatcher.answer = defect
    answer = front.post("/v1/chat/completions", CHAT)
    assert (answer.status, answer.error["code"]) == (500, "internal_error")
    assert "ZeroDivisionError" not in answer.error["message"]
    assert front.stream().rid in answer.error["message"]
    assert "in the dispatcher" in caplog.text


def test_a_stream_that_is_complete_without_a_finish_is_an_error(front: Any, make: Any) -> None:
    def incomplete(stream: Any) -> None:
        make.says("Hi")(stream)
        stream._deltas[-1].finish = None

    front.dispatcher.answer = incomplete
    assert front.post("/v1/chat/completions", CHAT).error["code"] == "internal_error"
    streamed = front.post("/v1/chat/completions", CHAT | {"stream": True}).body
    assert b'"code":"internal_error"' in streamed
    assert b"[DONE]" not in streamed


def test_unknown_routes_and_methods(front: Any) -> None:
    for method, path, status, code in (
        ("GET", "/v2/anything", 404, "not_found"),
        ("POST", "/v1/chat/completions/", 404, "not_found"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("POST", "/v1/models//infer", 404, "model_not_found"),
    ):
        answer = front.http(method, path, {"input": "x"})
        assert (answer.status, answer.error["code"]) == (status, code), path


# -- health, metrics, documentation ------------------------------------------------------------------------------------


def test_health(front: Any) -> None:
    for path in ("/livez", "/readyz", "/health"):
        assert front.http("GET", path).status == 200
    front.bus_usable = False
    assert front.http("GET", "/livez").status == 200
    for path in ("/readyz", "/health"):
        answer = front.http("GET", path)
        assert (answer.status, answer.json["status"]) == (503, "bus_unavailable")
    front.bus_usable = True


def metric(front: Any, name: str) -> float:
    for line in front.http("GET", "/metrics").body.decode().splitlines():
        if line.startswith(name + " "):
            return float(line.rsplit(" ", 1)[1])
    return 0.0


def test_metrics(front: Any, make: Any) -> None:
    served = 'headrace_requests_total{code="ok",model="m",route="/v1/chat/completions",version="v1"}'
    unknown = 'headrace_requests_total{code="model_not_found",model="",route="/v1/chat/completions",version=""}'
    tokens = 'headrace_output_tokens_total{model="m",version="v1"}'
    names = [served, unknown, tokens]
    names += [
        f'headrace_{name}_seconds_count{{model="m",version="v1"}}'
        for name in ("time_to_first_token", "time_per_output_token", "request")
    ]
    before = [metric(front, name) for name in names]
    front.dispatcher.answer = make.says("a", "b", "c")
    front.post("/v1/chat/completions", CHAT)
    front.post("/v1/chat/completions", CHAT | {"model": "no-such-model"})
    # a request is counted when its task ends, which may be after its client has the answer
    make.wait_for(lambda: not front.context.open, "both requests ended")
    assert [metric(front, name) - was for name, was in zip(names, before, strict=True)] == [1, 1, 3, 1, 1, 1]
    front.dispatcher.queued_now = 4
    assert metric(front, "headrace_queued") == 4
    assert b"no-such-model" not in front.http("GET", "/metrics").body


def test_the_documentation_lists_the_routes(front: Any) -> None:
    assert front.http("GET", "/docs").status == 200
    document = front.http("GET", "/openapi.json").json
    assert set(document["paths"]) == {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/models/{model}/infer",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/responses",
        "/v1/embeddings",
        "/v1/models/{model}/versions",
        "/v1/models/{model}/versions/{version}",
        "/v1/models/{model}/aliases/{alias}",
        "/v1/deployments",
        "/v1/deployments/{deployment_id}",
        "/v1/deployments/{deployment_id}/rollback",
        "/v1/deployments/{deployment_id}/pause",
        "/v1/deployments/{deployment_id}/resume",
        "/v1/deployments/{deployment_id}/promote",
        "/v1/tenants",
        "/v1/tenants/{tenant}",
        "/v1/tenants/{tenant}/keys",
        "/v1/tenants/{tenant}/keys/{key_id}/rotate",
        "/v1/tenants/{tenant}/keys/{key_id}",
        "/v1/usage",
        "/v1/files",
        "/v1/files/{file_id}",
        "/v1/files/{file_id}/content",
        "/v1/batches",
        "/v1/batches/{batch_id}",
        "/v1/batches/{batch_id}/cancel",
        "/v1/models",
        "/v1/models/{model}",
        "/v1/streams/{rid}",
        "/v1/streams/{rid}/cancel",
        "/v1/jobs",
        "/v1/jobs/{job_id}",
        "/v1/jobs/{job_id}/events",
        "/v1/jobs/{job_id}/result",
        "/v1/jobs/{job_id}/cancel",
        "/v1/webhooks/secret",
        "/v1/responses/{response_id}",
        "/v1/responses/{response_id}/input_items",
        "/v1/responses/{response_id}/cancel",
        "/livez",
        "/readyz",
        "/health",
        "/metrics",
    }
    text = json.dumps(document)
    referred = {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert referred <= set(document["components"]["schemas"])
    body = document["components"]["schemas"]["ChatBody"]
    assert {"model", "messages"} == set(body["required"])
    assert "max_completion_tokens" in body["properties"]
    assert "tools" in body["properties"]
    assert "functions" not in body["properties"]
    message = document["components"]["schemas"]["MessagesBody"]
    assert set(message["required"]) == {"model", "messages", "max_tokens"}
    assert not {"thinking", "stop", "n"} & set(message["properties"])
    assert set(document["components"]["schemas"]["CountBody"]["properties"]) == {
        *("model", "messages", "system", "tools", "tool_choice", "metadata", "user", "prompt_cache_key")
    }
    assert "tools" not in document["components"]["schemas"]["InferBody"]["properties"]
