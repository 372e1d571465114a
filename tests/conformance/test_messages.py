"""/v1/messages: Anthropic's events, blocks and errors field by field, streamed and plain, and what goes on the wire."""

import json
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from ingress.family import Admitted, Framing
from ingress.position import NumberedEvents, parse
from ingress.routes.messages_events import MessageEvents
from shared import wire
from shared.dispatch import Delta
from shared.errors import EngineFailed, HeadraceError, QueueFull, Unavailable

PATH = "/v1/messages"
ASKED = [{"role": "user", "content": "Weather in Rome and Oslo?"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"name": "weather", "description": "Of a city", "input_schema": SCHEMA}]
BODY: dict[str, Any] = {"model": "m", "max_tokens": 50, "messages": ASKED}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "%s"}}\n</tool_call>'
TWO = "I look.\n" + CALL % "Rome" + "\n" + CALL % "Oslo"


def pieces(text: str, size: int = 5) -> list[str]:
    return [text[at : at + size] for at in range(0, len(text), size)]


def events_of(body: bytes) -> list[tuple[str, Any]]:
    """(name, data) of each event; comments are left out."""
    found = []
    for part in body.decode().split("\n\n"):
        lines = [line for line in part.split("\n") if line and not line.startswith(":")]
        if lines:
            name, data = lines
            found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


def streamed(front: Any, body: dict[str, Any], **headers: str) -> list[Any]:
    answer = front.post(PATH, body | {"stream": True}, **headers)
    assert answer.status == 200, answer.body
    assert answer.headers["content-type"].startswith("text/event-stream")
    found = events_of(answer.body)
    assert [name for name, _ in found] == [data["type"] for _, data in found]
    return [data for _, data in found]


def gathered(told: list[Any]) -> dict[str, Any]:
    """What the events of a stream come to, as a client accumulates them; their order is checked."""
    assert told[0]["type"] == "message_start"
    message = told[0]["message"]
    open_block, written = None, ""
    for event in told[1:-2]:
        kind = event["type"]
        if kind == "content_block_start":
            assert open_block is None
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
            open_block, written = event["index"], ""
        elif kind == "content_block_delta":
            assert event["index"] == open_block
            block, delta = message["content"][-1], event["delta"]
            if block["type"] == "text":
                assert set(delta) == {"type", "text"}
                block["text"] += delta["text"]
            else:
                assert set(delta) == {"type", "partial_json"}
                written += delta["partial_json"]
        else:
            assert (kind, event["index"]) == ("content_block_stop", open_block)
            block = message["content"][-1]
            if block["type"] == "tool_use":
                try:
                    block["input"] = json.loads(written)
                except ValueError:
                    block["input"] = {"INVALID_JSON": written}
            open_block = None
    assert open_block is None
    assert [event["type"] for event in told[-2:]] == ["message_delta", "message_stop"]
    return message | told[-2]["delta"] | {"usage": told[-2]["usage"]}


# -- the shapes --------------------------------------------------------------------------------------------------------


def test_a_stream_of_text_has_exactly_these_events(front: Any, make: Any) -> None:
    front.dispatcher.answer = make.says("Hel", "", "lo")
    told = streamed(front, BODY)
    none = {"input_tokens": 0, "output_tokens": 0, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    message = {
        "id": f"msg_{front.stream().rid}",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": none,
    }
    assert told == [
        {"type": "message_start", "message": message},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Hel"}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "lo"}},
        {"type": "content_block_stop", "index": 0},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "end_turn", "stop_sequence": None},
            "usage": none | {"input_tokens": 3, "output_tokens": 3, "cache_read_input_tokens": 2},
        },
        {"type": "message_stop"},
    ]


