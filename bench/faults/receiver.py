"""Who is told by webhooks of what became of jobs; refuses some, so that they are told again."""

import asyncio
import base64
import contextlib
import hashlib
import hmac
import random
from collections import defaultdict
from typing import Any, Self

import msgspec
from aiohttp import web

from faults.broker import HOST

KEY = b"of the receiver of all the jobs here"
SECRET = "whsec_" + base64.b64encode(KEY).decode()
REFUSED_SHARE = 0.1
PATH = "/told"


class Receiver:
    """A receiver on a free port, as long as the context lasts."""

    def __init__(self, seed: int) -> None:
        self.url = ""
        self.told: defaultdict[str, list[str]] = defaultdict(list)  # ids of deliveries that were taken, by job
        self.types: dict[str, set[str]] = defaultdict(set)  # of a job's events
        self.deliveries = self.refused = self.unsigned = 0
        self._dice = random.Random(f"{seed}/receiver")
        self._received = asyncio.Event()
        application = web.Application()
        application.router.add_post(PATH, self._receive)
        self._runner = web.AppRunner(application)

    async def __aenter__(self) -> Self:
        await self._runner.setup()
        site = web.TCPSite(self._runner, HOST, 0)
        await site.start()
        _, port = self._runner.addresses[0][:2]
        self.url = f"http://{HOST}:{port}{PATH}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def until_told(self, jobs: int, budget_s: float) -> None:
        """Wait until it was told of so many jobs, or for so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(budget_s):
                while len(self.told) < jobs:
                    self._received.clear()
                    await self._received.wait()

    async def _receive(self, request: web.Request) -> web.Response:
        body = await request.read()
        self.deliveries += 1
        self.unsigned += not _is_signed(request, body)
        if self._dice.random() < REFUSED_SHARE:
            self.refused += 1
            return web.Response(status=500)
        event: dict[str, Any] = msgspec.json.decode(body)
        job = event["data"]["id"]
        self.told[job].append(request.headers["webhook-id"])
        self.types[job].add(event["type"])
        self._received.set()
        return web.Response()


def _is_signed(request: web.Request, body: bytes) -> bool:
    content = f"{request.headers['webhook-id']}.{request.headers['webhook-timestamp']}.".encode() + body
    wanted = base64.b64encode(hmac.new(KEY, content, hashlib.sha256).digest()).decode()
    return f"v1,{wanted}" in request.headers["webhook-signature"].split(" ")
