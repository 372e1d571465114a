"""/v1/messages with the demo model: Anthropic's SDK against real processes, and what only a worker can say."""

import json
from typing import Any

import anthropic
import httpx
import pytest

from .conftest import Stack

pytestmark = [pytest.mark.e2e, pytest.mark.model]

PATH = "/v1/messages"
TOOLS: Any = [
    {
        "name": "get_weather",
        "description": "Weather of a city",
        "input_schema": {
            "type": "object",
            "properties": {"unit": {"type": "string", "enum": ["celsius", "fahrenheit"]}},
            "required": ["unit"],
            "additionalProperties": False,
        },
    }
]
ASKED: Any = [{"role": "user", "content": "What is the weather in Paris, in celsius?"}]
ASK: Any = {"model": "smollm2", "messages": ASKED, "max_tokens": 24, "system": "Be brief."}
GREEDY = {"temperature": 0}  # not a parameter of the SDK any more
BODY = ASK | GREEDY
CALLING: Any = ASK | {"max_tokens": 60, "tools": TOOLS, "tool_choice": {"type": "tool", "name": "get_weather"}}


def test_the_sdk_gets_text_calls_and_counts(demo_stack: Stack) -> None:
    with anthropic.Anthropic(base_url=demo_stack.url, api_key="none", max_retries=0) as client:
        plain = client.messages.create(**ASK, extra_body=GREEDY)
        with client.messages.stream(**ASK, extra_body=GREEDY) as stream:
            text = "".join(stream.text_stream)
            streamed = stream.get_final_message()
        (block,) = plain.content
        assert block.type == "text"
        assert block.text == text
        assert (streamed.stop_reason, streamed.usage.output_tokens) == (plain.stop_reason, plain.usage.output_tokens)

        stop = text.split()[3]
        cut = client.messages.create(**ASK, extra_body=GREEDY, stop_sequences=["not in there", stop])
        assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)
        assert [each.to_dict() for each in cut.content] == [{"type": "text", "text": text[: text.index(stop)]}]

        called = client.messages.create(**CALLING, extra_body=GREEDY)
        with client.messages.stream(**CALLING, extra_body=GREEDY) as stream:
            again = stream.get_final_message()
        for message in (called, again):
            (use,) = message.content
            assert use.type == "tool_use"
            assert (message.stop_reason, use.name) == ("tool_use", "get_weather")
            assert use.input in ({"unit": "celsius"}, {"unit": "fahrenheit"})

        prompt = {name: ASK[name] for name in ("model", "messages", "system")}
        count = client.messages.count_tokens(**prompt).input_tokens
        assert count == plain.usage.input_tokens + (plain.usage.cache_read_input_tokens or 0)
        with_tools = client.messages.count_tokens(**prompt, tools=TOOLS).input_tokens
        assert with_tools == called.usage.input_tokens + (called.usage.cache_read_input_tokens or 0)
        assert with_tools > count
    demo_stack.idle()


def test_told_again_and_resumed_a_message_is_the_same(demo_stack: Stack) -> None:
    text = demo_stack.post(PATH, BODY).json()["content"][0]["text"]
    body = BODY | {"stop_sequences": [text.split()[3]]}
    plain = [demo_stack.post(PATH, body, **{"Idempotency-Key": "messages"}) for _ in range(2)]
    assert plain[0].json() == plain[1].json()
    assert plain[0].json()["stop_reason"] == "stop_sequence"
    assert plain[1].headers["idempotent-replayed"] == "true"
    assert plain[1].headers["request-id"] == plain[0].headers["request-id"]
    headers = {"X-Resumable": "true", "Idempotency-Key": "messages-streamed"}
    whole = httpx.post(demo_stack.url + PATH, json=body | {"stream": True}, headers=headers, timeout=60).text
    events = whole.split("\n\n")[:-1]
    ids = [event.split("\n")[0].removeprefix("id: ") for event in events]
    url = f"{demo_stack.url}/v1/streams/{ids[0].split('.')[0]}"
    for number in (0, 1, 2, len(ids) - 3, len(ids) - 2):
        rest = httpx.get(url, headers={"Last-Event-ID": ids[number]}, timeout=60)
        assert rest.text.split("\n\n")[:-1] == events[number + 1 :], ids[number]
    last = json.loads(events[-2].split("\ndata: ")[1])
    assert last["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": body["stop_sequences"][0]}
    demo_stack.idle()
