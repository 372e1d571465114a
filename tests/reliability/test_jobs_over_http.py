"""Jobs from the outside: they are submitted, looked at, waited for, read and ended at any ingress."""

import asyncio
import time
from typing import Any

import httpx

from shared import subjects

from .conftest import Ingress, Site, Stream, take

JOBS = "/v1/jobs"


def order(site: Site, prompt: str, tokens: int = 5, route: str = "chat", **more: Any) -> dict[str, Any]:
    """The body of a POST to /v1/jobs; `more` is of the request."""
    path, body = site.body(route, prompt, tokens, **more)
    del body["stream"]
    return {"endpoint": path, "body": body}


async def submit(site: Site, asked: dict[str, Any], ingress: Ingress | None = None, **headers: str) -> Any:
    url = (ingress or site.first).url + JOBS
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    answer = await site.http.post(url, json=asked, headers=named)
    assert answer.status_code == 202, answer.text
    assert answer.headers["location"] == f"{JOBS}/{answer.json()['id']}"
    return answer.json()


async def get(site: Site, path: str, ingress: Ingress | None = None, **query: Any) -> httpx.Response:
    return await site.http.get((ingress or site.second).url + JOBS + path, params=query)


async def ended(site: Site, job: Any) -> Any:
    found = (await get(site, f"/{job['id']}", wait=15)).json()
    assert found["status"] not in ("queued", "running"), found
    return found


async def events(site: Site, job: Any, events_max: int | None = None, seen: Stream | None = None) -> Stream:
    """A job's events, at the other ingress where there is something before."""
    ingress = site.first if seen is None else site.second
    headers = {} if seen is None else {"last_event_id": seen.id}
    stream = seen or Stream()
    await site.read(stream, "GET", f"{ingress.url}{JOBS}/{job['id']}/events", events_max, headers=headers)
    return stream


def same(answer: Any, other: Any) -> None:
    """Two answers of one request at two times: all but their ids and times."""
    assert {**answer, "id": "", "created": 0} == {**other, "id": "", "created": 0}


def test_a_job_answers_what_its_endpoint_would_in_each_shape(site: Site) -> None:
    async def work() -> None:
        for route in ("chat", "text", "native"):
            asked = order(site, f"shape of {route}", 6, route)
            job = await submit(site, asked)
            assert (job["object"], job["endpoint"], job["status"]) == ("job", asked["endpoint"], "queued")
            assert "result" not in job
            found = await ended(site, job)
            assert (found["status"], found["error"], found["progress"]["tokens"]) == ("completed", None, 6)
            assert found["progress"]["claims"] >= 1
            assert found["usage"]["completion_tokens"] == 6
            assert found["ended_at"] + 86_400 == found["expires_at"]
            result = await get(site, f"/{job['id']}/result")
            assert (result.status_code, result.json()) == (200, found["result"])
            now = await site.http.post(site.first.url + asked["endpoint"], json=asked["body"] | {"seed": 1})
            again = await submit(site, asked | {"body": asked["body"] | {"seed": 1}})
            same(now.json(), (await ended(site, again))["result"])
            # the stream of the job, and that of the endpoint
            whole = await events(site, job)
            path, body = site.body(route, f"shape of {route}", 6)
            live = await site.begin(site.first, (path, body))
            assert whole.done
            assert whole.tokens == live.tokens
            assert [sorted(event) for event in whole.events] == [sorted(event) for event in live.events]

    site.run(work())


def test_the_events_of_a_job_go_on_from_any_point_at_any_ingress_and_after_the_end(site: Site) -> None:
    async def work() -> None:
        job = await submit(site, order(site, "resumed", 120, n=2))
        stream = await events(site, job, 40)
        assert not stream.done
        for _ in range(3):
            stream = await events(site, job, len(stream.events) + 30, stream)
        middle = len(stream.events)
        stream = await events(site, job, None, stream)
        assert stream.done
        whole = await events(site, job)
        assert stream.by_choice() == whole.by_choice()
        assert [len(choice) for choice in whole.by_choice()] == [122, 122]  # its role, 120 tokens, its finish
        assert middle < len(stream.events)
        complete = await site.http.get(
            f"{site.second.url}{JOBS}/{job['id']}/events", headers={"last-event-id": stream.id}
        )
        assert complete.status_code == 204
        for wrong in ("x", stream.id.replace(job["id"], "0" * 32)):
            refused = await site.http.get(
                f"{site.first.url}{JOBS}/{job['id']}/events", headers={"last-event-id": wrong}
            )
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "Last-Event-ID")

    site.run(work())


