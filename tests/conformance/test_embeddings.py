"""/v1/embeddings: OpenAI's shape field by field, what is refused, and what goes on the wire."""

import base64
import struct
from collections.abc import Callable
from typing import Any

import pytest

from shared import wire
from shared.dispatch import Delta
from shared.encoders import Encoder
from shared.errors import ContextLength, EngineFailed

PATH = "/v1/embeddings"
ENCODER = Encoder(dimensions=3, length=1000, positions=1000, pooling="mean_tokens", normalized=True, shorter=(2,))
BODY: dict[str, Any] = {"model": "vectors", "input": "A mill."}
ROUNDED = struct.unpack("<f", struct.pack("<f", 0.1))[0]


def embeds(stream: Any) -> None:
    """Choice c of a request has the vector (place, c, 0.1); they come in any order."""
    embedding = stream.request.input.embedding
    for choice in reversed(range(stream.request.sampling.n)):
        vector = struct.pack("<3f", embedding.first + choice, choice, 0.1)
        stream.push(Delta(choice, [], "", None, "stop", vector))
    stream.finish(wire.Usage(7 * stream.request.sampling.n, 0))


@pytest.fixture
def post(front: Any, make: Any) -> Callable[..., Any]:
    """`post(body, **headers)` to a front with a model `vectors` beside the model `m`, which generates."""
    front.call(front.router.put_version, make.version("v1", "vectors", encoder=ENCODER))
    front.call(front.router.put_route, make.route(("v1", 10_000), model="vectors", stable="v1"))
    front.dispatcher.answer = embeds
    return lambda body, **headers: front.post(PATH, body, **headers)


def test_an_answer_has_openais_fields_and_no_others(post: Callable[..., Any], front: Any) -> None:
    answer = post(BODY | {"user": "u"})
    assert answer.status == 200
    assert answer.json == {
        "object": "list",
        "data": [{"object": "embedding", "index": 0, "embedding": [0.0, 0.0, ROUNDED]}],
        "model": "vectors",
        "usage": {"prompt_tokens": 7, "total_tokens": 7},
    }
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-headrace-version"] == "v1"
    assert answer.headers["x-headrace-claims"] == "1"
    (stream,) = front.dispatcher.streams
    request = wire.decode_request(wire.encode_request(stream.request), {})
    assert request.input == wire.Input(embedding=wire.Embedding(["A mill."]))
    assert (request.model, request.version, request.sampling.n) == ("vectors", "v1", 1)
    assert request.sampling.max_tokens == 0


def test_base64_is_the_same_numbers_as_float32_little_endian(post: Callable[..., Any]) -> None:
    floats = post(BODY | {"input": ["a", "b"], "encoding_format": "float"}).json["data"]
    coded = post(BODY | {"input": ["a", "b"], "encoding_format": "base64"}).json["data"]
    for one, other in zip(floats, coded, strict=True):
        assert list(struct.unpack("<3f", base64.b64decode(other["embedding"]))) == one["embedding"]
        assert (one["index"], one["object"]) == (other["index"], other["object"])


@pytest.mark.parametrize(
    ("given", "inputs"),
    [
        ("text", ["text"]),
        (["one", "two"], ["one", "two"]),
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
        (["mixed", [7]], ["mixed", [7]]),
    ],
)
def test_every_form_of_input_is_taken(post: Callable[..., Any], front: Any, given: Any, inputs: list[Any]) -> None:
    answer = post(BODY | {"input": given, "dimensions": 2})
    assert [each["index"] for each in answer.json["data"]] == list(range(len(inputs)))
    embedding = front.dispatcher.streams[-1].request.input.embedding
    assert embedding == wire.Embedding(inputs, 0, 2)


def test_many_inputs_are_a_few_requests_whose_vectors_come_in_order(post: Callable[..., Any], front: Any) -> None:
    long = ["word " * 3000] * 3  # bytes of about 3750 tokens each: two of them fill a pack
    inputs = ["short"] * 150 + long + [[1] * 999] * 20
    answer = post(BODY | {"input": inputs})
    assert answer.status == 200, answer.body
    data = answer.json["data"]
    assert [each["index"] for each in data] == list(range(173))
    assert [each["embedding"][0] for each in data] == list(range(173))
    assert answer.json["usage"] == {"prompt_tokens": 7 * 173, "total_tokens": 7 * 173}
    packs = [stream.request.input.embedding for stream in front.dispatcher.streams]
    assert [each for pack in packs for each in pack.inputs] == inputs
    assert [pack.first for pack in packs] == [0, 64, 128, 152, 157, 165]
    assert len({stream.request.rid for stream in front.dispatcher.streams}) == len(packs)


