"""Whose a job is: the routes of jobs with keys, on a real nats-server."""

import secrets
import time
from typing import Any

import httpx

from ingress.family import Framing, encode_framing
from ingress.preferences import preference
from shared import job_records, results, tenancy, wire
from shared.audit import Actor
from shared.bus import Bus
from shared.job_records import JobRecord
from shared.results import Part, Result
from shared.settings import Settings
from shared.tenancy import NewKey, NewTenant
from shared.webhooks import Webhook

from .application import refusal, run

HAND = Actor("local", "cli:test@here")
HOOK = Webhook(url="https://there.example/hook", secret="whsec_" + "a" * 32)


async def completed(bus: Bus, tenant: str, model: str = "m", **changed: Any) -> JobRecord:
    """A job that has ended."""
    now = time.time()
    rid = job_records.new_job_id(now)
    framing = encode_framing(Framing("/v1/completions", f"{model}@stable", 77, False, False))
    request = wire.Request(rid, model, "v", wire.Input(), framing=framing)
    given: dict[str, Any] = {"created_at": now, "deadline": now + 60, "keep_s": 60, "webhook": HOOK} | changed
    record = JobRecord(id=rid, tenant=tenant, endpoint="/v1/completions", request=request, **given)
    assert await job_records.create(bus, record)
    part = Part([1, 2], ["a", "b"], None, "stop")
    result = Result(version="v", claim="c", parts=[part], ended_at=now, usage=wire.Usage(3, 2), claims=1)
    await results.store(bus, tenant, rid, result, record.keep_s)
    return record


def test_a_job_is_its_tenant_s_and_of_the_models_that_the_key_is_for(nats_url: str) -> None:
    async def work(client: httpx.AsyncClient, bus: Bus) -> None:
        mine, other = (f"team-{secrets.token_hex(4)}" for _ in range(2))
        keys = {}
        for name, tenant, models in (("all", mine, []), ("narrow", mine, ["m2"]), ("other", other, [])):
            if name != "narrow":
                await tenancy.add(bus, HAND, NewTenant(name=tenant))
            keys[name] = (await tenancy.issue(bus, HAND, tenant, NewKey(models=models))).secret

        async def ask(key: str, method: str, path: str) -> httpx.Response:
            deadline = time.monotonic() + 10
            while True:  # until the key is known here
                answer = await client.request(method, f"/v1/jobs{path}", headers={"x-api-key": keys[key]})
                if answer.status_code != 401 or time.monotonic() > deadline:
                    return answer

        one, two = await completed(bus, mine), await completed(bus, mine, "m2")
        background = await completed(bus, mine, kind="response")
        shown = await ask("all", "GET", f"/{one.id}")
        assert shown.status_code == 200
        assert shown.json()["result"]["choices"][0]["text"] == "ab"
        assert shown.json()["model"] == "m@stable"
        assert "whsec" not in shown.text
        assert shown.json()["webhook"]["url"] == HOOK.url
        for method, path in (("GET", ""), ("GET", "/events"), ("GET", "/result"), ("POST", "/cancel"), ("DELETE", "")):
            for key, job in (("other", one), ("all", background)):
                answer = await ask(key, method, f"/{job.id}{path}")
                assert refusal(answer) == (404, "job_not_found", None), (key, method, path)
            assert refusal(await ask("narrow", method, f"/{one.id}{path}")) == (403, "model_not_allowed", "model")
        listed = {key: (await ask(key, "GET", "")).json() for key in keys}
        assert [job["id"] for job in listed["all"]["data"]] == [two.id, one.id]
        assert [job["id"] for job in listed["narrow"]["data"]] == [two.id]
        assert listed["other"] == {"object": "list", "data": [], "last_id": None, "has_more": False}
        assert (await ask("narrow", "DELETE", f"/{two.id}")).json()["deleted"] is True
        assert (await client.get("/v1/jobs")).status_code == 401

    run(Settings(nats_url=nats_url, require_keys=True), work)


def test_a_preference_is_heeded_if_it_is_known_and_left_alone_if_not() -> None:
    for given, wait_s in (
        (b"respond-async", 0),
        (b"respond-async, wait=5", 5),
        (b'wait="7";x=1 , Respond-Async', 7),
        (b"respond-async, wait=soon", 0),
        (b"respond-async, wait=1, wait=9", 1),
    ):
        found = preference(given)
        assert found is not None
        assert found.wait_s == wait_s, given
    for given in (None, b"", b"wait=5", b"return=minimal", b"respond-asynchronously", b"\xff"):
        assert preference(given) is None
