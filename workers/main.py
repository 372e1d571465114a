"""The worker process: start up (fetch, load), serve, drain. `python -m workers.main --model M --version V --worker-id ID`."""

import argparse
import asyncio
import gc
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import uvloop

from shared import lifeline, records, subjects
from shared.bus import Bus
from shared.errors import Cancelled, HeadraceError, VersionNotFound
from shared.log import configure_logging
from shared.records import Lease, Version
from shared.settings import Settings, load
from workers.engine.load import SIMULATED, LoadRefused, import_engine, load_engine
from workers.engine.request import Engine
from workers.leases import LeaseKeeper
from workers.metrics import WorkerMetrics
from workers.server import WorkerServer

log = logging.getLogger(__name__)

T = TypeVar("T")

EXIT_FAILED = 3  # could not start; the lease says why
EXIT_HUNG = 4  # the engine finished no step within step_ms_max


class Worker:
    """One worker from start to end: the lease tells the controller where it is."""

    def __init__(self, settings: Settings, model: str, version: str, worker_id: str, born: float) -> None:
        self._settings, self._model, self._version, self.id = settings, model, version, worker_id
        self._born = born  # unix seconds when the controller started the process
        self._state = "starting"
        self._reason = ""
        self._permanent = False
        self._phases: dict[str, float] = {}
        self._server: WorkerServer | None = None
        self._metrics = WorkerMetrics(model, version)
        self._metrics_port = 0
        self._stop = asyncio.Event()

    async def run(self) -> int:
        """Serve until told to stop; the exit status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        self._phase("process", time.time() - self._born)
        self._metrics_port = self._metrics.serve(self._settings.http_host, self._settings.metrics_port)
        bus = await Bus.connect(self._settings, f"worker-{self.id}")
        leases = LeaseKeeper(bus, self.id, self.lease)
        await leases.start()
        drain = await bus.subscribe(subjects.worker_drain(self.id), lambda _message: self._stop.set())
        try:
            return await self._serve(bus, leases)
        except Cancelled:
            return 0  # told to stop while it was starting
        except (HeadraceError, LoadRefused, MemoryError) as error:
            self._state, self._reason = "failed", str(error) or repr(error)
            self._permanent = not (isinstance(error, HeadraceError) and error.retryable)
            log.error("cannot serve %s@%s: %s", self._model, self._version, self._reason)
            await leases.write()
            return EXIT_FAILED
        finally:
            await drain.unsubscribe()
            if self._state != "failed":
                await leases.stop()
            self._metrics.close()
            await bus.close()

    async def _serve(self, bus: Bus, leases: LeaseKeeper) -> int:
        version = await self._record(bus)
        engine = await self._until_stopped(asyncio.to_thread(self._load, version))
        self._metrics.watch(engine)
        server = WorkerServer(bus, self._settings, version, self.id, engine, self._metrics, self._first_token)
        self._server = server
        await server.start()
        self._state = "active"
        leases.changed()
        log.info("active after %.1f s: %s", time.time() - self._born, self._show_phases())
        useless = asyncio.create_task(server.watch())
        stopped = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({useless, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if useless.done():
                log.error("%s: ending", useless.result())
                await server.abandon()
                logging.shutdown()
                os._exit(EXIT_HUNG)  # its thread cannot be joined
            self._state = "draining"
            leases.changed()
            await server.drain()
        finally:
            for task in (useless, stopped):
                task.cancel()
            await asyncio.gather(useless, stopped, return_exceptions=True)
            await server.stop()
        return 0

    async def _record(self, bus: Bus) -> Version:
        found = await bus.kv_get(subjects.MODELS_BUCKET, subjects.key(self._model, self._version))
        if found is None:
            raise VersionNotFound(f"there is no {self._model}@{self._version}")
        return records.decode_version(found[0])

    def _load(self, version: Version) -> Engine:
        """Blocking: the engine's imports beside the fetch of the weights, then the load."""
        directory: Path | None = None
        with ThreadPoolExecutor(1, "imports") as pool:
            importing = pool.submit(
                self._timed, "imports", lambda: import_engine(version.source, version.engine.engine)
            )
            if not version.source.startswith(SIMULATED):
                directory = self._timed("fetch", lambda: self._fetch(version))
            importing.result()
        threads = self._settings.torch_threads
        return self._timed("load", lambda: load_engine(version.source, directory, version.engine, threads))

    def _fetch(self, version: Version) -> Path:
        from shared.objects import ObjectStore
        from workers.weights import fetch

        return fetch(version, ObjectStore(self._settings), self._settings)

    def _timed(self, phase: str, work: Callable[[], T]) -> T:
        begin = time.monotonic()
        result = work()
        self._phase(phase, time.monotonic() - begin)
        return result

    async def _until_stopped(self, loading: Coroutine[Any, Any, Engine]) -> Engine:
        task = asyncio.create_task(loading)
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
            model=self._model,
            version=self._version,
            state=self._state,
            pid=os.getpid(),
            host=socket.gethostname(),
            started=self._born,
            metrics_port=self._metrics_port,
            reason=self._reason,
            permanent=self._permanent,
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
        self._metrics.cold_start(name, seconds)

    def _show_phases(self) -> str:
        return " ".join(f"{name}={seconds:.2f}s" for name, seconds in self._phases.items())


def main(settings: Settings, model: str, version: str, worker_id: str) -> int:
    """Run one worker until it is told to stop; the exit status."""
    born = float(os.environ.get("HEADRACE_SPAWNED_AT") or time.time())
    configure_logging(settings)
    if settings.lifeline_fd is not None:
        lifeline.watch(settings.lifeline_fd)
    gc.freeze()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_run(settings, model, version, worker_id, born))


async def _run(settings: Settings, model: str, version: str, worker_id: str, born: float) -> int:
    return await Worker(settings, model, version, worker_id, born).run()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("model", "version", "worker-id"):
        parser.add_argument(f"--{name}", required=True)
    given = parser.parse_args()
    sys.exit(main(load(), given.model, given.version, given.worker_id))
