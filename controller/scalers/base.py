"""What the controller asks of its hands: something that makes workers and can end them."""

from collections.abc import Iterable, Mapping
from typing import Protocol

from msgspec import Struct

from controller.starts import Exit
from shared.records import Lease


class Managed(Struct, kw_only=True):
    """A live worker that the scaler made, or took over. Times are seconds of the monotonic clock.

    A warm worker has no model: `model` and `version` are "" until the controller writes down which it is assigned.
    """

    worker: str
    model: str
    version: str
    started: float
    device: str = ""  # that is its own; "" where that is not the scaler's to say
    assigned_at: float | None = None  # when a warm one was
    drained_at: float | None = None  # when it was told to drain
    killed_because: str = ""
    own: bool = True  # started by this controller, not taken over
    waiting_for: str = ""  # what keeps it from starting, where the scaler knows: no node with room, no image


class Scaler(Protocol):
    """Makes, ends and reaps workers. No method blocks; what takes time goes on in the background of `open`.

    `workers` are those that are alive, or about to be, by id: the controller sees here what it started before any lease
    tells of it. What becomes of a worker after its start (assignment, activation, drain) the controller tells it by NATS.
    """

    @property
    def workers(self) -> Mapping[str, Managed]: ...

    @property
    def replicas_max(self) -> int:
        """Replicas of one version where its record sets no limit."""
        ...

    @property
    def devices(self) -> tuple[str, ...] | None:
        """The accelerators that there are, each for one loaded worker; None: there is no such bound."""
        ...

    @property
    def makes_workers(self) -> bool:
        """Whether it can start any. If not, those that there are are all kept, and what is missing is only shown."""
        ...

    async def open(self) -> None:
        """Begin. Raises Unavailable when what the workers run on cannot be reached."""
        ...

    async def close(self) -> None:
        """End what goes on in the background. The workers live on."""
        ...

    def owns(self, lease: Lease) -> bool:
        """Whether the lease is of a worker that this scaler can see: without a process behind it, it is a dead one's."""
        ...

    def adopt(self, leases: Iterable[Lease]) -> None:
        """Take over the live workers that an earlier controller started."""
        ...

    def start(self, model: str, version: str, device: str = "") -> str:
        """Start a worker, a warm one if `model` is ""; its id. Raises OSError when it cannot be made."""
        ...

    def drain(self, worker: str) -> None:
        """Tell a worker to finish what it has and end. Once is enough: the worker keeps its own budget."""
        ...

    def kill(self, worker: str, reason: str) -> None:
        """End it now."""
        ...

    def reap(self) -> list[Exit]:
        """The workers that have ended since the last call."""
        ...
