"""Telling webhooks, with a real nats-server and real receivers: every event at least once, under one id."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from controller.metrics import Metrics
from controller.webhook_sender import Sender
from controller.webhooks import Webhooks, wait_after
from shared import notices, subjects, webhook_secrets, webhooks
from shared.audit import Actor
from shared.bus import Bus
from shared.errors import BadRequest
from shared.leadership import CONTROLLER, Leadership
from shared.notices import Event, Notice
from shared.settings import Settings
from shared.webhook_secrets import SecretRotation
from shared.webhooks import DeliveryState, Webhook

from .webhook_receiver import SECRET, Receiver, receiving, status

FAST = {"webhook_private_hosts": "*", "webhook_backoff_s": 0.05, "webhook_answer_s": 5.0, "leader_ttl_s": 1.0}


class World:
    """A bus, and controllers that tell webhooks and do nothing else."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus

    @contextlib.asynccontextmanager
    async def controller(self) -> AsyncIterator[Webhooks]:
        """One that runs as long as the body lasts, and then dies: it gives nothing back, and its attempts are cut."""
        bus = await Bus.connect(self.bus.settings, "controller")
        leader = Leadership(bus, CONTROLLER, bus.settings.leader_ttl_s)
        running = Webhooks(bus, leader, bus.settings, Metrics(), Sender(bus.settings))
        await running.start()
        await leader.start()
        try:
            yield running
        finally:
            await running.close()
            await leader.close()
            await bus.close()

    async def tell(self, receiver: Receiver, subject: str, secret: str | None = SECRET, tenant: str = "acme") -> Notice:
        event = Event("job.completed", subject, time.time(), {"id": subject, "status": "completed"})
        notice = await notices.tell(self.bus, tenant, Webhook(url=receiver.url, secret=secret), event)
        assert notice is not None
        return notice

    async def until(
        self, notice: Notice, state: DeliveryState, also: Callable[[Notice], bool] = lambda _: True
    ) -> Notice:
        """The notice, once it is in that state."""
        async with asyncio.timeout(60):
            while True:
                found = await notices.find(self.bus, notice.tenant, notice.id)
                assert found is not None
                if found.state == state and also(found):
                    return found
                await asyncio.sleep(0.02)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while True:
            if condition():
                return
            await asyncio.sleep(0.01)


RunWorld = Callable[..., None]


@pytest.fixture
def run_world(nats_server: Any, tmp_path: Any) -> RunWorld:
    """`run_world(work, **settings)`."""

    def run(work: Callable[[World], Awaitable[None]], **given: Any) -> None:
        settings = Settings(data_dir=str(tmp_path), nats_url=nats_server.url, **FAST | given)

        async def main() -> None:
            bus = await Bus.connect(settings, "test")
            try:
                await bus.ensure()
                async with asyncio.timeout(240):
                    await work(World(bus))
            finally:
                await bus.close()

        asyncio.run(main())

    return run


def test_an_event_is_told_until_it_is_taken(run_world: RunWorld) -> None:
    async def work(world: World) -> None:
        async with receiving(status(500)) as receiver, world.controller():
            notice = await world.tell(receiver, "job-1")
            await until(lambda: len(receiver.received) >= 3)
            receiver.answer = status(200)
            ended = await world.until(notice, "delivered")
            assert ended.attempts == len(receiver.received) >= 4
            assert set(receiver.ids) == {notice.id}
            assert all(each.is_signed() for each in receiver.received)
            assert len({each.body for each in receiver.received}) == 1
            assert receiver.received[0].event["data"] == {"id": "job-1", "status": "completed"}
            assert (ended.body, ended.secret, ended.url) == ("", None, f"127.0.0.1:{receiver.port}")

    run_world(work)


