"""/v1/responses: OpenAI's events, items and errors field by field, streamed and plain, and what goes on the wire."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from ingress.family import Admitted, Framing
from ingress.position import NumberedEvents, parse
from ingress.responses_body import ResponsesBody
from ingress.routes.responses_events import ResponseEvents
from shared import wire
from shared.dispatch import Delta
from shared.errors import Cancelled, Draining, EngineFailed, HeadraceError, QueueFull

PATH = "/v1/responses"
CHAT = "/v1/chat/completions"
ASKED = "Weather in Rome and Oslo?"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "name": "weather", "description": "Of a city", "parameters": SCHEMA, "strict": False}
BODY: dict[str, Any] = {"model": "m", "input": ASKED, "store": False}
SCORED = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "%s"}}\n</tool_call>'
TWO = "I look.\n" + CALL % "Rome" + "\n" + CALL % "Oslo"
REPEATED: dict[str, Any] = {
    "background": False,
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "reasoning": {"effort": None, "summary": None},
    "safety_identifier": None,
    "service_tier": "default",
    "store": False,
    "temperature": 1.0,
    "text": {"format": {"type": "text"}, "verbosity": "medium"},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": 1.0,
    "truncation": "disabled",
    "user": None,
}


def pieces(text: str, size: int = 5) -> list[str]:
    return [text[at : at + size] for at in range(0, len(text), size)]


def scored(texts: list[str], finish: str = "stop") -> Any:
    """An answer of these tokens, each with its log probability and one candidate."""

    def answer(stream: Any) -> None:
        for number, text in enumerate(texts):
            top = [wire.TopLogprob(number, -0.5, b"x")]
            score = [wire.Logprob(number, -0.5 - number, text.encode(), top)]
            last = number == len(texts) - 1
            stream.push(Delta(0, [number], text, score, finish if last else None))
        stream.finish(wire.Usage(5, len(texts), 2))

    return answer


def events_of(body: bytes) -> list[Any]:
    """The data of each event, whose name is its type; comments are left out."""
    found = []
    for part in body.decode().split("\n\n"):
        lines = [line for line in part.split("\n") if line and not line.startswith((":", "id: "))]
        if lines:
            name, data = lines
            found.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {found[-1]['type']}"
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def streamed(front: Any, body: dict[str, Any], **headers: str) -> list[Any]:
    answer = front.post(PATH, body | {"stream": True}, **headers)
    assert answer.status == 200, answer.body
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert b"[DONE]" not in answer.body
    return events_of(answer.body)


def gathered(told: list[Any]) -> dict[str, Any]:
    """What the deltas of a stream come to; their order, and that the `done` events and the last response agree, is checked."""
    assert [event["type"] for event in told[:2]] == ["response.created", "response.in_progress"]
    output: list[Any] = []
    open_item: dict[str, Any] | None = None
    for event in told[2:-1]:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert open_item is None
            assert event["output_index"] == len(output)
            open_item = event["item"]
            assert open_item["status"] == "in_progress"
            output.append(open_item)
            continue
        assert open_item is not None
        assert event["output_index"] == len(output) - 1
        if kind == "output_item.done":
            assert event["item"] == open_item | {"status": event["item"]["status"]}
            output[-1], open_item = event["item"], None
            continue
        assert event["item_id"] == open_item["id"]
        if kind.startswith("function_call_arguments"):
            if kind.endswith("delta"):
                open_item["arguments"] += event["delta"]
            else:
                assert (event["arguments"], event["name"]) == (open_item["arguments"], open_item["name"])
            continue
        assert event["content_index"] == 0
        if kind == "content_part.added":
            assert open_item["content"] == []
            assert event["part"] == {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            open_item["content"].append(event["part"])
            continue
        [part] = open_item["content"]
        if kind == "output_text.delta":
            part["text"] += event["delta"]
            part["logprobs"] += event["logprobs"]
        elif kind == "output_text.done":
            assert (event["text"], event["logprobs"]) == (part["text"], part["logprobs"])
        else:
            assert (kind, event["part"]) == ("content_part.done", part)
    assert open_item is None
    last = told[-1]
    assert last["type"] == f"response.{last['response']['status']}"
    assert last["response"]["output"] == output
    assert last["headrace"] == {"claims": 1}
    response: dict[str, Any] = last["response"]
    return response


def same(response: dict[str, Any]) -> dict[str, Any]:
    """What two requests that get the same have in common."""
    output = [{**item, "id": "", "call_id": ""} for item in response["output"]]
    return response | {"id": "", "created_at": 0, "completed_at": response["completed_at"] and 0, "output": output}


# -- the shapes --------------------------------------------------------------------------------------------------------


def test_a_stream_of_text_has_exactly_these_events(front: Any, make: Any) -> None:
    front.dispatcher.answer = make.says("Hel", "", "lo")
    told = streamed(front, BODY)
    created = told[0]["response"]["created_at"]
    identity = told[2]["item"]["id"]
    assert identity.startswith("msg_")
    begun = REPEATED | {
        "id": f"resp_{front.stream().rid}",
        "object": "response",
        "created_at": created,
        "model": "m",
        "status": "in_progress",
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "output": [],
        "usage": None,
    }
    place = {"item_id": identity, "output_index": 0, "content_index": 0}
    empty = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    message = {"type": "message", "id": identity, "role": "assistant", "content": [], "status": "in_progress"}
    part = empty | {"text": "Hello"}
    done = message | {"content": [part], "status": "completed"}
    usage = {
        "input_tokens": 5,
        "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
        "output_tokens": 3,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 8,
    }
    ended = {"status": "completed", "output": [done], "usage": usage}
    assert told[-1]["response"]["completed_at"] - created in (0, 1)
    ended["completed_at"] = told[-1]["response"]["completed_at"]
    wanted = [
        {"type": "response.created", "response": begun},
        {"type": "response.in_progress", "response": begun},
        {"type": "response.output_item.added", "output_index": 0, "item": message},
        {"type": "response.content_part.added", **place, "part": empty},
        {"type": "response.output_text.delta", **place, "delta": "Hel", "logprobs": []},
        {"type": "response.output_text.delta", **place, "delta": "lo", "logprobs": []},
        {"type": "response.output_text.done", **place, "text": "Hello", "logprobs": []},
        {"type": "response.content_part.done", **place, "part": part},
        {"type": "response.output_item.done", "output_index": 0, "item": done},
        {"type": "response.completed", "response": begun | ended, "headrace": {"claims": 1}},
    ]
    assert told == [event | {"sequence_number": number} for number, event in enumerate(wanted)]


def test_a_stream_of_calls_has_exactly_these_items(front: Any, make: Any) -> None:
    texts = ["Hm. ", "<tool_call>", '{"name": "weather", ', '"arguments": {"ci', 'ty": "Rome"}}', "</tool_call>"]
    front.dispatcher.answer = make.says(*texts)
    told = streamed(front, BODY | {"tools": [TOOL]})
    call = told[8]["item"]
    assert call["id"].startswith("fc_")
    assert call["call_id"].startswith("call_")
    arguments = {"item_id": call["id"], "output_index": 1}
    assert [{k: v for k, v in event.items() if k != "sequence_number"} for event in told[8:-1]] == [
        {
            "type": "response.output_item.added",
            "output_index": 1,
            "item": {
                "type": "function_call",
                "id": call["id"],
                "call_id": call["call_id"],
                "name": "weather",
                "arguments": "",
                "status": "in_progress",
            },
        },
        {"type": "response.function_call_arguments.delta", **arguments, "delta": '{"ci'},
        {"type": "response.function_call_arguments.delta", **arguments, "delta": 'ty": "Rome"}'},
        {
            "type": "response.function_call_arguments.done",
            **arguments,
            "name": "weather",
            "arguments": '{"city": "Rome"}',
        },
        {
            "type": "response.output_item.done",
            "output_index": 1,
            "item": call | {"arguments": '{"city": "Rome"}', "status": "completed"},
        },
    ]
    assert gathered(told)["tools"] == [TOOL]


@pytest.mark.parametrize("finish", ["stop", "length"])
def test_streamed_and_plain_agree_with_each_other_and_with_chat(front: Any, finish: str) -> None:
    broken = '<tool_call>{"name": "weather", "arguments": {"city": Rome}}</tool_call>'
    chat_tools = [{"type": "function", "function": {name: TOOL[name] for name in ("name", "parameters")}}]
    for text in (TWO, TWO[:-40], "Nothing <tool", "<tool_call>nothing</tool_call>", " ", CALL % "A" + " so", broken):
        for with_tools in (True, False):
            front.dispatcher.answer = scored(pieces(text, 3), finish)
            body = BODY | SCORED | ({"tools": [TOOL]} if with_tools else {})
            plain, told = front.post(PATH, body).json, gathered(streamed(front, body))
            assert same(plain) == same(told), text
            chat_body = {"model": "m", "messages": [{"role": "user", "content": ASKED}], "logprobs": True}
            chat_body |= {"top_logprobs": 1} | ({"tools": chat_tools} if with_tools else {})
            chat = front.post(CHAT, chat_body).json
            [choice] = chat["choices"]
            messages = [item for item in plain["output"] if item["type"] == "message"]
            calls = [item for item in plain["output"] if item["type"] == "function_call"]
            said = "".join(item["content"][0]["text"] for item in messages)
            assert said == (choice["message"]["content"] or "")
            called = [call["function"] for call in choice["message"].get("tool_calls", [])]
            assert [{name: call[name] for name in ("name", "arguments")} for call in calls] == called
            if not calls:
                assert messages[0]["content"][0]["logprobs"] == choice["logprobs"]["content"]
            assert plain["usage"]["total_tokens"] == chat["usage"]["total_tokens"]
            assert plain["status"] == ("incomplete" if choice["finish_reason"] == "length" else "completed")


def test_a_call_has_the_id_that_chat_gives_it(front: Any, make: Any) -> None:
    front.dispatcher.answer = make.says(*pieces(TWO))
    plain = front.post(PATH, BODY | {"tools": [TOOL]}).json
    ids = [item["id"] for item in plain["output"]] + [item["call_id"] for item in plain["output"][1:]]
    assert len(set(ids)) == 5
    again = gathered(streamed(front, BODY | {"tools": [TOOL]}))
    assert {item["id"] for item in again["output"]}.isdisjoint(ids)


def test_what_max_output_tokens_cuts_is_incomplete(front: Any, make: Any) -> None:
    for text, kind in (("Hel", "message"), ((CALL % "Rome")[:-22], "function_call")):
        front.dispatcher.answer = make.says(text, finish="length")
        for answer in (
            front.post(PATH, BODY | {"tools": [TOOL]}).json,
            gathered(streamed(front, BODY | {"tools": [TOOL]})),
        ):
            assert (answer["status"], answer["completed_at"]) == ("incomplete", None)
            assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
            [item] = answer["output"]
            assert (item["type"], item["status"]) == (kind, "incomplete")


def test_an_answer_without_text_is_a_message_without_text(front: Any, make: Any) -> None:
    front.dispatcher.answer = make.says("")
    [item] = front.post(PATH, BODY).json["output"]
    assert item["content"] == [{"type": "output_text", "text": "", "annotations": [], "logprobs": []}]
    told = streamed(front, BODY)
    assert [event["type"] for event in told if event["type"].endswith(".delta")] == []
    gathered(told)


def test_log_probabilities(front: Any) -> None:
    front.dispatcher.answer = scored(["Hel", "", "lo"])
    told = streamed(front, BODY | SCORED)
    deltas = [event for event in told if event["type"] == "response.output_text.delta"]
    assert [event["delta"] for event in deltas] == ["Hel", "", "lo"]
    assert deltas[0]["logprobs"] == [
        {
            "token": "Hel",
            "logprob": -0.5,
            "bytes": [72, 101, 108],
            "top_logprobs": [{"token": "x", "logprob": -0.5, "bytes": [120]}],
        }
    ]
    assert front.stream().request.sampling.logprobs == 1
    [part] = gathered(told)["output"][0]["content"]
    assert [each["token"] for each in part["logprobs"]] == ["Hel", "", "lo"]
    front.post(PATH, BODY | {"include": ["message.output_text.logprobs", "reasoning.encrypted_content"]})
    assert front.stream().request.sampling.logprobs == 0
    front.post(PATH, BODY | {"include": []})
    assert front.stream().request.sampling.logprobs is None


def test_an_answer_repeats_its_request(front: Any, make: Any) -> None:
    front.dispatcher.answer = make.says("{}")
    format_ = {"type": "json_schema", "name": "city", "description": "A city", "schema": SCHEMA, "strict": True}
    given: dict[str, Any] = {
        "instructions": "Be brief.",
        "max_output_tokens": 9,
        "max_tool_calls": 3,
        "metadata": {"a": "b"},
        "parallel_tool_calls": False,
        "prompt_cache_key": "k",
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": "s",
        "temperature": 0.5,
        "text": {"format": format_, "verbosity": "medium"},
        "tool_choice": {"type": "function", "name": "weather"},
        "tools": [TOOL | {"strict": True}],
        "top_logprobs": 2,
        "top_p": 0.9,
        "user": "u",
    }
    answer = front.post(PATH, BODY | given | {"include": ["message.output_text.logprobs"]})
    assert {name: answer.json[name] for name in given} == given
    assert {name: answer.json[name] for name in REPEATED} == REPEATED | given
    told = streamed(front, BODY | given | {"include": ["message.output_text.logprobs"]})
    for number in (0, 1, -1):
        assert {name: told[number]["response"][name] for name in REPEATED} == REPEATED | given
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "weather"}]}
    assert front.post(PATH, BODY | {"tools": [TOOL], "tool_choice": allowed}).json["tool_choice"] == allowed


# -- what goes on the wire ---------------------------------------------------------------------------------------------


def sent(front: Any, make: Any, body: dict[str, Any]) -> wire.Request:
    front.dispatcher.answer = make.says("ok")
    answer = front.post(PATH, BODY | body)
    assert answer.status == 200, answer.body
    request: wire.Request = front.stream().request
    return request


def test_parameters(front: Any, make: Any) -> None:
    given = {"temperature": 0.5, "top_p": 0.9, "max_output_tokens": 9, "seed": 7, "stop": ["a"], "top_k": 3}
    ignored = {"service_tier": "auto", "metadata": {"a": "b"}, "reasoning": {"effort": "none"}, "stream": False}
    sampling = sent(front, make, given | ignored | {"truncation": "disabled", "n": 1}).sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens, sampling.n) == (0.5, 0.9, 9, 1)
    assert (sampling.seed, sampling.stop, sampling.top_k, sampling.include_stop) == (7, ["a"], 3, False)
    bare = sent(front, make, {})
    assert (bare.sampling.temperature, bare.sampling.max_tokens, bare.framing) == (1.0, None, b"")


def test_items_become_messages(front: Any, make: Any) -> None:
    text = {"type": "input_text", "text": "One"}
    said = {"type": "output_text", "text": "I look. ", "annotations": [], "logprobs": []}
    call = {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": '{"city": "Rome"}'}
    items = [
        {"role": "developer", "content": "Be kind."},
        {"type": "message", "role": "user", "content": [text, {"type": "input_text", "text": "Two"}]},
        {"type": "message", "role": "assistant", "content": [said], "id": "msg_1", "status": "completed"},
        call | {"id": "fc_1", "status": "completed"},
        call | {"call_id": "call_2", "arguments": "not JSON"},
        {"role": "assistant", "content": "Looking."},
        {"type": "function_call_output", "call_id": "call_1", "output": "21"},
        {"type": "function_call_output", "call_id": "call_2", "output": [text]},
        {"role": "user", "content": "And?"},
    ]
    messages = sent(front, make, {"input": items, "instructions": "Be brief."}).input.messages
    function = {"name": "weather", "arguments": {"city": "Rome"}}
    assert messages == [
        wire.ChatMessage("system", "Be brief."),
        wire.ChatMessage("system", "Be kind."),
        wire.ChatMessage("user", "OneTwo"),
        wire.ChatMessage(
            "assistant",
            "I look. Looking.",
            tool_calls=[
                {"id": "call_1", "type": "function", "function": function},
                {"id": "call_2", "type": "function", "function": function | {"arguments": "not JSON"}},
            ],
        ),
        wire.ChatMessage("tool", "21", name="weather", tool_call_id="call_1"),
        wire.ChatMessage("tool", "One", name="weather", tool_call_id="call_2"),
        wire.ChatMessage("user", "And?"),
    ]
    assert sent(front, make, {}).input.messages == [wire.ChatMessage("user", ASKED)]


def test_an_output_that_is_sent_back_is_what_chat_would_send(front: Any, make: Any) -> None:
    front.dispatcher.answer = make.says(*pieces(TWO))
    output = front.post(PATH, BODY | {"tools": [TOOL]}).json["output"]
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "21"}
        for item in output
        if item["type"] == "function_call"
    ]
    messages = sent(front, make, {"input": [{"role": "user", "content": ASKED}, *output, *results]}).input.messages
    assert messages is not None
    assert [(each.role, each.content) for each in messages] == [
        ("user", ASKED),
        ("assistant", "I look."),
        ("tool", "21"),
        ("tool", "21"),
    ]
    assert [call["function"]["arguments"] for call in messages[1].tool_calls or []] == [
        {"city": "Rome"},
        {"city": "Oslo"},
    ]


def test_tools_and_choices(front: Any, make: Any) -> None:
    tools = [TOOL, {"type": "function", "name": "time"}]
    request = sent(front, make, {"tools": tools})
    none = {"type": "object", "properties": {}, "additionalProperties": False}
    told = [
        {"type": "function", "function": {"name": "weather", "description": "Of a city", "parameters": SCHEMA}},
        {"type": "function", "function": {"name": "time", "description": "", "parameters": none}},
    ]
    assert (request.input.tools, request.sampling.grammar) == (told, None)
    named = {"type": "function", "name": "time"}
    for choice, parallel, names, required, several in (
        ("required", None, ["weather", "time"], True, True),
        ("required", False, ["weather", "time"], True, False),
        (named, None, ["time"], True, False),
        ({"type": "allowed_tools", "mode": "auto", "tools": [named]}, True, ["time"], False, True),
    ):
        request = sent(front, make, {"tools": tools, "tool_choice": choice, "parallel_tool_calls": parallel})
        assert request.sampling.grammar is not None
        grammar = json.loads(request.sampling.grammar.body)
        assert [each["name"] for each in grammar["tools"]] == names
        assert (grammar.get("required", True), grammar.get("parallel", True)) == (required, several)
        assert request.input.tools == told
    for body in ({"tools": tools, "tool_choice": "none"}, {"tools": []}, {"tool_choice": "auto"}):
        request = sent(front, make, body)
        assert (request.input.tools, request.sampling.grammar) == (None, None)
    strict = sent(front, make, {"tools": [TOOL | {"strict": True}]}).sampling.grammar
    assert strict is not None
    assert json.loads(strict.body)["required"] is False
    front.dispatcher.answer = make.says(*pieces(TWO))
    one = front.post(PATH, BODY | {"tools": [TOOL], "parallel_tool_calls": False}).json
    assert [item["type"] for item in one["output"]] == ["message", "function_call"]


def test_formats(front: Any, make: Any) -> None:
    for given, kind, strict in (
        ({"type": "json_object"}, "json_object", True),
        ({"type": "json_schema", "name": "c", "schema": SCHEMA, "strict": True}, "json_schema", True),
        ({"type": "json_schema", "name": "c", "schema": SCHEMA}, "json_schema", False),
    ):
        grammar = sent(front, make, {"text": {"format": given}}).sampling.grammar
        assert grammar is not None
        assert (grammar.kind, grammar.strict) == (kind, strict)
        assert not grammar.body or json.loads(grammar.body) == SCHEMA
    for text in ({"format": {"type": "text"}}, {"format": None}, {}, None):
        assert sent(front, make, {"text": text}).sampling.grammar is None


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({"input": None}, "invalid_request", "input"),
        ({"input": []}, "invalid_request", "input"),
        ({"input": [{"content": "a"}]}, "invalid_request", "input[0].role"),
        ({"input": [{"role": "user"}]}, "invalid_request", "input[0].content"),
        ({"input": [{"role": "tool", "content": "a"}]}, "invalid_request", "input[0].role"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
            *("invalid_request",),
            "input[0].content[0].text",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "unsupported_parameter",
            "input[0].content[0].type",
        ),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "unsupported_parameter", "input[0].type"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "unsupported_parameter", "input[0].type"),
        ({"input": [{"type": "function_call", "call_id": "a"}]}, "invalid_request", "input[0].name"),
        ({"input": [{"type": "function_call_output", "call_id": "a"}]}, "invalid_request", "input[0].output"),
        (
            {"input": [{"type": "function_call_output", "call_id": "a", "output": "b"}]},
            "invalid_request",
            "input[0].call_id",
        ),
        ({"tools": [{"type": "web_search"}]}, "unsupported_parameter", "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "invalid_request", "tools[0].name"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "invalid_request", "tools[0].name"),
        ({"tools": [TOOL, TOOL]}, "invalid_request", "tools[1].name"),
        ({"tool_choice": "required"}, "invalid_request", "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "b"}}, "invalid_request", "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "web_search"}}, "unsupported_parameter", "tool_choice.type"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, "invalid_request", "tool_choice"),
        ({"top_logprobs": 2}, "invalid_request", "top_logprobs"),
        ({"include": ["everything"]}, "invalid_request", "include[0]"),
        ({"metadata": {"a": "b" * 513}}, "invalid_request", None),
        ({"metadata": {str(number): "a" for number in range(17)}}, "invalid_request", "metadata"),
        ({"max_tokens": 5}, "unsupported_parameter", "max_tokens"),
        ({"response_format": {"type": "json_object"}}, "unsupported_parameter", "response_format"),
        ({"n": 2}, "unsupported_parameter", "n"),
        ({"conversation": "conv_1"}, "unsupported_parameter", "conversation"),
        ({"prompt": {"id": "p"}}, "unsupported_parameter", "prompt"),
        ({"truncation": "auto"}, "unsupported_parameter", "truncation"),
        ({"reasoning": {"effort": "high"}}, "unsupported_parameter", "reasoning"),
        ({"reasoning": {"summary": "auto"}}, "unsupported_parameter", "reasoning"),
        ({"text": {"verbosity": "low"}}, "unsupported_parameter", "text.verbosity"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "invalid_request", "text.format.schema"),
        ({"text": {"format": {"type": "json_object"}}, "guided_regex": "a"}, "invalid_request", "guided_regex"),
        ({"stream_options": {}}, "invalid_request", "stream_options"),
        ({"max_output_tokens": 5000}, "context_length_exceeded", "max_tokens"),
    ],
)
def test_refusals_name_their_place(front: Any, body: dict[str, Any], code: str, param: str | None) -> None:
    answer = front.post(PATH, BODY | body)
    assert answer.status == 400
    assert answer.error["code"] == code, answer.error
    assert param is None or answer.error["param"] == param, answer.error
    assert not front.dispatcher.streams


# -- what fails --------------------------------------------------------------------------------------------------------


def test_errors_before_the_stream_have_their_status(front: Any) -> None:
    front.dispatcher.refusal = QueueFull("full", retry_after=2.0)
    for stream in (False, True):
        answer = front.post(PATH, BODY | {"stream": stream})
        assert (answer.status, answer.error["code"], answer.headers["retry-after"]) == (429, "queue_full", "2")


@pytest.mark.parametrize(
    ("error", "status", "shown"),
    [
        (EngineFailed("it broke"), "failed", {"code": "server_error", "type": "engine_failed", "message": "it broke"}),
        (Cancelled("ended by its tenant"), "cancelled", None),
    ],
)
def test_a_stream_that_fails_ends_with_a_response_that_failed(
    front: Any, make: Any, error: HeadraceError, status: str, shown: dict[str, Any] | None
) -> None:
    def fails(stream: Any) -> None:
        stream.push(make.token("Hi"))
        stream.fail(error)

    front.dispatcher.answer = fails
    told = streamed(front, BODY)
    last = told[-1]
    assert (last["type"], last["response"]["status"]) == ("response.failed", status)
    assert last["response"]["error"] == (shown and shown | {"param": None})
    [item] = last["response"]["output"]
    assert (item["status"], item["content"][0]["text"]) == ("incomplete", "Hi")
    assert last["response"]["usage"] is None


def test_a_stream_that_fails_before_its_first_token_begins_all_the_same(front: Any) -> None:
    with front.connect(PATH, BODY | {"stream": True}) as client:
        stream = front.stream()
        client.read_until(b": keepalive\n\n")
        front.call(stream.fail, EngineFailed("it broke"))
        body = client.read_until(b"0\r\n\r\n")
    names = [line.decode() for line in body.split(b"\n") if line.startswith(b"event:")]
    assert names == ["event: response.created", "event: response.failed"]


# -- told again --------------------------------------------------------------------------------------------------------


def admitted(**framing: Any) -> Admitted:
    body = ResponsesBody(model="m", input=ASKED, **framing)
    body.prepare([], keeps=True)
    request = wire.Request("a" * 32, "m", "v1", body.to_input())
    framing = Framing("/v1/responses", "m", 7, False, True, tools="hermes", repeated=body.repeated())
    return Admitted(request, framing, ended_at=9.0)


DELTAS = [Delta(0, [number], text, None, None) for number, text in enumerate(pieces(TWO + " so", 4))]
DELTAS[-1].finish = "stop"


def told_in(batches: list[list[Delta]], after: int = -1, background: bool = True) -> list[bytes]:
    events, out = ResponseEvents(admitted(background=background), after), []
    for batch in batches:
        events.add(batch, out)
    assert events.open_choices == 0
    return [part + b"\n\n" for part in (b"".join(out) + events.closing(wire.Usage(1, 2), 1)).split(b"\n\n")[:-1]]


def test_events_do_not_depend_on_how_tokens_were_batched() -> None:
    whole = told_in([DELTAS])
    opening = Delta(0, [], "", None, None)
    assert [json.loads(event.split(b"data: ")[1])["sequence_number"] for event in whole] == list(range(len(whole)))
    assert told_in([[each] for each in DELTAS]) == whole
    assert told_in([[opening], *([each] for each in DELTAS)]) == whole
    kinds = [event.split(b"\n")[0] for event in whole[:3]]
    assert kinds == [b"event: response.created", b"event: response.queued", b"event: response.in_progress"]


def test_a_telling_that_fails_is_no_response_that_failed() -> None:
    of_background = admitted(background=True)
    for ended_at, kind, last in ((None, "error", 5), (9.0, "response.failed", 6)):
        of_background.ended_at = ended_at
        events, out = ResponseEvents(of_background), []
        events.add(DELTAS[:1], out)
        assert out[-1].startswith(b"event: response.output_text.delta")
        raw = b"".join(out) + events.failure(Draining("this ingress is shutting down"))
        told = [json.loads(part.split(b"data: ")[1]) for part in raw.split(b"\n\n")[:-1]]
        assert [event["sequence_number"] for event in told] == [*range(len(told) - 1), last]
        assert told[-1]["type"] == kind
    assert told[-1]["response"]["error"]["type"] == "draining"


def test_who_has_some_events_is_told_the_others_only() -> None:
    whole = told_in([DELTAS])
    for after in range(len(whole)):
        assert told_in([DELTAS[:5], DELTAS[5:]], after) == whole[after + 1 :]


def test_a_resumable_stream_goes_on_after_any_event(front: Any) -> None:
    stream: Any = SimpleNamespace(rid="a" * 32, sequence=7)

    def numbered(seen: Any) -> list[bytes]:
        events, out = NumberedEvents(ResponseEvents(admitted()), stream, 1, seen), []
        events.add(DELTAS, out)
        raw = b"".join(out) + events.closing(wire.Usage(1, 2), 1)
        return raw.split(b"\n\n")[:-1]

    whole = numbered(None)
    plain = told_in([DELTAS], background=False)
    assert [event.partition(b"\n")[2] + b"\n\n" for event in whole] == plain
    for index, event in enumerate(whole[:-1]):
        identity = event.split(b"\n")[0].removeprefix(b"id: ").decode()
        assert numbered(parse(identity)) == whole[index + 1 :], identity