def test_a_stream_of_calls_has_exactly_these_blocks(front: Any, make: Any) -> None:
    texts = ["Hm. ", "<tool_call>", '{"name": "weather", ', '"arguments": {"ci', 'ty": "Rome"}}', "</tool_call>"]
    front.dispatcher.answer = make.says(*texts)
    told = streamed(front, BODY | {"tools": TOOLS})
    identity = told[4]["content_block"]["id"]
    assert identity.startswith("toolu_")
    call = {"type": "tool_use", "id": identity, "name": "weather", "input": {}}
    assert told[1:-2] == [
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Hm."}},
        {"type": "content_block_stop", "index": 0},
        {"type": "content_block_start", "index": 1, "content_block": call},
        {"type": "content_block_delta", "index": 1, "delta": {"type": "input_json_delta", "partial_json": '{"ci'}},
        {
            "type": "content_block_delta",
            "index": 1,
            "delta": {"type": "input_json_delta", "partial_json": 'ty": "Rome"}'},
        },
        {"type": "content_block_stop", "index": 1},
    ]
    assert told[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


def test_a_plain_answer_has_exactly_these_fields(front: Any, make: Any) -> None:
    front.dispatcher.answer = make.says(*pieces(TWO))
    answer = front.post(PATH, BODY | {"tools": TOOLS})
    first, second = (block["id"] for block in answer.json["content"][1:])
    assert answer.json == {
        "id": f"msg_{front.stream().rid}",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": first, "name": "weather", "input": {"city": "Rome"}},
            {"type": "tool_use", "id": second, "name": "weather", "input": {"city": "Oslo"}},
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 3,
            "output_tokens": len(pieces(TWO)),
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 2,
        },
    }
    assert first != second
    assert answer.headers["request-id"] == answer.headers["x-request-id"] == f"req_{front.stream().rid}"


@pytest.mark.parametrize("finish", ["stop", "length"])
def test_streamed_and_plain_agree(front: Any, make: Any, finish: str) -> None:
    broken = '<tool_call>{"name": "weather", "arguments": {"city": Rome}}</tool_call>'
    for text in (TWO, TWO[:-40], "Nothing <tool", "<tool_call>nothing</tool_call>", " ", CALL % "A" + " so", broken):
        for tools in (TOOLS, []):
            front.dispatcher.answer = make.says(*pieces(text, 3), finish=finish)
            body = BODY | {"tools": tools, "stop_sequences": ["so", "sos"]}
            plain, told = front.post(PATH, body).json, gathered(streamed(front, body))
            for each in (plain, told, *plain["content"], *told["content"]):
                each.pop("id", None)  # they are two requests
            assert plain == told, text


def test_an_answer_without_text_has_no_blocks(front: Any, make: Any) -> None:
    front.dispatcher.answer = make.says("")
    assert front.post(PATH, BODY).json["content"] == []
    assert [event["type"] for event in streamed(front, BODY)] == ["message_start", "message_delta", "message_stop"]


def test_stop_reasons(front: Any, make: Any) -> None:
    call = CALL % "Rome"
    for texts, finish, tools, reason, sequence, said in (
        (["Hi"], "stop", [], "end_turn", None, "Hi"),
        (["Hi"], "length", [], "max_tokens", None, "Hi"),
        (["Hi ", "a", "STOP"], "stop", [], "stop_sequence", "STOP", "Hi a"),
        (["Hi TOP"], "stop", [], "stop_sequence", "TOP", "Hi "),  # not the longer one, which is not there
        (["STOP", "Hi"], "stop", [], "end_turn", None, "STOPHi"),  # only what ends an output can have ended it
        (["Hi STOP"], "stop", TOOLS, "stop_sequence", "STOP", "Hi"),  # as white space before a call
        ([call, "Hi"], "stop", TOOLS, "tool_use", None, "Hi"),
        ([call[:-18]], "length", TOOLS, "max_tokens", None, None),
        ([call], "stop", [], "end_turn", None, call),
    ):
        front.dispatcher.answer = make.says(*texts, finish=finish)
        body = BODY | {"tools": tools, "stop_sequences": ["TOP", "STOP"]}
        for answer in (front.post(PATH, body).json, gathered(streamed(front, body))):
            assert (answer["stop_reason"], answer["stop_sequence"]) == (reason, sequence), texts
            assert [block["text"].strip() for block in answer["content"] if block["type"] == "text"] == (
                [said.strip()] if said else []
            )


def test_a_silence_is_broken_by_pings_once_the_message_began(front: Any, make: Any) -> None:
    with front.connect(PATH, BODY | {"stream": True}) as client:
        stream = front.stream()
        before = client.read_until(b": keepalive\n\n")
        assert b"event:" not in before
        front.call(stream.push, make.token("Hi"))
        client.read_until(b'event: ping\ndata: {"type":"ping"}\n\n')
        front.call(stream.push, make.token("", finish="stop"))
        front.call(stream.finish, wire.Usage(1, 2, 0))
        client.read_until(b'data: {"type":"message_stop"}\n\n')


# -- what goes on the wire ---------------------------------------------------------------------------------------------


def sent(front: Any, make: Any, body: dict[str, Any]) -> wire.Request:
    front.dispatcher.answer = make.says("ok")
    answer = front.post(PATH, BODY | body)
    assert answer.status == 200, answer.body
    request: wire.Request = front.stream().request
    return request


