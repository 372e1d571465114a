"""Which process leads, of those that could: a key with a TTL for each office, taken and renewed by compare-and-set.

A leader counts its own lead from before the write that renewed it, and stops acting some time before the key can be another's:
so one that was stopped and goes on finds that it does not lead. What it had sent already carries its term, and workers do not
heed a term that has been replaced.
"""

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

from shared import subjects
from shared.background import end
from shared.bus import Bus
from shared.errors import Internal, Unavailable
from shared.records import Leader, decode_leader, encode

log = logging.getLogger(__name__)

CONTROLLER = "controller"  # decides what runs
BATCHES = "batches"  # runs the batches, in an ingress
SURE = 0.8  # of the TTL: for so long a renewal is good
RENEWALS = 4  # in a TTL


class Leadership:
    """Campaigns for `office` from `start` to `close`. `on_change` is called when this process begins or ceases to lead."""

    def __init__(self, bus: Bus, office: str, ttl_s: float, on_change: Callable[[], None] = lambda: None) -> None:
        self._bus, self._office, self._ttl_s, self._on_change = bus, office, ttl_s, on_change
        self._me = Leader(host=socket.gethostname(), pid=os.getpid(), process=_process_of(os.getpid()))
        self.term = 0  # rises from leader to leader
        self._revision = 0
        self._until = 0.0  # monotonic seconds
        self._task: asyncio.Task[None] | None = None

    @property
    def leads(self) -> bool:
        return time.monotonic() < self._until

    async def start(self) -> None:
        """Returns after the first try. Raises Unavailable."""
        await self._campaign()
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Give the lead up, so that the next one need not wait for the TTL."""
        await end(self._task)
        if self.leads:
            self._until = 0.0
            try:
                await self._bus.kv_delete(subjects.LEADER_BUCKET, self._office, self._revision)
            except Unavailable as error:
                log.warning("the lead of %s is left to expire: %s", self._office, error.message)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._ttl_s / RENEWALS)
            try:
                await self._campaign()
            except Unavailable as error:
                log.info("the lead of %s could not be renewed: %s", self._office, error.message)

    async def _campaign(self) -> None:
        begun = time.monotonic()
        if self._revision:
            revision = await self._bus.kv_update(subjects.LEADER_BUCKET, self._office, encode(self._me), self._revision)
            if revision is not None:
                self._revision, self._until = revision, begun + SURE * self._ttl_s
                return
            self._lost("it was not renewed in time, or another process leads")
        revision = await self._take()
        if revision is not None:
            # a broker that was restarted begins to count anew, in a bucket that it made later
            made_us = await self._bus.stream_made_us(f"KV_{subjects.LEADER_BUCKET}")
            self.term, self._revision = made_us + revision, revision
            self._until = begun + SURE * self._ttl_s
            log.info("this process leads %s, term %d", self._office, self.term)
            self._on_change()

    async def _take(self) -> int | None:
        """The revision of the lead if it could be had: nobody has it, or one whose process on this host is gone."""
        found = await self._bus.kv_get(subjects.LEADER_BUCKET, self._office)
        if found is None:
            return await self._bus.kv_create(subjects.LEADER_BUCKET, self._office, encode(self._me))
        try:
            other = decode_leader(found[0])
        except Internal as error:
            log.warning("the lead of %s is somebody's: %s", self._office, error)
            return None
        if other.host != self._me.host or _process_of(other.pid) == other.process:
            return None
        return await self._bus.kv_update(subjects.LEADER_BUCKET, self._office, encode(self._me), found[1])

    def _lost(self, why: str) -> None:
        log.warning("this process leads %s no more: %s", self._office, why)
        self._revision, self._until = 0, 0.0
        self._on_change()


def _process_of(pid: int) -> str:
    """Which process a pid is at present: when it started, in ticks since which boot; "" for none, and for a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return "" if fields[0] == "Z" else f"{fields[19]}@{boot}"
