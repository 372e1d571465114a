"""Anthropic's SDK for Python drives /v1/messages: plain, streamed, tools, counting, errors."""

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from shared import wire
from shared.dispatch import Delta
from shared.errors import EngineFailed

from .test_messages import ASKED, TOOLS, TWO, pieces

BODY: Any = {"model": "m", "max_tokens": 50, "messages": ASKED}


@pytest.fixture
def sdk(front: Any) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=front.url, api_key="none", max_retries=0, timeout=10) as client:
        yield client


def test_plain(front: Any, sdk: anthropic.Anthropic, make: Any) -> None:
    front.dispatcher.answer = make.says("Hel", "lo", "END")
    message = sdk.messages.create(**BODY, system="Be brief.", stop_sequences=["END"], metadata={"user_id": "u"})
    (block,) = message.content
    assert (block.type, block.text) == ("text", "Hello")
    assert (message.role, message.type, message.model) == ("assistant", "message", "m")
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "END")
    usage = message.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (3, 2, 3)
    assert message._request_id == f"req_{front.stream().rid}"


def test_streamed(front: Any, sdk: anthropic.Anthropic, make: Any) -> None:
    front.dispatcher.answer = make.says("Hel", "lo")
    with sdk.messages.stream(**BODY) as stream:
        assert list(stream.text_stream) == ["Hel", "lo"]
        message = stream.get_final_message()
    assert (message.stop_reason, message.usage.input_tokens, message.usage.output_tokens) == ("end_turn", 3, 2)
    plain = sdk.messages.create(**BODY)
    assert [block.to_dict() for block in message.content] == [block.to_dict() for block in plain.content]
    kinds = [event.type for event in sdk.messages.create(**BODY, stream=True)]
    assert kinds == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]


def test_tools_streamed_and_plain_and_their_results_sent_back(front: Any, sdk: anthropic.Anthropic, make: Any) -> None:
    front.dispatcher.answer = make.says(*pieces(TWO))
    tools: Any = TOOLS
    with sdk.messages.stream(**BODY, tools=tools) as stream:
        partial = "".join(event.partial_json for event in stream if event.type == "input_json")
        streamed = stream.get_final_message()
    assert partial == '{"city": "Rome"}{"city": "Oslo"}'
    plain = sdk.messages.create(**BODY, tools=tools)
    for message in (streamed, plain):
        assert message.stop_reason == "tool_use"
        assert [block.type for block in message.content] == ["text", "tool_use", "tool_use"]
        assert [block.input for block in message.content if block.type == "tool_use"] == [
            {"city": "Rome"},
            {"city": "Oslo"},
        ]
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": f"{number} degrees"}
        for number, block in enumerate(plain.content)
        if block.type == "tool_use"
    ]
    turns: Any = [*ASKED, {"role": "assistant", "content": plain.content}, {"role": "user", "content": results}]
    front.dispatcher.answer = make.says("1 and 2.")
    last = sdk.messages.create(model="m", max_tokens=5, messages=turns, tools=tools)
    assert [block.to_dict() for block in last.content] == [{"type": "text", "text": "1 and 2."}]
    sent = front.stream().request.input.messages
    assert [(turn.role, turn.content) for turn in sent[1:]] == [
        ("assistant", "I look."),
        ("tool", "1 degrees"),
        ("tool", "2 degrees"),
    ]


def test_counting(front: Any, sdk: anthropic.Anthropic) -> None:
    def counts(stream: Any) -> None:
        stream.push(Delta(0, [], "", None, "length"))
        stream.finish(wire.Usage(14, 0, 0))

    front.dispatcher.answer = counts
    tools: Any = TOOLS
    assert sdk.messages.count_tokens(model="m", messages=BODY["messages"], tools=tools).input_tokens == 14


def test_errors(front: Any, sdk: anthropic.Anthropic, make: Any) -> None:
    with pytest.raises(anthropic.NotFoundError) as unknown:
        sdk.messages.create(**(BODY | {"model": "nobody"}))
    body: Any = unknown.value.body
    assert (body["type"], body["error"]["type"], body["error"]["code"]) == (
        "error",
        "not_found_error",
        "model_not_found",
    )
    assert unknown.value.request_id == body["request_id"]
    with pytest.raises(anthropic.BadRequestError, match="thinking"):
        sdk.messages.create(**BODY, thinking={"type": "enabled", "budget_tokens": 1024})

    def fails(stream: Any) -> None:
        stream.push(make.token("Hi"))
        stream.fail(EngineFailed("it broke"))

    front.dispatcher.answer = fails
    with pytest.raises(anthropic.APIStatusError, match="it broke"), sdk.messages.stream(**BODY) as stream:
        stream.until_done()
