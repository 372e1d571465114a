"""What clients send that no example shows: bodies of the kinds that known clients send, and the ways of HTTP around them."""

import gzip
import json
from typing import Any

import pytest

from .gathered import CHAT, COMPLETIONS, MESSAGES

ASKED = [{"role": "user", "content": "Hi"}]
FUNCTION = {"name": "now", "description": None, "parameters": {"type": "object", "properties": {}}, "strict": None}
CALL = {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": ""}}

# client -> what it sends; each is answered, and what the model is told of it is below
SENT: dict[str, tuple[str, dict[str, Any]]] = {
    # every optional field of the reference as null: .NET, Java and Go clients that serialise whole objects
    "nulls": (
        CHAT,
        dict.fromkeys(
            "audio frequency_penalty function_call functions logit_bias logprobs max_completion_tokens max_tokens metadata"
            " modalities n parallel_tool_calls prediction presence_penalty prompt_cache_key reasoning_effort"
            " response_format safety_identifier seed service_tier stop store stream stream_options temperature tool_choice"
            " tools top_logprobs top_p user verbosity web_search_options".split()
        )
        | {"messages": [ASKED[0] | dict.fromkeys(["name", "tool_calls", "tool_call_id", "refusal", "audio"])]},
    ),
    # openai-node and openai-python send a gathered message back as it is, with all its fields
    "openai sdk, history": (
        CHAT,
        {
            "messages": [
                *ASKED,
                {
                    "role": "assistant",
                    "content": None,
                    "refusal": None,
                    "annotations": [],
                    "audio": None,
                    "tool_calls": [CALL],
                },
                {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "noon"}]},
                {"role": "assistant", "content": "", "refusal": None, "tool_calls": None, "function_call": None},
                *ASKED,
            ],
            "tools": [{"type": "function", "function": FUNCTION}],
        },
    ),
    "langchain": (
        CHAT,
        {
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
            ],
            "max_completion_tokens": 9,
            "stream": True,
            "stream_options": {"include_usage": True},
            "parallel_tool_calls": False,
            "tools": [],
            "n": 1,
        },
    ),
    "litellm": (
        CHAT,
        {
            "messages": [
                {"role": "developer", "content": "Be brief.", "name": "boss"},
                ASKED[0] | {"cache_control": {}},
            ],
            "max_tokens": 9,
            "metadata": {"trace_id": "1"},
            "user": "u",
            "top_p": 0,
            "extra_headers": {},
            "drop_params": True,
        },
    ),
    "vercel ai sdk": (
        CHAT,
        {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi", "providerOptions": {}}]}],
            "response_format": {"type": "text"},
            "tool_choice": "auto",
            "tools": [{"type": "function", "function": FUNCTION | {"strict": False}}],
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    ),
    "continue": (
        CHAT,
        {
            "messages": [*ASKED, {"role": "assistant", "content": "H", "tool_calls": []}, *ASKED],
            "max_tokens": 900,
            "stop": ["</s>", "[INST]"],
            "stream": True,
            "prompt_cache_key": "k",
            "thinking": None,
        },
    ),
    "open webui": (
        CHAT,
        {
            "messages": [{"role": "system", "content": ""}, *ASKED],
            "stream": True,
            "stream_options": {"include_usage": True, "include_obfuscation": False},
            "stop": [],
            "logit_bias": {},
            "num_ctx": 2048,
            "background_tasks": {"title_generation": True},
        },
    ),
    "lm-evaluation-harness": (
        COMPLETIONS,
        {"prompt": [[1, 2, 3]], "max_tokens": 1, "temperature": 0, "logprobs": 1, "seed": 1234, "echo": True},
    ),
    "a stop of a page": (CHAT, {"messages": ASKED, "stop": "x" * 50_000}),
    "numbers as other languages write them": (
        CHAT,
        {"messages": ASKED, "temperature": 1, "top_p": 1.0, "logit_bias": {"5": 1.0}},
    ),
}


@pytest.mark.parametrize("client", SENT)
def test_what_is_sent_is_answered(front: Any, make: Any, client: str) -> None:
    path, body = SENT[client]
    front.dispatcher.answer = make.says("Hel", "lo")
    answer = front.post(path, body | {"model": "m"}, authorization="Bearer sk-none", accept="*/*")
    assert answer.status == 200, answer.body
    assert b"lo" in answer.body
    turns = front.stream().request.input.messages
    for told, given in zip(turns or [], body.get("messages", []), strict=True):
        wanted = given["content"]
        if isinstance(wanted, list):
            wanted = "".join(part["text"] for part in wanted)
        assert told.content == (None if given.get("tool_calls") else wanted or "")
        assert told.role == {"developer": "system"}.get(given["role"], given["role"])


