"""What was rolled back, and where its requests go instead. Pure: routes in, a version or an error out."""

from shared.errors import NoReplicaForPin
from shared.records import Route
from shared.router import destination, withdrawn


class Withdrawals:
    """The routes as one process knows them."""

    def __init__(self) -> None:
        self._routes: dict[str, Route] = {}
        self._errors: dict[tuple[str, str], NoReplicaForPin] = {}

    def put_route(self, route: Route) -> None:
        self.drop_route(route.model)
        self._routes[route.model] = route
        for version, reason in route.withdrawn.items():
            self._errors[route.model, version] = withdrawn(route.model, version, reason)

    def drop_route(self, model: str) -> None:
        """There is none any more: nothing is known to be withdrawn."""
        before = self._routes.pop(model, None)
        for version in before.withdrawn if before is not None else ():
            del self._errors[model, version]

    def error(self, model: str, version: str) -> NoReplicaForPin | None:
        """Why nothing new goes to a version; None: it was not rolled back."""
        return self._errors.get((model, version)) if self._errors else None

    def destination(self, model: str, rid: str) -> str | None:
        """The version that a request of the model moves to; None: there is none."""
        route = self._routes.get(model)
        return None if route is None else destination(route, rid)

    def rolling(self, model: str) -> bool:
        """Whether a deployment is moving the model's traffic, and so may take it back."""
        route = self._routes.get(model)
        return route is not None and route.rolling
