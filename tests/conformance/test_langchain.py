"""LangChain's ChatOpenAI drives the demo model: invoke, stream, batch, tools, structured output, async, usage.

As its documentation says of `langchain_openai.ChatOpenAI` with a `base_url` of one's own.
"""

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import openai
import pydantic
import pytest
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, SystemMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.model,
    # of LangChain's own: it serialises what the SDK parsed
    pytest.mark.filterwarnings("ignore:Pydantic serializer warnings:UserWarning"),
]

QUESTION = "What is the capital of France?"


class Trip(pydantic.BaseModel):
    """A trip."""

    city: Literal["Rome", "Oslo"]
    days: Literal[1, 2, 3]


def weather(city: Literal["Rome", "Oslo"]) -> str:
    """Weather of a city."""
    return f"21 degrees in {city}"


@pytest.fixture(scope="module")
def url(demo_stack: Any) -> Iterator[str]:
    yield demo_stack.url + "/v1"
    demo_stack.idle()


@pytest.fixture(scope="module")
def given(url: str) -> dict[str, Any]:
    return {"model": "smollm2", "base_url": url, "api_key": "none", "max_retries": 0, "temperature": 0}


@pytest.fixture(scope="module")
def connections() -> Iterator[httpx.Client]:
    """LangChain closes none of its own."""
    with httpx.Client(timeout=120) as client:
        yield client


@pytest.fixture(scope="module")
def chat(given: dict[str, Any], connections: httpx.Client) -> ChatOpenAI:
    return ChatOpenAI(**given, max_tokens=80, stream_usage=True, http_client=connections)


def gathered(chunks: list[Any]) -> AIMessageChunk:
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    assert isinstance(whole, AIMessageChunk)
    return whole


def test_invoke_and_stream(chat: ChatOpenAI) -> None:
    turns = [SystemMessage("You are brief."), HumanMessage(QUESTION, name="Ada")]
    plain = chat.invoke(turns, max_tokens=8)
    assert plain.text
    chunks = list(chat.stream(turns, max_tokens=8))
    whole = gathered(chunks)
    assert len(chunks) > 3
    assert whole.text == plain.text
    assert plain.usage_metadata is not None
    assert whole.usage_metadata is not None
    for name in ("input_tokens", "output_tokens", "total_tokens"):
        assert whole.usage_metadata[name] == plain.usage_metadata[name]
    assert whole.response_metadata["finish_reason"] == plain.response_metadata["finish_reason"] == "length"
    again = chat.invoke([*turns, plain, HumanMessage("And of Italy?")], max_tokens=8)
    assert again.text
    scored = chat.bind(logprobs=True, top_logprobs=2, max_tokens=3).invoke(QUESTION)
    assert len(scored.response_metadata["logprobs"]["content"]) == 3
    cut = chat.invoke(QUESTION, stop=["Paris"])
    assert "Paris" not in cut.text
    assert cut.response_metadata["finish_reason"] == "stop"


def test_tools(chat: ChatOpenAI) -> None:
    bound = chat.bind_tools([weather], tool_choice="weather", strict=True)
    first = bound.invoke("What is the weather in Rome?")
    assert isinstance(first, AIMessage)
    [call] = first.tool_calls
    assert (call["name"], call["args"]["city"] in ("Rome", "Oslo")) == ("weather", True)
    whole = gathered(list(bound.stream("What is the weather in Rome?")))
    assert [(each["name"], each["args"]) for each in whole.tool_calls] == [(call["name"], call["args"])]
    assert whole.tool_calls[0]["id"]
    turns = [
        HumanMessage("What is the weather in Rome?"),
        first,
        ToolMessage(weather(**call["args"]), tool_call_id=call["id"]),
    ]
    assert chat.bind_tools([weather], tool_choice="none").invoke(turns, max_tokens=8).text
    [required] = chat.bind_tools([weather], tool_choice="any", parallel_tool_calls=False).invoke("Weather?").tool_calls
    assert required["name"] == "weather"


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(chat: ChatOpenAI, method: Any) -> None:
    structured = chat.with_structured_output(Trip, method=method, include_raw=True)
    told: Any = structured.invoke("Plan a trip.")
    assert told["parsing_error"] is None
    assert isinstance(told["parsed"], Trip)
    streamed = list(chat.with_structured_output(Trip, method=method).stream("Plan a trip."))
    assert isinstance(streamed[-1], Trip)  # not the same one: of two tokens as likely, what the cache has may decide


def test_batch(chat: ChatOpenAI) -> None:
    answers = chat.batch([QUESTION] * 4, max_tokens=8)
    assert all("Paris" in answer.text for answer in answers)


def test_async(given: dict[str, Any], connections: httpx.Client) -> None:
    async def ask() -> None:
        async with httpx.AsyncClient(timeout=120) as client:
            chat = ChatOpenAI(**given, max_tokens=8, http_client=connections, http_async_client=client)
            plain = await chat.ainvoke(QUESTION)
            assert "Paris" in plain.text
            assert gathered([chunk async for chunk in chat.astream(QUESTION)]).text == plain.text
            both = await chat.abatch([QUESTION] * 2)
            assert all("Paris" in answer.text for answer in both)

    asyncio.run(ask())


def test_completions(given: dict[str, Any], connections: httpx.Client) -> None:
    text = OpenAI(**given, max_tokens=3, http_client=connections)
    assert "four" in text.invoke("One, two, three,")
    assert "".join(text.stream("One, two, three,")) == text.invoke("One, two, three,")
    assert len(text.generate(["One, two, three,", "Red, green,"]).generations) == 2


def test_over_responses(given: dict[str, Any], connections: httpx.Client) -> None:
    chat = ChatOpenAI(**given, max_tokens=80, use_responses_api=True, http_client=connections)
    plain = chat.invoke(QUESTION, max_tokens=16)
    assert "Paris" in plain.text
    whole = gathered(list(chat.stream(QUESTION, max_tokens=16)))
    assert whole.text == plain.text
    assert plain.usage_metadata is not None
    assert whole.usage_metadata is not None
    assert whole.usage_metadata["output_tokens"] == plain.usage_metadata["output_tokens"]
    first = chat.bind_tools([weather], tool_choice="weather", strict=True).invoke("What is the weather in Rome?")
    [call] = first.tool_calls
    turns = [HumanMessage("What is the weather in Rome?"), first]
    turns.append(ToolMessage(weather(**call["args"]), tool_call_id=call["id"]))
    assert chat.invoke(turns, max_tokens=16).text
    assert isinstance(chat.with_structured_output(Trip).invoke("Plan a trip."), Trip)


def test_embeddings(given: dict[str, Any], embedder: str, connections: httpx.Client) -> None:
    # else LangChain counts tokens with a tokenizer that it downloads, and sends its ids
    chosen: Any = {"model": embedder, "check_embedding_ctx_length": False}
    embeddings = OpenAIEmbeddings(
        base_url=given["base_url"], api_key=given["api_key"], http_client=connections, **chosen
    )
    texts = ["A mill.", "Water turns the wheel."]
    vectors = embeddings.embed_documents(texts)
    assert [len(each) for each in vectors] == [len(vectors[0])] * 2
    assert embeddings.embed_query(texts[1]) == pytest.approx(vectors[1], abs=1e-5)


def test_errors(chat: ChatOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        chat.invoke(QUESTION, model="nobody")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="8192"):
        list(chat.stream("word " * 9000))
    assert json.loads(missing.value.response.text)["error"]["param"] == "model"