def test_progress_is_seen_and_a_wait_is_as_long_as_the_job_takes(site: Site) -> None:
    async def work() -> None:
        job = await submit(site, order(site, "progress", 4000) | {"metadata": {"of": "a test"}})
        seen: list[int] = []

        async def further() -> bool:
            """Whether it has come further than it had."""
            found = (await get(site, f"/{job['id']}")).json()
            assert (found["status"] in ("queued", "running"), found["metadata"]) == (True, {"of": "a test"})
            tokens = found["progress"]["tokens"]
            assert tokens >= (seen[-1] if seen else 0)
            seen.append(tokens)
            return found["status"] == "running" and tokens > seen[0]

        await site.until(further, site.one)
        pending = await get(site, f"/{job['id']}/result")
        assert (pending.status_code, pending.json()["id"]) == (202, job["id"])
        begun = time.monotonic()
        waiting = (await get(site, f"/{job['id']}", wait=0.3)).json()
        assert waiting["status"] in ("queued", "running")
        assert time.monotonic() - begun >= 0.3
        awaited = asyncio.create_task(get(site, f"/{job['id']}", wait=15))
        await site.http.post(f"{site.first.url}{JOBS}/{job['id']}/cancel")
        assert (await awaited).json()["status"] == "cancelled"

    site.run(work())


def test_cancel_delete_and_what_is_not_there(site: Site) -> None:
    async def work() -> None:
        job = await submit(site, order(site, "endless", 4000))
        await events(site, job, 5)
        cancelled = await site.http.post(f"{site.second.url}{JOBS}/{job['id']}/cancel")
        assert (cancelled.status_code, cancelled.json()["status"]) == (200, "cancelled")
        assert cancelled.json()["error"]["code"] == "cancelled"
        assert cancelled.json()["usage"] is not None
        again = await site.http.post(f"{site.first.url}{JOBS}/{job['id']}/cancel")
        assert again.json() == cancelled.json()
        result = await get(site, f"/{job['id']}/result")
        assert (result.status_code, result.json()["error"]["code"]) == (499, "cancelled")
        told = await events(site, job)
        assert told.error is not None
        running = await submit(site, order(site, "endless too", 4000))
        gone = await site.http.delete(f"{site.first.url}{JOBS}/{running['id']}")
        assert gone.json() == {"id": running["id"], "object": "job", "status": "cancelled", "deleted": False}
        gone = await site.http.delete(f"{site.first.url}{JOBS}/{running['id']}")
        assert gone.json() == {"id": running["id"], "object": "job", "status": "cancelled", "deleted": True}
        for missing in (running["id"], "0" * 32, "no-id", "x" * 200, "%00"):
            for method, path in (
                ("GET", ""),
                ("GET", "/events"),
                ("GET", "/result"),
                ("POST", "/cancel"),
                ("DELETE", ""),
            ):
                answer = await site.http.request(method, f"{site.first.url}{JOBS}/{missing}{path}")
                assert (answer.status_code, answer.json()["error"]["code"]) == (404, "job_not_found"), (missing, path)
        await site.idle()

    site.run(work())


def test_jobs_are_listed_by_pages_the_newest_first(site: Site) -> None:
    async def work() -> None:
        made = [await submit(site, order(site, f"listed {number}", 2)) for number in range(5)]
        for job in made:
            await ended(site, job)
        failed = await submit(site, order(site, "too long", 4) | {"deadline_seconds": 1, "ttl_seconds": 60})
        await ended(site, failed)
        page = (await get(site, "", limit=2)).json()
        assert (page["object"], page["has_more"], len(page["data"])) == ("list", True, 2)
        assert "result" not in page["data"][0]
        listed: list[str] = []
        after: dict[str, str] = {}
        while True:
            page = (await get(site, "", limit=2, **after)).json()
            listed += [each["id"] for each in page["data"]]
            after = {"after": page["last_id"]}
            if not page["has_more"]:
                break
        assert listed == sorted(listed, reverse=True)
        assert listed[:6] == [each["id"] for each in [failed, *reversed(made)]]
        completed = (await get(site, "", status="completed", limit=100)).json()["data"]
        assert {each["id"] for each in made} <= {each["id"] for each in completed}
        assert {each["status"] for each in completed} == {"completed"}
        for wrong in ({"limit": 0}, {"limit": "x"}, {"status": "done"}):
            assert (await get(site, "", **wrong)).status_code == 400

    site.run(work())


