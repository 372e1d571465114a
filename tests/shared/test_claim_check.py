import asyncio
import hashlib
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from shared import claim_check, subjects, wire
from shared.bus import Bus
from shared.claim_check import DEAD_INPUTS, INPUTS, JOB_INPUTS, ClaimCheck
from shared.errors import ObjectsUnavailable, QueueFull, StreamGone, TooLarge
from shared.objects import ObjectStore
from shared.settings import Settings
from shared.wire import Grammar, Input, Request, Sampling

SAMPLING = Sampling(max_tokens=3, n=2, seed=7, stop=["x"], logit_bias={1: 2.0}, grammar=Grammar("regex", "a" * 500))
SUBJECT = subjects.request("m", "v", subjects.LANE_FAST, "te nant")


def request(prompt: str = "hello", rid: str = "") -> Request:
    return Request(rid or wire.new_id(), "m", "v", Input(prompt=prompt), SAMPLING, True, b"framing")


def headers(message_id: str) -> dict[str, str]:
    return {wire.HEADER_MSG_ID: message_id}


def test_what_is_split_is_joined_and_the_message_has_nothing_that_grows() -> None:
    whole = request("hello " * 100_000)
    small, large = claim_check.split(whole, INPUTS, whole.rid)
    assert len(wire.encode(small)) < 300
    assert (small.sampling.n, small.sampling.seed, small.framing) == (2, 7, b"framing")
    assert claim_check.join(small, large) == whole
    again, _ = claim_check.split(msgspec.structs.replace(whole, version="w"), INPUTS, whole.rid)
    assert again.stored == small.stored  # whoever publishes that message refers to the same object


@pytest.mark.parametrize("damage", ["cut", "changed", "foreign", "sampling", "unreadable"])
def test_an_object_that_is_not_the_one_that_is_meant_is_refused(damage: str) -> None:
    small, large = claim_check.split(request(), INPUTS, "id")
    if damage == "cut":
        large = large[:-1]
    elif damage == "changed":
        large = large[:-1] + bytes([large[-1] ^ 1])
    elif damage == "sampling":  # the worker has counted the choices by the message
        small = msgspec.structs.replace(small, sampling=msgspec.structs.replace(small.sampling, n=1))
    elif damage == "foreign":
        large = claim_check.split(request("another"), INPUTS, "id")[1]
    else:
        large = b"\xc1" * 10
        digest = hashlib.sha256(large).hexdigest()
        small = msgspec.structs.replace(small, stored=wire.StoredInput(INPUTS, "0" * 32, 10, digest))
    with pytest.raises(StreamGone):
        claim_check.join(small, large)


@pytest.mark.parametrize(
    "stored",
    [
        {"place": "inputs", "id": "../../../other/x", "size": 1, "sha256": "0" * 64},
        {"place": "models", "id": "0" * 32, "size": 1, "sha256": "0" * 64},
        {"place": "inputs/other/rid", "id": "0" * 32, "size": 1, "sha256": "0" * 64},
        {"place": "inputs", "id": "0" * 32 + "\n", "size": 1, "sha256": "0" * 64},
        {"place": "inputs", "id": "A" * 32, "size": 1, "sha256": "0" * 64},
        {"place": "inputs", "id": "0" * 32, "size": 0, "sha256": "0" * 64},
        {"place": "inputs", "id": "0" * 32, "size": -5, "sha256": "0" * 64},
        {"place": "inputs", "id": "0" * 32, "size": 1, "sha256": "0" * 63},
        {"place": "inputs", "id": "0" * 32, "size": 1},
        "inputs/other/rid/id",
    ],
)
def test_a_reference_can_name_no_path(stored: Any) -> None:
    body = msgspec.json.encode({"rid": "r", "model": "m", "version": "v", "input": {}, "stored": stored})
    with pytest.raises(wire.Malformed):
        wire.decode_request(body, {"Content-Type": "application/json"})


def test_a_key_is_of_the_tenant_whatever_its_name(s3_settings: Settings) -> None:
    small, _ = claim_check.split(request(rid="r" * 64), INPUTS, "id")
    assert small.stored is not None
    for tenant in ("a/../b", "..", "a b", "\u00e9" * 64):
        name = claim_check.key(tenant, small.rid, small.stored)
        assert name.split("/") == ["inputs", subjects.encode_token(tenant), small.rid, small.stored.id]
        assert ".." not in name


class Place:
    """A bus whose messages may have a few KiB, and a bucket of the test's own."""

    def __init__(self, bus: Bus) -> None:
        self.bus, self.claim_check, self.objects = bus, ClaimCheck(bus), ObjectStore(bus.settings)

    def stored(self) -> list[str]:
        return [each.key for place in (INPUTS, JOB_INPUTS, DEAD_INPUTS) for each in self.objects.list(place)]


