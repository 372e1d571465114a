"""Requesters and real worker processes over a real broker, and what happens when one of them dies."""

import asyncio
import signal
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from shared import locate, subjects, wire
from shared.bus import Message
from shared.claim_check import ClaimCheck
from shared.errors import (
    BadRequest,
    ContextLength,
    HeadraceError,
    QueueDeadline,
    VersionFailed,
    VersionNotFound,
    VersionRetired,
)
from shared.records import Version
from workers.claims import ClaimTable
from workers.engine.load import load_engine
from workers.main import EXIT_FAILED, EXIT_HUNG
from workers.metrics import WorkerMetrics
from workers.server import WorkerServer

from .conftest import Fleet, read, text_of, until

RunFleet = Callable[..., None]


def test_a_stream_is_contiguous_and_leaves_nothing_behind(run_fleet: RunFleet) -> None:
    async def work(fleet: Fleet) -> None:
        await fleet.active(fleet.spawn())
        stream = await fleet.submit(max_tokens=64)
        deltas = await read(stream)
        assert sum(len(delta.ids) for delta in deltas) == 64
        assert [delta.finish for delta in deltas] == [None] * 63 + ["length"]
        assert stream.usage == wire.Usage(2, 64, 0)
        assert stream.claims == 1
        again = await read(await fleet.submit(max_tokens=64))
        assert again == deltas
        await fleet.idle()

    run_fleet(work)


def test_requests_wait_for_the_first_worker(run_fleet: RunFleet) -> None:
    async def work(fleet: Fleet) -> None:
        streams = [await fleet.submit(f"number {number}", max_tokens=5) for number in range(20)]
        assert fleet.dispatcher.queued(subjects.LOCAL_TENANT) == 20
        fleet.spawn()
        for stream in streams:
            assert len(await read(stream)) == 5
        assert fleet.dispatcher.queued(subjects.LOCAL_TENANT) == 0
        await fleet.idle()

    run_fleet(work)


def test_a_killed_workers_streams_go_on_elsewhere_without_a_seam(run_fleet: RunFleet) -> None:
    async def work(fleet: Fleet) -> None:
        first = fleet.spawn()
        await fleet.active(first)
        undisturbed = [await fleet.submit(f"p {number}", max_tokens=60, n=2, seed=7) for number in range(6)]
        wanted = [await read(stream) for stream in undisturbed]
        streams = [await fleet.submit(f"p {number}", max_tokens=60, n=2, seed=7) for number in range(6)]
        begun = [await stream.next(10) for stream in streams]
        fleet.workers[first].kill()
        await fleet.active(fleet.spawn())
        for stream, head, want in zip(streams, begun, wanted, strict=True):
            deltas = head + await read(stream)
            assert stream.claims == 2
            for choice in (0, 1):
                ids = [token for delta in deltas if delta.choice == choice for token in delta.ids]
                assert ids == [token for delta in want if delta.choice == choice for token in delta.ids]
                assert text_of(deltas, choice) == text_of(want, choice)
            assert stream.usage == wire.Usage(2, 120, 0)
        await fleet.idle()

    run_fleet(work, source="sim:fixed-20ms")


def test_a_stopped_worker_is_replaced_and_fenced_when_it_wakes(run_fleet: RunFleet) -> None:
    async def work(fleet: Fleet) -> None:
        first, second = fleet.spawn(), fleet.spawn()
        await fleet.active(first)
        await fleet.active(second)
        streams = [await fleet.submit(f"p {number}", max_tokens=100) for number in range(8)]
        begun = [await stream.next(10) for stream in streams]
        fleet.workers[first].send_signal(signal.SIGSTOP)
        for stream, head in zip(streams, begun, strict=True):
            assert sum(len(delta.ids) for delta in head + await read(stream)) == 100
        assert {stream.claims for stream in streams} == {1, 2}
        fleet.workers[first].send_signal(signal.SIGCONT)
        await fleet.idle()

    run_fleet(work, source="sim:fixed-20ms", ack_wait_s=2.0, in_progress_every_s=0.5, pull_expires_s=1.0)


