"""Idempotency keys: one execution for each key, whoever dies or leaves."""

import asyncio
from typing import Any

import httpx

from shared import subjects

from .conftest import Ingress, Site, Stream
from .test_resumption import told

COMPLETIONS = "/v1/completions"


def plain(site: Site, prompt: str, tokens: int = 30, **more: Any) -> dict[str, Any]:
    """A plain request whose tokens are drawn: run twice, it would not be the same."""
    return {"model": site.model, "prompt": prompt, "max_tokens": tokens, "temperature": 1} | more


async def post(ingress: Ingress, site: Site, body: Any, key: str, **headers: str) -> httpx.Response:
    return await site.http.post(ingress.url + COMPLETIONS, json=body, headers={"idempotency-key": key, **headers})


async def published(site: Site) -> int:
    """How many messages the queue has ever taken."""
    return int((await site.bus.api(f"STREAM.INFO.{subjects.REQ_STREAM}"))["state"]["last_seq"])


def test_concurrent_requests_with_one_key_are_one_request(site: Site) -> None:
    async def work() -> None:
        before = await published(site)
        body = plain(site, "concurrent", n=2)
        ingresses = [site.first, site.second] * 4
        answers = await asyncio.gather(*(post(ingress, site, body, "k-concurrent") for ingress in ingresses))
        assert [answer.status_code for answer in answers] == [200] * len(answers)
        assert len({answer.content for answer in answers}) == 1
        assert await published(site) == before + 1
        replayed = [answer.headers.get("idempotent-replayed") for answer in answers]
        assert replayed.count(None) == 1
        again = await post(site.second, site, body, '"k-concurrent"')
        assert again.content == answers[0].content
        assert again.headers["idempotent-replayed"] == "true"
        assert await published(site) == before + 1
        await site.idle()

    site.run(work())


def test_a_stream_is_told_again_in_the_same_shape(site: Site) -> None:
    async def work() -> None:
        request = site.body("chat", "again", 25, temperature=1, logprobs=True, stream_options={"include_usage": True})
        first = await site.begin(site.first, request, idempotency_key="k-stream")
        for ingress in (site.first, site.second):
            again = await site.begin(ingress, request, idempotency_key="k-stream")
            assert again.done
            assert again.events == first.events

    site.run(work())


def test_h18_a_key_outlives_its_client_and_its_workers(site: Site) -> None:
    async def work() -> None:
        before = await published(site)
        request = site.body("native", "left", 60, temperature=1)
        left = await site.begin(site.first, request, 20, idempotency_key="k-left")
        back = await site.begin(site.second, request, idempotency_key="k-left")  # while it goes on unseen
        assert back.done
        assert back.events[:20] == left.events
        await site.idle()
        site.one.kill()
        kept = await site.begin(site.first, request, idempotency_key="k-left")
        assert told(kept) == told(back)
        assert await published(site) == before + 1
        await site.one_worker()

    site.run(work())


def test_a_key_whose_ingress_died_goes_on_with_the_same_draws(site: Site) -> None:
    async def work() -> None:
        request = site.body("native", "dies", 60, temperature=1)
        cut = await site.begin(site.first, request, 20, idempotency_key="k-dies")
        site.first.kill()
        whole = await site.begin(site.second, request, idempotency_key="k-dies")
        assert whole.done
        assert whole.events[:20] == cut.events
        await site.both_ingresses()
        await site.idle()

    site.run(work())


def test_another_body_is_refused_and_a_refused_request_has_no_key(site: Site) -> None:
    async def work() -> None:
        body = plain(site, "body", 5)
        assert (await post(site.first, site, body, "k-body")).status_code == 200
        for changed, headers in ((body | {"max_tokens": 6}, {}), (body, {"x-version-pin": "v"})):
            refused = await post(site.second, site, changed, "k-body", **headers)
            assert (refused.status_code, refused.json()["error"]["code"]) == (422, "idempotency_key_reused")
            assert refused.json()["error"]["param"] == "Idempotency-Key"
        same = dict(reversed(body.items()))  # the order of the fields is not the body
        assert (await post(site.second, site, same, "k-body")).status_code == 200
        assert (await post(site.first, site, body | {"max_tokens": -1}, "k-wrong")).status_code == 400
        assert (await post(site.first, site, body, "k-wrong")).status_code == 200
        for key in ("", "x" * 300, "a\tb"):
            bad = await post(site.first, site, body, key)
            assert (bad.status_code, bad.json()["error"]["param"]) == (400, "Idempotency-Key"), key

    site.run(work())


def test_a_worker_s_refusal_is_the_key_s_answer(site: Site) -> None:
    async def work() -> None:
        before = await published(site)
        body = plain(site, "word " * 9000)
        for ingress in (site.first, site.second):
            refused = await post(ingress, site, body, "k-refused")
            assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert await published(site) == before + 1
        await site.idle()

    site.run(work())


def test_an_answer_too_large_to_keep_is_the_workers_for_a_while_and_never_run_again(site: Site) -> None:
    async def work() -> None:
        before = await published(site)
        body = plain(site, "large", 60, logprobs=5)
        first = await post(site.first, site, body, "k-large")
        again = await post(site.second, site, body, "k-large")
        assert again.content == first.content
        answer = again

        async def gone() -> bool:
            nonlocal answer
            answer = await post(site.second, site, body, "k-large")
            return answer.status_code != 200

        await site.until(gone)
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "idempotency_result_gone")
        assert answer.headers["x-should-retry"] == "false"
        assert await published(site) == before + 1

    site.run(work())


def test_a_resumable_request_may_have_a_key(site: Site) -> None:
    async def work() -> None:
        request = site.body("chat", "both", 50, temperature=1)
        headers = {"idempotency_key": "k-both", "x_resumable": "true"}
        stream = await site.begin(site.first, request, 10, **headers)
        site.first.kill()
        await site.resume(site.second, stream)
        again: Stream = await site.begin(site.second, request, **headers)
        assert stream.done
        assert again.done
        assert (again.events, again.id) == (stream.events, stream.id)
        await site.both_ingresses()
        await site.idle()

    site.run(work())
