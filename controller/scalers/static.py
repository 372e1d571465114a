"""No hands: others start the workers (systemd, Slurm, a Deployment), without a model as a rule, and start them again.

The controller assigns warm ones what is wanted, and tells those that are not needed to drain; who started them starts them
anew. One that hangs is theirs to end. One that says that it failed is taken for ended, so that its version is judged.
"""

import sys
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from controller.scalers.base import Managed
from controller.starts import Exit
from shared.records import Lease


class StaticScaler:
    """Starts nothing and ends nothing. Every worker is somebody else's, known by its lease alone."""

    workers: Mapping[str, Managed] = MappingProxyType({})

    def __init__(self) -> None:
        self._failed: set[str] = set()  # workers that said so, while their leases last
        self._ended: list[Exit] = []

    @property
    def replicas_max(self) -> int:
        """No bound: how many workers there are is not the controller's to say."""
        return sys.maxsize

    @property
    def devices(self) -> None:
        """Nor where they run."""

    @property
    def makes_workers(self) -> bool:
        return False

    async def open(self) -> None:
        pass

    async def close(self) -> None:
        pass

    def owns(self, lease: Lease) -> bool:
        return False

    def adopt(self, leases: Iterable[Lease]) -> None:
        """No worker is taken over; those that have failed are noted."""
        failed = {lease.worker: lease for lease in leases if lease.state == "failed"}
        for worker in failed.keys() - self._failed:
            lease = failed[worker]
            self._ended.append(
                Exit(
                    worker=worker,
                    model=lease.model,
                    version=lease.version,
                    code=None,
                    asked=False,
                    killed_because="",
                    last_line=lease.reason,
                )
            )
        self._failed = set(failed)

    def start(self, model: str, version: str, device: str = "") -> str:
        """Raises OSError."""
        raise OSError("with scaler=static others start the workers")

    def drain(self, worker: str) -> None:
        """Nothing: the controller's message to the worker is all that there is."""

    def kill(self, worker: str, reason: str) -> None:
        """Nothing."""

    def reap(self) -> list[Exit]:
        """The workers that have failed since the last call."""
        ended, self._ended = self._ended, []
        return ended
