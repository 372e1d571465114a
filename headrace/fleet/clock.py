"""Virtual time: what is to happen, in order. What falls on the same moment goes by rank, then by when it was asked for."""

import heapq
from collections.abc import Callable
from typing import Any

Event = Callable[[Any], None]


class Clock:
    """Seconds from 0 on."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, int, Event, Any]] = []
        self._number = 0

    def at(self, when: float, event: Event, argument: Any = None, rank: int = 0) -> None:
        """`event(argument)` is to happen at `when`, which is not past."""
        assert when >= self.now, f"{when} is before {self.now}"
        self._number += 1
        heapq.heappush(self._heap, (when, rank, self._number, event, argument))

    def run(self, until: float) -> None:
        """Let happen what is due by `until`."""
        heap, pop = self._heap, heapq.heappop
        while heap and heap[0][0] <= until:
            self.now, _, _, event, argument = pop(heap)
            event(argument)
        self.now = max(self.now, until)
