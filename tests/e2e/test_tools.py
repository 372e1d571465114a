"""Tools with the demo model, which was not trained for them: by grammar it calls them all the same."""

import json
from typing import Any

import httpx
import openai
import pytest

from .conftest import CHAT, Answer, Stack

pytestmark = [pytest.mark.e2e, pytest.mark.model]

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 16},
        "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": "get_weather", "description": "Weather of a city", "parameters": WEATHER},
    },
    {"type": "function", "function": {"name": "get_time", "description": "The time of day"}},
]
ASKED: Any = [{"role": "user", "content": "What is the weather in Paris, in celsius?"}]
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}
BODY: dict[str, Any] = {"model": "smollm2", "messages": ASKED, "tools": TOOLS, "max_tokens": 400, "temperature": 0}


def check(arguments: str) -> None:
    given = json.loads(arguments)
    assert list(given) == ["city", "unit"]
    assert len(given["city"]) <= 16
    assert given["unit"] in ("celsius", "fahrenheit")


def called(answer: Answer) -> tuple[list[str], list[str]]:
    """Ids and arguments of the calls of a stream."""
    ids, arguments = [], []
    for event in answer.events:
        for choice in event["choices"]:
            for call in choice["delta"].get("tool_calls", []):
                if "id" in call:
                    ids.append(call["id"])
                    arguments.append("")
                arguments[call["index"]] += call["function"]["arguments"]
    return ids, arguments


def test_the_sdk_gets_calls_sends_results_and_gets_an_answer(demo_stack: Stack) -> None:
    with openai.OpenAI(base_url=demo_stack.url + "/v1", api_key="none", max_retries=0) as client:
        first = client.chat.completions.create(**BODY, tool_choice=NAMED).choices[0]
        assert (first.finish_reason, first.message.content) == ("tool_calls", None)
        assert first.message.tool_calls is not None
        (call,) = first.message.tool_calls
        assert call.type == "function"
        assert call.function.name == "get_weather"
        check(call.function.arguments)
        with client.chat.completions.stream(**BODY, tool_choice=NAMED) as stream:
            streamed = stream.get_final_completion().choices[0]
        assert streamed.finish_reason == "tool_calls"
        assert streamed.message.tool_calls is not None
        assert [each.function.arguments for each in streamed.message.tool_calls] == [call.function.arguments]
        turns = [*ASKED, first.message, {"role": "tool", "tool_call_id": call.id, "content": "21 degrees, sunny"}]
        last = client.chat.completions.create(
            **(BODY | {"messages": turns, "max_tokens": 20}), tool_choice="none"
        ).choices[0]
        assert last.message.tool_calls is None
        assert last.message.content
    demo_stack.idle()


def test_required_and_strict_calls_are_valid(demo_stack: Stack) -> None:
    body = BODY | {"temperature": 1.0, "n": 3, "seed": 4, "parallel_tool_calls": False}
    for choice in demo_stack.post(CHAT, body | {"tool_choice": "required"}).json()["choices"]:
        (call,) = choice["message"]["tool_calls"]
        assert choice["finish_reason"] == "tool_calls"
        if call["function"]["name"] == "get_weather":
            check(call["function"]["arguments"])
        else:
            assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("get_time", {})
    strict = [{"type": "function", "function": TOOLS[0]["function"] | {"strict": True}}]
    begun = ASKED[0]["content"] + ' Answer with <tool_call>{"name": "get_weather", ...}</tool_call> and nothing else.'
    answer = demo_stack.post(
        CHAT,
        body
        | {
            "tools": strict,
            "messages": [{"role": "user", "content": begun}],
            "temperature": 0.5,
            "n": 4,
            "max_tokens": 60,
        },
    )
    for choice in answer.json()["choices"]:
        if choice["finish_reason"] == "tool_calls":
            check(choice["message"]["tool_calls"][0]["function"]["arguments"])
        else:
            assert choice["message"]["content"] or choice["finish_reason"] == "length"
    refused = demo_stack.post(
        CHAT,
        body | {"tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters": {"not": {}}}}]},
    )
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools")
    demo_stack.idle()


def test_a_call_goes_on_when_its_worker_is_killed(demo_stack: Stack) -> None:
    body = BODY | {"tool_choice": NAMED}
    pid = demo_stack.worker("smollm2")["pid"]
    killed: list[int] = []

    def kill(answer: Answer) -> None:
        if not killed and called(answer)[1]:
            killed.append(pid)
            demo_stack.kill(pid)

    answer = demo_stack.stream(CHAT, body, kill)
    assert killed
    assert (answer.done, answer.finish) == (True, "tool_calls")
    (_,), (arguments,) = called(answer)
    check(arguments)
    demo_stack.idle()


def test_told_again_a_call_is_the_same(demo_stack: Stack) -> None:
    body = BODY | {"tool_choice": NAMED}
    plain = [demo_stack.post(CHAT, body, **{"Idempotency-Key": "tools"}).json()["choices"] for _ in range(2)]
    assert plain[0] == plain[1]
    assert plain[0][0]["message"]["tool_calls"][0]["id"].startswith("call_")
    headers = {"X-Resumable": "true", "Idempotency-Key": "tools-streamed"}
    whole = httpx.post(demo_stack.url + CHAT, json=body | {"stream": True}, headers=headers, timeout=60).text
    events = whole.split("\n\n")[:-1]
    ids = [event.split("\n")[0].removeprefix("id: ") for event in events]
    rid = ids[0].split(".")[0]
    begins = next(number for number, event in enumerate(events) if "call_" in event)
    for number in (begins - 1, begins, begins + 1, len(events) - 2):
        again = httpx.get(f"{demo_stack.url}/v1/streams/{rid}", headers={"Last-Event-ID": ids[number]}, timeout=60)
        assert again.text == "".join(event + "\n\n" for event in events[number + 1 :])
    demo_stack.idle()
