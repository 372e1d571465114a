"""The bus against a real nats-server: connection, durable publishes, streams, key-value, pulls."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from shared import subjects, wire
from shared.bus import Bus, Message
from shared.errors import QueueFull, TooLarge, Unavailable
from shared.pull import Puller
from shared.settings import Settings
from shared.streams import delivery_of


async def until(condition: Callable[[], object], budget_s: float = 10.0) -> None:
    deadline = time.monotonic() + budget_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        await asyncio.sleep(0.005)


def with_bus(settings: Settings, work: Callable[[Bus], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        bus = await Bus.connect(settings, "test")
        try:
            await bus.ensure()
            return await work(bus)
        finally:
            await bus.close()

    return asyncio.run(run())


def headers(number: object) -> dict[str, str]:
    return {"Nats-Msg-Id": f"id-{number}", "Nats-TTL": "60"}


def test_durable_publish_gives_the_sequence_and_stores_a_message_id_once(nats_server: Any) -> None:
    async def work(bus: Bus) -> None:
        subject = subjects.request("m", "v", "fast", "t")
        first = await bus.publish_durable(subject, b"body", headers(1))
        assert await bus.publish_durable(subject, b"body", headers(1)) == first
        second = await bus.publish_durable(subject, b"other", headers(2))
        assert second == first + 1
        stored = await bus.get_message(subjects.REQ_STREAM, first)
        assert stored is not None
        assert (stored.seq, stored.subject, stored.data) == (first, subject, b"body")
        assert stored.headers["Nats-Msg-Id"] == "id-1"
        assert stored.time.startswith("20")
        following = await bus.next_message(subjects.REQ_STREAM, "q.>", first + 1)
        assert following is not None
        assert (following.seq, following.data) == (second, b"other")
        assert await bus.next_message(subjects.REQ_STREAM, "q.nobody.>", first) is None
        await bus.delete_message(subjects.REQ_STREAM, first)
        await bus.delete_message(subjects.REQ_STREAM, first)
        assert await bus.get_message(subjects.REQ_STREAM, first) is None
        assert (await bus.stream_info(subjects.REQ_STREAM)).messages == 1

    with_bus(Settings(nats_url=nats_server.url), work)


def test_a_full_subject_and_an_oversized_body_are_coded_errors_that_cost_nothing(nats_server: Any) -> None:
    async def work(bus: Bus) -> None:
        subject = subjects.request("m", "v", "fast", "t")
        for number in range(3):
            await bus.publish_durable(subject, b"x", headers(number))
        with pytest.raises(QueueFull) as full:
            await bus.publish_durable(subject, b"x", headers(3))
        assert full.value.retry_after is not None
        with pytest.raises(TooLarge) as large:
            await bus.publish_durable(subject, b"x" * (bus.payload_bytes_max + 1), headers(4))
        assert str(bus.payload_bytes_max) in large.value.message
        assert str(bus.payload_bytes_max + 1) in large.value.message
        with pytest.raises(TooLarge):
            await bus.publish("core", b"x" * (bus.payload_bytes_max + 60_000), headers={"big": "y" * 8000})
        assert bus.connected
        assert await bus.get_message(subjects.REQ_STREAM, 1) is not None

    with_bus(Settings(nats_url=nats_server.url, req_messages_per_subject_max=3), work)


def test_a_client_closed_for_good_is_replaced_with_all_its_subscriptions(nats_server: Any) -> None:
    async def work(bus: Bus) -> None:
        heard: list[bytes] = []
        hooks: list[int] = []
        await bus.subscribe("core.here", lambda message: heard.append(message.data))
        bus.on_reconnect(lambda: hooks.append(1))
        # past the check of `publish`: payload under the limit, payload and headers over it
        limit = bus._client.max_payload
        await bus._client.publish("x", b"a" * (limit - 10), headers={"h": "b" * 200})
        await until(lambda: bool(hooks) and bus.connected)
        await bus.publish("core.here", b"again")
        await until(lambda: heard == [b"again"])

    with_bus(Settings(nats_url=nats_server.url), work)


def test_a_callback_that_raises_stops_nothing(nats_server: Any, caplog: pytest.LogCaptureFixture) -> None:
    async def work(bus: Bus) -> None:
        heard: list[bytes] = []

        def callback(message: Message) -> None:
            heard.append(message.data)
            raise RuntimeError("of the callback")

        await bus.subscribe("core.raises", callback)
        for body in (b"1", b"2"):
            await bus.publish("core.raises", body)
        await until(lambda: heard == [b"1", b"2"])
        assert bus.connected

    with_bus(Settings(nats_url=nats_server.url), work)
    assert "of the callback" in caplog.text


def test_publishes_wait_out_a_restart_of_the_server(nats_server: Any) -> None:
    async def work(bus: Bus) -> None:
        subject = subjects.request("m", "v", "fast", "t")
        await bus.publish_durable(subject, b"before", headers(1))
        nats_server.kill()
        publishing = asyncio.create_task(bus.publish_durable(subject, b"during", headers(2)))
        await until(lambda: not bus.connected)
        await asyncio.to_thread(nats_server.start)
        sequence = await publishing
        stored = await bus.get_message(subjects.REQ_STREAM, sequence)
        assert stored is not None
        assert stored.data == b"during"
        assert (await bus.stream_info(subjects.REQ_STREAM)).messages == 2

    with_bus(Settings(nats_url=nats_server.url, publish_timeout_s=15), work)


def test_without_a_server_a_publish_is_unavailable_within_its_budget(nats_server: Any) -> None:
    async def work(bus: Bus) -> None:
        nats_server.kill()
        await until(lambda: not bus.connected)
        start = time.monotonic()
        with pytest.raises(Unavailable):
            await bus.publish_durable("q.m.v.fast.t", b"x", headers(1))
        assert time.monotonic() - start < 3
        await asyncio.to_thread(nats_server.start)
        await until(lambda: bus.connected)

    with_bus(Settings(nats_url=nats_server.url, publish_timeout_s=0.5), work)


def test_key_value_compare_and_set(nats_server: Any) -> None:
    async def work(bus: Bus) -> None:
        bucket = subjects.MODELS_BUCKET
        assert await bus.kv_get(bucket, "a") is None
        first = await bus.kv_create(bucket, "a", b"1")
        assert first is not None
        assert await bus.kv_create(bucket, "a", b"2") is None
        assert await bus.kv_get(bucket, "a") == (b"1", first)
        second = await bus.kv_update(bucket, "a", b"2", first)
        assert second is not None
        assert await bus.kv_update(bucket, "a", b"3", first) is None
        await bus.kv_delete(bucket, "a")
        assert await bus.kv_get(bucket, "a") is None
        assert await bus.kv_create(bucket, "a", b"4") is not None
        await bus.kv_put(bucket, "b.c", b"5")
        assert await bus.kv_keys(bucket) == ["a", "b.c"]

    with_bus(Settings(nats_url=nats_server.url), work)


def test_of_many_that_create_a_deleted_key_at_once_one_does(nats_server: Any) -> None:
    async def work(bus: Bus) -> None:
        bucket = subjects.MODELS_BUCKET
        for number in range(20):
            assert await bus.kv_create(bucket, "again", b"before") is not None
            await bus.kv_delete(bucket, "again")
            created = await asyncio.gather(*(bus.kv_create(bucket, "again", b"%d" % each) for each in range(20)))
            winners = [b"%d" % each for each, revision in enumerate(created) if revision is not None]
            found = await bus.kv_get(bucket, "again")
            assert found is not None
            assert winners == [found[0]], number
            await bus.kv_delete(bucket, "again")

    with_bus(Settings(nats_url=nats_server.url), work)


def test_a_watch_tells_what_is_there_what_changes_and_survives_a_restart(nats_server: Any) -> None:
    async def work(bus: Bus) -> None:
        bucket = subjects.ROUTES_BUCKET
        await bus.kv_put(bucket, "old", b"1")
        seen: dict[str, bytes | None] = {}
        watch = await bus.watch(bucket, seen.__setitem__)
        assert seen == {"old": b"1"}
        await bus.kv_put(bucket, "new", b"2")
        await bus.kv_delete(bucket, "old")
        await until(lambda: seen == {"old": None, "new": b"2"})
        nats_server.kill()
        await until(lambda: not bus.connected)
        await asyncio.to_thread(nats_server.start)
        await bus.kv_put(bucket, "new", b"3")
        await until(lambda: seen["new"] == b"3" and watch.live)
        await watch.close()

    with_bus(Settings(nats_url=nats_server.url, publish_timeout_s=15), work)


def test_pulls_take_no_more_than_the_credit_and_lose_nothing(nats_server: Any) -> None:
    async def work(bus: Bus) -> None:
        name = await bus.ensure_consumer("m", "v", "fast")
        assert await bus.ensure_consumer("m", "v", "fast") == name
        taken: list[Message] = []
        slots = 5
        puller = Puller(bus, subjects.REQ_STREAM, name, lambda: slots - len(taken), taken.append)
        await puller.start()
        for number in range(40):
            await bus.publish_durable(subjects.request("m", "v", "fast", "t"), str(number).encode(), headers(number))
        await until(lambda: len(taken) == 5)
        info = await bus.consumer_info(subjects.REQ_STREAM, name)
        assert info is not None
        assert (info.num_pending, info.num_ack_pending) == (35, 5)
        slots = 40
        puller.pump()
        await until(lambda: len(taken) == 40)
        assert [message.data for message in taken] == [str(number).encode() for number in range(40)]
        assert [delivery_of(message.reply).delivered for message in taken] == [1] * 40
        for message in taken:
            await bus.publish(message.reply, b"+ACK")
        await puller.stop()

    with_bus(Settings(nats_url=nats_server.url), work)


def test_pulls_go_on_after_expiry_restart_and_a_consumer_that_comes_late(nats_server: Any) -> None:
    async def work(bus: Bus) -> None:
        filter_subject = subjects.requests_of_lane("late", "v", "fast")
        name = subjects.consumer("fast", filter_subject)
        taken: list[bytes] = []
        puller = Puller(bus, subjects.REQ_STREAM, name, lambda: 2, lambda message: taken.append(message.data))
        await puller.start()
        await bus.ensure_consumer("late", "v", "fast")
        subject = subjects.request("late", "v", "fast", "t")
        await bus.publish_durable(subject, b"1", headers("l1"))
        await until(lambda: taken == [b"1"])
        before = puller._number
        await until(lambda: puller._number > before)  # the open pull ran out and was renewed
        await bus.publish_durable(subject, b"2", headers("l2"))
        await until(lambda: taken == [b"1", b"2"])
        nats_server.kill()
        await until(lambda: not bus.connected)
        await asyncio.to_thread(nats_server.start)
        await bus.publish_durable(subject, b"3", headers("l3"))
        await until(lambda: b"3" in taken)
        await puller.stop()

    with_bus(Settings(nats_url=nats_server.url, pull_expires_s=1.0, publish_timeout_s=15), work)


def test_pulls_go_on_in_a_client_that_replaces_one_closed_for_good(nats_server: Any) -> None:
    async def work(bus: Bus) -> None:
        name = await bus.ensure_consumer("m", "v", "fast")
        taken: list[bytes] = []
        puller = Puller(bus, subjects.REQ_STREAM, name, lambda: 2, lambda message: taken.append(message.data))
        await puller.start()
        subject = subjects.request("m", "v", "fast", "t")
        await bus.publish_durable(subject, b"1", headers("r1"))
        await until(lambda: taken == [b"1"])
        client = bus._client
        await client.publish("x", b"a" * (client.max_payload - 10), headers={"h": "b" * 200})
        await until(lambda: bus._client is not client and bus.connected)
        await bus.publish_durable(subject, b"2", headers("r2"))
        await until(lambda: taken == [b"1", b"2"])
        await puller.stop()

    with_bus(Settings(nats_url=nats_server.url, publish_timeout_s=15), work)


def test_a_stopped_puller_swallows_no_message(nats_server: Any) -> None:
    async def work(bus: Bus) -> None:
        name = await bus.ensure_consumer("m", "v", "fast")
        taken: list[Message] = []
        puller = Puller(bus, subjects.REQ_STREAM, name, lambda: 10, taken.append)
        await puller.start()
        await until(lambda: puller.outstanding == 10)
        await puller.stop()
        await bus.publish_durable(subjects.request("m", "v", "fast", "t"), b"x", headers(1))
        info = await bus.consumer_info(subjects.REQ_STREAM, name)
        assert info is not None
        assert (info.num_pending, info.num_ack_pending) == (1, 0)
        assert taken == []

    with_bus(Settings(nats_url=nats_server.url), work)


@pytest.mark.parametrize(
    "subject",
    [
        "$JS.ACK.REQ.fast-1.3.17.4.1795997726261275056.0",
        "$JS.ACK.hub.ACCHASH.REQ.fast-1.3.17.4.1795997726261275056.0",
    ],
)
def test_both_forms_of_ack_subject_are_understood(subject: str) -> None:
    delivery = delivery_of(subject)
    assert (delivery.sequence, delivery.delivered, delivery.stored_ms) == (17, 3, 1795997726261)


def test_headers_that_are_no_text_end_nothing(nats_server: Any) -> None:
    async def work(bus: Bus) -> None:
        heard: list[Message] = []
        await bus.subscribe("heard", heard.append)
        host, _, port = nats_server.url.removeprefix("nats://").rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b'CONNECT {"verbose":false,"headers":true}\r\n')
        for head in (b"NATS/1.0 \xff\xff\xff\r\n\r\n", b"NATS/1.0 503 \xff\r\n\r\n", b"NATS/1.0\r\n\xff: \xff\r\n\r\n"):
            writer.write(b"HPUB heard %d %d\r\n%b\r\n" % (len(head), len(head), head))
        writer.write(b"PING\r\n")
        await reader.readuntil(b"PONG\r\n")  # the server has passed them on
        await bus.publish("heard", b"after them")
        await until(lambda: heard and heard[-1].data == b"after them")
        assert bus.reconnects == 0
        writer.close()

    with_bus(Settings(nats_url=nats_server.url), work)


def test_what_is_no_subject_is_dropped_and_the_connection_stays(nats_url: str) -> None:
    async def work(bus: Bus) -> None:
        for subject in ("", "a b", "a\r\nPUB b 1\r\nx", "x" * 5000, "\N{SNOWMAN}"):
            assert not await bus.publish(subject, b"x")
            assert not await bus.publish("tok.a.b", b"x", reply=subject or " ")
        assert bus.dropped == 10
        await bus.request("$JS.API.INFO")
        assert bus.reconnects == 0

    with_bus(Settings(nats_url=nats_url), work)


def test_strange_messages_are_counted_and_told_once(nats_url: str, caplog: pytest.LogCaptureFixture) -> None:
    async def work(bus: Bus) -> None:
        decoded = []
        await bus.subscribe("strange", lambda message: decoded.append(wire.decode_about(message.data)))
        for _ in range(50):
            await bus.publish("strange", b"\xc1")
        await bus.publish("strange", wire.encode(wire.About("r", "t")))
        await until(lambda: decoded)
        assert bus.malformed == 50

    with_bus(Settings(nats_url=nats_url), work)
    assert len([record for record in caplog.records if "none of ours" in record.message]) == 1
    assert not any(record.exc_info for record in caplog.records)


def test_a_watch_is_ready_though_its_callback_fails(nats_server: Any, caplog: pytest.LogCaptureFixture) -> None:
    async def work(bus: Bus) -> None:
        await bus.kv_put(subjects.ROUTES_BUCKET, "a", b"1")

        def fail(key: str, value: bytes | None) -> None:
            raise ZeroDivisionError

        async with asyncio.timeout(5):
            watch = await bus.watch(subjects.ROUTES_BUCKET, fail)
        await watch.close()

    with_bus(Settings(nats_url=nats_server.url), work)
    assert "was not handled" in caplog.text


def test_a_watch_that_ends_leaves_no_consumer(nats_server: Any) -> None:
    async def work(bus: Bus) -> None:
        bucket = subjects.ROUTES_BUCKET
        await bus.kv_put(bucket, "a", b"1")
        watch = await bus.watch(bucket, lambda key, value: None)

        async def consumers() -> int:
            return int((await bus.api(f"STREAM.INFO.KV_{bucket}"))["state"]["consumer_count"])

        assert await consumers() == 1
        await watch.close()
        deadline = time.monotonic() + 5
        while await consumers():
            assert time.monotonic() < deadline, "the consumer is still there"

    with_bus(Settings(nats_url=nats_server.url), work)


def test_a_flush_that_is_given_up_leaves_the_connection_as_it_is(nats_server: Any) -> None:
    async def work(bus: Bus) -> None:
        for _ in range(3):
            given_up = asyncio.create_task(bus._client.flush())
            await asyncio.sleep(0)  # its PING is sent
            given_up.cancel()
            with pytest.raises(asyncio.CancelledError):
                await given_up
        await bus._client.flush()
        await bus.publish_durable(subjects.request("m", "v", "fast", "t"), b"body", headers(1))
        assert bus.reconnects == 0

    with_bus(Settings(nats_url=nats_server.url), work)
