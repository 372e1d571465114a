"""What the observer makes of leases, lag and hints, and of not hearing anything."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from controller.observer import Observer
from shared import records, subjects
from shared.bus import Bus, Message
from shared.records import Lease, Version, VersionLimits
from shared.settings import Settings

NAME = ("chat", "v1")
KEY = subjects.key("w1")
RunObserver = Callable[[Callable[[Bus, Observer], Awaitable[None]]], None]


@pytest.fixture
def observe(nats_server: Any) -> RunObserver:
    """`observe(work)`: run `await work(bus, observer)`, with chat@v1 available. The lease's TTL is 5 s."""
    settings = Settings(nats_url=nats_server.url, lease_ttl_s=5.0, idle_seconds=60.0)

    def run(work: Callable[[Bus, Observer], Awaitable[None]]) -> None:
        async def main() -> None:
            bus = await Bus.connect(settings, "test")
            try:
                await bus.ensure()
                record = Version(model="chat", version="v1", state="available", source="sim:zero")
                await bus.kv_put(subjects.MODELS_BUCKET, subjects.key(*NAME), records.encode(record))
                await bus.ensure_consumer(*NAME, subjects.LANE_FAST)
                observer = Observer(bus, settings)
                await observer.start()
                try:
                    await work(bus, observer)
                finally:
                    await observer.close()
            finally:
                await bus.close()

        asyncio.run(main())

    return run


async def until(condition: Callable[[], Any], budget_s: float = 10.0) -> None:
    deadline = time.monotonic() + budget_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        await asyncio.sleep(0.005)


def lease(**given: Any) -> bytes:
    defaults: dict[str, Any] = {"state": "active", "pid": 1, "host": "h", "started": time.time(), "slots": 4}
    return records.encode(Lease(worker="w1", model="chat", version="v1", **(defaults | given)))


def facts(observer: Observer, now: float) -> Any:
    return observer.facts(NAME, (), 1, now)


def test_what_is_there_at_the_start_is_known_when_start_returns(observe: RunObserver) -> None:
    async def work(bus: Bus, observer: Observer) -> None:
        now = time.monotonic()
        assert facts(observer, now).lag is None  # not asked yet
        await observer.poll(now)
        known = facts(observer, now)
        assert (known.state, known.lag.total, known.max_replicas, known.idle_seconds) == ("available", 0, 1, 60.0)

    observe(work)


def test_limits_of_the_record_go_before_the_settings(observe: RunObserver) -> None:
    async def work(bus: Bus, observer: Observer) -> None:
        limits = VersionLimits(min_replicas=2, max_replicas=7, idle_seconds=9.0)
        record = Version(model="chat", version="v1", state="available", source="sim:zero", limits=limits)
        await bus.kv_put(subjects.MODELS_BUCKET, subjects.key(*NAME), records.encode(record))
        await until(lambda: facts(observer, 0.0).min_replicas == 2)
        assert (facts(observer, 0.0).max_replicas, facts(observer, 0.0).idle_seconds) == (7, 9.0)

    observe(work)


def test_pending_and_claimed_messages_are_the_lag_and_keep_the_version_busy(observe: RunObserver) -> None:
    async def work(bus: Bus, observer: Observer) -> None:
        now = time.monotonic()
        await observer.poll(now)
        subject = subjects.request(*NAME, subjects.LANE_FAST, "local")
        await bus.publish_durable(subject, b"{}", {"Nats-Msg-Id": "1"})
        await observer.poll(now + 1)
        known = facts(observer, now + 1)
        assert (known.lag.pending, known.lag.claimed, known.busy_at) == (1, 0, now + 1)
        assert [(sample.at, sample.work) for sample in known.history] == [(now + 1, 1)]
        consumer = subjects.consumer(subjects.LANE_FAST, subjects.requests_of_lane(*NAME, subjects.LANE_FAST))
        taken: list[Message] = []
        await bus.subscribe("_INBOX.taker", taken.append)
        await bus.publish(f"$JS.API.CONSUMER.MSG.NEXT.{subjects.REQ_STREAM}.{consumer}", b"", "_INBOX.taker")
        await until(lambda: taken)
        await observer.poll(now + 2)
        known = facts(observer, now + 2)
        assert (known.lag.pending, known.lag.claimed, known.busy_at) == (0, 1, now + 2)
        await observer.poll(now + 100)  # the window is past
        assert [sample.at for sample in facts(observer, now + 100).history] == [now + 100]

    observe(work)


