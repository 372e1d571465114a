"""Who serves what is missing: a warm worker where there is one, else a new one; each on a device of its own. Pure."""

from collections.abc import Iterable, Sequence

from msgspec import Struct

from controller.fleet import Member, Plan

VersionName = tuple[str, str]  # model, version


class Give(Struct, frozen=True):
    """A warm worker gets a version."""

    worker: str
    name: VersionName
    claim: bool


class Start(Struct, frozen=True):
    """A new worker, a warm one if the name is empty."""

    name: VersionName
    device: str = ""


class Drain(Struct, frozen=True):
    """A warm worker too many."""

    worker: str


NO_VERSION: VersionName = ("", "")


def place(
    wanted: Sequence[tuple[VersionName, Plan]],
    fleet: Iterable[Member],
    devices: Sequence[str] | None,
    warm_workers: int,
    makes_workers: bool = True,
    makes_warm: bool = True,
) -> list[Give | Start | Drain]:
    """How the workers that the plans miss come to be, the plans in the order of their right to a device.

    `devices`: each is for one worker with a model, and one that still drains has its own; None: no such bound. Warm
    workers have devices too, but do not occupy them. `warm_workers` of them are kept, and as many more as spares are missing.
    Without `makes_workers` nothing is started, and a warm worker is never too many: who started it wants it there.
    Without `makes_warm` no warm one is started: the last one that was could not be.
    """
    return _Placement(list(fleet), devices, warm_workers, makes_workers, makes_warm).run(wanted)


class _Placement:
    def __init__(
        self,
        fleet: list[Member],
        devices: Sequence[str] | None,
        warm_workers: int,
        makes_workers: bool,
        makes_warm: bool,
    ) -> None:
        self._devices = devices
        self._makes_workers = makes_workers
        self._makes_warm = makes_warm
        self._free = list(devices or ())
        for member in fleet:
            if member.model and member.device in self._free:
                self._free.remove(member.device)
        self._warm = [member for member in fleet if member.is_warm]
        self._ready = sorted((member for member in self._warm if member.heard), key=lambda one: one.state != "warm")
        self._warm_wanted = warm_workers
        self._done: list[Give | Start | Drain] = []

    def run(self, wanted: Sequence[tuple[VersionName, Plan]]) -> list[Give | Start | Drain]:
        for name, plan in wanted:
            for _ in range(plan.starts):
                if not self._give(name, True) and self._has_room():
                    self._done.append(Start(name, self._free.pop(0) if self._free else ""))
        for name, plan in wanted:
            for _ in range(plan.spares):
                if not self._give(name, False):
                    self._prepare_spare()
        if self._makes_workers:
            self._fill_up()
        return self._done

    def _has_room(self) -> bool:
        return self._makes_workers and (self._devices is None or bool(self._free))

    def _give(self, name: VersionName, claim: bool) -> bool:
        """Let a warm worker have it, if there is one whose device is free."""
        ready = next(filter(self._fits, self._ready), None)
        if ready is None:
            return False
        self._ready.remove(ready)
        self._take(ready)
        self._done.append(Give(ready.worker, name, claim))
        return True

    def _prepare_spare(self) -> None:
        """A warm worker on a device that is free, which is assigned when it is there; perhaps it is on its way."""
        coming = next(filter(self._fits, self._warm), None)
        if coming is not None:
            self._take(coming)
        elif self._makes_warm and self._has_room():
            self._done.append(Start(NO_VERSION, self._free.pop(0) if self._free else ""))

    def _fits(self, member: Member) -> bool:
        return self._devices is None or not member.device or member.device in self._free

    def _take(self, member: Member) -> None:
        self._warm.remove(member)
        if member.device in self._free:
            self._free.remove(member.device)

    def _fill_up(self) -> None:
        """As many warm workers as are wanted, on the devices that have the fewest, free ones first."""
        used = [member.device for member in self._warm]
        for _ in range(self._warm_wanted - len(self._warm) if self._makes_warm else 0):
            device = min(self._devices or ("",), key=lambda each: (used.count(each), each not in self._free))
            used.append(device)
            self._done.append(Start(NO_VERSION, device))
        for member in self._warm[self._warm_wanted :]:
            self._done.append(Drain(member.worker))