def test_cancel_frees_everything(run_fleet: RunFleet) -> None:
    async def work(fleet: Fleet) -> None:
        await fleet.active(fleet.spawn())
        running = await fleet.submit(max_tokens=5000)
        await running.next(10)
        queued = await fleet.submit(max_tokens=5000)
        for stream in (running, queued):
            stream.cancel()
            stream.cancel()
            with pytest.raises(HeadraceError, match="cancelled"):
                await read(stream)
        await fleet.idle()

    run_fleet(work, source="sim:fixed-20ms")


def test_a_stream_that_nobody_reads_is_ended_at_its_limit(run_fleet: RunFleet) -> None:
    async def work(fleet: Fleet) -> None:
        await fleet.active(fleet.spawn())
        unread = [await fleet.submit(f"p {number}", max_tokens=5000, logprobs=5 * number) for number in range(2)]
        read_all = asyncio.create_task(read(await fleet.submit(max_tokens=150)))
        await until(lambda: all(stream.ended for stream in unread))
        for stream in unread:
            with pytest.raises(HeadraceError, match=r"left \d+ tokens and alternatives unread") as error:
                await stream.next()
            assert error.value.code == "cancelled"
        assert unread[1].requester._choices[0].next < 20  # five alternatives of each token count, too
        assert len(await read_all) == 150
        await fleet.idle()

    run_fleet(work, source="sim:fixed-10ms", unread_tokens_max=100)


def test_cancel_in_the_queue_removes_the_message(run_fleet: RunFleet) -> None:
    async def work(fleet: Fleet) -> None:
        stream = await fleet.submit()
        stream.cancel()
        await fleet.idle()
        assert fleet.dispatcher.totals == {
            "published": 1,
            "completed": 0,
            "failed": 0,
            "cancelled": 1,
            "withdrawn": 1,
        }

    run_fleet(work)


def test_refused_input_is_an_error_of_its_code(run_fleet: RunFleet) -> None:
    async def work(fleet: Fleet) -> None:
        await fleet.active(fleet.spawn())
        with pytest.raises(BadRequest, match="empty"):
            await read(await fleet.submit(" "))
        with pytest.raises(ContextLength, match="8192"):
            await read(await fleet.submit("word " * 9000))
        assert len(await read(await fleet.submit())) == 40
        await fleet.idle()

    run_fleet(work)


def test_both_clocks(run_fleet: RunFleet) -> None:
    async def work(fleet: Fleet) -> None:
        parked = await fleet.submit()
        with pytest.raises(QueueDeadline):
            await read(parked)
        await fleet.idle()
        await fleet.active(fleet.spawn())
        slow = await fleet.submit(max_tokens=8000)
        with pytest.raises(HeadraceError) as error:
            await read(slow)
        assert error.value.code == "generation_deadline"
        await fleet.idle()

    run_fleet(work, source="sim:fixed-20ms", queue_deadline_s=0.5, generation_deadline_s=1.0)


def test_the_queue_deadline_says_why_no_worker_came(run_fleet: RunFleet) -> None:
    async def work(fleet: Fleet) -> None:
        version = Version(model="m", version="v", state="available", source="s3", reason="the store is away")
        fleet.dispatcher.version_changed(version)
        with pytest.raises(QueueDeadline, match="the store is away"):
            await read(await fleet.submit())
        fleet.dispatcher.version_changed(msgspec.structs.replace(version, reason=""))
        with pytest.raises(QueueDeadline) as error:
            await read(await fleet.submit())
        assert "failed" not in error.value.message
        await fleet.idle()

    run_fleet(work, queue_deadline_s=0.3)


def test_a_failed_version_ends_what_waits_for_it(run_fleet: RunFleet) -> None:
    async def work(fleet: Fleet) -> None:
        stream = await fleet.submit()
        fleet.dispatcher.version_changed(
            Version(model="m", version="v", state="failed", source="s3", reason="weights are corrupt")
        )
        with pytest.raises(VersionFailed, match="weights are corrupt"):
            await read(stream)
        await fleet.idle()

    run_fleet(work)


