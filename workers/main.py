"""The worker process: start up (warm, fetch, load), serve, drain.

`python -m workers.main --worker-id ID [--model M --version V]`.
"""

import argparse
import asyncio
import gc
import logging
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import uvloop

from shared import lifeline, records, subjects, wire
from shared.bus import Bus, Message
from shared.config import engine_digest
from shared.errors import Cancelled, HeadraceError, VersionNotFound
from shared.leases import LeaseKeeper
from shared.log import configure_logging
from shared.records import Lease, Version
from shared.settings import Settings, load
from shared.shares import TenantShares
from shared.wire import Assign
from workers.device_lock import hold_device
from workers.engine.load import SIMULATED, LoadRefused, import_engine, load_engine, warm_up
from workers.engine.request import Engine
from workers.metrics import WorkerMetrics
from workers.server import WorkerServer

log = logging.getLogger(__name__)

T = TypeVar("T")

_is_worker_id = re.compile(r"[A-Za-z0-9_-]{1,128}").fullmatch

EXIT_FAILED = 3  # could not start; the lease says why
EXIT_HUNG = 4  # the engine finished no step within step_ms_max


class Worker:
    """One worker from start to end: the lease tells the controller where it is.

    Without `wanted` it is a warm one: it imports what any model needs and waits until it is assigned a version.
    """

    def __init__(
        self, settings: Settings, worker_id: str, born: float, wanted: Assign | None = None, device: str = ""
    ) -> None:
        self._settings, self.id, self._device = settings, worker_id, device
        self._born = born  # unix seconds when the controller started the process
        self._wanted = wanted
        self._told = asyncio.Event()  # something else is wanted
        self._state = "starting"
        self._config = ""
        self._reason = ""
        self._permanent = False
        self._phases: dict[str, float] = {}
        self._fetched = (0, 0)  # bytes: here, in all
        self._server: WorkerServer | None = None
        self._metrics: WorkerMetrics | None = None
        self._metrics_port = 0
        self._stop = asyncio.Event()

    async def run(self) -> int:
        """Serve until told to stop; the exit status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        self._phase("process", time.time() - self._born)
        bus = await Bus.connect(self._settings, f"worker-{self.id}")
        leases = LeaseKeeper(bus, subjects.WORKERS_BUCKET, self.id, lambda: records.encode(self.lease()))
        await bus.subscribe(subjects.worker_assign(self.id), self._on_assign)
        await bus.subscribe(subjects.worker_drain(self.id), lambda _message: self._stop.set())
        await leases.start()
        try:
            if self._wanted is None:
                await self._warm_up(leases)
            return await self._serve(bus, leases)
        except Cancelled:
            return 0  # told to stop before it could serve
        except (HeadraceError, LoadRefused, MemoryError) as error:
            self._state, self._reason = "failed", str(error) or repr(error)
            self._permanent = not (isinstance(error, HeadraceError) and error.retryable)
            log.error("cannot serve %s@%s: %s", *self._name, self._reason)
            await leases.write()
            return EXIT_FAILED
        finally:
            if self._state != "failed":
                await leases.stop()
            if self._metrics is not None:
                self._metrics.close()
            await bus.close()

    @property
    def _name(self) -> tuple[str, str]:
        return (self._wanted.model, self._wanted.version) if self._wanted else ("", "")

    def _on_assign(self, message: Message) -> None:
        """Listen to the newest leader. The version is assigned once and for all; whether to claim may change."""
        assign = wire.decode_assign(message.data)
        before = self._wanted
        if before is not None and (assign.term < before.term or (assign.model, assign.version) != self._name):
            log.warning("not heeded: %s@%s by leader %d", assign.model, assign.version, assign.term)
            return
        self._wanted = assign
        if before is None or assign.claim != before.claim:
            log.info("told to serve %s@%s%s", *self._name, "" if assign.claim else ", and not to claim yet")
            self._told.set()

    async def _warm_up(self, leases: LeaseKeeper) -> None:
        """Get ready for any model, and wait for one. Raises Cancelled when told to stop."""
        await self._until_stopped(asyncio.to_thread(lasting, lambda: self._timed("imports", warm_up)))
        self._state = "warm"  # unless it has been assigned one meanwhile: see `lease`
        leases.changed()
        log.info("warm after %.1f s: %s", time.time() - self._born, self._show_phases())
        await self._either(self._told, self._stop)
        if self._wanted is None:
            raise Cancelled("told to stop")
        self._state = "starting"
        leases.changed()

    async def _serve(self, bus: Bus, leases: LeaseKeeper) -> int:
        self._metrics = metrics = WorkerMetrics(*self._name)
        for name, seconds in self._phases.items():
            metrics.cold_start(name, seconds)
        self._metrics_port = metrics.serve(self._settings.http_host, self._settings.metrics_port)
        begin = time.monotonic()
        version = await self._record(bus)
        self._config = engine_digest(version.engine)
        engine = await self._until_stopped(asyncio.to_thread(lasting, lambda: self._load(version)))
        metrics.watch(engine)
        shares = TenantShares()
        await shares.start(bus)
        server = WorkerServer(bus, self._settings, version, self.id, engine, metrics, self._first_token, shares)
        self._server = server
        await server.start()
        log.info("loaded after %.1f s: %s", time.monotonic() - begin, self._show_phases())
        useless = asyncio.create_task(server.watch())
        try:
            await self._claim_as_wanted(server, leases, useless)
            if useless.done():
                log.error("%s: ending", useless.result())
                await server.abandon()
                logging.shutdown()
                os._exit(EXIT_HUNG)  # its thread cannot be joined
            self._state = "draining"
            leases.changed()
            await server.drain()
        finally:
            useless.cancel()
            await asyncio.gather(useless, return_exceptions=True)
            await server.stop()
            await shares.close()
        return 0

    async def _claim_as_wanted(self, server: WorkerServer, leases: LeaseKeeper, useless: asyncio.Task[str]) -> None:
        """Claim, or only be ready to, as the controller says. Returns when told to stop, or when `useless` is done."""
        useless.add_done_callback(lambda _: self._told.set())
        while not self._stop.is_set() and not useless.done():
            self._told.clear()
            state = "active" if self._wanted is not None and self._wanted.claim else "loaded"
            if state != self._state:
                await (server.claim() if state == "active" else server.rest())
                self._state = state
                leases.changed()
                log.info("%s", state)
            await self._either(self._told, self._stop)

    @staticmethod
    async def _either(*events: asyncio.Event) -> None:
        """Returns when one of them is set."""
        waits = [asyncio.create_task(event.wait()) for event in events]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    async def _record(self, bus: Bus) -> Version:
        found = await bus.kv_get(subjects.MODELS_BUCKET, subjects.key(*self._name))
        if found is None:
            raise VersionNotFound("there is no {}@{}".format(*self._name))
        return records.decode_version(found[0])

    def _load(self, version: Version) -> Engine:
        """Blocking: the engine's imports beside the fetch of the weights, then the wait for the device, then the load."""
        directory: Path | None = None
        with ThreadPoolExecutor(1, "imports") as pool:
            importing = pool.submit(
                self._timed, "imports", lambda: import_engine(version.source, version.engine.engine)
            )
            if not version.source.startswith(SIMULATED):
                directory = self._timed("fetch", lambda: self._fetch(version))
            importing.result()
        if self._device:
            self._timed("device", lambda: hold_device(self._settings.data_path, self._device))
        threads = self._settings.torch_threads
        return self._timed(
            "load", lambda: load_engine(version.source, directory, version.engine, threads, version.encoder)
        )

    def _fetch(self, version: Version) -> Path:
        from shared.objects import ObjectStore
        from workers.weights import fetch

        def on_progress(here: int, total: int) -> None:
            self._fetched = (here, total)

        return fetch(version, ObjectStore(self._settings), self._settings, on_progress)

    def _timed(self, phase: str, work: Callable[[], T]) -> T:
        begin = time.monotonic()
        result = work()
        self._phase(phase, time.monotonic() - begin)
        return result

    async def _until_stopped(self, thread: Coroutine[Any, Any, T]) -> T:
        task = asyncio.create_task(thread)
        stopped = asyncio.create_task(self._stop.wait())
        await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not task.done():
            log.info("told to stop before it could serve")
            logging.shutdown()
            os._exit(0)  # a thread in the middle of a load cannot be interrupted; nothing is claimed yet
        return await task

    def lease(self) -> Lease:
        """What the worker says of itself now."""
        lease = Lease(
            worker=self.id,
            model=self._name[0],
            version=self._name[1],
            state="starting" if self._state == "warm" and self._wanted else self._state,
            pid=os.getpid(),
            host=socket.gethostname(),
            started=self._born,
            device=self._device,
            config=self._config,
            metrics_port=self._metrics_port,
            reason=self._reason,
            permanent=self._permanent,
            fetched_bytes=self._fetched[0],
            fetch_bytes=self._fetched[1],
            cold_start=self._phases,
        )
        if self._server is not None:
            self._server.fill(lease)
        return lease

    def _first_token(self, seconds: float) -> None:
        self._phase("first_token", seconds)
        log.info("first token; cold start: %s", self._show_phases())

    def _phase(self, name: str, seconds: float) -> None:
        self._phases[name] = round(seconds, 3)
        if self._metrics is not None:
            self._metrics.cold_start(name, seconds)

    def _show_phases(self) -> str:
        return " ".join(f"{name}={seconds:.2f}s" for name, seconds in self._phases.items())


