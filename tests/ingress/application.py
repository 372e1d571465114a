"""An ingress's application on a real bus, called without a socket."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx

from ingress.app import build_app
from ingress.context import Context
from ingress.detached import Detached
from ingress.identity import Identities
from ingress.keys import Keys
from ingress.registrar import Registrar
from shared.bus import Bus
from shared.dispatch import Dispatcher
from shared.router import Router
from shared.settings import Settings


def run(settings: Settings, work: Callable[[httpx.AsyncClient, Bus], Awaitable[None]]) -> None:
    """Run `work` with a client of an ingress's application and with a bus."""

    async def main() -> None:
        bus = await Bus.connect(settings, "test")
        try:
            await bus.ensure()
            identities = Identities(settings.require_keys)
            await identities.start(bus)
            context = Context(
                settings,
                Router(),
                Dispatcher(bus, settings),
                Keys(bus, settings),
                Registrar(bus, settings),
                lambda: True,
                identities,
                Detached(bus),
            )
            transport = httpx.ASGITransport(build_app(context))
            async with httpx.AsyncClient(transport=transport, base_url="http://ingress") as client:
                await work(client, bus)
            await identities.close()
        finally:
            await bus.close()

    asyncio.run(main())


def refusal(response: httpx.Response) -> tuple[int, Any, Any]:
    error = response.json()["error"]
    return response.status_code, error["code"], error["param"]
