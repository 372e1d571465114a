"""Models and routes, watched from their buckets into the router."""

from typing import TYPE_CHECKING

from shared import records, subjects
from shared.router import Router

if TYPE_CHECKING:
    from shared.bus import Bus
    from shared.dispatch import Dispatcher
    from shared.keyvalue import Watch


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
        change = records.VERSIONS.change(key, value)
        if change is None:
            return
        if change.record is None:
            model, version = change.names
            self._router.drop_version(model, version)
            self._dispatcher.version_removed(model, version)
            return
        self._router.put_version(change.record)
        self._dispatcher.version_changed(change.record)

    def on_route(self, key: str, value: bytes | None) -> None:
        """A model's route is new, changed, or (None) deleted."""
        change = records.ROUTES.change(key, value)
        if change is None:
            return
        if change.record is None:
            [model] = change.names
            self._router.drop_route(model)
            self._dispatcher.route_removed(model)
            return
        self._router.put_route(change.record)
        self._dispatcher.route_changed(change.record)
