"""/v1/responses with the demo model: OpenAI's SDK against real processes, and what only a worker can do."""

import json
from typing import Any

import openai
import pydantic
import pytest

from .conftest import CHAT, Stack

pytestmark = [pytest.mark.e2e, pytest.mark.model]

TOOL: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "Weather of a city",
    "parameters": {
        "type": "object",
        "properties": {"unit": {"type": "string", "enum": ["celsius", "fahrenheit"]}},
        "required": ["unit"],
        "additionalProperties": False,
    },
    "strict": True,
}
QUESTION = "What is the weather in Paris, in celsius?"
ASK: Any = {"model": "smollm2", "input": QUESTION, "instructions": "Be brief.", "temperature": 0}
CALLING: Any = ASK | {"tools": [TOOL], "tool_choice": {"type": "function", "name": "get_weather"}}


class Mood(pydantic.BaseModel):
    happy: bool


def test_the_sdk_gets_text_calls_and_json_and_goes_on(demo_stack: Stack) -> None:
    with openai.OpenAI(base_url=demo_stack.url + "/v1", api_key="none", max_retries=0) as client:
        plain = client.responses.create(**ASK, max_output_tokens=16)
        with client.responses.stream(**ASK, max_output_tokens=16) as stream:
            text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
        chat = demo_stack.post(
            CHAT, {"model": "smollm2", "messages": messages, "max_tokens": 16, "temperature": 0}
        ).json()
        assert plain.output_text == text == chat["choices"][0]["message"]["content"]
        assert plain.usage is not None
        assert plain.usage.total_tokens == chat["usage"]["total_tokens"]

        called = client.responses.create(**CALLING)
        with client.responses.stream(**CALLING) as stream:
            again = stream.get_final_response()
        for response in (called, again):
            [call] = response.output
            assert call.type == "function_call"
            assert (call.name, json.loads(call.arguments)["unit"] in ("celsius", "fahrenheit")) == ("get_weather", True)
        result: Any = [{"type": "function_call_output", "call_id": called.output[0].call_id, "output": "21"}]  # type: ignore[union-attr]
        following = client.responses.create(
            model="smollm2", input=result, previous_response_id=called.id, max_output_tokens=8, background=True
        )
        parsed = client.responses.parse(model="smollm2", input="Are you happy?", text_format=Mood, temperature=0)
        assert isinstance(parsed.output_parsed, Mood)

        told = list(client.responses.retrieve(following.id, stream=True))
        assert told[-1].type in ("response.completed", "response.incomplete")
        for after in (0, len(told) // 2):
            rest = client.responses.retrieve(following.id, stream=True, starting_after=after)
            assert [event.to_dict() for event in rest] == [event.to_dict() for event in told[after + 1 :]]
        items = client.responses.input_items.list(following.id, order="asc").data
        assert [item.type for item in items] == ["message", "function_call", "function_call_output"]
    demo_stack.idle()
