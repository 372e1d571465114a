"""What the routes of one ingress process share."""

import asyncio
import time
from typing import TYPE_CHECKING

from ingress.admission import Admission
from ingress.files.store import Files
from ingress.identity import Identities
from ingress.keys import Keys
from ingress.limits import Limiter
from ingress.metrics import Metrics
from ingress.observations import Observations
from ingress.registrar import Registrar
from ingress.responses_store import ResponsesStore
from shared.errors import Draining, HeadraceError
from shared.peers import Peers
from shared.router import Router
from shared.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Callable

    from ingress.detached import Detached
    from ingress.relay import Exchange
    from shared.dispatch import Dispatcher

CLIENTS_EVERY_S = 1.0


class Context:
    """Settings, the router, the dispatcher and the requests in progress. `bus_usable` says whether requests can be stored,
    `identities` whose they are."""

    def __init__(
        self,
        settings: Settings,
        router: Router,
        dispatcher: "Dispatcher",
        keys: Keys,
        registrar: Registrar,
        bus_usable: "Callable[[], bool]",
        identities: Identities,
        detached: "Detached",
    ) -> None:
        self.settings, self.router, self.dispatcher, self.keys = settings, router, dispatcher, keys
        self.registrar = registrar
        self.files = Files(registrar.bus, settings)
        self.responses = ResponsesStore(keys.store, settings)
        self.bus_usable = bus_usable
        self.identities = identities
        self.detached = detached
        self.admission = Admission(settings, dispatcher)
        self.peers = Peers(settings.lease_ttl_s)
        self.limits = Limiter(
            settings, lambda tenant: identities.tenant(tenant).limits, lambda: dispatcher.streams(), self.peers
        )
        dispatcher.on_end = self.limits.ended
        dispatcher.lanes.weight = lambda tenant: identities.tenant(tenant).weight
        dispatcher.lanes.processes = lambda: self.peers.count(time.monotonic())
        self.open: set[Exchange] = set()
        self.draining = False
        self.accepting = True  # requests, in the drain too as long as its budget lasts
        self.observations = Observations(router.route)
        self.metrics = Metrics(
            dispatcher.queued_of_all, lambda: len(self.open), dispatcher.totals, lambda: self.limits.alone
        )

    def check_accepting(self) -> None:
        """Raises Draining once the process is about to end."""
        if not self.accepting:
            raise Draining("this ingress is shutting down")

    def interrupt_all(self, error: HeadraceError) -> None:
        """End every request in progress with `error`."""
        for exchange in list(self.open):
            exchange.interrupt(error)

    async def watch_clients(self) -> None:
        """Until cancelled, end requests whose clients neither send nor read."""
        while True:
            await asyncio.sleep(CLIENTS_EVERY_S)
            now = time.monotonic()
            for exchange in list(self.open):
                exchange.check_client(now)
