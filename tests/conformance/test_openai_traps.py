"""What OpenAI's clients trip over, one by one: where each trap is held, and tests of those that were held nowhere else.

The list is that of the project's design for its public interfaces; what is right is from OpenAI's API reference ("Chat",
"Completions", "Streaming", "Errors"), the HTML standard's chapter on server-sent events, and the clients' own source.
"""

import re
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest

from shared import errors

from .gathered import CHAT, COMPLETIONS

ROOT = Path(__file__).parents[2]
SHAPES = "tests/conformance/test_streamed_and_plain.py::test_they_say_the_same"
HERE = "tests/conformance/test_openai_traps.py::"
BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}

# trap -> the test that a client would fail in the same way as
HELD = {
    "chunks: one id, created and model throughout": SHAPES,
    "chunks: the role is in the first delta of a choice, and only there": SHAPES,
    "chunks: finish_reason is null until exactly one finish chunk a choice, never empty": (
        "tests/ingress/test_sse.py::test_each_choice_opens_and_finishes_once"
    ),
    "usage: a chunk without choices, if asked for; null in the others then": SHAPES,
    "usage: not a word of it if not asked for": "tests/ingress/test_app.py::test_sdk_no_usage_unless_asked_for",
    "stream_options without stream is a 400": "tests/ingress/test_schemas.py::test_invalid_bodies_are_refused_by_place",
    "[DONE] is last, and only of what is complete": HERE + "test_done_is_last_and_only_of_what_is_complete",
    "max_tokens null is no bound": "tests/ingress/test_schemas.py::test_max_completion_tokens_wins",
    "max_completion_tokens wins over max_tokens": SHAPES,
    "stop is a string or up to four": "tests/ingress/test_schemas.py::test_invalid_bodies_are_refused_by_place",
    "stop strings are not in the text, streamed or plain": SHAPES,
    "n choices, each with its index": SHAPES,
    "seed: the same one, the same answer": SHAPES,
    "logit_bias: its keys are strings in JSON": "tests/ingress/test_schemas.py::test_every_field_reaches_the_wire",
    "logprobs 0 asks for the chosen tokens": "tests/ingress/test_sse.py::test_completion_logprobs_zero_has_no_tops",
    "response_format json_schema": SHAPES,
    "tools: argument deltas, id and name once": "tests/conformance/test_chat_tools.py::test_a_stream_has_the_deltas_of_openai",
    "tools: parallel calls have an index each": "tests/conformance/test_chat_tools.py::test_the_sdk_accumulates_a_stream",
    "echo": SHAPES,
    "suffix is refused clearly": HERE + "test_suffix_is_refused",
    "chat logprobs have token, logprob, bytes and top_logprobs": "tests/ingress/test_sse.py::test_chat_logprobs",
    "completions logprobs have a shape of their own, with text_offset": (
        "tests/ingress/test_completion_logprobs.py::test_a_stream_gives_the_same_piece_by_piece"
    ),
    "context overflow is a 400 that names both numbers": (
        "tests/e2e/test_real_model.py::test_a_prompt_over_the_models_length_is_refused_with_both_numbers"
    ),
    "an unknown model is a 404 model_not_found": "tests/ingress/test_app.py::test_the_model_is_checked_before_the_request",
    "streams: content type, cache-control, x-accel-buffering": "tests/ingress/test_app.py::test_heads",
    "streams are not compressed": HERE + "test_a_stream_is_never_compressed_and_has_no_ids",
    "streams have no id and no retry by default": HERE + "test_a_stream_is_never_compressed_and_has_no_ids",
    "silence is broken by comments, which the SDK survives": HERE + "test_the_sdk_survives_keepalives",
    "ids of events only with X-Resumable": "tests/reliability/test_resumption.py",
    "real status codes first": "tests/ingress/test_app.py::test_errors_before_the_head_have_their_status",
    "errors have message, type, param and code": "tests/ingress/test_app.py::test_refusals_have_one_shape_on_every_route",
    "an error after the head is the last event, without [DONE]": (
        HERE + "test_done_is_last_and_only_of_what_is_complete"
    ),
    "what must not be retried says so": "tests/ingress/test_app.py::test_sdk_does_not_retry_what_cannot_succeed",
    "what may be retried is, after the time that was told": HERE + "test_the_sdk_retries_after_the_time_it_is_told",
    "Idempotency-Key, bare or quoted": "tests/reliability/test_idempotency.py",
    "every answer has its request's id": HERE + "test_every_answer_has_an_id",
    "rate-limit headers": "tests/e2e/test_limits.py::test_what_clients_are_told",
    "usage has the cached tokens of the prompt": "tests/ingress/test_app.py::test_sdk_plain_chat",
    "an interrupted stream still reports true usage": (
        "tests/e2e/test_platform.py::test_twenty_streams_each_survive_a_killed_worker"
    ),
    "leaving cancels: streamed": "tests/e2e/test_real_model.py::test_disconnecting_frees_the_slot_within_a_step",
    "leaving cancels: plain, queued, running": "tests/reliability/test_cancel_everywhere.py",
    "every status of the doctrine, as a client sees it": "tests/e2e/test_status_doctrine.py::test_the_answer_to",
}


