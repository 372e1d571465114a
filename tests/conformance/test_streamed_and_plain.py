"""Streamed and plain answers of the demo model are as documented, field by field, and say the same.

Text, calls, finish reasons, usage and log probabilities, for chat, completions, messages and the native route.
From OpenAI's API reference ("The chat completion object", "The chat completion chunk object", "The completion object"),
Anthropic's ("Messages", "Streaming messages"), and docs/api.md for the native route.
"""

import json
from typing import Any

import httpx
import pytest

from .gathered import CHAT, COMPLETIONS, MESSAGES, Gathered, plain, streamed

pytestmark = [pytest.mark.e2e, pytest.mark.model]

NATIVE = "/v1/models/smollm2/infer"
ASKED = [{"role": "user", "content": "Count from one to five."}]
SEEDED = {"temperature": 0.7, "seed": 11}
GREEDY = {"temperature": 0}
WHOLE = 80  # tokens are enough for a call, or for JSON of the schema
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
FUNCTION = {"name": "weather", "description": "Of a city", "parameters": CITY}
TOOLS = [{"type": "function", "function": FUNCTION}, {"type": "function", "function": {"name": "now"}}]
NAMED = {"type": "function", "function": {"name": "weather"}}
CLAUDE = [{"name": "weather", "description": "Of a city", "input_schema": CITY}]

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, GREEDY),
    "chat n seed": (CHAT, SEEDED | {"n": 3}),
    "chat n logprobs": (CHAT, SEEDED | {"n": 2, "logprobs": True, "top_logprobs": 3}),
    "chat logprobs of the chosen": (CHAT, GREEDY | {"logprobs": True, "top_logprobs": 0}),
    "chat stop": (CHAT, GREEDY | {"stop": ["never there", "2"], "logprobs": True}),
    "chat max_completion_tokens": (CHAT, GREEDY | {"max_completion_tokens": 2, "max_tokens": 9}),
    "chat logit_bias": (CHAT, GREEDY | {"logit_bias": {"28": 40, "33": -100}}),
    "chat json_schema": (CHAT, GREEDY | {"response_format": FORMAT, "max_tokens": WHOLE}),
    "chat json_schema cut": (CHAT, GREEDY | {"response_format": FORMAT, "max_tokens": 4}),
    "chat json_object n": (CHAT, SEEDED | {"response_format": {"type": "json_object"}, "n": 2, "max_tokens": 30}),
    "chat tools, none called": (CHAT, GREEDY | {"tools": TOOLS}),
    "chat tool named": (CHAT, GREEDY | {"tools": TOOLS, "tool_choice": NAMED, "max_tokens": WHOLE}),
    "chat tools required n logprobs": (
        CHAT,
        SEEDED | {"tools": TOOLS, "tool_choice": "required", "n": 2, "logprobs": True, "max_tokens": WHOLE},
    ),
    "chat tool cut": (CHAT, GREEDY | {"tools": TOOLS, "tool_choice": NAMED, "max_tokens": 16}),
    "chat one call": (
        CHAT,
        SEEDED | {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": WHOLE},
    ),
    "completions": (COMPLETIONS, GREEDY),
    "completions n seed logprobs": (COMPLETIONS, SEEDED | {"n": 3, "logprobs": 2}),
    "completions logprobs 0": (COMPLETIONS, GREEDY | {"logprobs": 0}),
    "completions echo": (COMPLETIONS, GREEDY | {"echo": True}),
    "completions echo n logprobs": (COMPLETIONS, SEEDED | {"echo": True, "n": 2, "logprobs": 2}),
    "completions echo alone": (COMPLETIONS, GREEDY | {"echo": True, "logprobs": 1, "max_tokens": 0}),
    "completions stop logprobs": (COMPLETIONS, GREEDY | {"stop": " one", "logprobs": 1, "prompt": "zero, one,"}),
    "completions prompts": (COMPLETIONS, GREEDY | {"prompt": ["1, 2, 3, 4,", "a, b, c, d,"], "n": 2, "logprobs": 1}),
    "completions ids": (COMPLETIONS, GREEDY | {"prompt": [[1, 400, 20], [300, 28]], "logprobs": 1}),
    "completions half characters": (COMPLETIONS, SEEDED | {"prompt": "😀 😃 😄 😁", "echo": True, "logprobs": 2}),
    "native": (NATIVE, GREEDY | {"input": "One, two,"}),
    "native messages logprobs": (NATIVE, SEEDED | {"input": ASKED, "logprobs": 2}),
    "native stop": (NATIVE, GREEDY | {"input": ASKED, "stop": "2", "logprobs": 0}),
    "native json_schema": (NATIVE, GREEDY | {"input": ASKED, "response_format": FORMAT, "max_tokens": WHOLE}),
    "messages": (MESSAGES, GREEDY | {"system": "Be brief."}),
    "messages stop": (MESSAGES, GREEDY | {"stop_sequences": ["never there", "2"]}),
    "messages tool": (
        MESSAGES,
        GREEDY | {"tools": CLAUDE, "tool_choice": {"type": "tool", "name": "weather"}, "max_tokens": WHOLE},
    ),
    "messages seed": (MESSAGES, SEEDED | {"top_k": 40, "top_p": 0.9}),
}
BASE: dict[str, dict[str, Any]] = {
    CHAT: {"model": "smollm2", "messages": ASKED, "max_tokens": 12},
    COMPLETIONS: {"model": "smollm2", "prompt": "One, two,", "max_tokens": 8},
    MESSAGES: {"model": "smollm2", "messages": ASKED, "max_tokens": 12},
    NATIVE: {"max_tokens": 8},
}


