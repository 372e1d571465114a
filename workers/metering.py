"""What requests take of the engine: its steps' time, divided among the runs that each step gave something. Pure."""

import msgspec

from workers.engine.request import TokenEvent

OVER_MAX = 10_000  # requests whose runs have ended and whose claims have not


class Metered(msgspec.Struct):
    rid: str
    prompt_tokens: int
    gpu_s: float = 0.0


class Meter:
    """The times of one engine; they add up to the time in which it had something to do. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._runs: dict[str, Metered] = {}
        self._over: dict[str, Metered] = {}  # by rid, the latest last
        self._since = 0.0  # up to when time is accounted for

    def submitted(self, run: str, rid: str, prompt_tokens: int, now: float) -> None:
        if not self._runs:
            self._since = now
        self._runs[run] = Metered(rid, prompt_tokens)

    def step(self, events: list[TokenEvent], now: float) -> None:
        """A step ended at `now` with these events."""
        served = {event.key for event in events if event.key in self._runs}
        if not served:
            return
        part_s = max(0.0, now - self._since) / len(served)
        self._since = now
        for run in served:
            self._runs[run].gpu_s += part_s
        for event in events:
            if event.usage is not None or event.error is not None:
                self.ended(event.key)

    def ended(self, run: str) -> None:
        """It takes nothing any more."""
        metered = self._runs.pop(run, None)
        if metered is None:
            return
        before = self._over.pop(metered.rid, None)
        metered.gpu_s += before.gpu_s if before is not None else 0.0
        self._over[metered.rid] = metered
        if len(self._over) > OVER_MAX:
            del self._over[next(iter(self._over))]

    def take(self, rid: str) -> Metered:
        """What a request took here, which is then forgotten."""
        return self._over.pop(rid, None) or Metered(rid, 0)