def test_parameters(front: Any, make: Any) -> None:
    given = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "stop_sequences": ["a", "b"], "max_tokens": 9}
    ignored = {"service_tier": "auto", "metadata": {"user_id": "u"}, "thinking": {"type": "disabled"}, "stream": False}
    sampling = sent(front, make, given | ignored).sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == (0.5, 0.9, 7, 9)
    assert (sampling.stop, sampling.include_stop, sampling.n, sampling.logprobs) == (["a", "b"], True, 1, None)
    bare = sent(front, make, {}).sampling
    assert (bare.temperature, bare.stop, bare.include_stop) == (1.0, [], False)


def test_turns_and_blocks_become_messages(front: Any, make: Any) -> None:
    text = {"type": "text", "text": "One", "cache_control": {"type": "ephemeral"}}
    call = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Rome"}}
    parts = [{"type": "text", "text": "21"}, {"type": "text", "text": "degrees"}]
    turns = [
        {"role": "user", "content": [text, {"type": "text", "text": "Two"}]},
        {"role": "user", "content": "Three"},
        {"role": "assistant", "content": [text, call, call | {"id": "toolu_2"}]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": parts},
                {"type": "tool_result", "tool_use_id": "toolu_2", "content": "no such city", "is_error": True},
                {"type": "text", "text": "And?"},
            ],
        },
    ]
    request = sent(front, make, {"system": [text, {"type": "text", "text": "Two"}], "messages": turns})
    arguments = {"name": "weather", "arguments": {"city": "Rome"}}
    calls = [{"id": f"toolu_{number}", "type": "function", "function": arguments} for number in (1, 2)]
    assert request.input.messages == [
        wire.ChatMessage("system", "One\nTwo"),
        wire.ChatMessage("user", "One\nTwo\nThree"),
        wire.ChatMessage("assistant", "One", tool_calls=calls),
        wire.ChatMessage("tool", "21\ndegrees", name="weather", tool_call_id="toolu_1"),
        wire.ChatMessage("tool", "Error: no such city", name="weather", tool_call_id="toolu_2"),
        wire.ChatMessage("user", "And?"),
    ]
    request = sent(front, make, {"system": "Be brief."})
    assert request.input.messages == [
        wire.ChatMessage("system", "Be brief."),
        wire.ChatMessage("user", ASKED[0]["content"]),
    ]


def test_tools_and_choices(front: Any, make: Any) -> None:
    tools = [*TOOLS, {"name": "time", "type": "custom", "input_schema": {"type": "object"}}]
    request = sent(front, make, {"tools": tools})
    told = [
        {"type": "function", "function": {"name": "weather", "description": "Of a city", "parameters": SCHEMA}},
        {"type": "function", "function": {"name": "time", "description": "", "parameters": {"type": "object"}}},
    ]
    assert (request.input.tools, request.sampling.grammar) == (told, None)
    for choice, names, required, parallel in (
        ({"type": "any"}, ["weather", "time"], True, True),
        ({"type": "any", "disable_parallel_tool_use": True}, ["weather", "time"], True, False),
        ({"type": "tool", "name": "time"}, ["time"], True, False),
    ):
        request = sent(front, make, {"tools": tools, "tool_choice": choice})
        assert request.sampling.grammar is not None
        grammar = json.loads(request.sampling.grammar.body)
        assert [each["name"] for each in grammar["tools"]] == names
        assert (grammar.get("required", True), grammar.get("parallel", True)) == (required, parallel)
        assert request.input.tools == told
    for body in ({"tools": tools, "tool_choice": {"type": "none"}}, {"tools": []}, {"tool_choice": {"type": "auto"}}):
        request = sent(front, make, body)
        assert (request.input.tools, request.sampling.grammar) == (None, None)
    strict = sent(front, make, {"tools": [TOOLS[0] | {"strict": True}]}).sampling.grammar
    assert strict is not None
    assert json.loads(strict.body)["required"] is False
    front.dispatcher.answer = make.says(*pieces(TWO))
    once = BODY | {"tools": tools, "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}
    for answer in (front.post(PATH, once).json, gathered(streamed(front, once))):
        assert [block["input"] for block in answer["content"] if block["type"] == "tool_use"] == [{"city": "Rome"}]


# -- refusals ----------------------------------------------------------------------------------------------------------


def block(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [fields]}]}