def test_a_version_that_is_removed_or_retired_ends_what_waits_for_it(run_fleet: RunFleet) -> None:
    async def work(fleet: Fleet) -> None:
        retired = Version(model="m", version="v", state="retired", source="s3")
        for leave, wanted in (
            (lambda: fleet.dispatcher.version_removed("m", "v"), VersionNotFound),
            (lambda: fleet.dispatcher.version_changed(retired), VersionRetired),
        ):
            stream = await fleet.submit()
            leave()
            with pytest.raises(wanted):
                await read(stream)
            late = await fleet.submit()  # it was on its way already
            with pytest.raises(wanted):
                await read(late)
        await fleet.idle()

    run_fleet(work)


def test_a_body_without_a_version_is_of_its_subjects(run_fleet: RunFleet) -> None:
    async def work(fleet: Fleet) -> None:
        accepted: set[str] = set()

        def on_items(message: Message) -> None:
            items = wire.decode_from_worker(message.data).items
            accepted.update(item.rid for item in items if isinstance(item, wire.Accepted))

        await fleet.bus.subscribe("tok.t.c", on_items)
        home = {wire.HEADER_WIRE: "1", wire.HEADER_REPLY: "tok.t.c"}
        for rid, encode, kind in (("a", msgspec.msgpack.encode, "msgpack"), ("b", msgspec.json.encode, "json")):
            body = encode(wire.Request(rid, "m", "", wire.Input(prompt="x"), wire.Sampling(max_tokens=3)))
            headers = home | {wire.HEADER_MSG_ID: rid, "Content-Type": f"application/{kind}"}
            await fleet.bus.publish_durable("q.m.v.fast.t", body, headers)
        owner = subjects.INGRESS_OWNER
        # no worker: it is read from the stream
        found = await locate.locate(fleet.bus, ClaimCheck(fleet.bus), "a", "t", 1, owner)
        assert found is not None
        assert found.request.version == "v"
        fleet.spawn()
        await until(lambda: accepted == {"a", "b"})
        for rid in ("a", "b"):
            about = wire.encode(wire.About(rid, "t"))
            answer = wire.decode_found((await fleet.bus.request(subjects.find("t"), about)).data)
            assert answer.request.version == "v"
            assert (await fleet.bus.request(subjects.cancel("t"), about)).data in (wire.CANCELLED, wire.FINISHED)
        assert (await fleet.bus.stream_info(subjects.DLQ_STREAM)).messages == 0

    run_fleet(work)


def test_what_is_no_request_goes_to_the_dead_letters_and_the_worker_goes_on(run_fleet: RunFleet) -> None:
    async def work(fleet: Fleet) -> None:
        good = msgspec.to_builtins(
            wire.Request("a" * 32, "m", "v", wire.Input(prompt="x"), wire.Sampling(max_tokens=3))
        )
        home = {wire.HEADER_WIRE: "1", wire.HEADER_REPLY: "tok.t.c"}
        encode = msgspec.msgpack.encode
        number = 0

        async def put(data: bytes, subject: str = "q.m.v.fast.t", **headers: str) -> None:
            nonlocal number
            number += 1
            given = home | {name.replace("_", "-"): value for name, value in headers.items()}
            await fleet.bus.publish_durable(subject, data, given | {wire.HEADER_MSG_ID: f"id{number}"})

        await put(b"\xc1")
        await put(encode(good)[:-3])
        await put(b"[" * 100_000, Content_Type="application/json")
        await put(encode(good), Hr_Wire="2")
        for reply in ("", "a b", "$JS.API.STREAM.DELETE.REQ", "tok.t.*", "tok.other.c"):
            await put(encode(good), Hr_Reply=reply)
        for milliseconds in ("", "-5", "nan", "9" * 400, "9" * 5000):
            await put(encode(good), Hr_Generation_Ms=milliseconds)
        for choices in (0, -1, 10_000_000, 2**62):
            await put(encode(good | {"sampling": {"n": choices}}))
        for rid in ("", "a b", "x" * 100_000):
            await put(encode(good | {"rid": rid}))
        await put(encode(good | {"model": "other"}))
        await put(encode(good | {"version": "other"}))
        await put(encode(good), subject="q.m.v.fast.=FF")
        # over what is left for more headers: stored all the same, by somebody who does not ask us
        await fleet.bus.publish("q.m.v.fast.t", b"x" * (fleet.bus.payload_bytes_max + 30_000), headers=home)
        number += 1
        worker = fleet.spawn()
        await fleet.active(worker)
        assert len(await read(await fleet.submit(max_tokens=5))) == 5
        await fleet.idle()
        assert (await fleet.bus.stream_info(subjects.DLQ_STREAM)).messages == number
        log = fleet.log(worker)
        assert "Traceback" not in log
        assert "connection lost" not in log

    run_fleet(work)