@pytest.mark.parametrize("trap", HELD)
def test_each_is_held(trap: str) -> None:
    file, _, name = HELD[trap].partition("::")
    text = (ROOT / file).read_text()
    assert f"def {name}(" in text if name else "def test_" in text


@pytest.fixture
def sdk(front: Any) -> Any:
    with openai.OpenAI(base_url=front.url + "/v1", api_key="none", max_retries=0, timeout=10) as client:
        yield client


def test_done_is_last_and_only_of_what_is_complete(front: Any, sdk: openai.OpenAI, make: Any) -> None:
    front.dispatcher.answer = make.says("Hel", "lo")
    assert front.post(CHAT, BODY | {"stream": True}).body.endswith(b"\n\ndata: [DONE]\n\n")

    def breaks(stream: Any) -> None:
        stream.push(make.token("Hel"))
        stream.fail(errors.EngineFailed("it broke"))

    front.dispatcher.answer = breaks
    told = front.post(CHAT, BODY | {"stream": True}).body
    assert b"[DONE]" not in told
    last = msgspec.json.decode(told.strip().split(b"\n\n")[-1].removeprefix(b"data: "))
    assert last == {"error": {"message": "it broke", "type": "server_error", "param": None, "code": "engine_failed"}}
    seen = []
    with pytest.raises(openai.APIError, match="it broke") as caught:
        seen.extend(chunk.choices[0].delta.content for chunk in sdk.chat.completions.create(**BODY, stream=True))
    assert caught.value.code == "engine_failed"


def test_suffix_is_refused(front: Any, make: Any) -> None:
    refused = front.post(COMPLETIONS, {"model": "m", "prompt": "a", "suffix": "b"})
    assert (refused.status, refused.error["code"], refused.error["param"]) == (400, "unsupported_parameter", "suffix")
    front.dispatcher.answer = make.says("x")
    assert front.post(COMPLETIONS, {"model": "m", "prompt": "a", "suffix": None}).status == 200


def test_a_stream_is_never_compressed_and_has_no_ids(front: Any, make: Any) -> None:
    front.dispatcher.answer = make.says("Hi" * 2000)
    answer = front.post(CHAT, BODY | {"stream": True}, accept_encoding="gzip, br, zstd", accept="application/json")
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert "content-encoding" not in answer.headers
    assert {line.split(b":")[0] for line in answer.body.split(b"\n") if line} == {b"data"}


def test_the_sdk_survives_keepalives(front: Any, sdk: openai.OpenAI, make: Any) -> None:
    def slow(stream: Any) -> None:
        stream.push(make.token("Hel"))

    front.dispatcher.answer = slow
    chunks: list[Any] = []
    with sdk.chat.completions.create(**BODY, stream=True) as stream:
        received = iter(stream)
        chunks += [next(received), next(received)]
        silence_s = front.settings.keepalive_s * 2.5  # two comments between two chunks
        front.loop.call_soon_threadsafe(front.loop.call_later, silence_s, make.says("lo"), front.stream())
        chunks += received
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hello"


def test_the_sdk_retries_after_the_time_it_is_told(front: Any, make: Any) -> None:
    front.dispatcher.refusal = errors.QueueFull("full", retry_after=0.01)
    front.dispatcher.answer = make.says("Hi")
    sent: list[httpx.Request] = []

    def retried(request: httpx.Request) -> None:
        sent.append(request)
        if len(sent) == 2:
            front.dispatcher.refusal = None

    with openai.OpenAI(base_url=front.url + "/v1", api_key="none", max_retries=2) as client:
        client._client.event_hooks["request"].append(retried)
        assert client.chat.completions.create(**BODY).choices[0].message.content == "Hi"
    assert [request.headers["x-stainless-retry-count"] for request in sent] == ["0", "1"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/models", 200),
        ("HEAD", "/v1/models", 200),
        ("GET", "/v1/models/m/versions", 200),
        ("GET", "/v1/models/nobody", 404),
        ("GET", CHAT, 405),
        ("GET", "/v1/nothing", 404),
        ("GET", "/livez", 200),
        ("POST", CHAT, 400),
    ],
)
def test_every_answer_has_an_id(front: Any, method: str, path: str, status: int) -> None:
    answer = front.http(method, path, headers={"x-request-id": "mine-1"})
    assert (answer.status, answer.headers["x-request-id"]) == (status, "mine-1")
    assert int(answer.headers["openai-processing-ms"]) >= 0
    assert re.fullmatch(r"req_[0-9a-f]{32}", front.http(method, path).headers["x-request-id"])