def said(**fields: Any) -> dict[str, Any]:
    return {"messages": [*ASKED, {"role": "assistant", "content": [fields]}, *ASKED]}


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"max_tokens": None}, "invalid_request", "max_tokens"),
    ({"max_tokens": 0}, "invalid_request", "max_tokens"),
    ({"messages": []}, "invalid_request", "messages"),
    ({"messages": [*ASKED, {"role": "assistant", "content": "I"}]}, "unsupported_parameter", "messages[1].role"),
    ({"messages": [{"role": "user", "content": []}]}, "invalid_request", "messages[0].content"),
    (block(type="image", source={}), "unsupported_parameter", "messages[0].content[0].type"),
    (block(type="document", source={}), "unsupported_parameter", "messages[0].content[0].type"),
    (block(type="tool_use", id="x", name="f", input={}), "unsupported_parameter", "messages[0].content[0].type"),
    (block(type="text"), "invalid_request", "messages[0].content[0].text"),
    (block(type="tool_result", content="x"), "invalid_request", "messages[0].content[0].tool_use_id"),
    (block(type="tool_result", tool_use_id="x"), "invalid_request", "messages[0].content[0].tool_use_id"),
    (said(type="thinking", thinking="x"), "unsupported_parameter", "messages[1].content[0].type"),
    (said(type="tool_use", name="f", input={}), "invalid_request", "messages[1].content[0].id"),
    (said(type="tool_use", id="x", input={}), "invalid_request", "messages[1].content[0].name"),
    (said(type="tool_use", id="x", name="f"), "invalid_request", "messages[1].content[0].input"),
    ({"system": [{"type": "image"}]}, "unsupported_parameter", "system[0].type"),
    ({"system": [{"type": "text"}]}, "invalid_request", "system[0].text"),
    ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "unsupported_parameter", "thinking"),
    ({"mcp_servers": [{}]}, "unsupported_parameter", "mcp_servers"),
    ({"n": 2}, "unsupported_parameter", "n"),
    ({"stop": ["x"]}, "unsupported_parameter", "stop"),
    ({"stop_sequences": [""]}, "invalid_request", "stop_sequences"),
    ({"stop_sequences": list("abcde")}, "invalid_request", "stop_sequences"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "unsupported_parameter", "tools[0].type"),
    ({"tools": [{"name": "f"}]}, "invalid_request", "tools[0].input_schema"),
    ({"tools": TOOLS * 2}, "invalid_request", "tools[1].name"),
    ({"tool_choice": {"type": "any"}}, "invalid_request", "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "x"}}, "invalid_request", "tool_choice.name"),
    ({"tools": TOOLS, "tool_choice": {"type": "required"}}, "invalid_request", "tool_choice.type"),
]


@pytest.mark.parametrize(("body", "code", "param"), REFUSED)
def test_refusals_name_the_field(front: Any, body: dict[str, Any], code: str, param: str) -> None:
    answer = front.post(PATH, BODY | body, x_request_id="mine")
    assert answer.status == 400
    assert answer.json == {
        "type": "error",
        "error": {
            "type": "invalid_request_error",
            "message": answer.error["message"],
            "param": param,
            "code": code,
        },
        "request_id": "mine",
    }
    assert param in answer.error["message"]
    assert answer.headers["request-id"] == "mine"
    assert front.dispatcher.streams == []


def test_a_wrong_role_is_told_the_roles_there_are(front: Any) -> None:
    answer = front.post(PATH, BODY | {"messages": [{"role": "system", "content": "x"}]})
    assert answer.error["param"] == "messages[0].role"
    assert answer.error["message"].endswith("one of assistant, user is expected")


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (QueueFull("full"), 429, "rate_limit_error"),
        (Unavailable("no"), 503, "overloaded_error"),
        (EngineFailed("broke"), 500, "api_error"),
    ],
)
def test_errors_are_of_anthropics_types(front: Any, error: HeadraceError, status: int, kind: str) -> None:
    front.dispatcher.refusal = error
    answer = front.post(PATH, BODY)
    assert (answer.status, answer.json["type"], answer.error["type"]) == (status, "error", kind)
    assert (answer.error["code"], answer.error["message"]) == (error.code, error.message)


def test_other_errors_of_these_routes_have_the_same_shape(front: Any) -> None:
    unknown = front.post(PATH, BODY | {"model": "nobody"})
    assert (unknown.status, unknown.error["type"], unknown.error["code"]) == (404, "not_found_error", "model_not_found")
    for path in (PATH, PATH + "/count_tokens"):
        method = front.http("GET", path)
        assert (method.status, method.json["type"], method.error["type"]) == (405, "error", "invalid_request_error")
        large = front.post(path, b" " * 300_000)
        assert (large.status, large.json["type"], large.error["type"]) == (413, "error", "request_too_large")
    assert "type" not in front.post("/v1/chat/completions", {"model": "nobody", "messages": ASKED}).json


