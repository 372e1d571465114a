"""Models and routes, watched from their buckets into the router."""

import logging
from typing import TYPE_CHECKING

from shared import records, subjects
from shared.errors import Internal
from shared.router import Router

if TYPE_CHECKING:
    from shared.bus import Bus
    from shared.dispatch import Dispatcher
    from shared.keyvalue import Watch

log = logging.getLogger(__name__)


class Watches:
    """Two watched buckets. `live` says whether changes of both arrive."""

    def __init__(self, router: Router, dispatcher: "Dispatcher") -> None:
        self._router, self._dispatcher = router, dispatcher
        self._watches: list[Watch] = []

    async def start(self, bus: "Bus") -> None:
        """Returns when the router knows what the buckets hold now."""
        self._watches = [
            await bus.watch(subjects.MODELS_BUCKET, self.on_version),
            await bus.watch(subjects.ROUTES_BUCKET, self.on_route),
        ]

    async def close(self) -> None:
        for watch in self._watches:
            await watch.close()

    @property
    def live(self) -> bool:
        return bool(self._watches) and all(watch.live for watch in self._watches)

    def on_version(self, key: str, value: bytes | None) -> None:
        """A version's record is new, changed, or (None) deleted."""
        try:
            model, version = records.version_key(key)
            record = None if value is None else records.version_at(key, value)
        except Internal as error:
            log.error("version %s stays as it was: %s", key, error)
            return
        if record is None:
            self._router.drop_version(model, version)
            self._dispatcher.version_removed(model, version)
            return
        self._router.put_version(record)
        self._dispatcher.version_changed(record)

    def on_route(self, key: str, value: bytes | None) -> None:
        """A model's route is new, changed, or (None) deleted."""
        try:
            if value is None:
                model = records.model_key(key)
                self._router.drop_route(model)
                self._dispatcher.route_removed(model)
                return
            route = records.route_at(key, value)
        except Internal as error:
            log.error("the route of %s stays as it was: %s", key, error)
            return
        self._router.put_route(route)
        self._dispatcher.route_changed(route)