@pytest.fixture(scope="module")
def client(demo_stack: Any) -> Any:
    with httpx.Client(base_url=demo_stack.url, timeout=120) as client:
        yield client
    demo_stack.idle()


def asked(client: httpx.Client, path: str, body: dict[str, Any]) -> str:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.text


@pytest.mark.parametrize("case", CASES)
def test_they_say_the_same(client: httpx.Client, case: str) -> None:
    path, fields = CASES[case]
    body = BASE[path] | fields
    usage = {"stream_options": {"include_usage": True}} if path in (CHAT, COMPLETIONS) else {}
    one = plain(path, asked(client, path, body))
    other = streamed(path, asked(client, path, body | {"stream": True} | usage))
    for said, told in zip(one.choices, other.choices, strict=True):
        if path != CHAT or said.text or not told.calls:
            assert (said.text or "") == (told.text or "")
        assert (said.calls, said.finish) == (told.calls, told.finish)
        assert said.tokens == told.tokens
        assert said.scores == pytest.approx(told.scores, abs=0.02)
    assert one.usage == other.usage
    check(path, body, one)


def check(path: str, body: dict[str, Any], told: Gathered) -> None:
    """What was asked for is there."""
    prompts = len(body["prompt"]) if isinstance(body.get("prompt"), list) else 1
    assert len(told.choices) == body.get("n", 1) * prompts
    stops = body.get("stop_sequences") or body.get("stop")
    stop = stops[-1] if isinstance(stops, list) else stops
    for said in told.choices:
        assert bool(said.tokens) == ("logprobs" in body)
        if body["max_tokens"] >= WHOLE and "tool_choice" in body:
            assert said.calls
            assert (said.text, said.finish) == (None, "tool_use None" if path == MESSAGES else "tool_calls")
        elif body["max_tokens"] >= WHOLE:
            assert (set(json.loads(said.text or "")), said.finish) == ({"city", "days"}, "stop")
        elif stop is not None:
            assert stop not in (said.text or "")
            assert said.finish == (f"stop_sequence {stop}" if path == MESSAGES else "stop")
        if body.get("echo") and prompts == 1:
            assert (said.text or "").startswith(body["prompt"])
            assert said.scores[:1] == [None] * ("logprobs" in body)
