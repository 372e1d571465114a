"""What this ingress counts of the versions that a deployment is about, told in its lease."""

import os
import socket
import time
from typing import TYPE_CHECKING

from ingress.metrics import Served
from shared import subjects, tally
from shared.leases import LeaseKeeper
from shared.tally import IngressLease, Tally, VersionTally
from shared.wire import new_id

if TYPE_CHECKING:
    from collections.abc import Callable

    from shared.bus import Bus
    from shared.records import Route


class Observations:
    """Counts while a model's deployment goes on. `route` is what is known of a model's route now."""

    def __init__(self, route: "Callable[[str], Route | None]") -> None:
        self._route = route
        self._tallies: dict[tuple[str, str, str], Tally] = {}  # by model, version and deployment
        self._id = new_id()
        self._started = time.time()

    def keeper(self, bus: "Bus") -> LeaseKeeper:
        """What writes the lease."""
        return LeaseKeeper(bus, subjects.INGRESSES_BUCKET, self._id, lambda: tally.encode(self.lease()))

    def finished(self, served: Served, status: int) -> None:
        """Count a request that ended with `status`, if it was known for which version it is."""
        route = self._route(served.model) if served.model else None
        if route is None or not route.rolling:
            return
        place = (served.model, served.version, route.deployment)
        counts = self._tallies.get(place)
        if counts is None:
            counts = self._tallies[place] = Tally()
        counts.note(status, served.first_token_s, served.per_token_s)

    def lease(self) -> IngressLease:
        """As of now; what was counted for deployments that have ended is dropped."""
        for place in list(self._tallies):
            route = self._route(place[0])
            if route is None or route.deployment != place[2] or not route.rolling:
                del self._tallies[place]
        return IngressLease(
            ingress=self._id,
            pid=os.getpid(),
            host=socket.gethostname(),
            started=self._started,
            tallies=[
                VersionTally(model=model, version=version, deployment=deployment, tally=counts)
                for (model, version, deployment), counts in self._tallies.items()
            ],
        )
