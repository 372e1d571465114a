"""Completions' own shape of log probabilities, with an echoed prompt before the output."""

import json
from typing import Any

from shared.wire import Logprob, TopLogprob, Usage

PATH = "/v1/completions"
TOP = [TopLogprob(1, -0.5, b"x"), TopLogprob(2, -2.0, b"y")]
TOKENS = [
    ("", Logprob(9, None, b"<|begin|>", special=True)),
    ("Né", Logprob(10, -1.0, "Né".encode(), TOP)),
    ("", Logprob(11, -2.0, "\N{EARTH GLOBE EUROPE-AFRICA}".encode()[:2], TOP)),
    ("\N{EARTH GLOBE EUROPE-AFRICA}", Logprob(12, -3.0, "\N{EARTH GLOBE EUROPE-AFRICA}".encode()[2:], TOP)),
    (" out", Logprob(13, -0.25, b" out", TOP)),
]
EXPECTED = {
    "tokens": ["<|begin|>", "Né", "\ufffd", "\ufffd\ufffd", " out"],
    "token_logprobs": [None, -1.0, -2.0, -3.0, -0.25],
    "top_logprobs": [None, *[{"x": -0.5, "y": -2.0}] * 4],
    "text_offset": [0, 0, 2, 2, 3],
}


def echoing(front: Any, make: Any) -> None:
    def answer(stream: Any) -> None:
        sampling = stream.request.sampling
        assert (sampling.echo, sampling.logprobs) == (True, 2)
        for text, logprob in TOKENS:
            stream.push(make.token(text, logprobs=[logprob]))
        stream.push(make.token("", finish="length"))
        stream.finish(Usage(4, 1))

    front.dispatcher.answer = answer


def test_an_echoed_prompt_is_scored_from_its_second_token_on(front: Any, make: Any) -> None:
    echoing(front, make)
    answer = front.post(PATH, {"model": "m", "prompt": "x", "echo": True, "logprobs": 2})
    [choice] = answer.json["choices"]
    assert choice["text"] == "Né\N{EARTH GLOBE EUROPE-AFRICA} out"
    assert choice["logprobs"] == EXPECTED
    assert answer.json["usage"]["completion_tokens"] == 1


def test_a_stream_gives_the_same_piece_by_piece(front: Any, make: Any) -> None:
    echoing(front, make)
    body = {"model": "m", "prompt": "x", "echo": True, "logprobs": 2, "stream": True}
    lines = front.post(PATH, body).body.decode().splitlines()
    events = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
    assert "".join(event["text"] for event in events) == "Né\N{EARTH GLOBE EUROPE-AFRICA} out"
    pieces = [event["logprobs"] for event in events if event["logprobs"]]
    assert {name: [each for piece in pieces for each in piece[name]] for name in EXPECTED} == EXPECTED
