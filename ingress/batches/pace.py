"""Long work on the event loop that streams tokens: in slices of a few milliseconds."""

import asyncio
import time

SLICE_S = 0.002


class Pace:
    """Of one piece of work."""

    def __init__(self) -> None:
        self._since = time.monotonic()

    async def breathe(self) -> None:
        """Let others have the loop, if this has had it for long enough. Call it between small steps."""
        if time.monotonic() - self._since >= SLICE_S:
            await asyncio.sleep(0)
            self._since = time.monotonic()