def lasting(work: Callable[[], T]) -> T:
    """Do what makes things that stay, such as imports: collections of garbage do not walk them, meanwhile or later.

    A full one would take 0.15 s with what a model needs, and there are some while it is imported.
    """
    gc.disable()
    try:
        return work()
    finally:
        gc.collect()  # it may have gone round a tensor
        gc.freeze()
        gc.enable()


def main(settings: Settings, worker_id: str, wanted: Assign | None) -> int:
    """Run one worker until it is told to stop; the exit status. Exits with 1 when `worker_id` cannot be one."""
    born = float(os.environ.get("HEADRACE_SPAWNED_AT") or time.time())
    device = os.environ.get("HEADRACE_DEVICE", "")
    if not _is_worker_id(worker_id):  # it is a token of subjects, and a key
        sys.exit(f"{worker_id!r} is no worker id: up to 128 letters, digits, - and _ make one")
    configure_logging(settings)
    if settings.lifeline_fd is not None:
        lifeline.watch(settings.lifeline_fd)
    if device.startswith("cpu"):
        os.sched_setaffinity(0, {int(core) for core in device.partition(":")[2].split(",")})
    gc.freeze()

    async def run() -> int:
        return await Worker(settings, worker_id, born, wanted, device).run()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="with --version: serve it at once; else wait until one is assigned")
    parser.add_argument("--version")
    parser.add_argument("--worker-id", required=True)
    given = parser.parse_args()
    sys.exit(main(load(), given.worker_id, Assign(given.model, given.version, True, 0) if given.model else None))
