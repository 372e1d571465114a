"""The queue as JetStream keeps it: open pulls are served in turn, what nobody pulls waits, what comes back goes first."""

from collections import deque
from dataclasses import dataclass
from typing import Protocol

from headrace.fleet.clock import Clock
from headrace.fleet.workload import Request
from shared.streams import ConsumerInfo, Delivered


class Puller(Protocol):
    """Who pulls. `listens`: until it is not there any more; then its pulls are passed over."""

    listens: bool

    def message(self, request: Request) -> None: ...

    def pull_ended(self, name: str, left: int) -> None: ...


@dataclass(slots=True, eq=False)
class _Pull:
    puller: Puller
    name: str
    left: int


class Broker:
    """The durable consumer of one model version (lane `fast`)."""

    def __init__(self, clock: Clock, version: str = "") -> None:
        self.version = version
        self._clock = clock
        self._heir: Broker | None = None
        self.rehomed = 0
        self._pulls: deque[_Pull] = deque()
        self._waiting: deque[Request] = deque()
        self._returned: deque[Request] = deque()
        self.claimed = 0  # delivered and not acknowledged
        self.delivered = 0  # so far
        self.paused = False
        self._serving = False

    @property
    def pending(self) -> int:
        return len(self._waiting) + len(self._returned)

    def info(self) -> ConsumerInfo:
        """What the server says of the consumer."""
        open_pulls = sum(pull.puller.listens and pull.left > 0 for pull in self._pulls)
        return ConsumerInfo(
            num_pending=self.pending,
            num_ack_pending=self.claimed,
            num_waiting=open_pulls,
            delivered=Delivered(self.delivered),
        )

    def publish(self, request: Request) -> None:
        request.version = self.version
        self._waiting.append(request)
        self._serve()

    def give_back(self, request: Request) -> None:
        """A negative acknowledgement: it is delivered again, before all others."""
        self.claimed -= 1
        self._returned.append(request)
        if self._heir is not None:
            self.rehome(self._heir)
        self._serve()

    def rehome(self, heir: "Broker") -> None:
        """What nobody has claimed and no token is there of goes to another version's queue, from now on."""
        self._heir = heir
        for queue in (self._returned, self._waiting):
            moved = [request for request in queue if request.first < 0]
            for request in moved:
                queue.remove(request)
                heir.publish(request)
            self.rehomed += len(moved)

    def acknowledge(self) -> None:
        self.claimed -= 1

    def pull(self, puller: Puller, name: str, batch: int, expires: float) -> None:
        pull = _Pull(puller, name, batch)
        self._pulls.append(pull)
        self._clock.at(expires, self._expire, pull)
        self._serve()

    def resume(self, _: object = None) -> None:
        self.paused = False
        self._serve()

    def withdraw(self, request: Request) -> bool:
        """Delete a message that nobody has claimed."""
        for queue in (self._waiting, self._returned):
            if request in queue:
                queue.remove(request)
                return True
        return False

    def _serve(self) -> None:
        """Hand out what can be. A message calls for the next pull, which is served here too and not one call deeper."""
        if self._serving:
            return
        self._serving = True
        pulls = self._pulls
        while pulls and not self.paused and (queue := self._returned or self._waiting):
            pull = pulls.popleft()
            if pull.left <= 0 or not pull.puller.listens:
                continue
            request = queue.popleft()
            pull.left -= 1
            if pull.left:
                pulls.append(pull)
            self.claimed += 1
            self.delivered += 1
            pull.puller.message(request)
        self._serving = False

    def _expire(self, pull: _Pull) -> None:
        if pull.left > 0 and pull.puller.listens:
            left, pull.left = pull.left, 0
            pull.puller.pull_ended(pull.name, left)