def test_whoever_sees_an_event_again_changes_nothing(run_world: RunWorld) -> None:
    async def work(world: World) -> None:
        async with receiving() as receiver:

            async def tell(at: float, events: tuple[webhooks.EventType, ...] = ()) -> Notice | None:
                webhook = Webhook(url=receiver.url, secret=SECRET, events=events)
                event = Event("job.failed", "job-2", at, {"id": "job-2"})
                return await notices.tell(world.bus, "acme", webhook, event)

            assert await tell(time.time(), ("job.completed",)) is None  # it does not want to know
            assert await tell(time.time() - 86_401.0) is None  # history
            notice = await tell(time.time())
            assert notice is not None
            assert await tell(time.time()) is None
            async with world.controller():
                await world.until(notice, "delivered")
                assert await tell(time.time()) is None
                last = await world.tell(receiver, "job-3")
                await world.until(last, "delivered")
            assert set(receiver.ids) == {notice.id, last.id}

    run_world(work)


def test_a_controller_that_dies_leaves_what_it_was_at_to_the_next(run_world: RunWorld) -> None:
    async def work(world: World) -> None:
        async def never(*_: Any) -> None:
            await asyncio.sleep(60)

        async with receiving(never) as receiver:
            async with world.controller():
                told = [await world.tell(receiver, f"job-{n}") for n in range(3)]
                await until(lambda: len(receiver.received) >= 3)
            receiver.answer = status(200)
            async with world.controller(), world.controller():
                for each in told:
                    await world.until(each, "delivered")
            assert sorted(receiver.ids) == sorted([each.id for each in told] * 2)

    run_world(work)


def test_who_has_gone_is_left_alone_and_who_asks_for_time_gets_it(run_world: RunWorld) -> None:
    async def work(world: World) -> None:
        async with receiving(status(410)) as gone, receiving(status(503, "retry-after: 999999")) as busy:
            async with world.controller():
                for_gone, for_busy = await world.tell(gone, "job-4"), await world.tell(busy, "job-5")
                given_up = await world.until(for_gone, "given_up")
                assert (given_up.attempts, given_up.error) == (1, "status 410")
                found = await world.until(for_busy, "waiting", lambda notice: notice.attempts > 0)
            assert found.error == "status 503"
            assert 3000 < found.due - time.time() <= world.bus.settings.webhook_backoff_max_s
            assert len(gone.received) == len(busy.received) == 1

    run_world(work)


def test_what_cannot_be_signed_is_not_sent_and_holds_up_nothing(run_world: RunWorld) -> None:
    async def work(world: World) -> None:
        async with receiving() as receiver, world.controller():
            damaged = await world.tell(receiver, "job-9", "whsec_damaged")
            nobodys = await world.tell(receiver, "job-9", None, "tenant-without-a-secret")
            await world.until(await world.tell(receiver, "job-10"), "delivered")
            for each, why in ((damaged, "base64"), (nobodys, "no secret")):
                found = await world.until(each, "waiting", lambda notice: notice.attempts > 0)
                assert why in found.error
            assert len(receiver.received) == 1

    run_world(work)


def test_a_notice_that_is_written_over_is_not_told_again_and_again(run_world: RunWorld) -> None:
    async def work(world: World) -> None:
        async with receiving(status(500)) as receiver, world.controller() as running:
            notice = await world.tell(receiver, "job-1")
            await until(lambda: bool(receiver.received))
            await world.bus.kv_put(subjects.NOTICES_BUCKET, subjects.key(notice.tenant, notice.id), b"{")
            receiver.answer = status(200)
            await until(lambda: not running.waiting(notice.tenant))
            told = len(receiver.received)
            await world.until(await world.tell(receiver, "job-2"), "delivered")
            assert len(receiver.received) == told + 1

    run_world(work)


def test_an_event_that_nobody_takes_is_given_up_after_its_time(run_world: RunWorld) -> None:
    async def work(world: World) -> None:
        async with receiving(status(500)) as receiver, world.controller():
            notice = await world.tell(receiver, "job-6")
            ended = await world.until(notice, "given_up")
            assert ended.attempts == len(receiver.received) >= 2
            assert ended.error == "status 500"

    run_world(work, webhook_age_max_s=1.5)


def test_a_dead_receiver_does_not_delay_the_others(run_world: RunWorld) -> None:
    async def work(world: World) -> None:
        async def never(*_: Any) -> None:
            await asyncio.sleep(60)

        async with receiving(never) as dead, receiving() as alive, world.controller():
            for n in range(20):
                await world.tell(dead, f"dead-{n}")
            told = [await world.tell(alive, f"alive-{n}") for n in range(20)]
            for each in told:
                await world.until(each, "delivered")
            assert sorted(alive.ids) == sorted(each.id for each in told)
            assert len(dead.received) <= 2

    run_world(work, webhook_answer_s=45.0, webhook_tries_max=4, webhook_tries_per_host_max=2)


