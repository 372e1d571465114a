"""What the wire refuses: whatever else arrives is one error, whoever sent it."""

import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from shared import wire
from shared.wire import (
    Accepted,
    Attach,
    ChatMessage,
    Frame,
    FromWorker,
    Input,
    Malformed,
    No,
    Ok,
    Release,
    Request,
    Sampling,
    ToWorker,
)

HOME = "tok.ingress.0a"
REQUEST = Request("a" * 32, "m", "v", Input(messages=[ChatMessage("user", "x", tool_calls=[{"a": 1}])]), Sampling(n=2))
FROM_WORKER = FromWorker(
    "w1",
    [
        Accepted("r", "c", 5, "$JS.ACK.REQ.fast-1.1.5.1.1.0", 1),
        Frame("r", "c", "s", 0, 3, [1, 70_000], ["a", "b"], [wire.Logprob(1, -0.5, b"a")] * 2, "stop"),
        Frame("r", "c", "s", 1, 0, [], [], finish="stop", usage=wire.Usage(3, 0), vector=b"\x00\x00\x80?"),
        Ok("r", "c", "s", 1, "", 5),
        No("r", "s"),
    ],
)
TO_WORKER = ToWorker([Attach("r", "s", HOME, [[1, 2]]), Release("r", "s", HOME, True)])


def test_who_reads_json_is_told_the_same_in_json() -> None:
    for message, decode in ((FROM_WORKER, wire.decode_from_worker), (TO_WORKER, wire.decode_to_worker)):
        data = wire.encode_json(message)
        assert data.startswith(b"[")
        assert not wire.is_json(wire.encode(message))
        assert decode(data) == decode(wire.encode(message)) == message
    about = wire.About("r", "acme")
    assert wire.decode_about(wire.encode_json(about)) == wire.decode_about(wire.encode(about)) == about
    assert wire.encoder_for("tok.acme.json-0a") is wire.encode_json
    assert wire.encoder_for("tok.json-acme.0a") is wire.encoder_for(HOME) is wire.encode
    assert wire.answer_to(wire.encode_json(about), about) == wire.encode_json(about)
    assert wire.answer_to(wire.encode(about), about) == wire.encode(about)
    whole = len(wire.encode_json(FROM_WORKER))
    parts = list(
        wire.encode_batches(lambda items: FromWorker("w1", items), FROM_WORKER.items, whole - 1, wire.encode_json)
    )
    assert len(parts) == 2
    assert [item for part in parts for item in wire.decode_from_worker(part).items] == FROM_WORKER.items


@pytest.mark.parametrize("encode", [wire.encode, wire.encode_json])
def test_damaged_bytes_are_malformed_and_nothing_else(encode: Callable[[Any], bytes]) -> None:
    headers = {"Content-Type": "application/json"} if encode is wire.encode_json else {}

    def decode_request(data: bytes) -> Any:
        return wire.decode_request(data, headers)

    whole = [(FROM_WORKER, wire.decode_from_worker), (TO_WORKER, wire.decode_to_worker), (REQUEST, decode_request)]
    random_ = random.Random(1)
    refused = 0
    for message, decode in whole:
        data = encode(message)
        assert decode(data) == message
        for _ in range(3000):
            damaged = bytearray(data)
            for _ in range(random_.randint(1, 4)):
                place = random_.randrange(len(damaged))
                damaged[place : place + random_.randint(0, 2)] = random_.randbytes(random_.randint(0, 2))
            try:
                decode(bytes(damaged))
            except Malformed:
                refused += 1
    assert refused > 8000


LONG_SEED = b'{"rid":"a","model":"m","version":"v","input":{"prompt":"x"},"sampling":{"seed":1%b}}' % (b"0" * 30)


