"""/v1/batches: files of requests that are run when there is room, as OpenAI has them."""

import time
from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from ingress import listing, openapi
from ingress.batches import life, store
from ingress.batches.record import BatchRecord
from ingress.batches.views import BatchEntry, BatchList, NewBatch, entry
from ingress.body import read_json
from ingress.context import Context
from ingress.family import Family
from ingress.files.store import Files, new_id
from ingress.identity import caller_of, needs
from shared import webhook_secrets
from shared.errors import BadRequest, BatchNotFound, TooManyBatches

BATCHES = "/v1/batches"
BATCH = BATCHES + "/{batch_id}"
ID_PREFIX = "batch_"

_decoder = msgspec.json.Decoder(NewBatch)


def router(context: Context, files: Files, families: Mapping[str, Family]) -> APIRouter:
    """The routes; `families` are those that lines may be of."""
    routes = APIRouter(dependencies=[needs("infer")])
    bus = context.registrar.bus

    async def create(request: Request) -> Response:
        asked = await read_json(context, request, _decoder)
        caller, window_s = caller_of(request), asked.window_s()
        if asked.endpoint not in families:
            raise BadRequest(f"endpoint: one of {', '.join(families)} is expected", param="endpoint")
        file = await files.find(caller.tenant, asked.input_file_id)
        caller.check_models(file.models)
        if file.purpose != "batch":
            raise BadRequest(f"input_file_id: the purpose of the file is {file.purpose}", param="input_file_id")
        if asked.webhook is not None:
            await webhook_secrets.check(bus, caller.tenant, asked.webhook)
        open_max = context.settings.batches_open_max
        if len(await store.open_batches(bus, caller.tenant)) >= open_max:
            raise TooManyBatches(f"{open_max} batches have not ended, which is the limit")
        now = int(time.time())
        record = BatchRecord(
            id=new_id(ID_PREFIX),
            tenant=caller.tenant,
            endpoint=asked.endpoint,
            input_file_id=file.id,
            completion_window=asked.completion_window,
            created_at=now,
            expires_at=now + window_s,
            metadata=asked.metadata,
            webhook=asked.webhook,
            models=caller.key.models,
        )
        await store.create(bus, record)
        return _json(entry(record))

    async def list_all(request: Request) -> Response:
        page, caller = listing.page_of(request), caller_of(request)
        found: list[BatchEntry] = []
        for batch_id in page.of(await store.ids(bus, caller.tenant)):
            try:
                record, _ = await store.find(bus, caller.tenant, batch_id)
            except BatchNotFound:  # its time is over
                continue
            if caller.may_see(record.models):
                found.append(entry(record))
            if len(found) > page.limit:
                break
        data = found[: page.limit]
        first, last = (data[0].id, data[-1].id) if data else (None, None)
        return _json(BatchList(data, first, last, len(found) > page.limit))

    async def show(request: Request, batch_id: str) -> Response:
        caller = caller_of(request)
        record, _ = await store.find(bus, caller.tenant, batch_id)
        caller.check_models(record.models)
        return _json(entry(record))

    async def cancel(request: Request, batch_id: str) -> Response:
        context.check_accepting()
        caller, now = caller_of(request), int(time.time())

        def cancelled(record: BatchRecord) -> BatchRecord:
            caller.check_models(record.models)
            return life.cancelled(record, now)

        return _json(entry(await store.change(bus, caller.tenant, batch_id, cancelled)))

    made = openapi.answer(BatchEntry)
    listed = openapi.answer(BatchList) | {"openapi_extra": {"parameters": listing.PARAMETERS}}
    routes.post(BATCHES, summary="Run the requests of a file", **openapi.told(NewBatch, BatchEntry))(create)
    routes.get(BATCHES, summary="The tenant's batches, the newest first", **listed)(list_all)
    routes.get(BATCH, summary="One batch", **made)(show)
    routes.post(BATCH + "/cancel", summary="Stop a batch; what is done is kept", **made)(cancel)
    return routes


def _json(data: Any) -> Response:
    return Response(msgspec.json.encode(data), media_type="application/json")
