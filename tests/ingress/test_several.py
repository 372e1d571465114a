"""Several prompts in one request: their choices side by side in one answer, and one end for all."""

import json
from typing import Any

from shared.errors import EngineFailed, QueueFull
from shared.wire import Usage

PATH = "/v1/completions"
BODY = {"model": "m", "prompt": ["first", [7, 8], "third"], "n": 2, "max_tokens": 4}


def spoken(front: Any) -> None:
    """Each prompt's choices say which they are."""

    def answer(stream: Any) -> None:
        number = len(front.dispatcher.streams) - 1
        for choice in range(2):
            stream.push(front.make.token(f"{number}.", choice), front.make.token(str(choice), choice, "stop"))
        stream.finish(Usage(10 + number, 4, number))

    front.dispatcher.answer = answer


def test_choices_are_numbered_across_prompts(front: Any, make: Any) -> None:
    front.make = make
    spoken(front)
    answer = front.post(PATH, BODY)
    assert answer.status == 200
    assert [(choice["index"], choice["text"]) for choice in answer.json["choices"]] == [
        (index, f"{index // 2}.{index % 2}") for index in range(6)
    ]
    assert answer.json["usage"] == {
        "prompt_tokens": 33,
        "completion_tokens": 12,
        "total_tokens": 45,
        "prompt_tokens_details": {"cached_tokens": 3},
    }
    streams = front.dispatcher.streams
    assert [stream.request.input.prompt or stream.request.input.token_ids for stream in streams] == BODY["prompt"]
    assert answer.json["id"] == f"cmpl-{streams[0].rid}"
    assert answer.headers["x-headrace-claims"] == "1"


def test_a_stream_has_them_as_they_come(front: Any, make: Any) -> None:
    with front.connect(PATH, BODY | {"stream": True, "n": 1, "stream_options": {"include_usage": True}}) as client:
        first, second, third = (front.stream(index) for index in range(3))
        front.call(second.push, make.token("b"))
        client.read_until(b'"index":1,"text":"b"')
        front.call(first.push, make.token("a", 0, "stop"))
        client.read_until(b'"index":0,"text":"a"')
        for stream in (first, third, second):
            front.call(stream.push, make.token("!", 0, "stop" if stream is not first else None))
            front.call(stream.finish, Usage(1, 2))
        received = client.read_until(b"[DONE]").decode()
    events = [json.loads(line[6:]) for line in received.splitlines() if line.startswith("data: {")]
    finished = [choice["index"] for event in events for choice in event["choices"] if choice["finish_reason"]]
    assert sorted(finished) == [0, 1, 2]
    assert events[-1]["usage"]["total_tokens"] == 9


def test_one_that_fails_ends_them_all(front: Any, make: Any) -> None:
    def answer(stream: Any) -> None:
        if len(front.dispatcher.streams) == 2:
            stream.fail(EngineFailed("the second broke"))

    front.dispatcher.answer = answer
    answer = front.post(PATH, BODY)
    assert (answer.status, answer.error["code"]) == (500, "engine_failed")
    make.wait_for(lambda: [stream.cancelled for stream in front.dispatcher.streams] == [True, False, True], "cancels")


def test_a_queue_that_fills_up_halfway_leaves_nothing_behind(front: Any, make: Any) -> None:
    def answer(stream: Any) -> None:
        if len(front.dispatcher.streams) == 2:
            front.dispatcher.refusal = QueueFull("full")

    front.dispatcher.answer = answer
    assert front.post(PATH, BODY).error["code"] == "queue_full"
    make.wait_for(lambda: [stream.cancelled for stream in front.dispatcher.streams] == [True, True], "cancels")


def test_a_client_that_leaves_cancels_them_all(front: Any, make: Any) -> None:
    client = front.connect(PATH, BODY)
    front.stream(2)
    client.close()
    make.wait_for(lambda: all(stream.cancelled for stream in front.dispatcher.streams), "cancels")


def test_they_cannot_be_resumed_or_keyed(front: Any) -> None:
    for headers in ({"x_resumable": "true"}, {"idempotency_key": "k"}):
        answer = front.post(PATH, BODY | {"stream": True}, **headers)
        assert (answer.status, answer.error["code"], answer.error["param"]) == (400, "unsupported_parameter", "prompt")
    assert front.dispatcher.streams == []
