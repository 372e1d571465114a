"""Webhooks of a whole stack, as whoever receives them sees it: each event at least once, under one id, whatever dies."""

import asyncio
import os
import signal
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from shared import webhooks

from ..controller.webhook_receiver import KEY, SECRET, Received, Receiver, receiving, status
from .conftest import COMPLETIONS, Stack, ended, until, wait_for

JOBS, FAILURES = 24, 2
ENVIRONMENT = {"HEADRACE_WEBHOOK_PRIVATE_HOSTS": "127.0.0.1", "HEADRACE_WEBHOOK_BACKOFF_S": "0.3"}


@pytest.fixture
def hooked_stack(tmp_path: Path) -> Iterator[Stack]:
    """A stack that may send to the loopback."""
    stack = Stack(tmp_path / "data", ENVIRONMENT)
    stack.up()
    yield stack
    ended(stack)


def test_every_end_is_told_whatever_dies(hooked_stack: Stack) -> None:
    stack = hooked_stack
    stack.push("sim:zero", "zero")
    stack.push("sim:zero", "zero", version="v2")
    tries: Counter[str] = Counter()
    taken: defaultdict[str, set[str]] = defaultdict(set)  # ids by what they are about

    async def flaky(received: Received, writer: asyncio.StreamWriter) -> None:
        tries[received.id] += 1
        fails = tries[received.id] <= FAILURES
        if not fails:
            taken[received.event["data"]["id"]].add(received.id)
        await status(500 if fails else 204)(received, writer)

    def kill_controller() -> None:
        pid = stack.state["processes"]["controller"]["pid"]
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: stack.state["processes"]["controller"]["pid"] != pid, what="another controller")

    async def work() -> None:
        async with receiving(flaky) as receiver, httpx.AsyncClient(base_url=stack.url, timeout=60) as client:

            async def post(path: str, body: dict[str, Any]) -> Any:
                answer = await client.post(path, json=body)
                assert answer.is_success, answer.text
                return answer.json()

            async def job(webhook: dict[str, Any], tokens: int = 4) -> str:
                body = {"model": "zero", "prompt": "a SECRET question", "max_tokens": tokens}
                made = await post("/v1/jobs", {"endpoint": COMPLETIONS, "body": body, "webhook": webhook})
                assert made["webhook"]["url"] == webhook["url"]
                return str(made["id"])

            own = {"url": receiver.url, "secret": SECRET}
            tenants = {"url": receiver.url}
            refused = await client.post(
                "/v1/jobs",
                json={"endpoint": COMPLETIONS, "body": {"model": "zero", "prompt": "a"}, "webhook": tenants},
            )
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "webhook.secret")
            assert (await client.get("/v1/webhooks/secret")).status_code == 404
            tenants_secret = (await post("/v1/webhooks/secret", {}))["secret"]
            assert tenants_secret not in (await client.get("/v1/webhooks/secret")).text

            first = {await job(own if n % 2 else tenants) for n in range(JOBS)}
            await until(lambda: len(receiver.received) >= JOBS // 2)
            await asyncio.to_thread(kill_controller)
            rollout = {"model": "zero", "version": "v2", "strategy": "immediate", "webhook": own}
            deployment = (await post("/v1/deployments", rollout))["deployment_id"]
            second = {await job(own) for _ in range(JOBS // 4)}
            await asyncio.to_thread(kill_controller)
            jobs = first | second
            await until(lambda: jobs <= taken.keys() and "deployment.promoted" in types(receiver, deployment))

            ids = [taken[job] for job in jobs]
            assert all(len(found) == 1 for found in ids)
            assert len(set().union(*ids)) == len(jobs)
            assert all(tries[id_] > FAILURES for found in ids for id_ in found)
            assert all(types(receiver, job) == {"job.completed"} for job in jobs)
            assert "deployment.pending" in types(receiver, deployment)
            key = webhooks.secret_bytes(tenants_secret)
            assert {each.is_signed(key) for each in receiver.received if not each.is_signed(KEY)} == {True}
            assert not any(b"SECRET" in each.body for each in receiver.received)

            async with asyncio.timeout(30):
                while True:  # what the receiver took is written a moment later
                    shown = await client.get(f"/v1/jobs/{min(second)}")
                    delivery = shown.json()["webhook"]["delivery"]
                    if delivery["state"] == "delivered":
                        break
            assert {delivery["id"]} == taken[min(second)]
            assert (delivery["type"], delivery["attempts"] > FAILURES) == ("job.completed", True)
            detail = await client.get(f"/v1/deployments/{deployment}")
            assert detail.json()["webhook"]["url"] == receiver.url
            said = shown.text + detail.text + "".join(path.read_text() for path in (stack.data / "logs").iterdir())
            assert SECRET not in said
            assert tenants_secret not in said

    asyncio.run(work())


def types(receiver: Receiver, subject: str) -> set[str]:
    """The types of what was told about a subject."""
    events = [each.event for each in receiver.received]
    return {event["type"] for event in events if event["data"]["id"] == subject}