def test_the_lag_is_that_of_both_lanes_and_its_deliveries_only_rise(observe: RunObserver) -> None:
    async def work(bus: Bus, observer: Observer) -> None:
        taken: list[Message] = []
        await bus.subscribe("_INBOX.taker", taken.append)

        async def publish(tenant: str, number: int) -> None:
            subject = subjects.request(*NAME, subjects.LANE_FAIR, tenant)
            await bus.publish_durable(subject, b"{}", {"Nats-Msg-Id": f"{tenant} {number}"})

        async def take(tenant: str) -> Message:
            name = await bus.ensure_fair_consumer(*NAME, tenant)
            before = len(taken)
            await bus.publish(f"$JS.API.CONSUMER.MSG.NEXT.{subjects.REQ_STREAM}.{name}", b"", "_INBOX.taker")
            await until(lambda: len(taken) > before)
            return taken[-1]

        async def poll() -> tuple[int, int, int]:
            await observer.poll(time.monotonic())
            sums = await observer._backlogs.read()
            lag = facts(observer, 0.0).lag
            return lag.pending, lag.claimed, sums[NAME].delivered.consumer_seq

        await publish("a", 1)
        await publish("a", 2)
        await publish("b", 1)
        assert await poll() == (3, 0, 0)  # nobody has asked for them, so that they have no consumers
        message = await take("a")
        assert await poll() == (2, 1, 1)
        await bus.publish(message.reply, b"+ACK")
        for tenant in ("a", "b"):
            await bus.publish((await take(tenant)).reply, b"+ACK")
        await until_async(lambda: is_empty(bus))
        assert await poll() == (0, 0, 2)  # that of b came and went unseen
        await publish("a", 3)
        await take("a")
        assert await poll() == (0, 1, 3)
        name = subjects.fair_consumer(*NAME, "a")
        await bus.api(f"CONSUMER.DELETE.{subjects.REQ_STREAM}.{name}")
        assert await poll() == (1, 0, 3)
        await take("a")
        assert await poll() == (0, 1, 4)

    observe(work)


async def is_empty(bus: Bus) -> bool:
    return (await bus.stream_info(subjects.REQ_STREAM)).messages == 0


async def until_async(condition: Callable[[], Awaitable[bool]], budget_s: float = 10.0) -> None:
    deadline = time.monotonic() + budget_s
    while not await condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        await asyncio.sleep(0.005)


def test_without_a_consumer_lag_is_unknown(observe: RunObserver) -> None:
    async def work(bus: Bus, observer: Observer) -> None:
        await bus.delete_consumer(*NAME, subjects.LANE_FAST)
        await observer.poll(time.monotonic())
        assert facts(observer, 0.0).lag is None
        assert observer.without_consumer == {NAME}

    observe(work)


def test_a_lease_runs_out_after_its_ttl_of_listening_and_time_without_listening_does_not_count(
    observe: RunObserver,
) -> None:
    async def work(bus: Bus, observer: Observer) -> None:
        await bus.kv_put(subjects.WORKERS_BUCKET, KEY, lease())
        await until(lambda: "w1" in observer.leases)
        heard = observer.leases["w1"].heard_at

        async def silent_at(seconds: float) -> bool:
            await observer.poll(heard + seconds)
            return observer.leases["w1"].silent

        for second in (1, 3, 5):
            assert not await silent_at(second)
        assert await silent_at(5.1)
        assert not await silent_at(60)  # no tick for so long: we were stopped, not the worker
        assert not await silent_at(62)
        assert not await silent_at(64)
        assert await silent_at(65.1)
        for second in range(66, 166, 2):
            await observer.poll(heard + second)
        assert "w1" not in observer.leases

    observe(work)


