"""OpenAI's SDK for Python drives /v1/responses: plain, streamed, tools, structured output, conversations, errors.

Its answers are validated against its own types, where it would else take them as they come.
"""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pydantic
import pytest

from shared.errors import EngineFailed

from .test_responses import ASKED, TOOL, TWO, pieces, scored

BODY: Any = {"model": "m", "input": ASKED}


@pytest.fixture
def sdk(front: Any) -> Iterator[openai.OpenAI]:
    url = front.url + "/v1"
    with openai.OpenAI(
        base_url=url, api_key="none", max_retries=0, timeout=10, _strict_response_validation=True
    ) as client:
        yield client


def test_plain(front: Any, sdk: openai.OpenAI, make: Any) -> None:
    front.dispatcher.answer = make.says("Hel", "lo")
    response = sdk.responses.create(**BODY, instructions="Be brief.", metadata={"a": "b"}, max_output_tokens=9)
    assert (response.output_text, response.status, response.object) == ("Hello", "completed", "response")
    assert (response.instructions, response.metadata, response.max_output_tokens) == ("Be brief.", {"a": "b"}, 9)
    assert response.usage is not None
    usage = response.usage
    assert (usage.input_tokens, usage.input_tokens_details.cached_tokens, usage.total_tokens) == (5, 2, 7)
    assert response.id == f"resp_{front.stream().rid}"
    assert response._request_id == f"req_{front.stream().rid}"


def test_streamed(front: Any, sdk: openai.OpenAI, make: Any) -> None:
    front.dispatcher.answer = make.says("Hel", "lo")
    with sdk.responses.stream(**BODY) as stream:
        seen = list(stream)
        response = stream.get_final_response()
    assert [event.type for event in seen] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.snapshot for event in seen if event.type == "response.output_text.delta"] == ["Hel", "Hello"]
    plain = sdk.responses.create(**BODY)
    assert (response.output_text, response.usage) == (plain.output_text, plain.usage)
    raw = sdk.responses.create(**BODY, stream=True)
    assert [event.sequence_number for event in raw] == list(range(10))


def test_tools_streamed_and_plain_and_their_results_sent_back(front: Any, sdk: openai.OpenAI, make: Any) -> None:
    front.dispatcher.answer = make.says(*pieces(TWO))
    tools: Any = [TOOL | {"strict": True}]
    with sdk.responses.stream(**BODY, tools=tools) as stream:
        snapshots = [event.snapshot for event in stream if event.type == "response.function_call_arguments.delta"]
        streamed = stream.get_final_response()
    assert '{"city": "Rome"}' in snapshots
    plain = sdk.responses.create(**BODY, tools=tools)
    for response in (streamed, plain):
        assert [item.type for item in response.output] == ["message", "function_call", "function_call"]
        calls = [item for item in response.output if item.type == "function_call"]
        assert [json.loads(call.arguments) for call in calls] == [{"city": "Rome"}, {"city": "Oslo"}]
    given: Any = [{"role": "user", "content": ASKED}, *plain.output]
    given += [{"type": "function_call_output", "call_id": call.call_id, "output": "21"} for call in calls]
    front.dispatcher.answer = make.says("21.")
    assert sdk.responses.create(model="m", input=given, tools=tools).output_text == "21."


def test_structured_output_is_parsed(front: Any, sdk: openai.OpenAI, make: Any) -> None:
    class City(pydantic.BaseModel):
        city: str

    front.dispatcher.answer = make.says('{"city": ', '"Rome"}')
    response = sdk.responses.parse(**BODY, text_format=City)
    assert response.output_parsed == City(city="Rome")
    grammar = front.stream().request.sampling.grammar
    assert (grammar.kind, grammar.strict) == ("json_schema", True)
    with sdk.responses.stream(**BODY, text_format=City) as stream:
        assert stream.get_final_response().output_parsed == City(city="Rome")


def test_log_probabilities(front: Any, sdk: openai.OpenAI) -> None:
    front.dispatcher.answer = scored(["Hel", "lo"])
    response = sdk.responses.create(**BODY, include=["message.output_text.logprobs"], top_logprobs=1)
    [item] = response.output
    assert item.type == "message"
    [part] = item.content
    assert part.type == "output_text"
    assert [each.token for each in part.logprobs or []] == ["Hel", "lo"]


def test_what_is_cut_is_incomplete(front: Any, sdk: openai.OpenAI, make: Any) -> None:
    front.dispatcher.answer = make.says("Hel", finish="length")
    response = sdk.responses.create(**BODY)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"


# -- kept --------------------------------------------------------------------------------------------------------------


