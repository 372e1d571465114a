"""/v1/files: files of batches, as OpenAI has them."""

import re
from typing import Any, Literal

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response, StreamingResponse

from ingress import listing, openapi
from ingress.batches import store as batches
from ingress.context import Context
from ingress.files.store import FileRecord, Files, Purpose
from ingress.files.upload import Uploads
from ingress.identity import caller_of, needs
from shared.errors import BadRequest, FileInUse, FileNotFound

FILES = "/v1/files"
FILE = FILES + "/{file_id}"
CONTENT = FILE + "/content"
PURPOSES = ("batch", "batch_output")

_UNSAFE = re.compile(r"[^A-Za-z0-9._ -]")

FORM: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"type": "string", "enum": ["batch"]},
                    },
                }
            }
        },
    }
}


class FileEntry(msgspec.Struct):
    """A file as callers see it."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: Purpose
    object: Literal["file"] = "file"
    status: Literal["processed"] = "processed"
    expires_at: int | None = None


class FileList(msgspec.Struct):
    data: list[FileEntry]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


class DeletedFile(msgspec.Struct):
    id: str
    object: Literal["file"] = "file"
    deleted: bool = True


def router(context: Context, files: Files) -> APIRouter:
    """The routes."""
    routes = APIRouter(dependencies=[needs("infer")])
    uploads, bus = Uploads(context, files), context.registrar.bus

    async def find(request: Request, file_id: str) -> FileRecord:
        caller = caller_of(request)
        record = await files.find(caller.tenant, file_id)
        caller.check_models(record.models)
        return record

    async def upload(request: Request) -> Response:
        return _json(_entry(await uploads.take(request, caller_of(request))))

    async def list_all(request: Request) -> Response:
        page, caller, purpose = listing.page_of(request), caller_of(request), _purpose(request)
        found: list[FileEntry] = []
        for file_id in page.of(await files.ids(caller.tenant)):
            try:
                record = await files.find(caller.tenant, file_id)
            except FileNotFound:  # deleted meanwhile
                continue
            if purpose in (None, record.purpose) and caller.may_see(record.models):
                found.append(_entry(record))
            if len(found) > page.limit:
                break
        data = found[: page.limit]
        first, last = (data[0].id, data[-1].id) if data else (None, None)
        return _json(FileList(data, first, last, len(found) > page.limit))

    async def show(request: Request, file_id: str) -> Response:
        return _json(_entry(await find(request, file_id)))

    async def content(request: Request, file_id: str) -> Response:
        record = await find(request, file_id)
        first = await files.read(record, 0)  # while an error can still be told
        name = _UNSAFE.sub("_", record.filename)
        headers = {
            "content-length": str(record.bytes),
            "content-disposition": f'attachment; filename="{name}"',
            "x-content-type-options": "nosniff",
        }
        return StreamingResponse(files.stream(record, first), 200, headers, "application/octet-stream")

    async def delete(request: Request, file_id: str) -> Response:
        context.check_accepting()
        record = await find(request, file_id)
        for batch in await batches.open_batches(bus, record.tenant):
            if file_id in (batch.input_file_id, batch.output_file_id, batch.error_file_id):
                raise FileInUse(f"batch {batch.id} is {batch.status} and needs the file")
        await files.delete(record)
        return _json(DeletedFile(file_id))

    made = openapi.answer(FileEntry)
    listed = openapi.answer(FileList) | {"openapi_extra": {"parameters": listing.PARAMETERS}}
    routes.post(FILES, summary="Upload a file for a batch", **(made | {"openapi_extra": FORM}))(upload)
    routes.get(FILES, summary="The tenant's files, the newest first", **listed)(list_all)
    routes.get(FILE, summary="One file", **made)(show)
    told: dict[str, Any] = {
        "responses": {200: {"description": "Its bytes", "content": {"application/octet-stream": {}}}}
    }
    routes.get(CONTENT, summary="What is in a file", **told)(content)
    routes.delete(FILE, summary="Delete a file", **openapi.answer(DeletedFile))(delete)
    return routes


def _purpose(request: Request) -> str | None:
    purpose = request.query_params.get("purpose")
    if purpose is not None and purpose not in PURPOSES:
        raise BadRequest(f"purpose: one of {', '.join(PURPOSES)} is expected", param="purpose")
    return purpose


def _entry(record: FileRecord) -> FileEntry:
    return FileEntry(record.id, record.bytes, record.created_at, record.filename, record.purpose)


def _json(data: Any) -> Response:
    return Response(msgspec.json.encode(data), media_type="application/json")