def test_nothing_runs_out_and_lag_is_unknown_while_nats_is_away(observe: RunObserver, nats_server: Any) -> None:
    async def work(bus: Bus, observer: Observer) -> None:
        await bus.kv_put(subjects.WORKERS_BUCKET, KEY, lease())
        await until(lambda: "w1" in observer.leases)
        await observer.poll(observer.leases["w1"].heard_at)
        await asyncio.to_thread(nats_server.kill)
        await until(lambda: not bus.connected)
        now = observer.leases["w1"].heard_at
        for second in range(1, 20):
            await observer.poll(now + second)
        assert not observer.leases["w1"].silent
        assert facts(observer, now).lag is None
        assert NAME in observer.records

    observe(work)


def test_a_lease_that_its_worker_deleted_is_gone_at_once_but_not_forgotten(observe: RunObserver) -> None:
    async def work(bus: Bus, observer: Observer) -> None:
        await bus.kv_put(subjects.WORKERS_BUCKET, KEY, lease())
        await until(lambda: "w1" in observer.leases)
        await bus.kv_delete(subjects.WORKERS_BUCKET, KEY)
        await until(lambda: observer.leases["w1"].silent)
        assert list(observer.live_leases()) == []
        seen = await observer.take_lease("w1")
        assert seen is not None
        assert seen.was_active
        assert "w1" not in observer.leases

    observe(work)


def test_the_last_lease_of_an_ended_worker_is_read_and_taken_away(observe: RunObserver) -> None:
    async def work(bus: Bus, observer: Observer) -> None:
        await bus.kv_put(subjects.WORKERS_BUCKET, KEY, lease(state="failed", reason="why", permanent=True))
        seen = await observer.take_lease("w1")
        assert seen is not None
        assert (seen.lease.reason, seen.lease.permanent, seen.was_active) == ("why", True, False)
        assert await bus.kv_get(subjects.WORKERS_BUCKET, KEY) is None
        assert await observer.take_lease("w2") is None

    observe(work)


def test_claims_and_a_moving_busy_time_are_work_whatever_the_workers_clock_says(observe: RunObserver) -> None:
    async def work(bus: Bus, observer: Observer) -> None:
        async def told(**given: Any) -> float:
            claims = given.get("claims", 0)
            await bus.kv_put(subjects.WORKERS_BUCKET, KEY, lease(**given))
            await until(
                lambda: (
                    "w1" in observer.leases
                    and (observer.leases["w1"].lease.claims, observer.leases["w1"].lease.busy_at)
                    == (claims, given.get("busy_at", 0.0))
                )
            )
            return time.monotonic() - facts(observer, time.monotonic()).busy_at

        started = time.time() - 500
        idle_s = await told(started=started, busy_at=started + 400)
        assert idle_s == pytest.approx(100, abs=2)
        assert await told(started=started, busy_at=started + 400, claims=2) < 2
        observer._busy_at[NAME] -= 50
        assert await told(started=started, busy_at=started + 400) == pytest.approx(50, abs=2)
        assert await told(started=started, busy_at=started + 401) < 2

    observe(work)


def test_a_hint_counts_only_for_a_known_version_that_nobody_serves(observe: RunObserver) -> None:
    async def work(bus: Bus, observer: Observer) -> None:
        before = observer.hinted_at
        await bus.publish(subjects.wake("unknown", "v1"))
        await bus.publish("wake.x=FF.y")  # no name: not valid UTF-8
        await bus.kv_put(subjects.WORKERS_BUCKET, KEY, lease())
        await until(lambda: "w1" in observer.leases)
        await bus.publish(subjects.wake(*NAME))
        await bus.request("$JS.API.INFO")  # a round trip: the hints have arrived
        assert observer.hinted_at == before
        await bus.kv_delete(subjects.WORKERS_BUCKET, KEY)
        await until(lambda: observer.leases["w1"].silent)
        observer.changed.clear()
        await bus.publish(subjects.wake(*NAME))
        await until(observer.changed.is_set)
        assert observer.hinted_at > before

    observe(work)