@pytest.mark.parametrize(
    ("change", "code", "param"),
    [
        ({"input": ""}, "invalid_request", "input"),
        ({"input": []}, "invalid_request", "input"),
        ({"input": ["a", ""]}, "invalid_request", "input[1]"),
        ({"input": [[1], []]}, "invalid_request", "input[1]"),
        ({"input": [1, "a"]}, "invalid_request", "input"),
        ({"input": ["a", 1]}, "invalid_request", "input[1]"),
        ({"input": None}, "invalid_request", "input"),
        ({"input": [-1]}, "invalid_request", None),
        ({"input": ["a"] * 2049}, "invalid_request", "input"),
        ({"input": ["a", [1] * 1001]}, "context_length_exceeded", "input[1]"),
        ({"input": ["a", "x" * 16_001]}, "context_length_exceeded", "input[1]"),
        ({"encoding_format": "int8"}, "invalid_request", "encoding_format"),
        ({"dimensions": 0}, "invalid_request", "dimensions"),
        ({"dimensions": 4}, "invalid_request", "dimensions"),
        ({"dimensions": 1}, "unsupported_parameter", "dimensions"),
        ({"stream": True}, "unsupported_parameter", "stream"),
        ({"temperature": 0.5}, "unsupported_parameter", "temperature"),
        ({"n": 2}, "unsupported_parameter", "n"),
        ({"model": "m"}, "wrong_task", "model"),
        ({"model": "nothing"}, "model_not_found", "model"),
    ],
)
def test_what_cannot_be_served_is_refused(
    post: Callable[..., Any], front: Any, change: dict[str, Any], code: str, param: str | None
) -> None:
    answer = post(BODY | change)
    assert answer.status == (404 if code == "model_not_found" else 400)
    assert answer.error["code"] == code
    assert param is None or answer.error["param"] == param
    assert not front.dispatcher.streams


def test_a_model_of_vectors_generates_nothing(post: Callable[..., Any], front: Any) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    for path, body in (
        ("/v1/chat/completions", {"messages": messages}),
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/models/vectors/infer", {"input": "Hi"}),
        ("/v1/messages", {"messages": messages, "max_tokens": 5}),
        ("/v1/messages/count_tokens", {"messages": messages}),
        ("/v1/responses", {"input": "Hi", "store": False}),
    ):
        answer = front.post(path, {"model": "vectors"} | body)
        assert (answer.status, answer.json["error"]["code"]) == (400, "wrong_task"), path
    assert not front.dispatcher.streams


def test_neutral_values_of_other_routes_are_let_through(post: Callable[..., Any]) -> None:
    assert post(BODY | {"stream": False, "n": 1, "dimensions": None, "encoding_format": None}).status == 200


def test_the_first_error_of_a_pack_is_the_answers(post: Callable[..., Any], front: Any) -> None:
    def fails(stream: Any) -> None:
        if stream.request.input.embedding.first == 0:
            embeds(stream)
        else:
            stream.fail(ContextLength("input[64] is long", param="input[64]"))

    front.dispatcher.answer = fails
    answer = post(BODY | {"input": ["a"] * 65})
    assert (answer.status, answer.error["code"], answer.error["param"]) == (400, "context_length_exceeded", "input[64]")
    front.dispatcher.answer = lambda stream: stream.fail(EngineFailed("it failed"))
    assert post(BODY).error["code"] == "engine_failed"


def test_a_key_is_for_what_fits_into_one_request_on_the_bus(post: Callable[..., Any]) -> None:
    answer = post(BODY | {"input": ["a"] * 65}, Idempotency_Key="many")
    assert (answer.status, answer.error["code"], answer.error["param"]) == (400, "unsupported_parameter", "input")
