"""An upload, from the request's body to the object store: streamed, with limits on its size, its time and their number."""

import asyncio
import time
from collections.abc import AsyncIterator
from weakref import WeakValueDictionary

from starlette.requests import Request

from ingress.answers import Receive
from ingress.context import Context
from ingress.files.form import FILE, PURPOSE, Form
from ingress.files.pulling import Pulled
from ingress.files.store import FileRecord, Files, new_id
from ingress.identity import Caller
from shared.errors import BadRequest, BodyTimeout, Cancelled, InvalidApiKey, ObjectsUnavailable

FORM_BYTES = 64 * 1024  # of a form, beside the file in it
ID_PREFIX = "file-"


class Uploads:
    """Those of one process."""

    def __init__(self, context: Context, files: Files) -> None:
        self._context, self._files = context, files
        self._turns = asyncio.Semaphore(context.settings.file_uploads_max)
        self._turns_of: WeakValueDictionary[str, asyncio.Semaphore] = (
            WeakValueDictionary()
        )  # by tenant, while it has any

    def _own_turns(self, tenant: str) -> asyncio.Semaphore:
        """Half of all: uploads may take as long as their clients like, and those of others must not wait for them."""
        own = self._turns_of.get(tenant)
        if own is None:
            own = self._turns_of[tenant] = asyncio.Semaphore(max(1, self._context.settings.file_uploads_max // 2))
        return own

    async def take(self, request: Request, caller: Caller) -> FileRecord:
        """Store the file of a form.

        Raises Draining, TooManyFiles, BadRequest, Unsupported, TooLarge, BodyTimeout, Cancelled, InvalidApiKey,
        ObjectsUnavailable and Unavailable.
        """
        settings, tenant = self._context.settings, caller.tenant
        self._context.check_accepting()
        form = Form(request.headers.get("content-type", ""), settings.file_bytes_max)
        await self._files.check_room(tenant)
        file_id = new_id(ID_PREFIX)
        try:
            async with asyncio.timeout(settings.file_upload_s), self._own_turns(tenant), self._turns:
                stored = await self._store(form, request.receive, tenant, file_id)
        except TimeoutError:
            raise BodyTimeout(f"the file did not arrive within {settings.file_upload_s:g} s") from None
        try:
            _check(form)
            if not self._context.identities.has(caller):
                raise InvalidApiKey("the tenant was removed meanwhile")
            if stored != form.file_bytes:
                raise ObjectsUnavailable(f"the object store kept {stored} of {form.file_bytes} bytes")
            record = FileRecord(
                id=file_id,
                tenant=tenant,
                filename=form.filename,
                purpose="batch",
                bytes=form.file_bytes,
                created_at=int(time.time()),
                models=caller.key.models,
            )
            await self._files.note(record)
        except BaseException:
            await self._files.discard(tenant, file_id)
            raise
        return record

    async def _store(self, form: Form, receive: Receive, tenant: str, file_id: str) -> int:
        source = Pulled(form.read(_body(receive, self._context.settings.request_read_s)))
        try:
            return await self._files.write(tenant, file_id, source)
        finally:
            source.stop()


def _check(form: Form) -> None:
    if not form.has_file:
        raise BadRequest("file: missing", param=FILE)
    purpose = form.fields.get(PURPOSE)
    if purpose is None:
        raise BadRequest("purpose: missing, `batch` is expected", param=PURPOSE)
    if purpose != "batch":
        raise BadRequest(f"purpose: `batch` is expected, got {purpose!r}", param=PURPOSE)
    if not form.file_bytes:
        raise BadRequest("file: it is empty", param=FILE)


async def _body(receive: Receive, silence_s: float) -> AsyncIterator[bytes]:
    """The pieces of a body. Raises BodyTimeout when none comes for so long, Cancelled when the client leaves before its end."""
    while True:
        try:
            async with asyncio.timeout(silence_s):
                message = await receive()
        except TimeoutError:
            raise BodyTimeout(f"nothing of the body arrived for {silence_s:g} s") from None
        if message["type"] != "http.request":
            raise Cancelled("the client left before its request was complete")
        if message.get("body"):
            yield message["body"]
        if not message.get("more_body", False):
            return