def test_what_cannot_be_read_is_left_out(observe: RunObserver) -> None:
    async def work(bus: Bus, observer: Observer) -> None:
        await bus.kv_put(subjects.MODELS_BUCKET, subjects.key("bad", "v1"), b"{")
        await bus.kv_put(subjects.WORKERS_BUCKET, subjects.key("bad"), b'{"worker": 1}')
        await bus.kv_put(subjects.WORKERS_BUCKET, KEY, lease())
        await until(lambda: "w1" in observer.leases)
        await until(lambda: NAME in observer.records)
        assert list(observer.leases) == ["w1"]
        assert list(observer.records) == [NAME]

    observe(work)


def test_a_cold_start_is_measured_from_the_first_lease_or_told_by_its_phases(observe: RunObserver) -> None:
    async def work(bus: Bus, observer: Observer) -> None:
        async def told(**given: Any) -> None:
            await bus.kv_put(subjects.WORKERS_BUCKET, KEY, lease(**given))
            await until(lambda: "w1" in observer.leases and observer.leases["w1"].lease.state == given["state"])

        assert facts(observer, 0.0).cold_start_s is None
        phases = {"process": 2.0, "imports": 3.0, "fetch": 1.0, "load": 4.0, "first_token": 9.0}
        await told(state="active", cold_start=phases)
        assert facts(observer, 0.0).cold_start_s == 9.0  # 2, the longer of 3 and 1, 4
        await told(state="starting", cold_start={"process": 50.0})
        await told(state="loaded")
        await told(state="active")  # loaded is when it counts
        await observer.poll(time.monotonic())
        known = facts(observer, time.monotonic())
        assert known.cold_start_s == 9.0  # it was seen before as another: warm, and assigned
        assert known.slots == 4

    observe(work)


def test_what_the_counts_of_the_queue_tell_is_among_the_facts_and_unknown_again_with_them(observe: RunObserver) -> None:
    async def work(bus: Bus, observer: Observer) -> None:
        now = time.monotonic()
        await observer.poll(now)
        subject = subjects.request(*NAME, subjects.LANE_FAST, "local")
        for number in range(8):
            await bus.publish_durable(subject, b"{}", {"Nats-Msg-Id": str(number)})
        await observer.poll(now + 4)
        known = facts(observer, now + 6)
        assert (known.rate, known.oldest_s, known.stranded) == (2.0, 2.0, 0)
        await bus.delete_consumer(*NAME, subjects.LANE_FAST)
        await observer.poll(now + 8)
        blind = facts(observer, now + 8)
        assert (blind.lag, blind.rate, blind.oldest_s) == (None, None, 0.0)

    observe(work)


def test_a_schedule_opens_early_enough_for_a_worker_to_start(observe: RunObserver) -> None:
    async def work(bus: Bus, observer: Observer) -> None:
        soon = time.gmtime(time.time() + 180)
        until_then = time.gmtime(time.time() + 7200)
        schedule = (
            {"from": time.strftime("%H:%M", soon), "to": time.strftime("%H:%M", until_then), "min_replicas": 3},
        )
        limits = msgspec.convert({"schedule": schedule}, VersionLimits)
        record = Version(model="chat", version="v1", state="available", source="sim:zero", limits=limits)
        await bus.kv_put(subjects.MODELS_BUCKET, subjects.key(*NAME), records.encode(record))
        await until(lambda: observer.records[NAME].limits == limits)
        assert facts(observer, 0.0).scheduled_min == 0  # two minutes and more to go
        observer._of(*NAME).loaded(240.0)
        assert facts(observer, 0.0).scheduled_min == 3

    observe(work)