def test_a_conversation_goes_on_after_a_response(front: Any, sdk: openai.OpenAI, make: Any) -> None:
    front.dispatcher.answer = make.says("Hi.")
    first = sdk.responses.create(model="m", input="Hello", instructions="Be brief.")
    second = sdk.responses.create(
        model="m", input=[{"role": "user", "content": "And?"}], previous_response_id=first.id, instructions="Be kind."
    )
    with sdk.responses.stream(model="m", input="So?", previous_response_id=second.id) as stream:
        third = stream.get_final_response()
    turns = front.stream().request.input.messages
    assert [(each.role, each.content) for each in turns] == [
        ("user", "Hello"),
        ("assistant", "Hi."),
        ("user", "And?"),
        ("assistant", "Hi."),
        ("user", "So?"),
    ]
    assert front.stream(1).request.input.messages[0].content == "Be kind."
    again = sdk.responses.retrieve(third.id)
    told = {name: value for name, value in third.to_dict().items() if name != "output"}  # the helper adds to it
    assert {name: value for name, value in again.to_dict().items() if name != "output"} == told
    assert again.output_text == third.output_text == "Hi."
    items = sdk.responses.input_items.list(third.id, limit=2)
    assert [item.id for item in items.data] == [item.id for item in list(items)[:2]]
    said = [(item.role, item.content[0].text) for item in items if item.type == "message"]  # type: ignore[union-attr]
    assert said == [("user", "So?"), ("assistant", "Hi."), ("user", "And?"), ("assistant", "Hi."), ("user", "Hello")]
    oldest_first = sdk.responses.input_items.list(third.id, order="asc", limit=1)
    assert (oldest_first.has_more, oldest_first.data[0].id) == (True, list(items)[-1].id)
    sdk.responses.delete(third.id)
    for gone in (sdk.responses.retrieve, sdk.responses.delete, sdk.responses.cancel, sdk.responses.input_items.list):
        with pytest.raises(openai.NotFoundError, match="there is no response"):
            gone(third.id)
    with pytest.raises(openai.BadRequestError) as unknown:
        sdk.responses.create(**BODY, previous_response_id=third.id)
    assert (unknown.value.code, unknown.value.param) == ("previous_response_not_found", "previous_response_id")


def test_results_go_with_the_calls_of_the_response_before(front: Any, sdk: openai.OpenAI, make: Any) -> None:
    front.dispatcher.answer = make.says(*pieces(TWO))
    tools: Any = [TOOL]
    first = sdk.responses.create(**BODY, tools=tools)
    calls = [item for item in first.output if item.type == "function_call"]
    results: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "21"} for call in calls]
    front.dispatcher.answer = make.says("21.")
    sdk.responses.create(model="m", input=results, tools=tools, previous_response_id=first.id)
    turns = front.stream().request.input.messages
    assert [each.role for each in turns] == ["user", "assistant", "tool", "tool"]
    wrong: Any = [results[0] | {"call_id": "call_of_nobody"}]
    with pytest.raises(openai.BadRequestError) as refused:
        sdk.responses.create(model="m", input=wrong, tools=tools, previous_response_id=first.id)
    assert refused.value.param == "input[0].call_id"


def test_what_is_not_kept_says_so(start_front: Any, make: Any) -> None:
    front = start_front(response_bytes_max=1000)
    front.dispatcher.answer = make.says("Hi.")
    with openai.OpenAI(base_url=front.url + "/v1", api_key="none", max_retries=0, timeout=10) as sdk:
        told = [sdk.responses.create(**BODY, store=False), sdk.responses.create(model="m", input="a" * 1000)]
        with sdk.responses.stream(model="m", input="a" * 500) as stream:  # with all that it repeats it is too large
            seen = [event.response for event in stream if event.type in ("response.created", "response.completed")]
        assert [response.to_dict()["store"] for response in seen] == [True, False]
        for response in (*told, seen[-1]):
            assert response.to_dict()["store"] is False
            with pytest.raises(openai.NotFoundError):
                sdk.responses.retrieve(response.id)
        with pytest.raises(openai.APIStatusError, match="store") as refused:
            sdk.responses.create(model="m", input="a" * 1000, store=True)
        assert refused.value.status_code == 413


def test_only_one_in_the_background_is_cancelled_or_streamed_again(front: Any, sdk: openai.OpenAI, make: Any) -> None:
    front.dispatcher.answer = make.says("Hi.")
    response = sdk.responses.create(**BODY)
    with pytest.raises(openai.BadRequestError, match="background"):
        sdk.responses.cancel(response.id)
    with pytest.raises(openai.BadRequestError, match="background"):
        sdk.responses.retrieve(response.id, stream=True)


@pytest.mark.parametrize(
    ("query", "param"),
    [("limit=0", "limit"), ("limit=101", "limit"), ("limit=a", "limit"), ("order=up", "order"), ("after=x", "after")],
)
def test_pages_that_cannot_be(front: Any, make: Any, query: str, param: str) -> None:
    front.dispatcher.answer = make.says("Hi.")
    identity = front.post("/v1/responses", BODY).json["id"]
    answer = front.http("GET", f"/v1/responses/{identity}/input_items?{query}")
    assert (answer.status, answer.error["param"]) == (400, param)


# -- errors ------------------------------------------------------------------------------------------------------------


def test_errors(front: Any, sdk: openai.OpenAI, make: Any) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        sdk.responses.create(**(BODY | {"model": "nobody"}))
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="conversation"):
        sdk.responses.create(**BODY, conversation="conv_1")

    def fails(stream: Any) -> None:
        stream.push(make.token("Hi"))
        stream.fail(EngineFailed("it broke"))

    front.dispatcher.answer = fails
    last = list(sdk.responses.create(**BODY, stream=True))[-1]
    assert last.type == "response.failed"
    assert last.response.error is not None
    assert (last.response.error.code, last.response.error.type) == ("server_error", "engine_failed")
    with sdk.responses.stream(**BODY) as stream:
        assert [event.type for event in stream][-1] == "response.failed"
