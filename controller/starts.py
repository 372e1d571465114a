"""What follows from workers that end before they ever served: try again later, or give the version up. Pure."""

import signal

from msgspec import Struct

from shared.records import Lease
from shared.settings import Settings


class Exit(Struct, frozen=True, kw_only=True):
    """A worker's process that is gone."""

    worker: str
    model: str
    version: str
    code: int | None  # as of Popen: negative for a signal; None when it was not our child
    asked: bool  # it was told to drain
    killed_because: str  # "" when we did not kill it
    last_line: str  # of its log
    outside: bool = False  # ended, or not made, by the doing of what it runs on: nothing is known against its version

    def description(self) -> str:
        """How it ended, and the last thing that it said."""
        if self.code is None:
            how = "the worker ended"
        elif self.code < 0:
            how = f"the worker was ended by signal {-self.code} ({signal.strsignal(-self.code)})"
        else:
            how = f"the worker exited with code {self.code}"
        return f"{how}: {self.last_line}" if self.last_line else how


class Failure(Struct, frozen=True, kw_only=True):
    """A worker that ended without ever being active."""

    kind: str  # permanent | transient | crash | timeout
    reason: str


class Starts(Struct):
    """The record of one version's starts since one last succeeded. Times are seconds on the controller's clock."""

    failures: int = 0  # in a row, of every kind
    crashes: int = 0  # of these, those that did not say why
    retry_at: float = 0.0  # no start before
    reason: str = ""  # of the last failure
    hopeless: bool = False  # the version is to be failed with `reason`

    def failed(self, failure: Failure, served: bool, now: float, settings: Settings) -> None:
        """Take in a failure: back off 1, 2, 4, ... seconds; give up at once when it is permanent, or after the limit.

        A version that is `served` by another worker can be loaded, so it is never given up.
        """
        self.failures += 1
        self.crashes += failure.kind in ("crash", "timeout")
        self.reason = failure.reason
        self.hopeless = not served and (failure.kind == "permanent" or self.crashes >= settings.start_failures_max)
        backoff_s = settings.start_backoff_s * 2.0 ** min(self.failures - 1, 30)
        self.retry_at = now + min(backoff_s, settings.start_backoff_max_s)

    def succeeded(self) -> None:
        """A worker is active: what went wrong before is over."""
        self.failures, self.crashes, self.retry_at, self.reason, self.hopeless = 0, 0, 0.0, "", False


def judge(ended: Exit, lease: Lease | None, was_active: bool) -> Failure | None:
    """Why the start failed, or None when it did not: the worker had been active, or was told to end.

    `lease` is the worker's last one. What the worker says of itself goes before what its exit looks like. One that was warm
    and ended by itself after it had been assigned a version has failed with that, even if it did not come to say so.
    """
    took = lease is None or (lease.model, lease.version) == (ended.model, ended.version)
    if was_active and (took or ended.killed_because):
        return None
    if lease is not None and lease.state == "failed":
        return Failure(kind="permanent" if lease.permanent else "transient", reason=lease.reason or "no reason given")
    if ended.killed_because:
        return Failure(kind="transient" if ended.outside else "timeout", reason=ended.killed_because)
    if ended.asked:
        return None
    return Failure(kind="transient" if ended.outside else "crash", reason=ended.description())