@pytest.mark.parametrize(
    ("data", "headers"),
    [
        (b"", {}),
        (b"\xc1", {}),
        (b"\xdd\xff\xff\xff\xff", {}),
        (wire.encode(REQUEST).replace(b"\xa1a\x01", b"\xa1a" + b"\x91" * 100_000 + b"\x01"), {}),
        (b"\xff", {"Content-Type": "application/json"}),
        (b'{"rid":"\xff"}', {"Content-Type": "application/json"}),
        (b"[" * 100_000, {"Content-Type": "application/json"}),
        (b'{"input":{"messages":' + b"[" * 100_000, {"Content-Type": "application/json"}),
        (LONG_SEED, {"Content-Type": "application/json"}),
    ],
)
def test_what_is_no_request(data: bytes, headers: dict[str, str]) -> None:
    with pytest.raises(Malformed):
        wire.decode_request(data, headers)


def request_of(**changed: Any) -> bytes:
    return msgspec.msgpack.encode(msgspec.to_builtins(REQUEST) | changed)


@pytest.mark.parametrize("rid", ["", "a b", "a\r\nHr-Evil: 1", "a.b", "x" * 65, "\0"])
def test_a_rid_is_fit_for_headers_and_logs(rid: str) -> None:
    with pytest.raises(Malformed):
        wire.decode_request(request_of(rid=rid), {})


@pytest.mark.parametrize("choices", [0, -1, 129, 2**62])
def test_the_number_of_choices_has_bounds(choices: int) -> None:
    with pytest.raises(Malformed):
        wire.decode_request(request_of(sampling={"n": choices}), {})


@pytest.mark.parametrize(
    "reply", ["", "a b", "tok.x", "tok.x.*", "tok.x.>", "tok.a b.c", "$JS.API.STREAM.DELETE.REQ", HOME + "\r\n"]
)
def test_answers_go_to_frame_addresses_only(reply: str) -> None:
    for item in (Attach("r", "s", reply, [[1]]), Release("r", "s", reply, True)):
        with pytest.raises(Malformed):
            wire.decode_to_worker(wire.encode(ToWorker([item])))


@pytest.mark.parametrize(
    "attach",
    [
        Attach("r", "s", HOME, [[-1]]),
        Attach("r", "s", HOME, [[2**32]]),
        Attach("r", "s", HOME, None, [-1], ["0" * 16]),
    ],
)
def test_ids_and_positions_have_bounds(attach: Attach) -> None:
    with pytest.raises(Malformed):
        wire.decode_to_worker(wire.encode(ToWorker([attach])))


@pytest.mark.parametrize("worker", ["", "a b", "*", ">", "a.b", "w\r\nPING\r\n", "w" * 65])
def test_a_worker_id_is_one_token_of_a_subject(worker: str) -> None:
    with pytest.raises(Malformed):
        wire.decode_from_worker(wire.encode(FromWorker(worker, [No("r", "s")])))


@pytest.mark.parametrize("ack", ["q.m.v.fast.t", "$JS.API.STREAM.DELETE.REQ", "$JS.ACK.x y"])
def test_a_message_is_handed_back_to_its_ack_subject_only(ack: str) -> None:
    with pytest.raises(Malformed):
        wire.decode_from_worker(wire.encode(FromWorker("w", [Accepted("r", "c", 1, ack, 0)])))


@pytest.mark.parametrize("depth", [0, 5000])
def test_what_msgpack_has_no_room_for_is_malformed(depth: int) -> None:
    value: Any = 10**30
    for _ in range(depth):
        value = [value]
    message = ChatMessage("assistant", "x", tool_calls=[{"a": value}])
    with pytest.raises(Malformed):
        wire.encode_request(Request("a", "m", "v", Input(messages=[message])))


def test_a_frame_is_even_when_its_lists_have_one_length() -> None:
    score = wire.Logprob(1, -0.5, b"a")
    assert wire.is_even(Frame("r", "c", "s", 0, 0, [1], ["a"], [score]))
    assert wire.is_even(Frame("r", "c", "s", 0, 0, [], [], finish="stop"))
    assert not wire.is_even(Frame("r", "c", "s", 0, 0, [1], []))
    assert not wire.is_even(Frame("r", "c", "s", 0, 0, [1], ["a"], []))