def test_a_tenants_own_secret_signs_and_can_be_rotated(run_world: RunWorld) -> None:
    async def work(world: World) -> None:
        bus, actor = world.bus, Actor("tenant-7", "test")

        async def sent(receiver: Receiver, subject: str) -> Any:
            await world.until(await world.tell(receiver, subject, None, "tenant-7"), "delivered")
            return receiver.received[-1]

        async with receiving() as receiver, world.controller():
            webhook = Webhook(url=receiver.url)
            with pytest.raises(BadRequest) as caught:
                await webhook_secrets.check(bus, "tenant-7", webhook)
            assert caught.value.param == "webhook.secret"
            assert await webhook_secrets.find(bus, "tenant-7") is None
            first = await webhook_secrets.rotate(bus, actor, SecretRotation())
            assert first.previous_until is None
            await webhook_secrets.check(bus, "tenant-7", webhook)
            one = webhooks.secret_bytes(first.secret)
            assert (await sent(receiver, "a")).is_signed(one)
            second = await webhook_secrets.rotate(bus, actor, SecretRotation())
            two = webhooks.secret_bytes(second.secret)
            both = await sent(receiver, "b")
            assert both.is_signed(one)
            assert both.is_signed(two)
            third = await webhook_secrets.rotate(bus, actor, SecretRotation(grace_seconds=0.0))
            only = await sent(receiver, "c")
            assert only.is_signed(webhooks.secret_bytes(third.secret))
            assert not only.is_signed(two)
            shown = await webhook_secrets.find(bus, "tenant-7")
            assert shown is not None
            assert shown.previous_until is None
            assert first.secret not in repr((first, second, third, shown))

    run_world(work)


def test_a_tenant_with_too_much_that_waits_holds_up_nobody(run_world: RunWorld) -> None:
    async def work(world: World) -> None:
        async with receiving(status(500)) as receiver, world.controller() as running:

            async def tell(tenant: str, subject: str) -> Notice | None:
                webhook = Webhook(url=receiver.url, secret=SECRET)
                await running.tell(tenant, webhook, Event("job.failed", subject, time.time(), {"id": subject}))
                return await notices.find(world.bus, tenant, webhooks.event_id(tenant, "job.failed", subject))

            for n in range(3):
                assert await tell("much", f"many-{n}")
            await until(lambda: running.waiting("much") >= 3)
            assert await tell("much", "one-more") is None
            assert await tell("little", "one") is not None

    run_world(work, webhook_waiting_per_tenant_max=3, webhook_backoff_s=60.0)


def test_what_is_kept_of_a_notice_goes_away_by_itself(run_world: RunWorld) -> None:
    async def work(world: World) -> None:
        async with receiving() as receiver, world.controller():
            notice = await world.tell(receiver, "job-8")
            ended = await world.until(notice, "delivered")
            key = subjects.key("acme", notice.id)
            while await world.bus.kv_get(subjects.NOTICES_BUCKET, key) is not None:
                assert time.time() < ended.ended + 30

    run_world(work, webhook_kept_s=1.0)


def test_waits_grow_and_are_bounded() -> None:
    settings = Settings(webhook_backoff_s=2.0, webhook_backoff_max_s=3600.0)
    assert [wait_after(n, 0.0, settings, 0.5) for n in (1, 2, 3, 4)] == [2.0, 6.0, 18.0, 54.0]
    assert wait_after(20, 0.0, settings, 0.5) == wait_after(10**9, 0.0, settings, 0.5) == 3600.0
    assert (wait_after(1, 0.0, settings, 0.0), wait_after(1, 0.0, settings, 1.0)) == (1.5, 2.5)
    assert wait_after(1, 100.0, settings, 0.5) == 100.0
    assert wait_after(1, 1e9, settings, 0.5) == 3600.0
    assert wait_after(3, 1.0, settings, 0.5) == 18.0
