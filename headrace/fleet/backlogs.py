"""The lane fair of one model version as JetStream keeps it: a queue of each tenant. A pull takes what is there."""

from collections import Counter, deque

from headrace.fleet.workload import Request


class Backlogs:
    """All tenants' queues."""

    def __init__(self) -> None:
        self.stored: Counter[str] = Counter()  # by tenant: messages that wait or are claimed
        self.pending = 0
        self.delivered = 0  # so far
        self._waiting: dict[str, deque[Request]] = {}
        self._returned: dict[str, deque[Request]] = {}

    @property
    def claimed(self) -> int:
        return self.stored.total() - self.pending

    def publish(self, request: Request) -> None:
        self.stored[request.tenant] += 1
        self._queue(self._waiting, request)

    def give_back(self, request: Request) -> None:
        """It is delivered again, before its tenant's others."""
        self._queue(self._returned, request)

    def acknowledge(self, tenant: str) -> None:
        self.stored[tenant] -= 1
        if not self.stored[tenant]:
            del self.stored[tenant]

    def left(self, tenant: str) -> int:
        """Messages that nobody has claimed."""
        return sum(len(queues.get(tenant, ())) for queues in (self._returned, self._waiting))

    def take(self, tenant: str) -> Request | None:
        """Deliver the next one."""
        for queues in (self._returned, self._waiting):
            if queue := queues.get(tenant):
                self.pending -= 1
                self.delivered += 1
                return queue.popleft()
        return None

    def withdraw(self, request: Request) -> bool:
        """Delete a message that nobody has claimed."""
        for queues in (self._returned, self._waiting):
            queue = queues.get(request.tenant)
            if queue and request in queue:
                queue.remove(request)
                self.pending -= 1
                self.acknowledge(request.tenant)
                return True
        return False

    def unclaimed(self) -> list[Request]:
        """What nobody has claimed, in the order in which each tenant's would be delivered."""
        return [each for queues in (self._returned, self._waiting) for queue in queues.values() for each in queue]

    def _queue(self, queues: dict[str, deque[Request]], request: Request) -> None:
        queues.setdefault(request.tenant, deque()).append(request)
        self.pending += 1