def test_a_request_that_cannot_be_stored_is_refused_before_it_counts(run_fleet: RunFleet) -> None:
    async def work(fleet: Fleet) -> None:
        message = wire.ChatMessage("assistant", "x", tool_calls=[{"a": 10**30}])
        request = wire.Request(wire.new_id(), "m", "v", wire.Input(messages=[message]))
        with pytest.raises(BadRequest, match="cannot be stored"):
            await fleet.dispatcher.submit(request, subjects.LOCAL_TENANT)
        assert fleet.dispatcher.queued(subjects.LOCAL_TENANT) == 0
        assert fleet.dispatcher.open_streams == 0

    run_fleet(work)


def test_a_worker_whose_loop_has_ended_says_so(run_fleet: RunFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(fleet: Fleet) -> None:
        version = Version(model="m", version="v", state="available", source="sim:zero")
        engine = load_engine(version.source, None, version.engine, 0)
        metrics = WorkerMetrics("m", "v")
        server = WorkerServer(fleet.bus, fleet.settings, version, "w9", engine, metrics, lambda _seconds: None)
        await server.start()
        monkeypatch.setattr(ClaimTable, "tick", lambda *_: 1 / 0)
        async with asyncio.timeout(5):
            assert "loop" in await server.watch()
        await server.abandon()
        await server.stop()

    run_fleet(work)


def test_strangers_on_control_subjects_disturb_nobody(run_fleet: RunFleet) -> None:
    async def work(fleet: Fleet) -> None:
        worker = fleet.spawn()
        await fleet.active(worker)
        stream = await fleet.submit(max_tokens=60)
        head = await stream.next(10)
        evil = wire.encode(wire.ToWorker([wire.Attach(stream.rid, "s", "a\r\nPUB b 1\r\nx", [[1]])]))
        far = wire.encode(wire.ToWorker([wire.Attach(stream.rid, "s", "tok.t.c", [[1], [2]])]))
        frame = wire.Frame(stream.rid, "c", stream.requester.sid, 0, 5, [1], [])
        uneven = wire.encode(wire.FromWorker(worker, [frame]))
        injected = wire.encode(wire.FromWorker("w 1", [wire.Accepted("r", "c", 1, "", 0)]))
        for data in (b"", b"\xc1", evil, far, wire.encode(42)):
            await fleet.bus.publish(subjects.worker_control(worker, subjects.INGRESS_OWNER), data)
            await fleet.bus.publish(subjects.attach_broadcast("m", "v", subjects.INGRESS_OWNER), data)
            await fleet.bus.publish(subjects.find(subjects.INGRESS_OWNER), data, reply="nobody")
            await fleet.bus.publish(subjects.cancel(subjects.INGRESS_OWNER), data)
        for data in (b"\xc1", uneven, injected):
            await fleet.bus.publish(fleet.dispatcher.address, data)
        assert sum(len(delta.ids) for delta in head + await read(stream)) == 60
        assert stream.claims == 1
        await fleet.idle()
        log = fleet.log(worker)
        assert "Traceback" not in log
        assert "connection lost" not in log
        assert fleet.bus.reconnects == 0

    run_fleet(work, source="sim:fixed-20ms")


def test_a_worker_drains_on_sigterm_and_hands_over_what_does_not_fit(run_fleet: RunFleet) -> None:
    async def work(fleet: Fleet) -> None:
        first = fleet.spawn()
        await fleet.active(first)
        short, long = await fleet.submit(max_tokens=40), await fleet.submit(max_tokens=150)
        heads = [await short.next(10), await long.next(10)]
        fleet.workers[first].terminate()
        fleet.spawn()
        assert await fleet.exit_status(first) == 0
        assert sum(len(delta.ids) for delta in heads[0] + await read(short)) == 40
        assert short.claims == 1
        assert sum(len(delta.ids) for delta in heads[1] + await read(long)) == 150
        assert long.claims == 2
        assert await fleet.lease(first) is None
        await fleet.idle()

    run_fleet(work, source="sim:fixed-20ms", drain_budget_s=1.5)


def test_a_broker_restart_is_a_pause(run_fleet: RunFleet, nats_server: Any) -> None:
    async def work(fleet: Fleet) -> None:
        await fleet.active(fleet.spawn())
        streams = [await fleet.submit(f"p {number}", max_tokens=100) for number in range(10)]
        heads = [await stream.next(10) for stream in streams]
        await asyncio.to_thread(nats_server.kill)
        await until(lambda: not fleet.bus.connected)
        await asyncio.to_thread(nats_server.start)
        for stream, head in zip(streams, heads, strict=True):
            assert sum(len(delta.ids) for delta in head + await read(stream)) == 100
        await fleet.idle()

    run_fleet(work, source="sim:fixed-20ms", publish_timeout_s=10)


def test_garbage_goes_to_the_dead_letters_and_stops_nobody(run_fleet: RunFleet) -> None:
    async def work(fleet: Fleet) -> None:
        await fleet.active(fleet.spawn())
        subject = subjects.request("m", "v", subjects.LANE_FAST, subjects.LOCAL_TENANT)
        bodies = (b"", b"not msgpack", wire.encode({"rid": 5}), b"\xc1" * 100)
        for number, body in enumerate(bodies):
            headers = {"Nats-Msg-Id": f"garbage-{number}", "Nats-TTL": "60", "Hr-Reply": "tok.ingress.nobody"}
            await fleet.bus.publish_durable(subject, body, headers)
        await fleet.bus.publish(subjects.worker_control("w1", subjects.INGRESS_OWNER), b"\xc1garbage")
        await fleet.bus.publish(fleet.dispatcher.address, b"\xc1garbage")
        assert len(await read(await fleet.submit())) == 40
        await fleet.idle()
        assert (await fleet.bus.stream_info(subjects.DLQ_STREAM)).messages == len(bodies)

    run_fleet(work)


def test_an_orphan_is_given_up_after_the_grace(run_fleet: RunFleet) -> None:
    async def work(fleet: Fleet) -> None:
        await fleet.active(fleet.spawn())
        stream = await fleet.submit(max_tokens=8000)
        await stream.next(10)
        await fleet.dispatcher._readers._subscription.unsubscribe()  # as if the process were gone
        start = time.monotonic()
        await fleet.idle()
        assert time.monotonic() - start < 5

    run_fleet(work, source="sim:fixed-20ms", orphan_grace_s=0.5, silence_s=60.0)


def test_a_hung_engine_ends_the_worker_and_its_requests_go_on(run_fleet: RunFleet) -> None:
    async def work(fleet: Fleet) -> None:
        first = fleet.spawn()
        await fleet.active(first)
        stream = await fleet.submit(max_tokens=3)  # a step takes longer than the watchdog allows
        assert await fleet.exit_status(first) == EXIT_HUNG
        info = await fleet.bus.consumer_info(
            subjects.REQ_STREAM, subjects.consumer("fast", subjects.requests_of_lane("m", "v", "fast"))
        )
        assert info is not None
        assert info.num_pending + info.num_ack_pending == 1
        stream.cancel()

    run_fleet(work, source="sim:fixed-9000ms", step_ms_max=500.0)


def test_a_version_that_cannot_load_says_why(run_fleet: RunFleet) -> None:
    async def work(fleet: Fleet) -> None:
        worker = fleet.spawn()
        assert await fleet.exit_status(worker) == EXIT_FAILED
        lease = await fleet.lease(worker)
        assert lease is not None
        assert (lease.state, lease.permanent) == ("failed", True)
        assert "no-such-profile" in lease.reason

    run_fleet(work, source="sim:no-such-profile")