def test_an_error_after_the_stream_began_is_an_event(front: Any, make: Any) -> None:
    def fails(stream: Any) -> None:
        stream.push(make.token("Hi"))
        stream.fail(EngineFailed("it broke"))

    front.dispatcher.answer = fails
    answer = front.post(PATH, BODY | {"stream": True})
    name, data = events_of(answer.body)[-1]
    assert name == "error"
    assert data == {
        "type": "error",
        "error": {"type": "api_error", "message": "it broke", "param": None, "code": "engine_failed"},
        "request_id": answer.headers["request-id"],
    }


# -- counting, leaving, resuming ---------------------------------------------------------------------------------------


def first_tokens(metrics: str) -> list[str]:
    return [line for line in metrics.splitlines() if line.startswith("headrace_time_to_first_token_seconds_count")]


def test_tokens_are_counted_by_a_request_that_generates_nothing(front: Any, make: Any) -> None:
    make.wait_for(lambda: not front.context.open, "earlier requests ended")
    before = front.http("GET", "/metrics").body.decode()

    def counts(stream: Any) -> None:
        stream.push(Delta(0, [], "", None, "length"))
        stream.finish(wire.Usage(14, 0, 3))

    front.dispatcher.answer = counts
    body = {"model": "m", "messages": ASKED, "system": "Be brief.", "tools": TOOLS, "tool_choice": {"type": "any"}}
    answer = front.post(PATH + "/count_tokens", body)
    assert (answer.status, answer.json) == (200, {"input_tokens": 14})
    request = front.stream().request
    assert (request.sampling.max_tokens, request.sampling.grammar) == (0, None)
    assert [message.role for message in request.input.messages] == ["system", "user"]
    assert [tool["function"]["name"] for tool in request.input.tools] == ["weather"]
    for extra in ({"max_tokens": 5}, {"stream": True}, {"temperature": 0.5}):
        refused = front.post(PATH + "/count_tokens", body | extra)
        assert (refused.status, refused.error["param"]) == (400, next(iter(extra)))
    make.wait_for(lambda: not front.context.open, "all requests ended")
    after = front.http("GET", "/metrics").body.decode()
    assert 'headrace_requests_total{code="ok",model="m",route="/v1/messages/count_tokens",version="v1"}' in after
    assert first_tokens(before) == first_tokens(after)  # there was none


def test_a_client_that_leaves_cancels(front: Any, make: Any) -> None:
    for stream in (False, True):
        with front.connect(PATH, BODY | {"stream": stream}):
            running = front.stream(int(stream))
        make.wait_for(lambda running=running: running.cancelled, "it is cancelled")


def resumable(given: list[Delta], position: Any) -> list[bytes]:
    """The events of a stream with ids, for a client that has `position`."""
    sampling = wire.Sampling(stop=["END"], include_stop=True)
    request = wire.Request("a" * 32, "m", "v", wire.Input(), sampling)
    framing = Framing(PATH, "m", 7, False, True, tools="hermes")
    source: Any = SimpleNamespace(rid="a" * 32, sequence=5)
    numbered = NumberedEvents(MessageEvents("x", Admitted(request, framing)), source, 1, position)
    out: list[bytes] = []
    numbered.add(given, out)
    assert numbered.open_choices == 0
    closing = numbered.closing(wire.Usage(1, 2, 0), 1).split(b"\n\n")[:-1]
    return [*out, *(event + b"\n\n" for event in closing)]


def test_a_client_that_resumes_after_any_event_misses_none_and_gets_none_twice() -> None:
    texts = ["Hm", ". ", *pieces(CALL % "Rome", 29), " so", " it ", "isEND"]
    given = [Delta(0, [number], text, None, None) for number, text in enumerate(texts)]
    given[-1] = msgspec.structs.replace(given[-1], finish="stop")
    whole = resumable(given, None)
    ids = [event.split(b"\n")[0].removeprefix(b"id: ").decode() for event in whole]
    assert len(set(ids)) == len(ids)
    assert any("p1" in each for each in ids)
    assert b'"stop_reason":"stop_sequence","stop_sequence":"END"' in whole[-2]
    assert b"END" not in b"".join(whole[:-2])
    for number, identity in enumerate(ids[:-1]):
        assert resumable(given, parse(identity)) == whole[number + 1 :]
