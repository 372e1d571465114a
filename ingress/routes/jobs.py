"""Jobs over HTTP: POST and GET /v1/jobs, one of them, its events, its result, and its end."""

import asyncio
import re
import time
from typing import Any, get_args

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from ingress import openapi
from ingress.answers import Headers
from ingress.asked import PIN, SESSION
from ingress.body import read_json
from ingress.context import Context
from ingress.detached import Order, admit_detached, family_at
from ingress.family import Admitted, Family
from ingress.identity import Caller, caller_of, needs
from ingress.job_answers import JobAnswer, family_of
from ingress.job_source import wait_ended
from ingress.job_submission import submit
from ingress.job_views import JOBS, Deleted, JobPage, JobView, NewJob, deadline_s, kept_s, location, view
from ingress.position import HEADER
from shared import job_events, job_records, job_status, webhook_secrets
from shared.errors import BadRequest, HeadraceError, JobNotFound
from shared.job_status import State, Status

JOB = JOBS + "/{job_id}"
EVENTS, RESULT, CANCEL = JOB + "/events", JOB + "/result", JOB + "/cancel"
LIMIT_DEFAULT, LIMIT_MAX = 20, 100  # jobs of a page
LOOKED_AT_MAX = 1000  # jobs that one call looks at, where few are of the status that is asked for
AT_ONCE = 16
STATUSES: tuple[Status, ...] = get_args(Status)

_is_id = re.compile(r"[0-9a-f]{32}").fullmatch

