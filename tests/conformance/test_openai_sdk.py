"""The official `openai` package for Python drives the demo model: sync and async, plain and streamed.

What each call returns is as the package's README and OpenAI's guides ("Structured model outputs", "Function calling",
"Streaming API responses") say. Shapes are in test_streamed_and_plain.py, single traps in test_openai_traps.py.
"""

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pydantic
import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.model]

ASKED: Any = [{"role": "user", "content": "What is the capital of France?"}]
ASK: dict[str, Any] = {"model": "smollm2", "messages": ASKED, "temperature": 0, "max_tokens": 8}
COUNT: dict[str, Any] = {"model": "smollm2", "prompt": "One, two, three,", "temperature": 0, "max_tokens": 3}


class Trip(pydantic.BaseModel):
    city: Literal["Rome", "Oslo"]
    days: int = pydantic.Field(ge=1, le=9)


class Weather(pydantic.BaseModel):
    """Weather of a city."""

    city: Literal["Rome", "Oslo"]


WHOLE: dict[str, Any] = ASK | {"max_tokens": 80}
TOOL: Any = openai.pydantic_function_tool(Weather, name="weather")
NAMED: Any = {"type": "function", "function": {"name": "weather"}}


@pytest.fixture(scope="module")
def url(demo_stack: Any) -> Iterator[str]:
    yield demo_stack.url + "/v1"
    demo_stack.idle()


@pytest.fixture
def sdk(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def test_chat_plain_streamed_and_by_the_helper(sdk: openai.OpenAI) -> None:
    answer = sdk.chat.completions.with_raw_response.create(**ASK, logprobs=True, top_logprobs=2)
    plain = answer.parse()
    text = plain.choices[0].message.content
    assert "Paris" in (text or "")
    assert answer.headers["x-request-id"] == plain._request_id
    with sdk.chat.completions.stream(
        **ASK, logprobs=True, top_logprobs=2, stream_options={"include_usage": True}
    ) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    assert "".join(event.delta for event in events if event.type == "content.delta") == text
    kinds = {event.type for event in events}
    assert {"chunk", "content.delta", "content.done", "logprobs.content.delta", "logprobs.content.done"} == kinds
    assert plain.usage is not None
    assert final.usage is not None
    assert final.usage.completion_tokens == plain.usage.completion_tokens
    tokens = [
        [one.token for one in each.choices[0].logprobs.content or []]
        for each in (plain, final)
        if each.choices[0].logprobs
    ]
    assert tokens[0] == tokens[1]
    assert final.choices[0].finish_reason == plain.choices[0].finish_reason


def test_structured_output_is_parsed(sdk: openai.OpenAI) -> None:
    plain = sdk.chat.completions.parse(**WHOLE, response_format=Trip).choices[0].message.parsed
    assert isinstance(plain, Trip)
    with sdk.chat.completions.stream(**WHOLE, response_format=Trip) as stream:
        parsed = [event.parsed for event in stream if event.type == "content.delta" and event.parsed]
        final = stream.get_final_completion().choices[0].message.parsed
    assert final == plain
    assert parsed[-1] == plain.model_dump()
    with pytest.raises(openai.LengthFinishReasonError):
        sdk.chat.completions.parse(**(WHOLE | {"max_tokens": 3}), response_format=Trip)


def test_tools_are_parsed_and_their_results_answered(sdk: openai.OpenAI) -> None:
    first = sdk.chat.completions.parse(**WHOLE, tools=[TOOL], tool_choice=NAMED).choices[0]
    [call] = first.message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Weather)
    with sdk.chat.completions.stream(**WHOLE, tools=[TOOL], tool_choice=NAMED) as stream:
        events = list(stream)
        [again] = stream.get_final_completion().choices[0].message.tool_calls or []
    deltas = [event.arguments_delta for event in events if event.type == "tool_calls.function.arguments.delta"]
    assert "".join(deltas) == call.function.arguments
    assert again.function.parsed_arguments == call.function.parsed_arguments
    turns = [*ASKED, first.message, {"role": "tool", "tool_call_id": call.id, "content": "21 degrees"}]
    assert sdk.chat.completions.create(**(ASK | {"messages": turns})).choices[0].message.content


def test_completions(sdk: openai.OpenAI) -> None:
    plain = sdk.completions.create(**COUNT, echo=True, logprobs=1)
    [choice] = plain.choices
    assert choice.text.startswith(COUNT["prompt"])
    assert "four" in choice.text
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs is not None
    assert choice.logprobs.token_logprobs[0] is None
    chunks = list(sdk.completions.create(**COUNT, echo=True, stream=True, stream_options={"include_usage": True}))
    assert "".join(each.text for chunk in chunks for each in chunk.choices) == choice.text
    assert plain.usage is not None
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == plain.usage.total_tokens
    with pytest.raises(openai.BadRequestError) as refused:
        sdk.completions.create(**COUNT, suffix=" and so on")
    assert (refused.value.code, refused.value.param) == ("unsupported_parameter", "suffix")


def test_models(sdk: openai.OpenAI) -> None:
    assert "smollm2" in [model.id for model in sdk.models.list()]
    assert sdk.models.retrieve("smollm2").object == "model"


def test_errors_are_of_the_sdks_classes(sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        sdk.chat.completions.create(**(ASK | {"model": "nobody"}))
    assert (missing.value.code, missing.value.param, missing.value.type) == (
        "model_not_found",
        "model",
        "not_found_error",
    )
    assert missing.value.request_id
    long: Any = [{"role": "user", "content": "word " * 9000}]
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="8192") as overflow:
            sdk.chat.completions.create(**(ASK | {"messages": long}), stream=stream)
        assert overflow.value.code == "context_length_exceeded"
    with pytest.raises(openai.APITimeoutError):
        sdk.with_options(timeout=0.2).chat.completions.create(
            **(ASK | {"max_tokens": 4000}), extra_body={"ignore_eos": True}
        )


def test_a_stream_that_is_closed_is_cancelled(sdk: openai.OpenAI, demo_stack: Any) -> None:
    endless: Any = ASK | {"max_tokens": 8000, "stream": True, "extra_body": {"ignore_eos": True}}
    with sdk.chat.completions.create(**endless) as stream:
        for _ in range(3):
            next(stream)
    demo_stack.idle()


def test_async(url: str) -> None:
    async def ask(client: openai.AsyncOpenAI) -> None:
        plain, *others = await asyncio.gather(*(client.chat.completions.create(**ASK) for _ in range(3)))
        assert "Paris" in (plain.choices[0].message.content or "")
        assert len({each.id for each in (plain, *others)}) == 3
        chunks = [chunk async for chunk in await client.chat.completions.create(**ASK, stream=True)]
        assert "Paris" in "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        trip = (await client.chat.completions.parse(**WHOLE, response_format=Trip)).choices[0].message.parsed
        async with client.chat.completions.stream(**WHOLE, response_format=Trip) as stream:
            assert (await stream.get_final_completion()).choices[0].message.parsed == trip
        async with client.chat.completions.stream(**WHOLE, tools=[TOOL], tool_choice=NAMED) as stream:
            [call] = (await stream.get_final_completion()).choices[0].message.tool_calls or []
        assert set(json.loads(call.function.arguments)) == {"city"}
        assert "four" in (await client.completions.create(**COUNT)).choices[0].text
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(**(ASK | {"model": "nobody"}))
        task = asyncio.create_task(
            client.completions.create(**(COUNT | {"max_tokens": 8000}), extra_body={"ignore_eos": True})
        )
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(task, 0.3)

    async def main() -> None:
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            await ask(client)

    asyncio.run(main())