@pytest.fixture
def place(nats_server: Any, s3_settings: Settings) -> Callable[..., None]:
    def run(work: Callable[[Place], Awaitable[None]], **changed: Any) -> None:
        settings = {"nats_url": nats_server.url, "s3_bucket": f"claims-{secrets.token_hex(6)}"} | changed

        async def main() -> None:
            bus = await Bus.connect(msgspec.structs.replace(s3_settings, **settings), "test")
            bus._client._max_payload = 64 * 1024 + 2000
            await bus.ensure()
            try:
                await work(Place(bus))
            finally:
                await bus.close()

        asyncio.run(main())

    return run


def test_a_large_request_is_published_read_moved_and_deleted_with_its_input(place: Callable[..., None]) -> None:
    async def work(it: Place) -> None:
        small, whole = request("small"), request("large " * 5000)
        await it.claim_check.publish(SUBJECT, wire.encode(small), headers(small.rid))
        ack = await it.claim_check.publish(SUBJECT, wire.encode(whole), headers(whole.rid))  # the bucket is made
        assert len(it.stored()) == 1
        message = await it.bus.get_message(subjects.REQ_STREAM, ack.seq)
        assert message is not None
        assert len(message.data) < 500
        read = wire.decode_request(message.data, {})
        assert await it.claim_check.open(read, "te nant") == whole
        with pytest.raises(StreamGone, match="no longer"):
            await it.claim_check.open(read, "another")  # a reference is one to an object of the subject's tenant
        again = await it.claim_check.publish(SUBJECT, wire.encode(whole), headers(whole.rid))
        assert (again.duplicate, len(it.stored())) == (True, 1)
        target = subjects.request("m", "w", subjects.LANE_FAST, "te nant")
        await it.claim_check.copy(message, read, target, headers(f"{whole.rid}.w.0"))
        await it.claim_check.delete_read(subjects.REQ_STREAM, message)
        [moved] = it.stored()
        assert await it.bus.get_message(subjects.REQ_STREAM, ack.seq) is None
        message = await it.bus.next_message(subjects.REQ_STREAM, target, 1)
        assert message is not None
        assert await it.claim_check.open(wire.decode_request(message.data, {}), "te nant") == whole
        buried = subjects.dead_letter("m", "w", "te nant")
        await it.claim_check.publish(buried, wire.encode(whole), headers(f"{whole.rid}.dlq"))
        await it.claim_check.delete(subjects.REQ_STREAM, message.seq, wire.encode(whole))
        [kept] = it.stored()
        assert kept.startswith("dead-inputs/te=20nant/")
        assert moved.startswith("inputs/te=20nant/")
        letter = await it.bus.next_message(subjects.DLQ_STREAM, buried, 1)
        assert letter is not None
        await it.claim_check.delete_read(subjects.DLQ_STREAM, letter)
        assert it.stored() == []
        await it.claim_check.delete(subjects.REQ_STREAM, 1, wire.encode(small))
        assert (await it.bus.stream_info(subjects.REQ_STREAM)).messages == 0

    place(work)


def test_what_is_refused_leaves_nothing_behind(place: Callable[..., None]) -> None:
    async def work(it: Place) -> None:
        whole = request("large " * 5000)
        await it.claim_check.publish(SUBJECT, wire.encode(request("large " * 5000)), headers("first"))
        with pytest.raises(QueueFull):
            await it.claim_check.publish(SUBJECT, wire.encode(whole), headers(whole.rid))
        assert len(it.stored()) == 1
        with pytest.raises(TooLarge, match=r"\d{5} bytes, the limit is 80000 bytes"):
            await it.claim_check.publish(SUBJECT, wire.encode(request("large " * 14_000)), headers("more"))
        body = wire.encode(msgspec.structs.replace(whole, framing=b"f" * 70_000))  # that is not what a client sends
        with pytest.raises(TooLarge, match="over the bus's limit"):
            await it.claim_check.publish(SUBJECT, body, headers("framing"))
        assert len(it.stored()) == 1
        with pytest.raises(TooLarge, match="over the bus's limit"):  # a tenant's own requester has no store
            await ClaimCheck(it.bus, may_store=False).publish(SUBJECT, wire.encode(whole), headers(whole.rid))
        far = msgspec.structs.replace(whole, input=Input(), stored=wire.StoredInput(INPUTS, "0" * 32, 80_001, "0" * 64))
        with pytest.raises(TooLarge, match="80001 bytes, the limit is 80000"):  # it is not even read
            await it.claim_check.open(far, "te nant")

    place(work, request_bytes_max=20_000, req_messages_per_subject_max=1)


def test_a_store_that_is_away_is_told_as_such(place: Callable[..., None]) -> None:
    async def work(it: Place) -> None:
        whole = request("large " * 5000)
        with pytest.raises(ObjectsUnavailable):
            await it.claim_check.publish(SUBJECT, wire.encode(whole), headers(whole.rid))
        small, _ = claim_check.split(whole, INPUTS, whole.rid)
        with pytest.raises(ObjectsUnavailable):
            await it.claim_check.open(small, "te nant")
        await it.claim_check.discard(small, "te nant")  # the sweep's, later
        assert (await it.bus.stream_info(subjects.REQ_STREAM)).messages == 0

    place(work, s3_endpoint="http://127.0.0.1:9")