def test_a_job_is_refused_as_its_endpoint_would_refuse_it(site: Site) -> None:
    async def work() -> None:
        good = order(site, "refused")
        cases = [
            (good | {"endpoint": "/v1/models"}, 400, "endpoint"),
            (good | {"body": good["body"] | {"temperature": 7}}, 400, "body.temperature"),
            (good | {"body": good["body"] | {"model": "nobody"}}, 404, "body.model"),
            (good | {"body": []}, 400, None),
            (good | {"ttl_seconds": 5}, 400, "ttl_seconds"),
            (good | {"ttl_seconds": 10**7}, 400, "ttl_seconds"),
            (good | {"deadline_seconds": 10**7}, 400, "deadline_seconds"),
            (good | {"webhook": {"url": "ftp://there/"}}, 400, "webhook.url"),
            (good | {"metadata": {"a": "b" * 513}}, 400, "metadata"),
            (good | {"unknown": 1}, 400, None),
            (order(site, "", route="text") | {"body": {"model": site.model, "prompt": ["a", "b"]}}, 400, "body.prompt"),
        ]
        for asked, status, param in cases:
            answer = await site.http.post(site.first.url + JOBS, json=asked)
            assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text

    site.run(work())


def test_with_an_idempotency_key_there_is_one_job_however_often_it_is_submitted(site: Site) -> None:
    async def work() -> None:
        async def published() -> int:
            return int((await site.bus.api(f"STREAM.INFO.{subjects.JOB_STREAM}"))["state"]["last_seq"])

        before = await published()
        asked = order(site, "keyed", 10, temperature=1)
        jobs = await asyncio.gather(
            *(submit(site, asked, ingress, idempotency_key="k-job") for ingress in [site.first, site.second] * 3)
        )
        assert len({each["id"] for each in jobs}) == 1
        assert await published() == before + 1
        await ended(site, jobs[0])
        assert (await submit(site, asked, idempotency_key="k-job"))["status"] == "completed"
        other = await site.http.post(
            site.first.url + JOBS, json=asked | {"metadata": {"a": "b"}}, headers={"idempotency-key": "k-job"}
        )
        assert (other.status_code, other.json()["error"]["code"]) == (422, "idempotency_key_reused")
        await site.http.delete(f"{site.first.url}{JOBS}/{jobs[0]['id']}")
        over = await site.http.post(site.first.url + JOBS, json=asked, headers={"idempotency-key": "k-job"})
        assert (over.status_code, over.json()["error"]["code"]) == (409, "idempotency_result_gone")
        assert await published() == before + 1

    site.run(work())


def test_an_inference_route_responds_asynchronously_where_that_is_preferred(site: Site) -> None:
    async def work() -> None:
        path, body = site.body("native", "later", 100, stream=False)
        url = site.first.url + path
        answer = await site.http.post(url, json=body, headers={"prefer": "respond-async"})
        assert (answer.status_code, answer.headers["preference-applied"]) == (202, "respond-async")
        job = (await site.http.get(site.second.url + answer.headers["location"], params={"wait": 15})).json()
        assert (job["status"], job["id"], job["result"]["id"]) == ("completed", answer.json()["id"], job["id"])
        soon = await site.http.post(url, json=body | {"max_tokens": 2}, headers={"prefer": "wait=15, respond-async"})
        assert (soon.status_code, soon.headers["preference-applied"]) == (200, "wait=15")
        assert soon.json()["usage"]["completion_tokens"] == 2
        late = await site.http.post(url, json=body | {"max_tokens": 500}, headers={"prefer": 'respond-async, wait="1"'})
        assert (late.status_code, late.json()["status"] in ("queued", "running")) == (202, True)
        await site.http.delete(site.first.url + late.headers["location"])
        streamed = body | {"max_tokens": 3, "stream": True}
        async with site.http.stream(
            "POST", url, json=streamed, headers={"prefer": "respond-async, wait=15"}
        ) as response:
            stream = Stream()
            lines = [line async for line in response.aiter_lines()]
            for number, line in enumerate(lines):
                if not line:
                    take(stream, [lines[number - 1]])
        assert (stream.done, len(stream.tokens)) == (True, 3)
        refused = await site.http.post(url, json=body | {"max_tokens": -1}, headers={"prefer": "respond-async"})
        assert refused.status_code == 400
        plain = await site.http.post(url, json=body | {"max_tokens": 1}, headers={"prefer": "return=minimal"})
        assert plain.status_code == 200
        assert "preference-applied" not in plain.headers
        keyed = [
            (await site.http.post(url, json=body, headers={"prefer": "respond-async", "idempotency-key": "k-a"})).json()
            for _ in range(2)
        ]
        assert keyed[0]["id"] == keyed[1]["id"]
        await site.idle()

    site.run(work())
