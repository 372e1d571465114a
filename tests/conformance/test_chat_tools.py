"""Tools of chat completions: OpenAI's deltas and messages field by field, and its SDK, streamed and plain."""

import json
from types import SimpleNamespace
from typing import Any

import msgspec
import openai
import pytest

from ingress.family import Admitted, Framing
from ingress.position import NumberedEvents, parse
from ingress.routes.chat_tools import ToolChatEvents
from ingress.tool_calls.whole import call_id
from shared import wire
from shared.dispatch import Delta

ASKED = [{"role": "user", "content": "Weather in Rome and Oslo?"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "description": "Of a city", "parameters": PARAMETERS}}
]
BODY: dict[str, Any] = {"model": "m", "messages": ASKED, "tools": TOOLS}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "%s"}}\n</tool_call>'
TWO = "I look.\n" + CALL % "Rome" + "\n" + CALL % "Oslo"


@pytest.fixture
def sdk(front: Any) -> Any:
    with openai.OpenAI(base_url=front.url + "/v1", api_key="none", max_retries=0, timeout=10) as client:
        yield client


def pieces(text: str, size: int = 5) -> list[str]:
    return [text[at : at + size] for at in range(0, len(text), size)]


def scored(texts: list[str], finish: str = "stop") -> Any:
    """An answer of these tokens, each with its log probability, for every choice."""

    def answer(stream: Any) -> None:
        for choice in range(stream.request.sampling.n):
            for number, text in enumerate(texts):
                score = [wire.Logprob(number, -0.5 - number, text.encode())]
                last = number == len(texts) - 1
                stream.push(Delta(choice, [number], text, score, finish if last else None))
        stream.finish(wire.Usage(5, len(texts) * stream.request.sampling.n, 0))

    return answer


def events(answer: Any) -> list[Any]:
    assert answer.status == 200, answer.body
    parts = [part.split(b"data: ")[-1] for part in answer.body.split(b"\n\n") if b"data: " in part]
    assert parts[-1] == b"[DONE]"
    return [msgspec.json.decode(part) for part in parts[:-1]]


def deltas(answer: Any, choice: int = 0) -> list[Any]:
    return [one["delta"] for event in events(answer) for one in event["choices"] if one["index"] == choice]


# -- the shapes --------------------------------------------------------------------------------------------------------


def test_a_stream_has_the_deltas_of_openai(front: Any, make: Any) -> None:
    texts = ["Hm. ", "<tool_call>", '{"name": "weather", ', '"arguments": {"ci', 'ty": "Rome"}}', "</tool_call>"]
    front.dispatcher.answer = make.says(*texts)
    told = deltas(front.post("/v1/chat/completions", BODY | {"stream": True}))
    identity = told[2]["tool_calls"][0]["id"]
    assert identity.startswith("call_")
    assert told == [
        {"role": "assistant", "content": None},
        {"content": "Hm."},
        {"tool_calls": [{"index": 0, "id": identity, "type": "function", "function": {"name": "weather", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"ci'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": 'ty": "Rome"}'}}]},
        {},
    ]  # fmt: skip


def test_finish_reasons(front: Any, make: Any) -> None:
    for text, finish, wanted in (
        (CALL % "Rome", "stop", "tool_calls"),
        ((CALL % "Rome")[:-30], "length", "length"),
        ("No call.", "stop", "stop"),
    ):
        front.dispatcher.answer = make.says(*pieces(text), finish=finish)
        plain = front.post("/v1/chat/completions", BODY).json["choices"][0]
        streamed = events(front.post("/v1/chat/completions", BODY | {"stream": True}))
        told = [one["finish_reason"] for event in streamed for one in event["choices"]]
        assert plain["finish_reason"] == wanted
        assert told == [None] * (len(told) - 1) + [wanted]


