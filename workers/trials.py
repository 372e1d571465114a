"""Suspects: requests with which several workers died before a token came. A worker tries them one at a time.

When a worker dies, every request that it ran is moved to the same few workers and starts there in the same step as the one
that killed it. Without turns the innocent would be counted dead as often as the guilty; a request that waits for its turn is
not granted its attach, so that a death is counted against the one on trial alone.
"""

from typing import Generic, Protocol, TypeVar

DEATHS_SUSPECT = 2


class Suspect(Protocol):
    """Whoever asks for a request to be started: the attach of its requester, or a job itself."""

    rid: str
    deaths: int  # workers that died with it since its last token


S = TypeVar("S", bound=Suspect)


class Trials(Generic[S]):
    """The suspects of one worker: the one that runs and has shown no token yet, and those that wait for their turn."""

    def __init__(self) -> None:
        self._on_trial: str | None = None  # a rid
        self._waiting: dict[str, S] = {}

    def may_start(self, suspect: S) -> bool:
        """Whether the request may start now; else its turn will come."""
        if suspect.deaths < DEATHS_SUSPECT or self._on_trial in (None, suspect.rid):
            return True
        self._waiting[suspect.rid] = suspect
        return False

    def started(self, suspect: S) -> None:
        """A run began: of a suspect, it is a trial."""
        self._waiting.pop(suspect.rid, None)
        if suspect.deaths >= DEATHS_SUSPECT:
            self._on_trial = suspect.rid

    def over(self, rid: str) -> None:
        """The request has shown a token, or its run has ended."""
        if rid == self._on_trial:
            self._on_trial = None

    def forget(self, rid: str) -> None:
        self._waiting.pop(rid, None)
        self.over(rid)

    def next(self) -> S | None:
        """Whose turn it is, if the turn is free."""
        if self._on_trial is not None or not self._waiting:
            return None
        return self._waiting.pop(next(iter(self._waiting)))
