"""Every byte of a stream, for the three shapes."""

import json
from typing import Any

import pytest

from ingress import sse
from ingress.family import Admitted, Choice, Family, Framing
from ingress.routes.chat import Chat
from ingress.routes.completions import Completions
from ingress.routes.infer import Infer
from shared.dispatch import Delta
from shared.errors import EngineFailed
from shared.wire import Input, Logprob, Request, Sampling, TopLogprob, Usage

CHAT = b'data: {"id":"chatcmpl-r1","object":"chat.completion.chunk","created":9,"model":"m@stable","choices":['
TEXT = b'data: {"id":"cmpl-r1","object":"text_completion","created":9,"model":"m@stable","choices":['
USAGE = (
    b'"usage":{"prompt_tokens":5,"completion_tokens":3,"total_tokens":8,"prompt_tokens_details":{"cached_tokens":1}}'
)


def admitted(include_usage: bool = False, **sampling: Any) -> Admitted:
    request = Request("r1", "m", "v1", Input(prompt="x"), Sampling(seed=7, **sampling))
    return Admitted(request, Framing("/v1/x", "m@stable", 9, include_usage, True))


def stream(family: Family, given: Admitted, *batches: list[Delta]) -> bytes:
    """The whole stream; every batch is one wake-up."""
    events, out = family.events(given), []
    for batch in batches:
        events.add(batch, out)
    assert events.open_choices == 0
    return b"".join(out) + events.closing(Usage(5, 3, 1), 2)


def delta(text: str, finish: str | None = None, choice: int = 0, logprobs: list[Logprob] | None = None) -> Delta:
    return Delta(choice, [1], text, logprobs, finish)


def test_a_chat_stream() -> None:
    assert stream(Chat(), admitted(), [delta("Hel"), delta('l"o\n')], [delta("", "stop")]) == (
        CHAT + b'{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}\n\n'
        + CHAT + b'{"index":0,"delta":{"content":"Hel"},"logprobs":null,"finish_reason":null}]}\n\n'
        + CHAT + b'{"index":0,"delta":{"content":"l\\"o\\n"},"logprobs":null,"finish_reason":null}]}\n\n'
        + CHAT + b'{"index":0,"delta":{},"logprobs":null,"finish_reason":"stop"}]}\n\n'
        + b"data: [DONE]\n\n"
    )  # fmt: skip


def test_a_completion_stream_with_usage() -> None:
    given = admitted(include_usage=True)
    assert stream(Completions(), given, [delta("日"), delta("本", "length")]) == (
        TEXT + '{"index":0,"text":"日","logprobs":null,"finish_reason":null}],"usage":null}\n\n'.encode()
        + TEXT + '{"index":0,"text":"本","logprobs":null,"finish_reason":null}],"usage":null}\n\n'.encode()
        + TEXT + b'{"index":0,"text":"","logprobs":null,"finish_reason":"length"}],"usage":null}\n\n'
        + TEXT + b"]," + USAGE + b',"headrace":{"claims":2}}\n\n'
        + b"data: [DONE]\n\n"
    )  # fmt: skip


def test_a_native_stream_numbers_every_token() -> None:
    deltas = [delta("Hel"), delta(""), delta("lo"), Delta(0, [], "", None, "stop")]
    assert stream(Infer(), admitted(), deltas) == (
        b'data: {"token":"Hel","index":0}\n\ndata: {"token":"","index":1}\n\ndata: {"token":"lo","index":2}\n\n'
        b'data: {"finish_reason":"stop",' + USAGE + b',"claims":2,"seed":7,"id":"r1","version":"v1"}\n\n'
    )


def test_held_back_text_sends_nothing() -> None:
    for family, chunks in ((Chat(), 3), (Completions(), 2)):
        sent = stream(family, admitted(), [delta(""), delta("")], [delta("a"), delta("", "stop")])
        assert sent.count(b"data: {") == chunks


def test_wake_ups_change_no_byte() -> None:
    deltas = [delta(text, choice=choice) for text in "abcd" for choice in range(2)]
    deltas += [delta("", "stop", choice) for choice in range(2)]
    for family in (Chat(), Completions()):
        together = stream(family, admitted(n=2), deltas)
        assert together == stream(family, admitted(n=2), *([one] for one in deltas))


