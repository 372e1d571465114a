"""Responses that are kept and those in the background, from the outside: at any ingress, whatever has died since."""

import asyncio
from typing import Any

import openai
import pytest

from shared import subjects

from .conftest import Ingress, Site, Stream

RESPONSES = "/v1/responses"


def asked(site: Site, prompt: str, tokens: int = 5, **more: Any) -> dict[str, Any]:
    return {"model": site.model, "input": prompt, "max_output_tokens": tokens, "temperature": 0} | more


def sdk(ingress: Ingress) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=ingress.url + "/v1", api_key="none", max_retries=0, timeout=20)


async def reached(site: Site, client: openai.AsyncOpenAI, identity: str, *statuses: str) -> Any:
    """A response, once it has one of these."""

    async def there() -> bool:
        return (await client.responses.retrieve(identity)).status in statuses

    await site.until(there)
    return await client.responses.retrieve(identity)


async def told(
    site: Site, ingress: Ingress, identity: str, after: int | None = None, events_max: int | None = None
) -> Any:
    """The events of a response from the one after `after` on."""
    query = "" if after is None else f"&starting_after={after}"
    stream = Stream()
    await site.read(stream, "GET", f"{ingress.url}{RESPONSES}/{identity}?stream=true{query}", events_max)
    assert stream.status == 200, stream.error
    return stream.events


def test_the_sdk_runs_one_in_the_background_looks_at_it_and_goes_on_after_it(site: Site) -> None:
    async def work() -> None:
        async with sdk(site.first) as first, sdk(site.second) as second:
            body = asked(site, "background", 30)
            begun = await first.responses.create(**body, background=True, metadata={"a": "b"})
            assert (begun.status, begun.background, begun.output, begun.metadata) == ("queued", True, [], {"a": "b"})
            found = await reached(site, second, begun.id, "completed", "incomplete")
            now = await first.responses.create(**body)
            assert (found.status, found.incomplete_details.reason) == ("incomplete", "max_output_tokens")
            assert (found.output_text, found.usage) == (now.output_text, now.usage)
            assert found.created_at == begun.created_at

            following = await second.responses.create(**asked(site, "And?"), previous_response_id=begun.id)
            third = await first.responses.create(
                **asked(site, "So?"), previous_response_id=following.id, background=True
            )
            items = await second.responses.input_items.list(third.id, order="asc")
            said = [item.content[0].text for item in items.data if item.type == "message"]  # type: ignore[union-attr]
            assert said == ["background", found.output_text, "And?", following.output_text, "So?"]
            kept = await second.responses.retrieve(following.id)  # it was told at the other ingress, and is over
            assert kept.to_dict() == following.to_dict()
            await reached(site, second, third.id, "completed", "incomplete")
            for identity in (begun.id, third.id, following.id, now.id):
                await second.responses.delete(identity)
                with pytest.raises(openai.NotFoundError, match="there is no response"):
                    await first.responses.retrieve(identity)

    site.run(work())
    site.run(site.idle())


def test_its_stream_goes_on_from_any_event_at_another_ingress_when_its_own_dies(site: Site) -> None:
    async def work() -> None:
        body = asked(site, "resumed", 150, background=True, stream=True)
        stream = Stream()
        await site.read(stream, "POST", site.first.url + RESPONSES, 40, json=body)
        kinds = [event["type"] for event in stream.events[:5]]
        assert kinds[:3] == ["response.created", "response.queued", "response.in_progress"]
        identity = stream.events[0]["response"]["id"]
        site.first.kill()
        got = stream.events
        for events_max in (30, 30, None):
            got += await told(site, site.second, identity, got[-1]["sequence_number"], events_max)
        await site.both_ingresses()
        whole = await told(site, site.first, identity)
        assert got == whole
        assert [event["sequence_number"] for event in whole] == list(range(len(whole)))
        assert whole[-1]["type"] == "response.incomplete"
        deltas = [event["delta"] for event in whole if event["type"] == "response.output_text.delta"]
        async with sdk(site.second) as client:
            found = await client.responses.retrieve(identity)
            assert "".join(deltas) == found.output_text
            assert found.to_dict() == whole[-1]["response"]
        for after in range(0, len(whole) + 20, 50):
            assert await told(site, site.second, identity, after) == whole[after + 1 :]

    site.run(work())
    site.run(site.idle())


def test_one_that_is_cancelled_has_ended_for_everybody(site: Site) -> None:
    async def work() -> None:
        async with sdk(site.first) as first, sdk(site.second) as second:
            begun = await first.responses.create(**asked(site, "cancelled", 5000), background=True)
            watching = asyncio.create_task(told(site, site.second, begun.id))
            await reached(site, second, begun.id, "in_progress")
            with pytest.raises(openai.BadRequestError, match="that response is running") as early:
                await first.responses.create(**asked(site, "too early"), previous_response_id=begun.id)
            assert early.value.code == "previous_response_not_found"
            cancelled = await second.responses.cancel(begun.id)
            assert (cancelled.status, cancelled.error) == ("cancelled", None)
            again = await first.responses.cancel(begun.id)
            assert again.to_dict() == cancelled.to_dict()
            events = await watching
            assert (events[-1]["type"], events[-1]["response"]["status"]) == ("response.failed", "cancelled")
            assert events == await told(site, site.first, begun.id)
            running = await first.responses.create(**asked(site, "deleted", 5000), background=True)
            await second.responses.delete(running.id)
            assert not await site.bus.subject_counts(subjects.JOB_STREAM, subjects.jobs_of_version(site.model, "v"))

    site.run(work())
    site.run(site.idle())


def test_a_key_stands_for_one_response(site: Site) -> None:
    async def work() -> None:
        headers = {"idempotency-key": "a response in the background"}
        body = asked(site, "keyed", background=True)
        answers = [
            await site.http.post(ingress.url + RESPONSES, json=body, headers=headers)
            for ingress in (site.first, site.second)
        ]
        assert len({answer.json()["id"] for answer in answers}) == 1
        assert answers[1].headers["idempotent-replayed"] == "true"
        headers = {"idempotency-key": "a response"}
        for _ in range(2):
            answer = await site.http.post(site.first.url + RESPONSES, json=asked(site, "keyed"), headers=headers)
            kept = await site.http.get(f"{site.second.url}{RESPONSES}/{answer.json()['id']}")
            assert kept.json() == answer.json()
        for wrong, param in (
            ({"background": True, "store": False}, "store"),
            ({"stream": True, "store": True}, "store"),
        ):
            refused = await site.http.post(
                site.first.url + RESPONSES, json=asked(site, "keyed") | wrong, headers={"x-resumable": "true"}
            )
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)

    site.run(work())
    site.run(site.idle())


def test_as_a_job_a_response_is_of_the_job(site: Site) -> None:
    async def work() -> None:
        order = {"endpoint": RESPONSES, "body": asked(site, "of a job")}
        job = (await site.http.post(site.first.url + "/v1/jobs", json=order)).json()
        found = (await site.http.get(f"{site.second.url}/v1/jobs/{job['id']}?wait=15")).json()
        assert (found["result"]["status"], found["result"]["store"]) == ("incomplete", False)
        for more in ({"background": True}, {"previous_response_id": "resp_" + "0" * 32}):
            order = {"endpoint": RESPONSES, "body": asked(site, "of a job", **more)}
            refused = await site.http.post(site.first.url + "/v1/jobs", json=order)
            assert refused.json()["error"]["param"] == f"body.{next(iter(more))}"
        assert (await site.http.get(f"{site.first.url}{RESPONSES}/resp_{job['id']}")).status_code == 404

    site.run(work())
    site.run(site.idle())