ID = {"name": "job_id", "in": "path", "required": True, "schema": {"type": "string", "pattern": "^[0-9a-f]{32}$"}}
WAIT = {
    "name": "wait",
    "in": "query",
    "schema": {"type": "number", "minimum": 0},
    "description": "Seconds, for its end",
}
LISTED = [
    {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": LIMIT_MAX}},
    {"name": "after", "in": "query", "schema": {"type": "string"}, "description": "`last_id` of the page before"},
    {"name": "status", "in": "query", "schema": {"type": "string", "enum": list(STATUSES)}},
]
KEY = {"name": "Idempotency-Key", "in": "header", "schema": {"type": "string"}}


def router(context: Context, families: tuple[Family, ...]) -> APIRouter:
    """The routes."""
    routes = APIRouter(dependencies=[needs("infer")])
    settings = context.settings

    async def create(request: Request) -> Response:
        asked = await read_json(context, request, msgspec.json.Decoder(NewJob))
        caller, headers = caller_of(request), request.headers
        family = family_at(families, asked.endpoint)
        if asked.webhook is not None:
            await webhook_secrets.check(context.detached.bus, caller.tenant, asked.webhook)
        order = Order(
            endpoint=asked.endpoint,
            deadline_s=deadline_s(asked.deadline_seconds, settings),
            keep_s=kept_s(asked.ttl_seconds, settings),
            webhook=asked.webhook,
            metadata=asked.metadata,
        )
        pin, session = headers.get(PIN.decode()), headers.get(SESSION.decode())

        def admit(rid: str) -> Admitted:
            try:
                return admit_detached(
                    context, family, bytes(asked.body), caller, rid, path=asked.endpoint, pin=pin, session=session
                )
            except HeadraceError as error:
                error.param = f"body.{error.param}" if error.param else None
                raise

        key = headers.get("idempotency-key")
        claim = None
        if key is not None:
            said = (JOBS.encode(), (pin or "").encode(), msgspec.json.encode(asked))
            claim = context.keys.claim(caller.tenant, key.encode("latin-1"), *said)
        told: Headers = []
        rid = job_records.new_job_id(time.time())
        record = await submit(context, admit, rid, caller.tenant, order, claim, told)
        state = State(record, "queued") if claim is None else await find(context, caller, record.id)
        response = _json(view(state), 202, {"location": location(record.id)})
        response.raw_headers += told
        return response

    async def list_some(request: Request) -> Response:
        return _json(await page(context, caller_of(request), dict(request.query_params)))

    async def found(request: Request, wait: bool = False) -> State:
        state = await find(context, caller_of(request), request.path_params["job_id"])
        wait_s = _wait_s(request.query_params.get("wait"), settings.job_wait_max_s) if wait else 0.0
        if state.result is not None or not wait_s:
            return state
        context.check_accepting()
        waited = await wait_ended(context.detached.bus, state.record, wait_s, lambda: context.draining)
        return _known(waited, state.record.id)

    async def show(request: Request) -> Response:
        state = await found(request, wait=True)
        told = view(state, family_of(families, state))
        if told.webhook is not None:
            told.webhook.delivery = await job_events.delivery(context.detached.bus, state)
        return _json(told)

    async def events(request: Request) -> Response:
        return JobAnswer(context, families, EVENTS, caller_of(request), await found(request), streamed=True)

    async def result(request: Request) -> Response:
        state = await found(request, wait=True)
        if state.result is None:
            return _json(view(state), 202, {"retry-after": "1"})
        return JobAnswer(context, families, RESULT, caller_of(request), state, streamed=False)

    async def end(request: Request, state: State) -> State:
        await context.detached.jobs.cancel(state.record.ticket)
        return await find(context, caller_of(request), state.record.id)

    async def cancel(request: Request) -> Response:
        state = await found(request)
        return _json(view(state if state.result is not None else await end(request, state)))

    async def delete(request: Request) -> Response:
        state = await found(request)
        has_ended = state.result is not None
        if has_ended:
            await job_status.forget(context.detached.bus, state)
        else:
            state = await end(request, state)
        return _json(Deleted(id=state.record.id, status=state.status, deleted=has_ended))

    created = openapi.told(NewJob, JobView, status=202)
    created["openapi_extra"]["parameters"] = [KEY]
    routes.post(JOBS, summary="Submit a request that nobody waits for", status_code=202, **created)(create)
    routes.get(JOBS, summary="The jobs, the newest first", **_told(JobPage, *LISTED))(list_some)
    routes.get(JOB, summary="One job, or wait for its end", **_told(JobView, ID, WAIT))(show)
    streamed: dict[str, Any] = {
        "responses": {
            200: {"description": "Its events, as its endpoint streams them", "content": {"text/event-stream": {}}},
            204: {"description": "It is complete, and so was what the client has"},
        },
        "openapi_extra": {"parameters": [ID, {"name": HEADER, "in": "header", "schema": {"type": "string"}}]},
    }
    routes.get(EVENTS, summary="Its events, from the first on or from where Last-Event-ID is", **streamed)(events)
    answered = _told(JobView, ID, WAIT)
    answered["responses"] = {
        200: {"description": "What its endpoint answers", "content": {"application/json": {}}},
        202: openapi.answer(JobView)["responses"][200] | {"description": "It has not ended"},
    }
    routes.get(RESULT, summary="Its answer, once it has ended", **answered)(result)
    routes.post(CANCEL, summary="End a job", **_told(JobView, ID))(cancel)
    routes.delete(JOB, summary="End a job, or delete one that has ended", **_told(Deleted, ID))(delete)
    return routes


async def find(context: Context, caller: Caller, job_id: str) -> State:
    """A job that is the caller's. Raises JobNotFound and ModelNotAllowed."""
    state = await job_status.look(context.detached.bus, caller.tenant, job_id) if _is_id(job_id) else None
    state = _known(state, job_id)
    caller.check_model(state.record.request.model)
    return state


async def page(context: Context, caller: Caller, asked: dict[str, str]) -> JobPage:
    """The jobs that are asked for: `limit`, `after`, `status`. Raises BadRequest."""
    bus, limit, status = context.detached.bus, _limit(asked.get("limit")), asked.get("status")
    if status is not None and status not in STATUSES:
        raise BadRequest(f"status: one of {', '.join(STATUSES)} is expected", param="status")
    after = asked.get("after")
    ids = [each for each in await job_records.ids(bus, caller.tenant) if after is None or each < after]
    data: list[JobView] = []
    looked_at = 0
    while looked_at < min(len(ids), LOOKED_AT_MAX) and len(data) < limit:
        some = ids[looked_at : looked_at + AT_ONCE]
        for state in await asyncio.gather(*(job_status.look(bus, caller.tenant, each) for each in some)):
            looked_at += 1
            if state is not None and _is_shown(state, caller, status):
                data.append(view(state))
                if len(data) == limit:
                    break
    last = ids[looked_at - 1] if looked_at else None
    return JobPage(data=data, last_id=last, has_more=looked_at < len(ids))


def _is_shown(state: State, caller: Caller, status: str | None) -> bool:
    record = state.record
    return record.kind == "job" and caller.may_use(record.request.model) and status in (None, state.status)


def _known(state: State | None, job_id: str) -> State:
    if state is None or state.record.kind != "job":
        raise JobNotFound(f"there is no job {job_id[:64]}, or its time is over")
    return state


def _limit(text: str | None) -> int:
    if text is None:
        return LIMIT_DEFAULT
    if not re.fullmatch("[0-9]{1,9}", text) or not 1 <= int(text) <= LIMIT_MAX:
        raise BadRequest(f"limit: 1 to {LIMIT_MAX} is expected", param="limit")
    return int(text)


def _wait_s(text: str | None, longest_s: float) -> float:
    if text is None:
        return 0.0
    if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", text):
        raise BadRequest("wait: seconds are expected", param="wait")
    return min(float(text), longest_s)


def _told(answer_type: Any, *parameters: dict[str, Any]) -> dict[str, Any]:
    return openapi.answer(answer_type) | {"openapi_extra": {"parameters": list(parameters)}}


def _json(data: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(data), status, headers, media_type="application/json")
