"""The counts of all ingresses together, for each version of a deployment: in all, and since its step began. No I/O."""

import logging

from shared.errors import Internal
from shared.rollouts import Deployment
from shared.tally import IngressLease, Tally, ingress_lease_at, total

log = logging.getLogger(__name__)


class Tallies:
    """Takes in leases. What an ingress counted still counts when it is gone."""

    def __init__(self) -> None:
        self._leases: dict[str, IngressLease] = {}
        self._began: dict[
            tuple[str, str], tuple[object, Tally]
        ] = {}  # by deployment and version: at a step's beginning

    def on_lease(self, key: str, value: bytes | None) -> None:
        """A lease is new or changed, or (None) gone."""
        if value is None:
            return
        try:
            lease = ingress_lease_at(key, value)
        except Internal as error:
            log.error("the lease of ingress %s is not taken: %s", key, error)
            return
        self._leases[lease.ingress] = lease

    def of(self, deployment: Deployment, version: str) -> tuple[Tally, Tally]:
        """What was counted of a version since the present step began, as far as it was seen to, and in all."""
        counted = total(
            each.tally
            for lease in self._leases.values()
            for each in lease.tallies
            if (each.deployment, each.version) == (deployment.id, version)
        )
        place, step = (deployment.id, version), (deployment.phase, deployment.step)
        before = self._began.get(place)
        if before is None or before[0] != step:
            self._began[place] = before = (step, counted)
        return counted - before[1], counted

    def forget(self, going: set[str]) -> None:
        """Drop what is kept of all deployments but these."""
        for place in [place for place in self._began if place[0] not in going]:
            del self._began[place]
        for ingress, lease in list(self._leases.items()):
            if not any(each.deployment in going for each in lease.tallies):
                del self._leases[ingress]