def test_a_plain_answer_has_its_calls_in_the_message(front: Any, make: Any) -> None:
    front.dispatcher.answer = make.says(*pieces(CALL % "Rome"))
    answer = front.post("/v1/chat/completions", BODY).json
    message = answer["choices"][0]["message"]
    (call,) = message["tool_calls"]
    assert call == {
        "id": call["id"],
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "Rome"}'},
    }
    assert (message["role"], message["content"]) == ("assistant", None)
    front.dispatcher.answer = make.says("No ", "call.")
    message = front.post("/v1/chat/completions", BODY).json["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "No call.", "refusal": None}


def test_without_tools_or_with_choice_none_text_is_text(front: Any, make: Any) -> None:
    front.dispatcher.answer = make.says(*pieces(CALL % "Rome"))
    for body in (BODY | {"tools": []}, BODY | {"tool_choice": "none"}):
        choice = front.post("/v1/chat/completions", body).json["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == (CALL % "Rome", "stop")
        assert front.stream().request.input.tools is None


def test_no_parallel_calls_means_one(front: Any, make: Any) -> None:
    front.dispatcher.answer = make.says(*pieces(TWO))
    body = BODY | {"parallel_tool_calls": False}
    message = front.post("/v1/chat/completions", body).json["choices"][0]["message"]
    assert [call["function"]["arguments"] for call in message["tool_calls"]] == ['{"city": "Rome"}']
    streamed = deltas(front.post("/v1/chat/completions", body | {"stream": True}))
    assert {call["index"] for delta in streamed for call in delta.get("tool_calls", [])} == {0}


# -- with n and logprobs -----------------------------------------------------------------------------------------------


def test_streamed_and_plain_agree_on_everything(front: Any) -> None:
    for text in (TWO, CALL % "Rome", "Nothing <tool", "<tool_call>nothing</tool_call>", " "):
        front.dispatcher.answer = scored(pieces(text, 3))
        body = BODY | {"n": 2, "logprobs": True, "seed": 5}
        plain = front.post("/v1/chat/completions", body).json
        streamed = front.post("/v1/chat/completions", body | {"stream": True})
        for index, choice in enumerate(plain["choices"]):
            content, calls, scores = None, [], []
            for event in events(streamed):
                for one in event["choices"]:
                    if one["index"] != index:
                        continue
                    if one["logprobs"] is not None:
                        scores += one["logprobs"]["content"]
                    if one["delta"].get("content") is not None:
                        content = (content or "") + one["delta"]["content"]
                    for call in one["delta"].get("tool_calls", []):
                        if "id" in call:
                            assert call["index"] == len(calls)
                            calls.append(call["function"])
                        else:
                            calls[call["index"]]["arguments"] += call["function"]["arguments"]
                    finish = one["finish_reason"]
            message = choice["message"]
            assert message["content"] == content
            assert [call["function"] for call in message.get("tool_calls", [])] == calls
            assert choice["finish_reason"] == finish
            assert choice["logprobs"]["content"] == scores
            assert [one["logprob"] for one in scores] == [-0.5 - number for number in range(len(pieces(text, 3)))]


def test_the_id_of_a_call_is_of_its_request_choice_and_place(front: Any, make: Any) -> None:
    front.dispatcher.answer = make.says(*pieces(TWO))
    answer = front.post("/v1/chat/completions", BODY | {"n": 2}).json
    rid = front.stream().rid
    for choice in answer["choices"]:
        wanted = [call_id(rid, choice["index"], number) for number in (0, 1)]
        assert [call["id"] for call in choice["message"]["tool_calls"]] == wanted
    places = [(rid, choice, number) for rid in ("a", "b") for choice in (0, 1) for number in (0, 1, 10)]
    assert len({call_id(*place) for place in places}) == len(places)
    streamed = events(front.post("/v1/chat/completions", BODY | {"n": 2, "stream": True}))
    rid = front.stream().rid
    told = [
        (one["index"], call["index"], call["id"])
        for event in streamed
        for one in event["choices"]
        for call in one["delta"].get("tool_calls", [])
        if "id" in call
    ]
    assert len(told) == 4
    assert all(identity == call_id(rid, choice, number) for choice, number, identity in told)


# -- resumable streams -------------------------------------------------------------------------------------------------


def resumable(given: list[Delta], position: Any) -> list[bytes]:
    """The events of a stream with ids, for a client that has `position`."""
    request = wire.Request("a" * 32, "m", "v", wire.Input(), wire.Sampling(n=2))
    framing = Framing("/v1/chat/completions", "m", 7, True, True, tools="hermes")
    source: Any = SimpleNamespace(rid="a" * 32, sequence=5)
    numbered = NumberedEvents(ToolChatEvents("x", Admitted(request, framing)), source, 2, position)
    out: list[bytes] = []
    numbered.add(given, out)
    assert numbered.open_choices == 0
    closing = numbered.closing(wire.Usage(1, 2, 0), 1).split(b"\n\n")[:-1]
    return [*out, *(event + b"\n\n" for event in closing)]


def test_a_client_that_resumes_after_any_event_misses_none_and_gets_none_twice() -> None:
    texts = [
        "Hm",
        ". ",
        *pieces(CALL % "Rome", 29),
        "\n<tool_call>",
        '{"name": "f", "arguments": {}}</tool_call> ',
        "<too",
    ]
    given = []
    for number, text in enumerate(texts):
        for choice in (0, 1):
            given.append(Delta(choice, [number + choice], text, None, "stop" if number == len(texts) - 1 else None))
    whole = resumable(given, None)
    ids = [event.split(b"\n")[0].removeprefix(b"id: ").decode() for event in whole]
    assert len(set(ids)) == len(ids)
    assert any("p1" in each for each in ids)
    one_after_the_other = [each for choice in (0, 1) for each in given if each.choice == choice]
    for number, identity in enumerate(ids[:-1]):
        assert resumable(given, parse(identity)) == whole[number + 1 :]
        again = resumable(one_after_the_other, parse(identity))  # as they come of what is told again
        assert sorted(map(body_of, again)) == sorted(map(body_of, whole[number + 1 :]))


def body_of(event: bytes) -> bytes:
    return event.partition(b"\n")[2]


# -- the SDK -----------------------------------------------------------------------------------------------------------


def test_the_sdk_reads_a_plain_answer_and_sends_the_results_back(front: Any, sdk: openai.OpenAI, make: Any) -> None:
    front.dispatcher.answer = make.says(*pieces(TWO))
    first = sdk.chat.completions.create(**BODY)
    message = first.choices[0].message
    assert message.content == "I look."
    assert message.tool_calls is not None
    cities = [json.loads(call.function.arguments)["city"] for call in message.tool_calls if call.type == "function"]
    assert cities == ["Rome", "Oslo"]
    turns: Any = [*ASKED, message]
    for call, result in zip(message.tool_calls, ("21 degrees", "3 degrees"), strict=True):
        turns.append({"role": "tool", "tool_call_id": call.id, "content": result})
    front.dispatcher.answer = make.says("21 and 3.")
    second = sdk.chat.completions.create(model="m", messages=turns, tools=TOOLS)
    assert (second.choices[0].message.content, second.choices[0].message.tool_calls) == ("21 and 3.", None)
    sent = front.stream(1).request.input
    assert sent.tools == TOOLS
    assert [turn.role for turn in sent.messages] == ["user", "assistant", "tool", "tool"]
    assert [call["function"]["arguments"] for call in sent.messages[1].tool_calls] == [
        {"city": "Rome"},
        {"city": "Oslo"},
    ]
    assert [turn.tool_call_id for turn in sent.messages[2:]] == [call.id for call in message.tool_calls]


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_the_sdk_accumulates_a_stream(front: Any, sdk: openai.OpenAI, make: Any, size: int) -> None:
    front.dispatcher.answer = make.says(*pieces(TWO, size))
    plain = sdk.chat.completions.create(**BODY)
    with sdk.chat.completions.stream(**BODY) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        final = stream.get_final_completion()
    assert [(event.name, event.index, event.arguments) for event in done] == [
        ("weather", 0, '{"city": "Rome"}'),
        ("weather", 1, '{"city": "Oslo"}'),
    ]
    message, expected = final.choices[0].message, plain.choices[0].message
    assert (message.content, final.choices[0].finish_reason) == ("I look.", "tool_calls")
    assert message.tool_calls is not None
    assert expected.tool_calls is not None
    assert [(call.function.name, call.function.arguments) for call in message.tool_calls] == [
        (call.function.name, call.function.arguments) for call in expected.tool_calls if call.type == "function"
    ]
    assert len({call.id for call in message.tool_calls}) == 2


@pytest.mark.parametrize(
    ("dialect", "text"),
    [
        ("llama3", '<|python_tag|>{"name": "weather", "parameters": {"city": "Rome"}}'),
        ("mistral", '[TOOL_CALLS]weather[ARGS]{"city": "Rome"}'),
    ],
)
def test_a_versions_dialect_is_read(start_front: Any, make: Any, dialect: str, text: str) -> None:
    front = start_front()
    front.call(front.router.put_version, make.version(tool_dialect=dialect))
    front.dispatcher.answer = make.says(*pieces(text))
    with openai.OpenAI(base_url=front.url + "/v1", api_key="none", max_retries=0, timeout=10) as sdk:
        message = sdk.chat.completions.create(**BODY).choices[0].message
        assert message.tool_calls is not None
        assert [(each.function.name, each.function.arguments) for each in message.tool_calls if each.type == "function"] == [
            ("weather", '{"city": "Rome"}')
        ]  # fmt: skip