def test_a_message_of_no_text_comes_back_as_it_was_gathered(front: Any, make: Any) -> None:
    """With tools a stream's first delta has content null: a client gathers no text, and no calls."""
    front.dispatcher.answer = make.says("")
    gathered = {"role": "assistant", "content": None, "refusal": None, "tool_calls": None}
    answer = front.post(CHAT, {"model": "m", "messages": [*ASKED, gathered, *ASKED]})
    assert answer.status == 200
    assert [each.content for each in front.stream().request.input.messages] == ["Hi", "", "Hi"]


def test_what_coding_agents_send_to_messages_is_answered(front: Any, make: Any) -> None:
    """Blocks with marks of the cache, tools with fields of their own, nulls, and a query string."""
    marked = {"cache_control": {"type": "ephemeral"}}
    schema = {"$schema": "http://json-schema.org/draft-07/schema#", "type": "object", "properties": {}}
    call = {"type": "tool_use", "id": "t1", "name": "Bash", "input": {}, "caller": {"type": "direct"}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": None, "is_error": None} | marked
    body = {
        "model": "m",
        "max_tokens": 9,
        "system": [{"type": "text", "text": "Be brief."} | marked],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Hi", "citations": None} | marked]},
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [result]},
            {"role": "assistant", "content": []},
            {"role": "user", "content": "And?"},
        ],
        "tools": [{"name": "Bash", "input_schema": schema, "eager_input_streaming": True} | marked],
        "metadata": {"user_id": "u"},
        "top_p": 0,
        "stream": True,
    } | dict.fromkeys(["tool_choice", "stop_sequences", "thinking", "container", "context_management", "mcp_servers"])
    front.dispatcher.answer = make.says("Hel", "lo")
    headers = {"x-api-key": "none", "anthropic-version": "2023-06-01", "anthropic-beta": "tools-2024-05-16"}
    answer = front.http("POST", MESSAGES + "?beta=true", body, headers)
    assert answer.status == 200, answer.body
    assert b"message_stop" in answer.body
    sent = front.stream().request.input
    assert [turn.role for turn in sent.messages] == ["system", "user", "assistant", "tool", "assistant", "user"]
    assert [tool["function"]["parameters"] for tool in sent.tools] == [schema]


@pytest.mark.parametrize(
    "headers", [{}, {"content-type": "text/plain"}, {"content-type": "application/json; charset=utf-8"}]
)
def test_the_body_is_json_whatever_the_header_says(front: Any, make: Any, headers: dict[str, str]) -> None:
    front.dispatcher.answer = make.says("Hi")
    body = json.dumps({"model": "m", "messages": ASKED}).encode()
    assert front.http("POST", CHAT, body, headers).status == 200


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/v1/deployments"])
def test_a_compressed_body_is_refused_by_name(front: Any, path: str) -> None:
    body = gzip.compress(json.dumps({"model": "m", "messages": ASKED}).encode())
    refused = front.http("POST", path, body, {"content-encoding": "gzip"})
    assert (refused.status, refused.error["code"], refused.error["param"]) == (
        400,
        "unsupported_parameter",
        "content-encoding",
    )
    assert "gzip" in refused.error["message"]


def test_identity_is_no_encoding(front: Any, make: Any) -> None:
    front.dispatcher.answer = make.says("Hi")
    assert front.post(CHAT, {"model": "m", "messages": ASKED}, content_encoding="identity").status == 200


def test_head_is_get_without_the_body(front: Any) -> None:
    for path in ("/livez", "/health", "/metrics", "/v1/models", "/v1/models/m", "/openapi.json"):
        head, whole = front.http("HEAD", path), front.http("GET", path)
        assert (head.status, head.body) == (whole.status, b"") == (200, b"")
        assert head.headers["content-type"] == whole.headers["content-type"]
    assert front.http("HEAD", "/v1/models/nobody").status == 404


def test_a_method_that_is_none_names_those_that_are(front: Any) -> None:
    for method, path, allowed in (
        ("GET", CHAT, "POST"),
        ("HEAD", CHAT, "POST"),
        ("DELETE", "/v1/models", "GET, HEAD"),
        ("PUT", "/v1/models/m/versions", "GET, POST, HEAD"),
        ("PUT", "/v1/tenants", "GET, POST"),
        ("PUT", "/v1/messages", "POST"),
    ):
        answer = front.http(method, path)
        assert (answer.status, answer.headers["allow"]) == (405, allowed), path


def test_a_wrong_base_url_is_told_the_right_one(front: Any) -> None:
    for path, meant in (
        ("/chat/completions", CHAT),
        ("/v1/v1/completions", None),
        ("/completions", COMPLETIONS),
        (CHAT + "/", CHAT),
        ("/models", "/v1/models"),
        ("/jobs", "/v1/jobs"),
        ("/v1/jobs/", "/v1/jobs"),
        ("/v1/models/", None),
        ("/v1/nothing", None),
    ):
        answer = front.http("POST" if "completions" in path else "GET", path, {} if "completions" in path else None)
        assert answer.status == 404
        assert (
            answer.error["message"].endswith(f"; there is {meant}")
            if meant
            else "there is /" not in answer.error["message"]
        )
