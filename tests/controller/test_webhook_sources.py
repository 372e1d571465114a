"""What webhooks are told of, by controllers that die at every point of it: each event at least once, under one id."""

import asyncio
import signal
import time
from typing import Any

from headrace.stack import ports
from shared import job_events, job_records, notices, results, rollouts, subjects, webhooks, wire
from shared.bus import Bus
from shared.errors import Cancelled, EngineFailed, QueueDeadline
from shared.job_records import JobRecord
from shared.results import Part, Result
from shared.rollouts import Deployment, NewDeployment
from shared.webhooks import EventType, Webhook

from .test_takeover import World, run_world, until
from .webhook_receiver import SECRET, receiving

__all__ = ["run_world"]

POINTS = ("webhook_noticed", "webhook_delivered", "webhook_noticed")
TENANT = "acme"
CEILING_S = 120.0  # of each wait, on a machine that is busy with other things


def a_job(webhook: Webhook | None, kind: job_records.Kind = "job") -> JobRecord:
    now = time.time()
    rid = job_records.new_job_id(now)
    request = wire.Request(rid, "m", "v", wire.Input(), wire.Sampling(seed=4))
    return JobRecord(
        id=rid,
        tenant=TENANT,
        kind=kind,
        endpoint="/v1/completions",
        request=request,
        created_at=now,
        deadline=now + 600,
        keep_s=600,
        webhook=webhook,
    )


async def ended(bus: Bus, job: JobRecord, error: str = "", finish: str = "stop", keep_s: int = 600) -> Result:
    """Let a worker store what came of a job."""
    told = wire.WireError(error, "told") if error else None
    parts = [Part([1], ["a SECRET answer"], None, finish)]
    result = Result(version="v", claim="c", parts=parts, ended_at=time.time(), error=told)
    return await results.store(bus, TENANT, job.id, result, keep_s)


def a_deployment(id_: str, webhook: Webhook | None) -> Deployment:
    """One that has ended: the controller leaves it alone."""
    asked = NewDeployment(model="unknown", version="v2", webhook=webhook)
    made = rollouts.plan_of(asked, id_, "v1", time.time(), TENANT)
    return rollouts.noted(rollouts.noted(made, "warming", "begun", time.time()), "failed", "given up", time.time())


def test_controllers_that_die_at_every_point_tell_of_everything(run_world: Any) -> None:
    (port,) = ports.free_ports(1)

    async def work(world: World) -> None:
        bus = world.bus
        async with receiving(port=port) as receiver:
            webhook = Webhook(url=receiver.url, secret=SECRET)
            wanted: dict[str, tuple[EventType, str]] = {}

            async def job(type_: EventType, *how: str, kind: job_records.Kind = "job") -> None:
                made = a_job(webhook, kind)
                await job_records.create(bus, made)
                await ended(bus, made, *how)
                subject = job_events.subject_of(made)
                wanted[webhooks.event_id(TENANT, type_, subject)] = (type_, subject)

            await job("job.completed")
            await job("job.failed", EngineFailed.code)
            await job("job.cancelled", Cancelled.code)
            await job("job.expired", QueueDeadline.code)
            await job("response.completed", kind="response")
            await job("response.incomplete", "", "length", kind="response")
            await job("response.failed", QueueDeadline.code, kind="response")
            await job("response.cancelled", Cancelled.code, kind="response")
            for nobodys in (a_job(None), a_job(Webhook(url=receiver.url, secret=SECRET, events=("job.failed",)))):
                await job_records.create(bus, nobodys)
                await ended(bus, nobodys)
            line = a_job(webhook)  # of a batch: there is no record, and its result has no time of its own
            await ended(bus, line, keep_s=0)
            deployment = a_deployment("d-71", webhook)
            await bus.kv_create(subjects.DEPLOYMENTS_BUCKET, subjects.key("d-71"), rollouts.encode(deployment))
            for tenant in (TENANT, notices.OPERATOR):
                for serial, state in enumerate(("pending", "warming", "failed"), 1):
                    type_: Any = f"deployment.{state}"
                    wanted[webhooks.event_id(tenant, type_, "d-71", serial)] = (type_, "d-71")

            for fault_point in POINTS:
                controller = world.controller(fault_point)
                assert await asyncio.to_thread(controller.process.wait, CEILING_S) == -signal.SIGKILL, (
                    world.log.read_text()
                )
            world.controller()
            await until(lambda: set(receiver.ids) >= wanted.keys(), CEILING_S)
            for id_, (type_, subject) in wanted.items():
                told = {
                    (each.event["type"], each.event["data"]["id"], each.body)
                    for each in receiver.received
                    if each.id == id_
                }
                ((told_type, told_subject, body),) = told
                assert (told_type, told_subject) == (type_, subject)
                assert b"SECRET" not in body
            assert set(receiver.ids) == wanted.keys()
            assert all(each.is_signed() for each in receiver.received)
            await nothing_left(bus)
            await bus.kv_delete(subjects.DEPLOYMENTS_BUCKET, subjects.key("d-71"))

    run_world(
        work,
        webhook_private_hosts="*",
        leader_ttl_s=2.0,
        deployment_webhook_url=f"http://127.0.0.1:{port}/",
        deployment_webhook_secret=SECRET,
    )


async def nothing_left(bus: Bus) -> None:
    """Every result was acked, every notice has ended."""
    async with asyncio.timeout(CEILING_S):
        while True:
            info = await bus.consumer_info(subjects.RES_STREAM, subjects.RESULTS_CONSUMER)
            assert info is not None
            if not info.num_pending and not info.num_ack_pending:
                return
            await asyncio.sleep(0.05)
