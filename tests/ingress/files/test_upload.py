"""Whose uploads wait for whose."""

import asyncio
from types import SimpleNamespace
from typing import Any

from starlette.requests import Request

from ingress.files.store import FileRecord
from ingress.files.upload import Uploads
from ingress.identity import Identities, tenant_itself
from shared.settings import Settings

FORM = (
    b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--x\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n{}\r\n--x--\r\n'
)


class Files:
    """A store that keeps nothing."""

    async def check_room(self, tenant: str) -> None:
        pass

    async def write(self, tenant: str, file_id: str, source: Any) -> int:
        return len(await asyncio.to_thread(source.read))

    async def note(self, record: FileRecord) -> None:
        pass


def upload(uploads: Uploads, tenant: str, ends: bool) -> asyncio.Task[FileRecord]:
    """One that is sent at once, or (not `ends`) never."""

    async def receive() -> Any:
        if not ends:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": FORM}

    headers = [(b"content-type", b"multipart/form-data; boundary=x")]
    request = Request({"type": "http", "headers": headers}, receive)
    return asyncio.create_task(uploads.take(request, tenant_itself(tenant)))


def test_a_tenant_whose_uploads_do_not_end_holds_up_its_own_alone() -> None:
    async def work() -> None:
        context: Any = SimpleNamespace(
            settings=Settings(file_uploads_max=4), check_accepting=lambda: None, identities=Identities(False)
        )
        files: Any = Files()
        uploads = Uploads(context, files)
        slow = [upload(uploads, "slow", ends=False) for _ in range(4)]
        async with asyncio.timeout(5):
            records = await asyncio.gather(*(upload(uploads, "other", ends=True) for _ in range(4)))
        assert [(each.tenant, each.bytes) for each in records] == [("other", 2)] * 4
        own = upload(uploads, "slow", ends=True)
        done, _ = await asyncio.wait({own}, timeout=0.05)
        assert not done, "it has its turn after its others"
        for each in slow:
            each.cancel()
        await asyncio.gather(*slow, return_exceptions=True)
        async with asyncio.timeout(5):
            assert (await own).tenant == "slow"

    asyncio.run(work())