@pytest.mark.parametrize(("family", "opening"), [(Chat(), 1), (Completions(), 0)])
def test_each_choice_opens_and_finishes_once(family: Family, opening: int) -> None:
    deltas = [delta("a", choice=1), delta("b", "stop", choice=1), delta("c"), delta("", "length", choice=0)]
    chunks = [json.loads(line[6:]) for line in stream(family, admitted(n=2), deltas).split(b"\n\n")[:-2]]
    for choice in range(2):
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == choice]
        assert [one["finish_reason"] for one in own if one["finish_reason"]] == ["length" if choice == 0 else "stop"]
        assert sum("role" in one.get("delta", {}) for one in own) == opening
        assert own[-1]["finish_reason"] is not None


LOGPROBS = [
    Logprob(4, -0.5, b"\xe6\x97", [TopLogprob(4, -0.5, b"\xe6\x97"), TopLogprob(5, float("-inf"), b"x")]),
    Logprob(6, -0.25, b"\xa5", [TopLogprob(6, -0.25, b"\xa5")]),
    Logprob(7, -1.0, b"!", [TopLogprob(7, -1.0, b"!")]),
]


def test_chat_logprobs() -> None:
    events, out = Chat().events(admitted(logprobs=2)), []
    events.add([delta("", logprobs=LOGPROBS[:1])], out)
    chunk = json.loads(out[1][6:])["choices"][0]
    assert chunk["delta"] == {"content": ""}
    assert chunk["logprobs"] == {
        "content": [
            {
                "token": "\ufffd",
                "logprob": -0.5,
                "bytes": [0xE6, 0x97],
                "top_logprobs": [
                    {"token": "\ufffd", "logprob": -0.5, "bytes": [0xE6, 0x97]},
                    {"token": "x", "logprob": -9999.0, "bytes": [120]},
                ],
            }
        ],
        "refusal": None,
    }


def test_completion_logprobs_count_characters() -> None:
    deltas = [delta("", logprobs=LOGPROBS[:1]), delta("日", logprobs=LOGPROBS[1:2])]
    deltas.append(delta("!", "stop", logprobs=LOGPROBS[2:]))
    events, out = Completions().events(admitted(logprobs=1)), []
    events.add(deltas, out)
    streamed = [json.loads(chunk[6:])["choices"][0]["logprobs"] for chunk in out]
    assert [one["text_offset"] for one in streamed[:3]] == [[0], [0], [1]]
    assert streamed[2] == {"tokens": ["!"], "token_logprobs": [-1.0], "top_logprobs": [{"!": -1.0}], "text_offset": [1]}
    assert streamed[3] is None

    gathered = Choice()
    for one in deltas:
        gathered.add(one)
    answer = json.loads(Completions().plain(admitted(logprobs=1), [gathered], Usage(5, 3), 1))
    logprobs = answer["choices"][0]["logprobs"]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert logprobs[name] == [entry for one in streamed[:3] for entry in one[name]]


def test_completion_logprobs_zero_has_no_tops() -> None:
    events, out = Completions().events(admitted(logprobs=0)), []
    events.add([delta("!", logprobs=[Logprob(7, -1.0, b"!")])], out)
    assert json.loads(out[0][6:])["choices"][0]["logprobs"]["top_logprobs"] is None


def test_native_scores() -> None:
    events, out = Infer().events(admitted(logprobs=1)), []
    events.add([delta("!", logprobs=LOGPROBS[2:])], out)
    score = {"id": 7, "logprob": -1.0, "top": [{"id": 7, "token": "!", "logprob": -1.0}]}
    assert json.loads(out[0][6:]) == {"token": "!", "index": 0, "score": score}


def test_an_error_event() -> None:
    assert sse.error_event(EngineFailed("it broke")) == (
        b'data: {"error":{"message":"it broke","type":"server_error","param":null,"code":"engine_failed"}}\n\n'
    )
    assert sse.KEEPALIVE == b": keepalive\n\n"
